"""Copies large tensors with several cores, and by the C library, which spares the caches."""

from __future__ import annotations

import ctypes
import itertools
from bisect import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from tensorwire.parameter_server.kernels.sharing import WORTH, divide


def joined(sources: Sequence[Tensor], out: Tensor) -> None:
    """Copies flat tensors into one, one behind the other: ``torch.cat`` with ``out``.

    Args:
        sources: as many elements in all as ``out`` has.
        out: a flat tensor.
    """
    if out.nbytes < WORTH or not all(_is_plain(each, out.dtype) for each in (*sources, out)):
        torch.cat(list(sources), out=out)
        return
    starts = [0, *itertools.accumulate(each.nbytes for each in sources)]
    target, addresses = out.data_ptr(), [each.data_ptr() for each in sources]

    def copy(begin: int, end: int) -> None:
        at = bisect(starts, begin) - 1
        while begin < end:
            stop = min(end, starts[at + 1])
            source = addresses[at] + begin - starts[at]
            ctypes.memmove(target + begin, source, stop - begin)
            begin, at = stop, at + 1

    divide(out.nbytes, 2 * out.nbytes, copy)


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """True if its bytes, one after the other, are its elements."""
    is_here = tensor.is_cpu and tensor.is_contiguous() and tensor.dtype == dtype
    return is_here and not (tensor.is_conj() or tensor.is_neg())


def copied(source: Tensor, target: Tensor) -> None:
    """``target.copy_(source)``, as autograd sees it, too."""
    same = source.numel() == target.numel() and _is_plain(source, target.dtype)
    if target.nbytes < WORTH or not same or not _is_plain(target, target.dtype):
        target.copy_(source.view(target.shape))
        return
    joined([source.reshape(-1)], target.detach().view(-1))
    torch.autograd.graph.increment_version(target)
