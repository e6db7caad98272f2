"""Lowers a value's tensors for the transport: small ones to bytes, the others to slots.

Decides which tensors travel inside the message header and how, and makes what
is left to the transport detached and dense. Records what a transport does not
carry: ``requires_grad`` and being a Parameter. Most sparse tensors were taken apart
by the codec before they come here; moving bytes is the transport's business.

Layout, little-endian, no padding: ``count u32``, then per tensor ``flags u8``
and, if it is inline, ``dtype u8, ndim u8, shape u64 × ndim``, the strides in
elements ``u64 × ndim`` if ``STRIDED`` (0 along a dimension that shows the same elements
again and again), and the bytes of its elements in memory order, each once: a single
element if it is ``EXPANDED``, too, which is then shown everywhere. If it is ``SPARSE``
(COO), ``ndim u8, shape u64 × ndim`` and a table of its indices and values. If it is
``EXPANDED`` and not inline, ``ndim u8, shape u64 × ndim`` and a table of one tensor, which
has size 1 wherever the same elements are shown again and again. If it is ``TIED``,
``memory u32, dtype u8, ndim u8, offset u64`` in bytes, ``shape u64 × ndim``, the strides in
elements ``u64 × ndim``, and where a memory is named for the first time a table of one
tensor, its bytes.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from rpc.errors import EncodeError, FrameError, caused
from rpc.ids import new_tuple
from rpc.wire import tensor_ties
from rpc.wire.inline_types import CODES, CONJUGABLE, INLINE_TYPES, InlineType
from rpc.wire.strides import contiguous_steps, is_dense, is_ordered, reach, shown_once

INLINE_LIMIT: Final = 32 * 1024
"""Bytes up to which a CPU tensor travels inside the header.

Measured with an echo: at 8 and 16 KB that saves a fifth (TENSORPIPE) to a quarter
(TENSORWIRE), at 32 KB a quarter on TENSORWIRE and nothing on TENSORPIPE, beyond it loses.
"""

_INLINE_IN_ALL: Final = 64 << 20
"""The most bytes of such tensors in one header; later ones get slots.

