"""Tells from the shape and strides of a tensor how it lies in memory.

Pure arithmetic, in elements where nothing else is said; decides nothing about how a tensor
travels.
"""

from __future__ import annotations

from collections.abc import Sequence


def shown_once(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The shape, but 1 wherever the same elements are shown again and again."""
    if 0 in shape:
        return [*shape]
    return [size if stride else 1 for size, stride in zip(shape, strides, strict=True)]


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from the first to the last, both among them; none may be 0 long."""
    return 1 + sum([(size - 1) * step for size, step in zip(shape, strides, strict=True)])


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if the elements lie in memory without gaps or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_ordered(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if the strides of a contiguous tensor say more than that: channels last, say."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected:
            return is_dense([size or 1 for size in shape], strides)
        expected *= size or 1
    return False


def contiguous_steps(shape: Sequence[int], itemsize: int) -> list[int]:
    """The strides that torch gives a contiguous tensor, in bytes."""
    steps: list[int] = []
    for size in reversed(shape):
        steps.insert(0, itemsize)
        itemsize *= size or 1
    return steps
