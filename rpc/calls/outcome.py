"""The end of a function that was called from elsewhere, on its way to the reply."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rpc.observe.names import MethodName

_WITHOUT_CODE = (type(None), bool, int, float, str, bytes, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a function; of one that made a value for a reference, what is told of it."""

    method: MethodName
    result: object
    error: BaseException | None

    def runs_no_code(self) -> bool:
        """True if it can be freed on any thread."""
        return self.error is None and type(self.result) in _WITHOUT_CODE