Transports bound the header, and receive it in one piece."""

_REQUIRES_GRAD: Final = 1
_PARAMETER: Final = 2
_INLINE: Final = 4
_STRIDED: Final = 8
_SPARSE: Final = 16
_COALESCED: Final = 32
_EXPANDED: Final = 64
_TIED: Final = 128
_OF_EXPANDED: Final = frozenset({0, _INLINE, _INLINE | _STRIDED})
"""The flags that what was expanded may have; below, those of the parts of a sparse tensor."""
_OF_SPARSE: Final = _OF_EXPANDED | {_INLINE | _EXPANDED, _EXPANDED}
_OF_TIED: Final = frozenset({0, _INLINE})
_FLAGS: Final = frozenset(
    layout | grad | kind
    for layout in _OF_SPARSE | {_SPARSE, _SPARSE | _COALESCED}
    for grad in (0, _REQUIRES_GRAD)
    for kind in (0, _PARAMETER)
)

_MALFORMED: Final = (struct.error, IndexError, ValueError, TypeError, OverflowError)

_COUNT: Final = struct.Struct("<I")
_PLACE: Final = struct.Struct("<IBBQ")
_MAX_DIMS: Final = 64
_SIZES: Final = tuple(struct.Struct(f"<{n}Q") for n in range(_MAX_DIMS + 1))
_NO_STEPS: Final = tuple((0,) * n for n in range(_MAX_DIMS + 1))
_MAX_INLINE_DIMS: Final = 32
_BYTES: Final = CODES[torch.uint8]

_MEMORY: Final[Any] = (ctypes.c_char * sys.maxsize).from_address(0)
"""All memory: a slice of it copies what is there without a foreign call."""


class UnpackedTensors(NamedTuple):
    """Tensors that arrived, before they are given back what autograd knows of them.

    Distributed autograd replaces some of ``tensors`` by non-leaf ones and then
    calls :meth:`finish`, as everyone else does at once.

    Args:
        tensors: detached, in the order they were packed.
        requiring_grad: indices of those that required grad at the sender.
        parameters: indices of those that were parameters there.
    """

    tensors: list[torch.Tensor]
    requiring_grad: list[int]
    parameters: list[int]

    def finish(self) -> list[torch.Tensor]:
        """Makes the tensors what they were at the sender, and returns them.

        A tensor that became part of a graph stays in it: it already requires
        grad, and cannot turn into a Parameter, but passes for one.
        """
        tensors = self.tensors
        for index in self.requiring_grad:
            if not tensors[index].requires_grad:
                tensors[index].requires_grad_()
        for index in self.parameters:
            tensors[index] = _as_parameter(tensors[index])
        return tensors


def pack_tensors(
    tensors: Sequence[torch.Tensor], inline_limit: int = INLINE_LIMIT
) -> tuple[bytes, tuple[torch.Tensor, ...]]:
    """Lowers strided tensors to a table of bytes and slots for the transport.

    A slot is detached and dense, in any order of dimensions. It may be a window
    into a larger storage, of which a transport must send only the window.

    Args:
        tensors: strided, or COO and requiring grad; as the user passed them.
        inline_limit: bytes up to which a CPU tensor becomes part of the table.

    Raises:
        EncodeError: a tensor's elements are not in memory, or it has a tangent.
    """
    if forward_ad._current_level >= 0:
        _require_no_tangent(tensors)
    parts = [_COUNT.pack(len(tensors))]
    slots: list[torch.Tensor] = []
    room = _INLINE_IN_ALL
    for tensor in tensors:
        flags = _REQUIRES_GRAD if tensor.requires_grad else 0
        if type(tensor) is Parameter or (flags and getattr(tensor, "_is_param", False)):
            flags |= _PARAMETER
        if flags and tensor.is_sparse:
            parts.append(_pack_sparse(tensor.detach(), flags, inline_limit, slots))
            continue
        code, shape = CODES.get(tensor.dtype, -1), tensor.shape
        head, size = _head_and_size(flags | _INLINE, code, shape)
        if size > inline_limit or not tensor.is_cpu or (room := room - size) < 0:
            parts.append(_pack_slot(tensor, flags, inline_limit, slots))
            continue
        # Most tensors are packed right here: a call of ours, and each question that torch
        # is asked, cost more than copying what a small tensor holds. (``numpy()`` would
        # answer most of them at once, but then nobody may resize the user's tensor.)
        try:
            address, held = tensor.data_ptr(), tensor.untyped_storage().nbytes()
        except RuntimeError as error:
            raise caused(_without_storage(tensor), error) from error
        if offset := tensor.storage_offset():
            held -= int(offset) * tensor.itemsize
        if address and not (tensor.is_neg() or (code in CONJUGABLE and tensor.is_conj())):
            if tensor.is_contiguous():
                if size <= held and (1 not in shape or len(shape) < 2):
                    parts += (head, _MEMORY[address : address + size])
                    continue
            elif tensor.itemsize <= held and not any(tensor.stride()):
                head = _head(flags | _INLINE | _EXPANDED, code, shape)  # the gradient of a sum
                parts += (head, _MEMORY[address : address + tensor.itemsize])
                continue
        parts.append(_pack_inline(tensor, code, flags, slots))
    return b"".join(parts), tuple(slots)


def pack_tied_tensors(
    tensors: Sequence[torch.Tensor], inline_limit: int = INLINE_LIMIT
) -> tuple[bytes, tuple[torch.Tensor, ...]]:
    """Packs as :func:`pack_tensors`, but tensors that share memory here do so on arrival."""
    pieces = tensor_ties.find(tensors, CODES) if len(tensors) > 1 else []
    if not pieces:
        return pack_tensors(tensors, inline_limit)
    if forward_ad._current_level >= 0:
        _require_no_tangent(tensors)
    parts = [_COUNT.pack(len(tensors))]
    slots: list[torch.Tensor] = []
    tied = {number: (piece, start) for piece in pieces for start, _, number in piece.members}
    numbers: dict[int, int] = {}
    room = _INLINE_IN_ALL
    for index, tensor in enumerate(tensors):
        limit = inline_limit if room > 0 else -1
        if index not in tied:
            table, more = pack_tensors((tensor,), limit)
            parts.append(table[_COUNT.size :])
        else:
            piece, start = tied[index]
            is_first = id(piece) not in numbers
            number = numbers.setdefault(id(piece), len(numbers))
            parts.append(_pack_place(tensor, number, start - piece.start))
            table, more = b"", ()
            if is_first:
                table, more = pack_tensors((piece.bytes_of(tensor),), limit)
                parts.append(table)
        room -= len(table)
        slots += more
    return b"".join(parts), tuple(slots)


def unpack_tensors(
    table: bytes | bytearray | memoryview, slots: Sequence[torch.Tensor]
) -> UnpackedTensors:
    """Reads what :func:`pack_tensors` wrote.

    Args:
        table: its bytes, from an untrusted source.
        slots: the tensors the transport delivered, in order.

    Raises:
        FrameError: the table is malformed or does not fit the slots.
    """
    position, end = _COUNT.size, len(table)
    if end < position:
        raise FrameError(f"{end} bytes are no tensor table")
    (count,) = _COUNT.unpack_from(table)
    waiting = iter(slots)
    tensors: list[torch.Tensor] = []
    requiring_grad: list[int] = []
    parameters: list[int] = []
    memories: list[dict[int, torch.Tensor]] = []
    for index in range(count):
        if position >= end:
            raise FrameError(f"a tensor table ends before tensor {index} of {count}")
        flags = table[position]
        if flags & _INLINE and flags in _FLAGS:
            tensor, position = _unpack_inline(table, position)
        elif flags & _TIED:
            tensor, position = _unpack_tied(table, position, waiting, memories)
        else:
            tensor, position = _unpack_other(table, position, waiting, _FLAGS)
        tensors.append(tensor)
        if flags & _REQUIRES_GRAD:
            dtype = tensor.dtype
            if not (dtype.is_floating_point or dtype.is_complex):
                raise FrameError(f"tensor {index} of dtype {dtype} cannot require grad")
            requiring_grad.append(index)
        if flags & _PARAMETER:
            parameters.append(index)
    if position != end or next(waiting, None) is not None:
        raise FrameError(f"a tensor table for {count} tensors does not end with the last one")
    return new_tuple(UnpackedTensors, (tensors, requiring_grad, parameters))


@functools.lru_cache(maxsize=1024)
def _head(flags: int, code: int, shape: tuple[int, ...]) -> bytes:
    """The bytes before an inline tensor's own or its strides; a program's shapes come again."""
    return bytes((flags, code, len(shape))) + _SIZES[len(shape)].pack(*shape)


@functools.lru_cache(maxsize=1024)
def _head_and_size(flags: int, code: int, shape: tuple[int, ...]) -> tuple[bytes, int]:
    """The head of an inline tensor, and how many bytes it shows; too many if it cannot be one."""
    if code < 0 or len(shape) > _MAX_INLINE_DIMS:
        return b"", sys.maxsize
    return _head(flags, code, shape), math.prod(shape) * INLINE_TYPES[code].bits.itemsize


def _pack_slot(
    tensor: torch.Tensor, flags: int, inline_limit: int, slots: list[torch.Tensor]
) -> bytes:
    _check_memory(tensor)
    if not tensor.is_contiguous() and _is_expanded(tensor):
        return _pack_expanded(tensor.detach(), flags, inline_limit, slots)
    slots.append(_dense(tensor.detach()))
    return bytes((flags,))


def _check_memory(tensor: torch.Tensor) -> None:
    """Raises ``EncodeError`` for elements that are not in memory: reading them would crash.

    Those of torch's ``ZeroTensor`` are not either, and need not be.
    """
    if not tensor.numel() or tensor.is_meta or tensor._is_zerotensor():
        return
    try:
        storage = tensor.untyped_storage()
        held = storage.nbytes() if storage.data_ptr() else 0
    except RuntimeError as error:
        raise caused(_without_storage(tensor), error) from error
    span = tensor.numel() if tensor.is_contiguous() else reach(tensor.shape, tensor.stride())
    needed = (tensor.storage_offset() + span) * tensor.itemsize
    if held < needed:
        raise EncodeError(
            f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} cannot be sent: its "
            f"storage was freed, or shrunk to {held} of the {needed} bytes "
            "that it needs (FSDP frees parameters so between uses); send it while it is filled"
        )


def _require_no_tangent(tensors: Sequence[torch.Tensor]) -> None:
    """Refuses dual tensors of forward-mode differentiation, whose other half would be lost."""
    for tensor in tensors:
        _, tangent = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
        if tangent is not None:
            raise EncodeError(
                f"a dual tensor of shape {tuple(tensor.shape)} cannot be sent: its tangent would "
                "be lost; send both halves, as forward_ad.unpack_dual gives them"
            )


def _without_storage(tensor: torch.Tensor) -> EncodeError:
    return EncodeError(
        f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} cannot be sent: it has "
        "no memory of its own, as inside torch.func.vmap, grad and jvp; send it outside of these"
    )


def _pack_sparse(
    tensor: torch.Tensor, flags: int, inline_limit: int, slots: list[torch.Tensor]
) -> bytes:
    shape = tensor.shape
    flags |= _SPARSE | (_COALESCED if tensor.is_coalesced() else 0)
    head = bytes((flags, len(shape))) + _SIZES[len(shape)].pack(*shape)
    table, more = pack_tensors((tensor._indices(), tensor._values()), inline_limit)
    slots += more
    return head + table


def _pack_place(tensor: torch.Tensor, memory: int, offset: int) -> bytes:
    flags = _TIED | (_REQUIRES_GRAD if tensor.requires_grad else 0)
    if isinstance(tensor, Parameter):
        flags |= _PARAMETER
    shape = tensor.shape
    sizes = _SIZES[len(shape)]
    head = bytes((flags,)) + _PLACE.pack(memory, CODES[tensor.dtype], len(shape), offset)
    return head + sizes.pack(*shape) + sizes.pack(*tensor.stride())


def _pack_inline(tensor: torch.Tensor, code: int, flags: int, slots: list[torch.Tensor]) -> bytes:
    """Packs a tensor that is not too large, but not as simple as most."""
    shape, strides, size = tensor.shape, tensor.stride(), tensor.nbytes
    ndim = len(shape)
    if ndim > _MAX_INLINE_DIMS:
        return _pack_slot(tensor, flags, size, slots)
    _check_memory(tensor)
    address = tensor.data_ptr()
    is_plain = (address or not size) and not tensor.is_neg() and not tensor.is_conj()
    if tensor.is_contiguous():
        if not is_plain:
            return _pack_inline(_dense(tensor.detach()), code, flags, slots)
        if ndim > 1 and (1 in shape or 0 in shape) and is_ordered(shape, strides):
            return _pack_strided(tensor, code, flags)
        elements: bytes = _MEMORY[address : address + size]
        return _head(flags | _INLINE, code, shape) + elements
    if is_plain and is_dense(shown_once(shape, strides), strides):
        return _pack_strided(tensor, code, flags)
    if _is_expanded(tensor):
        return _pack_expanded(tensor.detach(), flags, size, slots)
    return _pack_inline(_dense(tensor.detach()), code, flags, slots)


def _pack_strided(tensor: torch.Tensor, code: int, flags: int) -> bytes:
    shape, strides = tensor.shape, tensor.stride()
    head = _head(flags | _INLINE | _STRIDED, code, shape)
    size = math.prod(shown_once(shape, strides)) * tensor.itemsize
    address = tensor.data_ptr()
    elements: bytes = _MEMORY[address : address + size]
    return head + _SIZES[len(shape)].pack(*strides) + elements


def _is_expanded(tensor: torch.Tensor) -> bool:
    """True if it shows the same elements again and again along a dimension."""
    strides = tensor.stride()
    if 0 not in strides or len(strides) > _MAX_DIMS:
        return False
    return any(not step and size > 1 for step, size in zip(strides, tensor.shape, strict=True))


def _pack_expanded(
    tensor: torch.Tensor, flags: int, inline_limit: int, slots: list[torch.Tensor]
) -> bytes:
    shape = tensor.shape
    head = bytes((flags | _EXPANDED, len(shape))) + _SIZES[len(shape)].pack(*shape)
    for dim, stride in enumerate(tensor.stride()):
        if not stride:
            tensor = tensor.narrow(dim, 0, 1)
    table, more = pack_tensors((tensor,), inline_limit)
    slots += more
    return head + table


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements without gaps, overlaps or pending negation and conjugation.

    They are in memory, too, which those of torch's ``ZeroTensor`` are not.
    """
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride()):
        return tensor
    return tensor.detach().clone(memory_format=torch.preserve_format)


