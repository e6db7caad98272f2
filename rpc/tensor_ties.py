"""Which tensors of one message show the same memory, and are to do so where they arrive.

A module and the ``.data`` of its parameters, a flat buffer and its views, a module and its
``state_dict()``: who changes one changes the other. Tensors whose memory overlaps are sent
as one piece of memory, each with its place in it. Views that lie apart stay apart, as do those
between which more memory lies than they show: nothing travels that nobody asked for.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Window(NamedTuple):
    """Where a tensor lies in its storage: from the first byte to behind the last, and which."""

    start: int
    end: int
    number: int


@dataclass(slots=True)
class Memory:
    """A piece of memory, and the tensors that show some of it.

    Args:
        start: in the storage, in bytes.
        end: where it ends.
        members: the tensors.
    """

    start: int
    end: int
    members: list[Window] = field(default_factory=list)

    def bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of it as bytes, given one of the tensors; shares the memory."""
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        size = self.end - self.start
        return flat.set_(tensor.untyped_storage(), self.start, (size,), (1,))


def find(tensors: Sequence[torch.Tensor], dtypes: Container[torch.dtype]) -> list[Memory]:
    """The memory that several of ``tensors`` show; empty for most messages.

    Args:
        tensors: of a message, in order.
        dtypes: of tensors that can be placed in memory.
    """
    if _are_apart(tensors):
        return []
    storages: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.dtype not in dtypes:
            continue
        try:
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(number)
        except (RuntimeError, NotImplementedError):  # it has none
            continue
    found: list[Memory] = []
    for numbers in storages.values():
        if len(numbers) > 1:
            found += _overlapping(tensors, numbers)
    return found


def _are_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """True if no two show one storage: most messages."""
    try:
        return len({tensor.untyped_storage()._cdata for tensor in tensors}) == len(tensors)
    except (RuntimeError, NotImplementedError):  # one has none
        return False


def _overlapping(tensors: Sequence[torch.Tensor], numbers: list[int]) -> list[Memory]:
    windows = [window for each in numbers if (window := _window(tensors[each], each))]
    pieces: list[Memory] = []
    for window in sorted(windows):
        if not pieces or window.start >= pieces[-1].end:
            pieces.append(Memory(window.start, window.end))
        piece = pieces[-1]
        piece.end = max(piece.end, window.end)
        piece.members.append(window)
    return [piece for piece in pieces if _is_worth_it(tensors, piece)]


def _window(tensor: torch.Tensor, number: int) -> Window | None:
    """None for what has to be sent by itself."""
    if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
        return None
    if not tensor.numel() or tensor._is_zerotensor():
        return None
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    last = first + sum([(size - 1) * step for size, step in steps])
    return Window(first * tensor.itemsize, (last + 1) * tensor.itemsize, number)


def _is_worth_it(tensors: Sequence[torch.Tensor], piece: Memory) -> bool:
    if len(piece.members) < 2:
        return False
    shown = 0
    for start, _, number in piece.members:
        tensor = tensors[number]
        if (start - piece.start) % tensor.itemsize:
            return False
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        shown += math.prod([size for size, step in steps if step]) * tensor.itemsize
    return piece.end - piece.start <= shown
