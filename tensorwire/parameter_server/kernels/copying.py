"""Copies large tensors with several cores, past the caches, and looks for what is not finite.

A copy of tens of megabytes leaves little in the caches that is of use. A kernel that writes past
them takes as long as reading alone, and can look at each number on the way.
"""

from __future__ import annotations

import ctypes
import itertools
from bisect import bisect
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.kernels.arrays import Array
from tensorwire.parameter_server.kernels.sharing import WORTH, divide

STREAM_FROM: Final = 16 << 20
"""Copies of so many bytes or more go past the caches; smaller ones may still be read there."""

Move = Callable[[int, int, int, int], None]
"""Copies elements: the number of their source, the first there, the first here, how many."""


def joined(sources: Sequence[Tensor], out: Tensor) -> None:
    """Copies flat tensors into one, one behind the other: ``torch.cat`` with ``out``.

    Args:
        sources: as many elements in all as ``out`` has.
        out: a flat tensor.
    """
    if out.nbytes < WORTH or not all(_is_plain(each, out.dtype) for each in (*sources, out)):
        torch.cat(list(sources), out=out)
    elif _is_streamed(out) and kernels().NAME == "numba":
        _streamed(sources, out)
    else:
        target, size = out.data_ptr(), out.element_size()
        addresses = [each.data_ptr() for each in sources]

        def move(source: int, first: int, to: int, count: int) -> None:
            ctypes.memmove(target + to * size, addresses[source] + first * size, count * size)

        _divided(sources, out, move)


def joined_finite(sources: Sequence[Tensor], out: Tensor) -> bool:
    """Copies as :func:`joined` does; returns True if no element is infinite or not a number."""
    if _is_streamed(out) and all(_is_plain(each, out.dtype) for each in (*sources, out)):
        return _streamed(sources, out)
    joined(sources, out)
    return is_finite(out)


def is_finite(tensor: Tensor) -> bool:
    """True if no element is infinite or not a number."""
    if not tensor.is_floating_point():
        return True
    if not _is_plain(tensor, torch.float32):
        return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
    bits, verdicts, finite = _bits(tensor.detach().view(-1)), [], kernels().finite
    divide(len(bits), bits.nbytes, lambda begin, end: verdicts.append(finite(bits[begin:end])))
    return all(verdicts)


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """True if its bytes, one after the other, are its elements."""
    is_here = tensor.is_cpu and tensor.is_contiguous() and tensor.dtype == dtype
    return is_here and not (tensor.is_conj() or tensor.is_neg())


def _is_streamed(out: Tensor) -> bool:
    return out.nbytes >= STREAM_FROM and out.dtype == torch.float32


def _bits(flat: Tensor) -> Array:
    return flat.detach().numpy().view(np.int32)


def _streamed(sources: Sequence[Tensor], out: Tensor) -> bool:
    stream, target = kernels().stream_finite, _bits(out)
    arrays, verdicts = [_bits(each) for each in sources], []

    def move(source: int, first: int, to: int, count: int) -> None:
        verdicts.append(stream(arrays[source][first : first + count], target[to : to + count]))

    _divided(sources, out, move)
    return all(verdicts)


def _divided(sources: Sequence[Tensor], out: Tensor, move: Move) -> None:
    """Moves all elements to their places, on several cores."""
    starts = [0, *itertools.accumulate(len(each) for each in sources)]

    def work(begin: int, end: int) -> None:
        at = bisect(starts, begin) - 1
        while begin < end:
            stop = min(end, starts[at + 1])
            move(at, begin - starts[at], begin, stop - begin)
            begin, at = stop, at + 1

    divide(len(out), 2 * out.nbytes, work)


def copied(source: Tensor, target: Tensor) -> None:
    """``target.copy_(source)``, as autograd sees it, too."""
    same = source.numel() == target.numel() and _is_plain(source, target.dtype)
    if target.nbytes < WORTH or not same or not _is_plain(target, target.dtype):
        target.copy_(source.view(target.shape))
        return
    joined([source.reshape(-1)], target.detach().view(-1))
    torch.autograd.graph.increment_version(target)