def _as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.grad_fn is None:
        return Parameter(tensor, requires_grad=tensor.requires_grad)
    # isinstance(tensor, Parameter) holds with this mark, torch's own for such cases.
    tensor._is_param = True
    return tensor


def _unpack_inline(
    table: bytes | bytearray | memoryview, position: int
) -> tuple[torch.Tensor, int]:
    """The tensor at ``position``, and where the next one begins.

    numpy checks that the bytes are there and that shape and strides stay within
    them. Going through it also avoids torch's operators, which release the
    interpreter lock: getting it back among busy threads takes milliseconds.
    """
    try:
        flags = table[position]
        kind = INLINE_TYPES[table[position + 1]]
        ndim = table[position + 2]
        shape = _SIZES[ndim].unpack_from(table, position + 3)
        position += 3 + 8 * ndim
        if flags & _STRIDED:
            window, position = _strided_window(table, position, kind.bits, shape)
        elif flags & _EXPANDED:
            element = bytearray(table[position : position + kind.bits.itemsize])
            window = np.ndarray(shape, kind.bits, element, 0, _NO_STEPS[ndim])
            position += kind.bits.itemsize
        else:
            window = np.ndarray(shape, kind.bits, table, position).copy()
            size = window.nbytes
            position += size
            if not size:  # numpy would give it strides of 0
                window = np.ndarray(
                    shape, kind.bits, window, 0, contiguous_steps(shape, window.itemsize)
                )
        tensor = torch.from_numpy(window)
    except _MALFORMED as error:
        raise caused(FrameError(f"an inline tensor is malformed: {error}"), error) from error
    if not kind.is_native:
        tensor = _reinterpret(tensor, kind)
    return tensor, position


