"""The table of a frame: where its payload and tensors are, and the layouts of tensors.

Sans-IO: packs and parses :class:`Item` rows and checks that a row is possible.
Row 0 is the payload, the others are the tensors in order. Frames without
tensors whose payload travels inline have no table at all.
"""

from __future__ import annotations

import enum
import functools
import struct
from typing import NamedTuple

import numpy as np
import torch

from rpc.errors import EncodeError, FrameError
from rpc.ids import new_tuple
from rpc.transports.host.regions import array_at, view_of

INLINE_ALIGNMENT = 16

_COUNT = struct.Struct("<I")
_ROW = struct.Struct("<BBBxIQQ")
_MAX_DIMENSIONS = 64
_LAYOUTS = tuple(struct.Struct(f"<{2 * count}qB") for count in range(_MAX_DIMENSIONS + 1))

_DTYPE_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64"),
    *("bool", "complex64", "complex128", "complex32", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    "bcomplex32",
)
_DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, n, None) for n in _DTYPE_NAMES)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}
_ITEM_SIZES = tuple(0 if dtype is None else dtype.itemsize for dtype in _DTYPES)
_BYTES = 255
_LAYOUTS_KEPT = 256
"""A program's tensors look the same again and again."""


class Placement(enum.IntEnum):
    """Ways in which the bytes of an item travel."""

    INLINE = 0
    """In the frame itself, at ``position`` of the inline section."""
    SHARED = 1
    """In shared segment ``segment``, at ``position``."""
    STREAM = 2
    """On bulk channels, as transfer ``position``."""
    LENT = 3
    """On a device of the sender's; ``segment`` bytes at ``position`` of the inline section say how
    to get there. Tensors that arrive on a device only, and not over every transport."""


_PLACEMENTS = tuple(Placement)
_LENT = int(Placement.LENT)
HOST_PLACEMENTS = _PLACEMENTS[: Placement.LENT]


class Item(NamedTuple):
    """One row of the table; the payload has ``dtype`` None and no shape."""

    place: Placement
    segment: int
    position: int
    nbytes: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str


class Look(NamedTuple):
    """The layout of a tensor that is to be sent."""

    code: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int


def look_at(tensor: torch.Tensor) -> Look:
    """Describes a tensor.

    Raises:
        EncodeError: it cannot be sent: not strided and dense, of an unknown dtype, or of more
            than 64 dimensions.
    """
    dtype = tensor.dtype
    code = _DTYPE_CODES.get(dtype)
    if code is None:
        raise EncodeError(f"tensors of {dtype} cannot be sent")
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise EncodeError("only plain strided tensors travel as tensors of a frame")
    shape, strides = tuple(tensor.shape), tensor.stride()
    if len(shape) > _MAX_DIMENSIONS:
        raise EncodeError(f"a tensor of {len(shape)} dimensions cannot be sent; 64 are the most")
    elements = tensor.numel() if tensor.is_contiguous() else _dense_elements(shape, strides)
    if elements is None:
        raise EncodeError(f"a tensor of shape {shape} and strides {strides} is not dense")
    return new_tuple(Look, (code, shape, strides, elements * _ITEM_SIZES[code]))


