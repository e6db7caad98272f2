"""Which engine run a piece of user-visible code is executing for.

torch's engine calls hooks and Python functions on the thread that started the
run or, for device work, on threads of its own. Something that belongs to one
run therefore travels in torch's thread-local objects, which the engine hands
to whatever thread executes a node. This module owns that one slot.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from autograd_dist.recv_node import Origin

_SLOT = "tensorwire.autograd_dist.engine_run"


class EngineRun(Protocol):
    """What a recv node needs from the run that executes it."""

    def received_gradients(self, origin: Origin, gradients: Sequence[torch.Tensor | None]) -> None:
        """Takes the whole gradients of one received message."""


def current_run() -> EngineRun | None:
    """The run that the calling code executes for; None outside of ours."""
    if not torch._C._is_key_in_tls(_SLOT):
        return None
    run: EngineRun | None = torch._C._get_obj_in_tls(_SLOT)
    return run


class running:
    """Makes a run current for engine runs started inside the block.

    Args:
        run: the run.
    """

    __slots__ = ("_outer", "_run")

    def __init__(self, run: EngineRun) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._outer = current_run()
        _stash(self._run)

    def __exit__(self, *_: object) -> None:
        _restore(self._outer)


def _restore(outer: EngineRun | None) -> None:
    if outer is None and _remove is not None:
        # An object left in a thread's slot is destroyed at thread exit, which
        # can deadlock on the interpreter lock.
        _remove(_SLOT)
    else:
        _stash(outer)


def _stash(value: object) -> None:
    if not _counts:
        _increment(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(_SLOT, value)


def _slot_counts() -> bool:
    """Whether torch counts the reference that a slot holds; up to some release it forgot to."""
    value = object()
    _increment(ctypes.py_object(value))
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(_SLOT, value)
    counted = sys.getrefcount(value) > before
    if counted:
        _decrement(ctypes.py_object(value))
    return counted


_remove = getattr(torch._C, "_remove_obj_from_tls", None)
_increment = ctypes.pythonapi.Py_IncRef
_decrement = ctypes.pythonapi.Py_DecRef
_counts = _slot_counts()
_restore(None)