def _unpack_other(
    table: bytes | bytearray | memoryview,
    position: int,
    waiting: Iterator[torch.Tensor],
    allowed: frozenset[int],
) -> tuple[torch.Tensor, int]:
    """The tensor at ``position``, which has such flags, and where the next one begins."""
    flags = table[position]
    if flags not in allowed:
        raise FrameError(f"a tensor has meaningless flags 0x{flags:02x}")
    if flags & _INLINE:
        return _unpack_inline(table, position)
    if flags & _SPARSE:
        return _unpack_sparse(table, position, waiting)
    if flags & _EXPANDED:
        return _unpack_expanded(table, position, waiting)
    tensor = next(waiting, None)
    if tensor is None:
        raise FrameError("a tensor table names more slots than the frame has")
    return tensor, position + 1


def _unpack_parts(
    table: bytes | bytearray | memoryview,
    position: int,
    waiting: Iterator[torch.Tensor],
    allowed: frozenset[int],
) -> tuple[list[torch.Tensor], int]:
    """The tensors of the table that begins at ``position``, and where it ends."""
    (count,) = _COUNT.unpack_from(table, position)
    position += _COUNT.size
    parts: list[torch.Tensor] = []
    for _ in range(count):
        tensor, position = _unpack_other(table, position, waiting, allowed)
        parts.append(tensor)
    return parts, position


