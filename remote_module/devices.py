"""Moves the tensors inside arguments and results to a device.

Looks into tuples, lists and dicts, also subclasses such as named tuples, and
into packed sequences. Whatever holds no tensor that has to move is passed on as
it is; nothing that was passed in is changed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def move_tensors(value: Any, device: torch.device) -> Any:
    """Returns ``value`` with the tensors in it on ``device``, keeping their autograd graph."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, PackedSequence):
        to: Any = value.to
        return to(device)  # not the batch sizes, which belong on the CPU
    if isinstance(value, (tuple, list)):
        return _move_sequence(value, device)
    if isinstance(value, dict):
        return _move_dict(value, device)
    return value


def _move_sequence(value: tuple[Any, ...] | list[Any], device: torch.device) -> Any:
    items = [move_tensors(item, device) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if isinstance(value, list):
        moved = copy.copy(value)
        moved[:] = items
        return moved
    kind: Any = type(value)
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


def _move_dict(value: dict[Any, Any], device: torch.device) -> dict[Any, Any]:
    changed = {}
    for key, item in value.items():
        moved_item = move_tensors(item, device)
        if moved_item is not item:
            changed[key] = moved_item
    if not changed:
        return value
    moved = copy.copy(value)
    for key, item in changed.items():
        moved[key] = item
    return moved
