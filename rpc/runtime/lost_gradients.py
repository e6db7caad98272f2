"""Warns, once in a process, of gradients that end where a tensor came from another worker.

Such a tensor is a leaf, unless it came inside an autograd context: a program that calls
``loss.backward()`` outside of one trains nothing on other workers, and sees no error.
"""

from __future__ import annotations

import functools
import logging
from typing import Final

import torch
from torch.utils.hooks import unserializable_hook

_logger = logging.getLogger("rpc")

_TOLD: Final = (
    "backward() came to a tensor that another worker sent outside of an autograd context: its "
    "gradient ends here, and parameters on other workers get none. Make the calls inside "
    "`with autograd_dist.context() as context_id` and use autograd_dist.backward(context_id, "
    "[loss]); or detach() the tensor, if you mean it. This is said once"
)


def watch(leaf: torch.Tensor) -> None:
    """Says so when a gradient comes to a tensor that was received, unless that was said."""
    if not _warn.cache_info().currsize:
        leaf.register_hook(_came)  # type: ignore[no-untyped-call]


@unserializable_hook  # type: ignore[untyped-decorator]
def _came(_: torch.Tensor) -> None:
    _warn()


@functools.cache
def _warn() -> None:
    _logger.warning(_TOLD)