def _unpack_sparse(
    table: bytes | bytearray | memoryview, position: int, waiting: Iterator[torch.Tensor]
) -> tuple[torch.Tensor, int]:
    """The COO tensor at ``position``, and where the next one begins."""
    flags = table[position]
    try:
        sizes = _SIZES[table[position + 1]]
        shape = sizes.unpack_from(table, position + 2)
        start = position + 2 + sizes.size
        (indices, values), end = _unpack_parts(table, start, waiting, _OF_SPARSE)
        tensor = torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=bool(flags & _COALESCED), check_invariants=True
        )
    except (*_MALFORMED, RuntimeError) as error:
        raise caused(FrameError(f"a sparse tensor is malformed: {error}"), error) from error
    return tensor, end


def _unpack_tied(
    table: bytes | bytearray | memoryview,
    position: int,
    waiting: Iterator[torch.Tensor],
    memories: list[dict[int, torch.Tensor]],
) -> tuple[torch.Tensor, int]:
    """The tensor at ``position``, which shows some of one of ``memories``; where the next begins.

    Memory that is named for the first time comes right after it, and is added: as bytes, and
    later as elements of each kind that is shown. All that show one memory count its changes
    together, so that autograd notices that one of them changed what another saved.
    """
    flags = table[position]
    try:
        memory, code, ndim, offset = _PLACE.unpack_from(table, position + 1)
        sizes, kind = _SIZES[ndim], INLINE_TYPES[code]
        position += 1 + _PLACE.size
        shape = sizes.unpack_from(table, position)
        strides = sizes.unpack_from(table, position + sizes.size)
        position += 2 * sizes.size
        if memory == len(memories):
            (whole,), position = _unpack_parts(table, position, waiting, _OF_TIED)
            if whole.dtype is not torch.uint8 or whole.ndim != 1 or not whole.is_contiguous():
                raise FrameError("memory that tensors share is not bytes in a row")
            memories.append({_BYTES: whole.clone() if whole.storage_offset() else whole})
        seen = memories[memory]
        elements = seen.get(code)
        if elements is None:
            elements = seen[code] = _elements(seen[_BYTES], kind)
        start, uneven = divmod(offset, kind.bits.itemsize)
        if (
            flags & ~(_REQUIRES_GRAD | _PARAMETER) != _TIED
            or uneven
            or not all(shape)
            or start + reach(shape, strides) > len(elements)
        ):
            raise FrameError(f"a tensor of shape {shape} and strides {strides} has no such place")
    except _MALFORMED as error:
        raise caused(
            FrameError(f"a tensor that shares memory is malformed: {error}"), error
        ) from error
    return elements.as_strided(shape, strides, start).detach(), position


