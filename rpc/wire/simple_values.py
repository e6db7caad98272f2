"""Packs most of what is sent without a pickler of ours: atoms, tensors, references, tuples.

An atom is a value that can never change and needs no name to be rebuilt: a number, a
text, bytes, None. Whatever else there is in a value makes it the business of ``codec``,
which asks here first. What both make of a value is defined here, too.

Atoms alone are pickled. Of what is mixed with tensors and references, the layout is,
little-endian, after its mark: ``count u8``, the kind of each item (``u8``), and then what
the items hold, in order: of text (UTF-8) and bytes ``size u32`` and themselves, of an
integer ``i64``, of a float ``f64``, of all else nothing. Nothing at all stands for an
empty tuple.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from rpc.errors import DecodeError, caused
from rpc.ids import new_tuple
from rpc.wire.handles import OutOfBandHandle

PROTOCOL: Final = 5
"""The protocol of every pickle that is sent."""

# What a payload begins with that is not an ordinary pickle, whose first byte is 0x80.
_NOTHING: Final = b"n"  # None
_ATOMIC: Final = b"a"  # a pickle of an atom, or of a tuple of atoms, follows
_ONE_TENSOR: Final = b"t"
_MIXED: Final = b"m"
_A_TENSOR, _A_REFERENCE, _A_TEXT, _SOME_BYTES, _AN_INTEGER, _A_FLOAT = range(3, 9)
_CONSTANTS: Final = (None, False, True)
"""Values whose place here is their kind on the wire."""
_SIZE: Final = struct.Struct("<I")
_I64: Final = struct.Struct("<q")
_F64: Final = struct.Struct("<d")
_MOST_MIXED: Final = 255
_ATOMS: Final = frozenset({int, float, str, bytes, bool, type(None)})
_STRIDED: Final = torch.strided
NOT_SIMPLE: Final = object()
"""Returned in place of a value that is not one of these."""

_SMALL_BYTES: Final = 1024


class Encoded(NamedTuple):
    """A value as it leaves the codec.

    Args:
        payload: everything but the tensors and references.
        tensors: every strided tensor met, as the user passed it, each object once,
            in the order met; sparse ones appear as their strided parts, except those
            that autograd must see whole.
        references: every :class:`OutOfBandHandle` met, each once.
        plain: decoding runs no user code but, possibly, imports: there are only
            native values, tensors, references, and functions or classes by name.
        severed: the type of a tensor in it that lost what leads from it to its graph.
    """

    payload: bytes
    tensors: list[Tensor]
    references: list[Any]
    plain: bool
    severed: type[Tensor] | None = None


def encode_simple(value: Any) -> Encoded | None:
    """Packs an atom, a tensor, or a tuple of these and of references; None for all else."""
    kind = type(value)
    tensors: list[Tensor] = []
    references: list[Any] = []
    payload: bytes | None = b""
    if value is None:
        payload = _NOTHING
    elif kind is Tensor:
        payload = _ONE_TENSOR
        tensors.append(value)
    elif kind in _ATOMS or (kind is tuple and value and _ATOMS.issuperset(map(type, value))):
        payload = _ATOMIC + pickle.dumps(value, PROTOCOL)
    elif kind is not tuple or (value and not (payload := _pack_mixed(value, tensors, references))):
        return None
    for tensor in tensors:
        if (
            tensor.layout is not _STRIDED
            or (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
            or hasattr(tensor, "_is_buffer")
        ):
            return None
    return new_tuple(Encoded, (payload, tensors, references, True, None))


def _pack_mixed(
    items: tuple[Any, ...], tensors: list[Tensor], references: list[Any]
) -> bytes | None:
    """Packs a tuple of items of several kinds; None if there is anything else in it.

    One loop without calls of ours, as a call costs as much as packing an item does.
    """
    if len(items) > _MOST_MIXED:
        return None
    kinds = bytearray(_MIXED)
    kinds.append(len(items))
    parts: list[bytes | bytearray] = [kinds]
    try:
        for item in items:
            kind = type(item)
            if kind is Tensor or kind is Parameter:
                kinds.append(_A_TENSOR)
                tensors.append(item)
            elif kind is str:
                kinds.append(_A_TEXT)
                text = item.encode("utf-8", "surrogatepass")
                parts += (_SIZE.pack(len(text)), text)
            elif kind is bytes:
                kinds.append(_SOME_BYTES)
                parts += (_SIZE.pack(len(item)), item)
            elif issubclass(kind, OutOfBandHandle):
                kinds.append(_A_REFERENCE)
                references.append(item)
            elif kind is int:
                kinds.append(_AN_INTEGER)
                parts.append(_I64.pack(item))
            elif kind is float:
                kinds.append(_A_FLOAT)
                parts.append(_F64.pack(item))
            elif item is None or kind is bool:
                kinds.append(_CONSTANTS.index(item))
            else:
                return None
    except struct.error:  # an item is larger than this layout has room for
        return None
    if len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors):
        return None
    if len(references) > 1 and len(set(map(id, references))) < len(references):
        return None
    return b"".join(parts)


def encode_constant(value: Any) -> bytes:
    """The payload of a small value that can never change; empty for any other."""
    kind = type(value)
    if kind not in _ATOMS:
        return b""
    if kind is str or kind is bytes:
        small = len(value) <= _SMALL_BYTES
    else:
        small = kind is not int or value.bit_length() <= 8 * _SMALL_BYTES
    return _ATOMIC + pickle.dumps(value, PROTOCOL) if small else b""


def decode_simple(
    payload: bytes | bytearray | memoryview,
    tensors: Sequence[Tensor],
    references: Sequence[object],
) -> Any:
    """The inverse of :func:`encode_simple`; :data:`NOT_SIMPLE` if that packed nothing here.

    Raises:
        DecodeError: the bytes are damaged, or do not fit what came with them.
    """
    if not payload:
        return ()
    mark = payload[0]
    if mark == _ONE_TENSOR[0] and len(payload) == len(tensors) == 1:
        return tensors[0]
    if mark == _NOTHING[0] and len(payload) == 1:
        return None
    try:
        if mark == _MIXED[0]:
            return _unpack_mixed(payload, tensors, references)
        if mark != _ATOMIC[0]:
            return NOT_SIMPLE
        # An unpickler of ours that looks no name up would take four times as long. Whoever
        # sends a pickle that does more than make a value can send it to the codec as well.
        value = pickle.loads(memoryview(payload)[1:])
        if type(value) in _ATOMS or (type(value) is tuple and _ATOMS.issuperset(map(type, value))):
            return value
    except MemoryError as error:
        what = f"a value of {len(payload)} bytes that arrived"
        raise caused(DecodeError(f"no memory is left to unpack {what}"), error) from error
    except Exception as error:
        raise caused(DecodeError(f"a value that arrived is damaged: {error!r}"), error) from error
    raise DecodeError(f"a value that arrived is damaged: {type(value).__name__} for an atom")


def _unpack_mixed(
    payload: bytes | bytearray | memoryview,
    tensors: Sequence[Tensor],
    references: Sequence[object],
) -> tuple[Any, ...]:
    """The inverse of :func:`_pack_mixed`, one loop as well."""
    more_tensors, more_references = iter(tensors), iter(references)
    items: list[Any] = []
    place = 2 + payload[1]
    for kind in payload[2:place]:
        if kind == _A_TENSOR:
            items.append(next(more_tensors))
        elif kind in (_A_TEXT, _SOME_BYTES):
            start = place + 4
            place = start + _SIZE.unpack_from(payload, place)[0]
            data = payload[start:place]
            items.append(str(data, "utf-8", "surrogatepass") if kind == _A_TEXT else bytes(data))
        elif kind == _A_REFERENCE:
            items.append(next(more_references))
        elif kind in (_AN_INTEGER, _A_FLOAT):
            items += (_I64 if kind == _AN_INTEGER else _F64).unpack_from(payload, place)
            place += 8
        else:
            items.append(_CONSTANTS[kind])
    if place != len(payload) or not items or [*more_tensors, *more_references]:
        raise ValueError("it does not fit what came with it")
    return tuple(items)
