"""Warns of torch's own autograd contexts, which calls of this library do not reach.

A program that still imports ``torch.distributed.autograd`` gets a context there, and a
backward pass that ends where the first call begins: gradients would be missing without a
word. TorchScript code, whose calls are torch's, has a use for them.
"""

from __future__ import annotations

import warnings
from typing import Any, Final

import torch.distributed.autograd

_context: Final[Any] = torch.distributed.autograd.context
_torchs: Final = _context.__enter__


def _enter(self: Any) -> Any:
    warnings.warn(
        "torch.distributed.autograd.context() follows no calls but torch's own, made by "
        "TorchScript code; for those of rpc use autograd_dist.context()",
        stacklevel=2,
    )
    return _torchs(self)


def use() -> None:
    """Begins to warn."""
    _context.__enter__ = _enter


def stop_using() -> None:
    """Puts torch's method back."""
    _context.__enter__ = _torchs
