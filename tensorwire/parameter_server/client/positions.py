"""Positions inside files as bytes.

Positions lie in the cluster's view and in snapshots, which somebody else may have written. So they
are plain data, numbers' tensors and arrays included, and reading one calls nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.kernels.arrays import Array
from tensorwire.parameter_server.opaque import Untyped, UserValue

LARGEST_POSITION: Final = 16 << 10
"""Bytes of a position; more would be too much for pushes and snapshots, each of which has some."""

_PROTOCOL: Final = 4


def _array(data: bytes, dtype: str, shape: tuple[int, ...]) -> Array:
    array: Array = np.array(np.frombuffer(data, np.dtype(dtype)).reshape(shape))
    return array


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).reshape(shape)


_PLAIN: Final = (int, float, complex, bytearray, set, frozenset, slice, range, OrderedDict)
_NAMED: Final = {(each.__module__, each.__qualname__): each for each in (*_PLAIN, _array, _tensor)}
"""The callables that a position may name."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Untyped:
        """Called for all but numbers, texts, bytes, lists, tuples, dicts, sets and None."""
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous()
            raw = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            return _tensor, (raw, str(flat.dtype).removeprefix("torch."), tuple(flat.shape))
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return _array, (value.tobytes(), value.dtype.str, value.shape)
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            plain = value.item()
            return type(plain), (plain,)
        if type(value) in _PLAIN or any(value is each for each in _NAMED.values()):
            return NotImplemented
        raise TypeError(f"it has a {type(value).__name__}, which is no plain data")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        """The callables of :data:`_NAMED`, and nothing else."""
        allowed = _NAMED.get((module, name))
        if allowed is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no plain data")
        return allowed


def encode_position(position: object, file: str) -> bytes:
    """The bytes of a position.

    Args:
        position: plain data.
        file: of which file, for errors.

    Raises:
        TypeError: it is no plain data.
        ValueError: it has more than ``LARGEST_POSITION`` bytes.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, _PROTOCOL).dump(position)
    except (TypeError, pickle.PicklingError, AttributeError, RecursionError) as error:
        raise TypeError(
            f"samples: the position in file {file} cannot be kept, as {error}; it must be of "
            "numbers, texts, bytes, lists, tuples, sets, dicts, tensors and arrays of numbers"
        ) from None
    data = buffer.getvalue()
    if len(data) > LARGEST_POSITION:
        raise ValueError(
            f"samples: the position in file {file} has {len(data)} bytes, and must have at most "
            f"{LARGEST_POSITION}; each push and each snapshot carries it"
        )
    return data


def decode_position(data: bytes) -> UserValue:
    """The inverse of :func:`encode_position`.

    Raises:
        pickle.UnpicklingError: it names what is no plain data.
    """
    return _Unpickler(io.BytesIO(data)).load()
