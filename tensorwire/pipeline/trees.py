"""Finds and replaces the tensors inside tuples, lists and dicts, nested as may be.

Any other value that is no tensor stays as it is. Subclasses keep their class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, from left to right."""
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_leaves(value, torch.Tensor, note)
    return tensors


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Returns the value with ``change(tensor)`` in place of each tensor."""
    return map_leaves(value, torch.Tensor, change)


def map_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Returns the value with ``change(leaf)`` in place of each leaf of a kind."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [map_leaves(item, kind, change) for item in value]
        cls: Any = type(value)
        return cls._make(items) if hasattr(cls, "_make") else cls(items)
    if isinstance(value, dict):
        changed = copy.copy(value)
        for key, item in value.items():
            changed[key] = map_leaves(item, kind, change)
        return changed
    return value
