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
    if not _is_set(_SLOT):
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
        _set(_SLOT, self._run)

    def __exit__(self, *_: object) -> None:
        if self._outer is None:
            # An object left in a thread's slot is destroyed at thread exit, which
            # can deadlock on the interpreter lock.
            _empty(_SLOT)
        else:
            _set(_SLOT, self._outer)


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


def _set_counted(slot: str, value: object) -> None:
    _increment(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(slot, value)


def _set_none(slot: str) -> None:
    _set(slot, None)


_increment = ctypes.pythonapi.Py_IncRef
_decrement = ctypes.pythonapi.Py_DecRef
_is_set = torch._C._is_key_in_tls
_set = torch._C._stash_obj_in_tls if _slot_counts() else _set_counted
_empty = getattr(torch._C, "_remove_obj_from_tls", None) or _set_none
_empty(_SLOT)
