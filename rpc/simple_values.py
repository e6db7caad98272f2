"""Packs most of what is sent without a pickler of ours: atoms, tensors, references, tuples.

An atom is a value that can never change and needs no name to be rebuilt: a number, a
text, bytes, None. Whatever else there is in a value makes it the business of ``codec``,
which asks here first. What both make of a value is defined here, too.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from rpc.errors import DecodeError

PROTOCOL: Final = 5
"""Of every pickle that is sent."""

# What a payload begins with that is not an ordinary pickle, whose first byte is 0x80.
_ATOMIC: Final = b"a"  # a pickle of atoms follows
_ONE_TENSOR: Final = b"t"
_TENSORS: Final = b"T"
_MIXED: Final = b"m"  # the number of items follows, the kind of each, a pickle of the atoms
_A_TENSOR, _A_REFERENCE, _AN_ATOM = range(3)
_MOST_MIXED: Final = 255
_ATOMS: Final = frozenset({int, float, str, bytes, bool, type(None)})
NOT_SIMPLE: Final = object()
"""In place of a value that is not one of these."""

_SMALL_BYTES: Final = 1024


class Reference:
    """Base of handles that travel out of band, as an index into ``Encoded.references``."""

    __slots__ = ()


@dataclass(slots=True)
class Encoded:
    """A value as it leaves the codec. Mutable only because building it is on the fast path.

    Args:
        payload: everything but the tensors and references.
        tensors: every strided tensor met, as the user passed it, each object once,
            in the order met; sparse ones appear as their strided parts, except those
            that autograd must see whole.
        references: every :class:`Reference` met, each once.
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
    if kind in _ATOMS:
        return Encoded(_ATOMIC + pickle.dumps(value, PROTOCOL), [], [], True)
    if kind is Tensor:
        return Encoded(_ONE_TENSOR, [value], [], True) if _is_simple(value) else None
    if kind is not tuple:
        return None
    items: tuple[Any, ...] = value
    kinds = set(map(type, items))
    if kinds <= _ATOMS:
        return Encoded(_ATOMIC + pickle.dumps(items, PROTOCOL) if items else b"", [], [], True)
    if kinds == {Tensor} and len(items) == len(set(map(id, items))) and all(map(_is_simple, items)):
        return Encoded(_TENSORS, list(items), [], True)
    return _encode_mixed(items)


def _encode_mixed(items: tuple[Any, ...]) -> Encoded | None:
    """Such a tuple of items of several kinds; None if there is anything else in it."""
    if len(items) > _MOST_MIXED:
        return None
    kinds = bytearray(_MIXED)
    kinds.append(len(items))
    tensors: list[Tensor] = []
    references: list[Any] = []
    atoms: list[Any] = []
    for item in items:
        kind = type(item)
        if kind in _ATOMS:
            kinds.append(_AN_ATOM)
            atoms.append(item)
        elif kind is Tensor or kind is Parameter:
            if not _is_simple(item):
                return None
            kinds.append(_A_TENSOR)
            tensors.append(item)
        elif issubclass(kind, Reference):
            kinds.append(_A_REFERENCE)
            references.append(item)
        else:
            return None
    if len(set(map(id, tensors))) < len(tensors) or len(set(map(id, references))) < len(references):
        return None
    pickled = pickle.dumps(tuple(atoms), PROTOCOL) if atoms else b""
    return Encoded(bytes(kinds) + pickled, tensors, references, True)


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


def _is_simple(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
        and not hasattr(tensor, "_is_buffer")
    )


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
    if mark == _ATOMIC[0]:
        return _load_atoms(memoryview(payload), 1)
    if mark == _TENSORS[0] and len(payload) == 1:
        return tuple(tensors)
    if mark == _ONE_TENSOR[0] and len(payload) == 1 and len(tensors) == 1:
        return tensors[0]
    if mark == _MIXED[0] and len(payload) > 1:
        return _decode_mixed(memoryview(payload), tensors, references)
    return NOT_SIMPLE


def _decode_mixed(
    payload: memoryview, tensors: Sequence[Tensor], references: Sequence[object]
) -> tuple[Any, ...]:
    """The inverse of :func:`_encode_mixed`."""
    start = len(_MIXED) + 1
    end = start + payload[start - 1]
    atoms = _load_atoms(payload, end) if len(payload) > end else ()
    if type(atoms) is not tuple:
        raise DecodeError(f"a value that arrived is damaged: {type(atoms).__name__} for a tuple")
    sources = {_A_TENSOR: iter(tensors), _A_REFERENCE: iter(references), _AN_ATOM: iter(atoms)}
    try:
        value = tuple([next(sources[kind]) for kind in payload[start:end]])
    except (KeyError, StopIteration):
        value = ()
    if not value or len(value) != len(tensors) + len(references) + len(atoms):
        raise DecodeError("a value that arrived is damaged: it does not fit what came with it")
    return value


def _load_atoms(payload: memoryview, start: int) -> Any:
    try:
        return _AtomsOnly(io.BytesIO(payload[start:])).load()
    except MemoryError as error:
        what = f"a value of {len(payload)} bytes that arrived"
        raise DecodeError(f"no memory is left to unpack {what}") from error
    except Exception as error:
        raise DecodeError(f"a value that arrived is damaged: {error}") from error


class _AtomsOnly(pickle.Unpickler):
    """Finds nothing: a pickle of atoms needs no names."""

    def find_class(self, module: str, name: str) -> Any:
        raise DecodeError(f"a value that should hold no names holds {module}.{name}")
