"""Makes CUDA streams wait for each other where a value changes threads.

A kernel runs long after the call that starts it, in the order of the stream that was current
on that thread. A value goes through many threads here, so that wherever it lies between two
of them it is ready on the default streams of its devices: who leaves it makes these wait for
what the current streams still have to do, and who takes it makes the current streams wait for
these. Neither blocks the thread, and both do nothing where the default streams are current,
as they are on threads that nobody told otherwise. Memory is marked as used by the stream that
waits, so that it goes to nobody else before that stream is done with it.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch

_logger = logging.getLogger("rpc")

is_in_use: Callable[[], bool] = (
    torch.cuda.is_initialized if torch.version.cuda or torch.version.hip else bool
)
"""True if there can be such work at all; a torch without CUDA is not even asked."""

_Waits = list[tuple[torch.cuda.Stream, torch.cuda.Stream]]


def devices() -> list[torch.device]:
    """The devices whose streams a future has to mind; torch's futures have to be told of them."""
    if not is_in_use():
        return []
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def leave(value: object) -> None:
    """Makes any value, which the current streams may still work on, ready on the default ones.

    Its tensors are found as torch's futures find them, as if it were pickled.
    """
    if is_in_use() and (side := _side_streams(devices())):
        _hand_over(tensors_of(value), [(default, current) for current, default in side])


def take(value: object) -> None:
    """Makes the current streams wait for what the default ones still do for any value."""
    if is_in_use() and (side := _side_streams(devices())):
        _hand_over(tensors_of(value), side)


def leave_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Makes tensors, which the current streams may still work on, ready on the default ones.

    Args:
        tensors: those on other devices than GPUs stay as they are.
    """
    if is_in_use():
        on_devices = [each for each in tensors if each.is_cuda]
        side = _side_streams({each.device for each in on_devices})
        _hand_over(on_devices, [(default, current) for current, default in side])


def take_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Makes the current streams wait for what the default ones still do for tensors.

    Args:
        tensors: those on other devices than GPUs need nobody to wait.
    """
    if is_in_use():
        on_devices = [each for each in tensors if each.is_cuda]
        _hand_over(on_devices, _side_streams({each.device for each in on_devices}))


def _side_streams(among: Iterable[torch.device]) -> _Waits:
    """The current stream of each device on which that is not the default one, and the latter."""
    pairs = [(torch.cuda.current_stream(each), torch.cuda.default_stream(each)) for each in among]
    return [(current, default) for current, default in pairs if current != default]


def _hand_over(tensors: Iterable[torch.Tensor], waits: _Waits) -> None:
    """Makes the first stream of each pair wait for the second one, and keep the memory."""
    if not waits:
        return
    for waiting, awaited in waits:
        waiting.wait_stream(awaited)
    by_device = {waiting.device: waiting for waiting, _ in waits}
    for tensor in tensors:
        stream = by_device.get(tensor.device)
        if stream is not None:
            for part in _parts_of(tensor):
                part.record_stream(stream)


def _parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors whose memory it consists of."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def tensors_of(value: object) -> list[torch.Tensor]:
    """All tensors in a value, wherever pickle would find them."""
    if isinstance(value, torch.Tensor):
        return [value]
    finder = _Finder()
    try:
        finder.dump(value)
    except Exception:  # nested too deeply, most likely
        _logger.debug("not all tensors of a %s could be found", type(value), exc_info=True)
    return finder.found


class _Finder(pickle.Pickler):
    """Goes through a value, and past what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
        self.found: list[torch.Tensor] = []

    def persistent_id(self, obj: object) -> object:
        """Keeps tensors, which have no parts to go through."""
        if not isinstance(obj, torch.Tensor):
            return None
        self.found.append(obj)
        return ""

    def reducer_override(self, obj: Any) -> Any:
        """The parts of an object; none of what names itself, or has no way to be pickled."""
        if obj is _nothing:
            return NotImplemented
        if isinstance(obj, type | FunctionType):
            return _nothing, ()
        try:
            reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception:
            return _nothing, ()
        return (_nothing, ()) if isinstance(reduced, str) else reduced


def _nothing() -> None:
    """Makes what stands for an object without tensors."""
