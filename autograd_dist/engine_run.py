"""Tells for which engine run a piece of user-visible code executes.

torch's engine calls hooks and Python functions on the thread that started the
run or, for device work, on threads of its own. Something that belongs to one
run therefore travels in torch's thread-local objects, which the engine hands
to whatever thread executes a node. This module owns that one slot.

A run that a hook or function starts by itself inherits the slot. Torch has a number
for each run, but tells it only to code that the run executes: so a run that must be
told from those inside it begins at a leaf of ours, whose hook notes the number.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

if TYPE_CHECKING:
    from autograd_dist.recv_node import Origin

_SLOT = "tensorwire.autograd_dist.engine_run"


class EngineRun(Protocol):
    """The services of a run to the recv nodes that it executes."""

    def received_gradients(self, origin: Origin, gradients: Sequence[torch.Tensor | None]) -> None:
        """Takes the whole gradients of one received message."""


def current_run() -> EngineRun | None:
    """The run that the calling code executes for, also in one inside it; None outside of ours."""
    if not _is_set(_SLOT):
        return None
    block: running = torch._C._get_obj_in_tls(_SLOT)
    return block.run


def innermost_run() -> EngineRun | None:
    """Returns the run as :func:`current_run` does, but None in one that a hook or function started.

    Of a run that does not begin at the beacon, those cannot be told from it.
    """
    block = _current_block()
    if block is None or (block.number is not None and block.number != _number_of_run()):
        return None
    return block.run


class running:
    """Makes a run current for engine runs that are started from now on, until :meth:`end`.

    As a context manager it ends with its block.

    Args:
        run: the run.

    Attributes:
        run: the run.
        number: torch's for the engine run, once that has come to the beacon.
    """

    __slots__ = ("_outer", "number", "run")

    def __init__(self, run: EngineRun) -> None:
        self.run = run
        self.number: int | None = None
        self._outer: running | None = torch._C._get_obj_in_tls(_SLOT) if _is_set(_SLOT) else None
        _set(_SLOT, self)

    def __enter__(self) -> None:
        """Returns it; it began when it was made."""

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Makes current again what was before."""
        if self._outer is None:
            # An object left in a thread's slot is destroyed at thread exit, which
            # can deadlock on the interpreter lock.
            _empty(_SLOT)
        else:
            _set(_SLOT, self._outer)


def _current_block() -> running | None:
    if not _is_set(_SLOT):
        return None
    block: running | None = torch._C._get_obj_in_tls(_SLOT)
    return block


def _note_number(_: torch.Tensor) -> None:
    block = _current_block()
    assert block is not None  # only our runs begin there
    block.number = _number_of_run()


def _make_beacon() -> tuple[GradientEdge, torch.Tensor]:
    with torch.inference_mode(False), torch.enable_grad():  # the import may happen in others
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        leaf.register_hook(_note_number)  # type: ignore[no-untyped-call]
        return get_gradient_edge(leaf), torch.zeros((), device="cpu")


def _slot_counts() -> bool:
    """True if torch counts the reference that a slot holds; up to some release it forgot to."""
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
_number_of_run = torch._C._current_graph_task_id
_is_set = torch._C._is_key_in_tls
_set = torch._C._stash_obj_in_tls if _slot_counts() else _set_counted
_empty = getattr(torch._C, "_remove_obj_from_tls", None) or _set_none
_empty(_SLOT)
BEACON: Final = _make_beacon()
"""The edge at which a run begins that must know its number, and a gradient for it.

As the first of a run's roots, and an input, it is what the engine comes to first: of the nodes
that are ready on the processor it takes a leaf's before all others, and of these the first.
"""
