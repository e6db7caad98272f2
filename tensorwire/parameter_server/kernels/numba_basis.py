"""Compiles kernels, and has the instructions that numba has no name for.

What numba has compiled it keeps, and compiles again only when the file of that kernel changes:
after a change of this file ``__pycache__`` must go (``make clean``).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tensorwire.parameter_server.opaque import Numba

_FUSES: Final = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
_MULTIPLIER: Final = np.uint64(0xD6E8FEB86659FD93)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = (np.uint64(bits) for bits in (27, 30, 31, 32))
_LOW: Final = np.uint64(0xFFFFFFFF)
AHEAD: Final = 8
"""Rows that are asked for before they are needed."""
LINE: Final = 16
"""Floats in a line of the cache."""
STREAMED: Final = 8
"""Floats that one instruction copies."""


def compiled(function: Numba) -> Numba:
    """Compiles a kernel, which is kept for the next process."""
    return njit(nogil=True, cache=True)(function)


def inlined(function: Numba) -> Numba:
    """Makes a function a part of each kernel that uses it."""
    return njit(inline="always")(function)


@intrinsic  # type: ignore[untyped-decorator]
def fma(_context: Numba, a: Numba, b: Numba, c: Numba) -> Numba:
    """``a * b + c``, rounded once where torch's kernels round once on this processor."""
    kind = ir.FloatType()

    def generate(_context: Numba, builder: Numba, _signature: Numba, arguments: Numba) -> Numba:
        if not _FUSES:
            return builder.fadd(builder.fmul(arguments[0], arguments[1]), arguments[2])
        fused = builder.module.declare_intrinsic(
            "llvm.fma", [kind], ir.FunctionType(kind, [kind] * 3)
        )
        return builder.call(fused, arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_context: Numba, array: Numba, i: Numba, j: Numba) -> Numba:
    """Asks for a line of the cache that is needed soon."""
    number = ir.IntType(32)
    address = ir.IntType(8).as_pointer()

    def generate(context: Numba, builder: Numba, signature: Numba, arguments: Numba) -> Numba:
        kind = signature.args[0]
        made = context.make_array(kind)(context, builder, arguments[0])
        at = cgutils.get_item_pointer(
            context, builder, kind, made, [arguments[1], arguments[2]], wraparound=False
        )
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [address, number, number, number]),
            "llvm.prefetch.p0i8",
        )
        read, near, data = (ir.Constant(number, value) for value in (0, 3, 1))
        builder.call(function, [builder.bitcast(at, address), read, near, data])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def stream(_context: Numba, source: Numba, target: Numba, at: Numba) -> Numba:
    """Copies :data:`STREAMED` float32, as their bits, past the caches.

    Returns True if one of them is infinite or not a number. ``target`` must be aligned there.
    """
    number = ir.IntType(32)
    vector = ir.VectorType(number, STREAMED)

    def generate(context: Numba, builder: Numba, signature: Numba, arguments: Numba) -> Numba:
        def address(place: int) -> Numba:
            made = context.make_array(signature.args[place])(context, builder, arguments[place])
            return builder.bitcast(builder.gep(made.data, [arguments[2]]), vector.as_pointer())

        values = builder.load(address(0), align=4)
        store = builder.store(values, address(1), align=4 * STREAMED)
        once = builder.module.add_metadata([ir.Constant(number, 1)])
        store.set_metadata("nontemporal", once)
        exponent = ir.Constant(vector, [0x7F800000] * STREAMED)
        marks = builder.icmp_unsigned("==", builder.and_(values, exponent), exponent)
        mask = builder.bitcast(marks, ir.IntType(STREAMED))
        return builder.icmp_unsigned("!=", mask, ir.Constant(mask.type, 0))

    return types.boolean(source, target, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def fence(_context: Numba) -> Numba:
    """Has all that :func:`stream` wrote seen by others before what is written next."""

    def generate(context: Numba, builder: Numba, _signature: Numba, _arguments: Numba) -> Numba:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def bits(_context: Numba, value: Numba) -> Numba:
    """The bits of a float32."""

    def generate(_context: Numba, builder: Numba, _signature: Numba, arguments: Numba) -> Numba:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _floats_at(_context: Numba, address: Numba) -> Numba:
    """A pointer to float32."""
    kind = types.CPointer(types.float32)

    def generate(_context: Numba, builder: Numba, _signature: Numba, arguments: Numba) -> Numba:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return kind(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _ints_at(_context: Numba, address: Numba) -> Numba:
    """A pointer to int64."""
    kind = types.CPointer(types.int64)

    def generate(_context: Numba, builder: Numba, _signature: Numba, arguments: Numba) -> Numba:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return kind(types.int64), generate


@inlined
def column_at(address: Numba, width: Numba) -> Numba:
    """The column of float32 at an address; its end is not checked."""
    return carray(_floats_at(address), (1 << 40, width))


@inlined
def index_at(address: Numba, size: Numba) -> Numba:
    """The index of so many places at an address."""
    return carray(_ints_at(address), (size, 2))


@inlined
def mix(value: Numba) -> Numba:
    """The hash of an id."""
    mixed = np.uint64(value)
    mixed ^= mixed >> _S32
    mixed *= _MULTIPLIER
    mixed ^= mixed >> _S32
    mixed *= _MULTIPLIER
    return mixed ^ (mixed >> _S32)


@inlined
def home_of(identity: Numba, capacity: Numba) -> Numba:
    """The place of an index at which an id is looked for first."""
    return np.int64(((mix(identity) & _LOW) * capacity) >> _S32)


@inlined
def random(state: Numba) -> Numba:
    """64 bits that depend on a state."""
    mixed = (state ^ (state >> _S30)) * _MIX_1
    mixed = (mixed ^ (mixed >> _S27)) * _MIX_2
    return mixed ^ (mixed >> _S31)
