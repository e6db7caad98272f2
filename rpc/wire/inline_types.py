"""The dtypes that travel inside a message's header, with their codes.

A code is a place in a table that only grows: it is part of the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class InlineType:
    """The way one dtype travels; its place in ``INLINE_TYPES`` is its code on the wire.

    ``bits`` is what numpy takes the bytes for: the type itself, or an integer of
    its size if numpy does not know it, and then ``is_native`` is false.
    """

    torch_type: torch.dtype | None
    bits: np.dtype[np.generic]
    is_native: bool


def _native(name: str, bits: str) -> InlineType:
    return InlineType(getattr(torch, name, None), np.dtype(bits), is_native=True)


def _foreign(name: str, bits: str) -> InlineType:
    return InlineType(getattr(torch, name, None), np.dtype(bits), is_native=False)


INLINE_TYPES: Final = (
    _native("float32", "f4"),
    _native("float64", "f8"),
    _native("float16", "f2"),
    _foreign("bfloat16", "u2"),
    _native("int64", "i8"),
    _native("int32", "i4"),
    _native("int16", "i2"),
    _native("int8", "i1"),
    _native("uint8", "u1"),
    _native("bool", "?"),
    _native("complex64", "c8"),
    _native("complex128", "c16"),
    _foreign("complex32", "u4"),
    _native("uint16", "u2"),
    _native("uint32", "u4"),
    _native("uint64", "u8"),
    _foreign("float8_e4m3fn", "u1"),
    _foreign("float8_e5m2", "u1"),
    _foreign("float8_e4m3fnuz", "u1"),
    _foreign("float8_e5m2fnuz", "u1"),
    _foreign("float8_e8m0fnu", "u1"),
)
CODES: Final = {
    known.torch_type: code
    for code, known in enumerate(INLINE_TYPES)
    if known.torch_type is not None
}
CONJUGABLE: Final = frozenset(code for kind, code in CODES.items() if kind.is_complex)