def _dense_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Returns how many elements a layout has; None if they do not span just as many."""
    elements, reach = 1, 1
    for size, stride in zip(shape, strides, strict=True):
        if size < 0 or stride < 0:
            return None
        elements *= size
        reach += (size - 1) * stride
    return elements if reach == elements or not elements else None


def payload_row(place: Placement, segment: int, position: int, nbytes: int) -> bytes:
    """The row of a payload."""
    return _ROW.pack(place, _BYTES, 0, segment, position, nbytes)


def tensor_row(
    place: Placement, segment: int, position: int, look: Look, device: str = ""
) -> bytes:
    """The row of a tensor."""
    code, shape, strides, nbytes = look
    row = _ROW.pack(place, code, len(shape), segment, position, nbytes)
    return row + _pack_layout(shape, strides, device)


@functools.lru_cache(maxsize=_LAYOUTS_KEPT)
def _pack_layout(shape: tuple[int, ...], strides: tuple[int, ...], device: str) -> bytes:
    name = device.encode()
    return _LAYOUTS[len(shape)].pack(*shape, *strides, len(name)) + name


def join_rows(rows: list[bytes]) -> bytes:
    """The table section of a frame."""
    return _COUNT.pack(len(rows)) + b"".join(rows)


def unpack_table(
    table: bytes, inline_bytes: int, max_bytes: int, places: tuple[Placement, ...] = HOST_PLACEMENTS
) -> list[Item]:
    """Parses and checks a table.

    Args:
        table: the bytes.
        inline_bytes: length of the frame's inline section.
        max_bytes: bound on the sum of all items.
        places: where items may be.

    Raises:
        FrameError: the bytes are not a table, or it claims what cannot be.
    """
    items: list[Item] = []
    position, total = _COUNT.size, 0
    try:
        (count,) = _COUNT.unpack_from(table)
        for _ in range(count):
            place, code, dimensions, segment, at, nbytes = _ROW.unpack_from(table, position)
            position += _ROW.size
            if place >= len(places) or dimensions > _MAX_DIMENSIONS:
                raise FrameError(f"a table row with place {place} and {dimensions} dimensions")
            if not place and at + nbytes > inline_bytes:
                raise FrameError("a table row points past the inline section")
            if (code == _BYTES) is not (not items):
                raise FrameError("a table must describe one payload, then tensors")
            layout = _NO_LAYOUT
            if code != _BYTES:
                end = position + 16 * dimensions + 1
                end += table[end - 1]
                layout = _unpack_layout(code, dimensions, nbytes, table[position:end])
                position = end
            if place == _LENT and (at + segment > inline_bytes or not layout[3]):
                raise FrameError("a table row for lent memory without a handle or a device")
            total += nbytes
            items.append(new_tuple(Item, (_PLACEMENTS[place], segment, at, nbytes, *layout)))
    except (struct.error, IndexError, UnicodeDecodeError):
        raise FrameError("a frame's table ends early") from None
    if not items or position != len(table):
        raise FrameError("a frame's table has the wrong length")
    if total > max_bytes:
        raise FrameError(f"message of {total} bytes; the limit is {max_bytes} (max_message_bytes)")
    return items


_Layout = tuple[torch.dtype | None, tuple[int, ...], tuple[int, ...], str]
_NO_LAYOUT: _Layout = (None, (), (), "")


@functools.lru_cache(maxsize=_LAYOUTS_KEPT)
def _unpack_layout(code: int, dimensions: int, nbytes: int, layout: bytes) -> _Layout:
    """Returns the layout of a tensor of ``nbytes``: dtype, shape, strides and device."""
    sizes = _LAYOUTS[dimensions].unpack_from(layout)
    shape, strides, length = sizes[:dimensions], sizes[dimensions:-1], sizes[-1]
    device = layout[_LAYOUTS[dimensions].size :].decode("ascii")
    if len(device) != length or code >= len(_DTYPES) or (dtype := _DTYPES[code]) is None:
        raise FrameError(f"a table row with dtype code {code}, unknown to this torch")
    elements = _dense_elements(shape, strides)
    if elements is None or elements * _ITEM_SIZES[code] != nbytes:
        raise FrameError(
            f"a tensor of shape {shape} and strides {strides} does not fill {nbytes} bytes"
        )
    return dtype, shape, strides, device


class Source(NamedTuple):
    """Bytes to be sent: ``size`` of them at ``address``, alive as long as ``owner`` is."""

    address: int
    size: int
    owner: memoryview | torch.Tensor

    def view(self) -> memoryview:
        """The bytes as a buffer that keeps them alive."""
        if isinstance(self.owner, memoryview):
            return self.owner
        if not self.size:
            return memoryview(b"")
        array = array_at(self.address)
        array.owner = self.owner
        return view_of(array, self.size)


def source_of_payload(payload: bytes | bytearray | memoryview) -> Source:
    """The bytes of a payload."""
    view = memoryview(payload)
    if view.format != "B" or view.ndim != 1:
        view = view.cast("B")
    return Source(np.frombuffer(view, np.uint8).ctypes.data, len(view), view)


def tensor_over(memory: object, item: Item, offset: int = 0) -> torch.Tensor:
    """A tensor that lives in ``memory``, a writable buffer, from ``offset`` on; no view."""
    dtype = item.dtype or torch.uint8
    if not item.nbytes:
        return torch.empty_strided(item.shape, item.strides, dtype=dtype)
    count = item.nbytes // dtype.itemsize
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    if len(item.shape) == 1:
        return flat
    return flat.as_strided_(item.shape, item.strides)