def _elements(whole: torch.Tensor, kind: InlineType) -> torch.Tensor:
    """The bytes ``whole`` as elements of ``kind``, without an incomplete one at the end."""
    left = whole.nbytes % kind.bits.itemsize
    return _reinterpret(whole[: whole.nbytes - left] if left else whole, kind)


def _strided_window(
    table: bytes | bytearray | memoryview,
    position: int,
    bits: np.dtype[np.generic],
    shape: tuple[int, ...],
) -> tuple[np.ndarray[Any, Any], int]:
    """A copy of the elements at ``position`` with the strides named there; where they end."""
    packed = _SIZES[len(shape)]
    strides = packed.unpack_from(table, position)
    shown = shown_once(shape, strides)
    if not is_dense([size or 1 for size in shown], strides):
        raise FrameError(f"strides {strides} are not dense for shape {shape}")
    position += packed.size
    elements = np.ndarray(math.prod(shown), bits, table, position).copy()
    steps = tuple([stride * bits.itemsize for stride in strides])
    return np.ndarray(shape, bits, elements, 0, steps), position + elements.nbytes


def _unpack_expanded(
    table: bytes | bytearray | memoryview, position: int, waiting: Iterator[torch.Tensor]
) -> tuple[torch.Tensor, int]:
    """The expanded tensor at ``position``, and where the next one begins."""
    try:
        sizes = _SIZES[table[position + 1]]
        shape = sizes.unpack_from(table, position + 2)
        start = position + 2 + sizes.size
        (tensor,), end = _unpack_parts(table, start, waiting, _OF_EXPANDED)
        if tensor.ndim != len(shape):
            raise FrameError(f"a tensor of shape {tuple(tensor.shape)} cannot become {shape}")
        return tensor.expand(shape), end
    except (*_MALFORMED, RuntimeError) as error:
        raise caused(FrameError(f"an expanded tensor is malformed: {error}"), error) from error


def _reinterpret(tensor: torch.Tensor, kind: InlineType) -> torch.Tensor:
    if kind.torch_type is None:
        raise FrameError("this version of torch lacks the dtype of a tensor that arrived")
    return tensor.view(kind.torch_type)
