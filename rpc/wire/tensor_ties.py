"""Finds the tensors of one message that show the same elements, as they must where they arrive.

A module and the ``.data`` of its parameters, a flat buffer and its views, a module and its
``state_dict()``: who changes one changes the other. Such tensors are sent as one piece of
memory, each with its place in it. Tensors without a common element stay apart, though they
may take turns in one memory (``qkv.chunk(3, -1)``, the columns of a matrix), as do those
between which more memory lies than they show: nothing travels that nobody asked for.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from rpc.wire.strides import is_dense, reach, shown_once

Window = tuple[int, int, int]
"""The place of a tensor in its storage, from the first byte to behind the last; its number."""


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
    memories: list[Memory] = []
    for numbers in _of_one_storage(tensors):
        windows = _windows(tensors, numbers)
        if _overlap(windows):
            placed = [each for each in windows if _can_be_placed(tensors[each[2]], dtypes)]
            for piece in _pieces(placed):
                memories += _shared(tensors, piece)
    return memories


def _of_one_storage(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The numbers of tensors of which several show one storage."""
    storages: list[int] = []
    try:
        for tensor in tensors:
            storages.append(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # one has none
        storages = list(map(_storage_of, tensors))
    if len(set(storages)) == len(tensors):
        return []
    by_storage: dict[int, list[int]] = {}
    for number, storage in enumerate(storages):
        by_storage.setdefault(storage, []).append(number)
    return [numbers for storage, numbers in by_storage.items() if storage and len(numbers) > 1]


def _storage_of(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


def _windows(tensors: Sequence[torch.Tensor], numbers: list[int]) -> list[Window]:
    """Sorted; not of those that have no elements, or none that are in memory."""
    held = tensors[numbers[0]].untyped_storage().nbytes()
    windows: list[Window] = []
    for number in numbers:
        tensor = tensors[number]
        itemsize = tensor.itemsize
        start = int(tensor.storage_offset()) * itemsize
        if tensor.is_contiguous():
            end = start + tensor.nbytes
        elif tensor.numel():
            end = start + reach(tensor.shape, tensor.stride()) * itemsize
        else:
            continue
        if start < end <= held:
            windows.append((start, end, number))
    windows.sort()
    return windows


def _overlap(windows: list[Window]) -> bool:
    """True if any of the sorted ``windows`` overlap: two neighbours, then."""
    furthest = 0
    for start, end, _ in windows:
        if start < furthest:
            return True
        furthest = end
    return False


def _can_be_placed(tensor: torch.Tensor, dtypes: Container[torch.dtype]) -> bool:
    """False for what has to be sent by itself."""
    if tensor.dtype not in dtypes or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())


def _pieces(windows: Iterable[Window]) -> list[Memory]:
    """The memory that is within sorted ``windows``: one piece for those that overlap."""
    pieces: list[Memory] = []
    for window in windows:
        start, end, _ = window
        if not pieces or start >= pieces[-1].end:
            pieces.append(Memory(start, end))
        piece = pieces[-1]
        piece.end = max(piece.end, end)
        piece.members.append(window)
    return pieces


def _shared(tensors: Sequence[torch.Tensor], piece: Memory) -> Iterator[Memory]:
    """The parts of a piece that several of its members show, with these."""
    gapless = [each for each in piece.members if _is_gapless(tensors[each[2]])]
    parts = _pieces(gapless)
    if len(gapless) < len(piece.members):
        within = [each for each in piece.members if _is_within_one(each, parts)]
        if len(within) < len(piece.members) and _is_worth_it(tensors, piece):
            parts = _connected(tensors, piece)
        else:
            parts = _pieces(within)
    for part in parts:
        if len(part.members) > 1 and _is_worth_it(tensors, part):
            yield part


def _is_gapless(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    return is_dense(shown_once(tensor.shape, strides := tensor.stride()), strides)


def _is_within_one(window: Window, parts: list[Memory]) -> bool:
    return any(part.start <= window[0] and window[1] <= part.end for part in parts)


def _connected(tensors: Sequence[torch.Tensor], piece: Memory) -> list[Memory]:
    """Tells apart what only takes turns in a piece: marks, one after the other, what each shows."""
    unit = math.gcd(*[tensors[number].itemsize for _, _, number in piece.members])
    marks: NDArray[np.int32] = np.zeros((piece.end - piece.start) // unit, np.int32)
    leaders = [*range(len(piece.members) + 1)]
    for mark, (start, _, number) in enumerate(piece.members, 1):
        tensor = tensors[number]
        units = tensor.itemsize // unit
        steps = [step * units * marks.itemsize for step in tensor.stride()]
        first = (start - piece.start) // unit * marks.itemsize
        here = np.ndarray(
            (*tensor.shape, units), marks.dtype, marks, first, (*steps, marks.itemsize)
        )
        met = {_leader(leaders, int(each)) for each in np.unique(here)} - {0}
        here[...] = mark
        for each in met:
            leaders[each] = mark
    groups: dict[int, list[Window]] = {}
    for mark, window in enumerate(piece.members, 1):
        groups.setdefault(_leader(leaders, mark), []).append(window)
    return [
        Memory(min(each[0] for each in group), max(each[1] for each in group), group)
        for group in groups.values()
    ]


def _leader(leaders: list[int], mark: int) -> int:
    while leaders[mark] != mark:
        mark = leaders[mark]
    return mark


def _is_worth_it(tensors: Sequence[torch.Tensor], piece: Memory) -> bool:
    shown = 0
    for start, _, number in piece.members:
        tensor = tensors[number]
        if (start - piece.start) % tensor.itemsize:
            return False
        shown += math.prod(shown_once(tensor.shape, tensor.stride())) * tensor.itemsize
    return piece.end - piece.start <= shown
