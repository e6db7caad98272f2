"""The kernels, compiled by numba. One thread each, without the interpreter lock.

Reductions run along the columns, one after the other, several rows at a time.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tensorwire.parameter_server.kernels import numba_updates
from tensorwire.parameter_server.kernels.arrays import Bytes, Floats, Halves, Ints, Pairs
from tensorwire.parameter_server.kernels.numba_basis import (
    AHEAD,
    LINE,
    STREAMED,
    bits,
    compiled,
    fence,
    home_of,
    inlined,
    mix,
    prefetch,
    random,
    stream,
)
from tensorwire.parameter_server.kernels.numba_many import dedup_many as dedup_many
from tensorwire.parameter_server.kernels.numba_many import find_many as find_many
from tensorwire.parameter_server.kernels.numba_many import gather_many as gather_many
from tensorwire.parameter_server.kernels.numba_many import partition as partition
from tensorwire.parameter_server.kernels.numba_many import pool as pool
from tensorwire.parameter_server.kernels.numba_many import pool_back as pool_back
from tensorwire.parameter_server.opaque import Numba

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_S32: Final = np.uint64(32)
_S40: Final = np.uint64(40)
_S48: Final = np.uint64(48)
_LOW_16: Final = np.uint64(0xFFFF)
_ONE: Final = np.uint64(1)

_GOLDEN_32: Final = np.uint64(0x9E3779B1)
_LOW: Final = np.uint64(0xFFFFFFFF)
NAME: Final = "numba"
UPDATES: Final = numba_updates
"""The compiled updates of rows, by rule."""


# --- index


@compiled
def find(pairs: Pairs, ids: Ints, rows: Ints) -> None:
    """Looks ids up; -1 for those that are not there."""
    capacity, last = np.uint64(pairs.shape[0]), pairs.shape[0] - 1
    homes = np.empty(32, np.int64)
    for begin in range(0, len(ids), 32):
        count = min(32, len(ids) - begin)
        for k in range(count):
            homes[k] = home_of(ids[begin + k], capacity)
            prefetch(pairs, homes[k], 0)
        for k in range(count):
            at, identity = homes[k], ids[begin + k]
            while pairs[at, 1] != -1 and pairs[at, 0] != identity:
                at = at + 1 if at < last else 0
            rows[begin + k] = pairs[at, 1]


@compiled
def upsert(pairs: Pairs, ids: Ints, rows: Ints, following: int) -> int:
    """Looks ids up; those that are not there get the rows from ``following`` on, in order."""
    capacity, last = np.uint64(pairs.shape[0]), pairs.shape[0] - 1
    homes = np.empty(32, np.int64)
    for begin in range(0, len(ids), 32):
        count = min(32, len(ids) - begin)
        for k in range(count):
            homes[k] = home_of(ids[begin + k], capacity)
            prefetch(pairs, homes[k], 0)
        for k in range(count):
            at, identity = homes[k], ids[begin + k]
            while pairs[at, 1] != -1 and pairs[at, 0] != identity:
                at = at + 1 if at < last else 0
            if pairs[at, 1] == -1:
                pairs[at, 0] = identity
                pairs[at, 1] = following
                following += 1
            rows[begin + k] = pairs[at, 1]
    return following


@compiled
def rehash(old: Pairs, pairs: Pairs) -> None:
    """Enters everything into a larger table, which is empty."""
    capacity, last = np.uint64(pairs.shape[0]), pairs.shape[0] - 1
    for k in range(old.shape[0]):
        if old[k, 1] != -1:
            at = home_of(old[k, 0], capacity)
            while pairs[at, 1] != -1:
                at = at + 1 if at < last else 0
            pairs[at, 0] = old[k, 0]
            pairs[at, 1] = old[k, 1]


@compiled
def set_rows(pairs: Pairs, ids: Ints, rows: Ints) -> None:
    """Changes the rows of ids that the table has."""
    capacity, last = np.uint64(pairs.shape[0]), pairs.shape[0] - 1
    for k in range(len(ids)):
        at = home_of(ids[k], capacity)
        while pairs[at, 0] != ids[k] or pairs[at, 1] == -1:
            at = at + 1 if at < last else 0
        pairs[at, 1] = rows[k]


@compiled
def remove(pairs: Pairs, ids: Ints) -> None:
    """Takes ids out that are there; what was moved on because of them moves back."""
    size = pairs.shape[0]
    capacity, last = np.uint64(size), size - 1
    for k in range(len(ids)):
        at = home_of(ids[k], capacity)
        while pairs[at, 0] != ids[k] or pairs[at, 1] == -1:
            at = at + 1 if at < last else 0
        hole = at
        while True:
            at = at + 1 if at < last else 0
            if pairs[at, 1] == -1:
                break
            home = home_of(pairs[at, 0], capacity)
            if (at - home + size) % size >= (at - hole + size) % size:
                pairs[hole, 0] = pairs[at, 0]
                pairs[hole, 1] = pairs[at, 1]
                hole = at
        pairs[hole, 1] = -1


# --- batches of ids


@compiled
def dedup(scratch: Pairs, ids: Ints, unique: Ints, inverse: Ints) -> int:
    """Finds the different ids, in the order in which they come, and where each one is.

    Args:
        scratch: an empty table with room for twice as many; empty again afterwards.
        ids: what to look at.
        unique: gets the different ones.
        inverse: gets, for each id, its place in ``unique``.

    Returns:
        How many different ones there are.
    """
    capacity, last = np.uint64(scratch.shape[0]), scratch.shape[0] - 1
    count = 0
    for k in range(len(ids)):
        identity = ids[k]
        at = home_of(identity, capacity)
        while scratch[at, 1] != -1 and scratch[at, 0] != identity:
            at = at + 1 if at < last else 0
        place = scratch[at, 1]
        if place == -1:
            place = count
            scratch[at, 0] = identity
            scratch[at, 1] = place
            unique[place] = identity
            count += 1
        inverse[k] = place
    for k in range(count):
        at = home_of(unique[k], capacity)
        while scratch[at, 1] != -1:
            scratch[at, 1] = -1
            at = at + 1 if at < last else 0
    return count


@compiled
def slots(ids: Ints, out: Ints) -> None:
    """The slot of each id, by the high bits of its hash."""
    shift = np.uint64(54)
    for k in range(len(ids)):
        out[k] = np.int64(mix(ids[k]) >> shift)


@compiled
def split(places: Ints, count: int, position: Ints, sizes: Ints) -> None:
    """Orders things by their groups, and keeps the order within each group.

    Args:
        places: the group of each, from 0.
        count: how many groups there are.
        position: gets, for each, its place in the new order.
        sizes: gets the size of each group.
    """
    starts = np.zeros(count + 1, np.int64)
    for k in range(len(places)):
        starts[places[k] + 1] += 1
    for k in range(count):
        sizes[k] = starts[k + 1]
        starts[k + 1] += starts[k]
    for k in range(len(places)):
        group = places[k]
        position[k] = starts[group]
        starts[group] += 1


@compiled
def permute(values: Ints, position: Ints, out: Ints) -> None:
    """Puts each value where ``position`` says."""
    for k in range(len(values)):
        out[position[k]] = values[k]


@compiled
def translate(values: Ints, position: Ints) -> None:
    """Replaces each value by the position of what it names."""
    for k in range(len(values)):
        values[k] = position[values[k]]


@compiled
def claim(pending: Bytes, rows: Ints, out: Ints) -> int:
    """Finds the rows that are marked, unmarks them, and returns how many there are."""
    count = 0
    for k in range(len(rows)):
        row = rows[k]
        if row >= 0 and row < len(pending) and pending[row] == 1:
            pending[row] = 0
            out[count] = row
            count += 1
    return count


@compiled
def finite(bits: Numba) -> bool:
    """True if none of these float32, as their bits, is infinite or not a number."""
    exponent, is_special = np.int32(0x7F800000), np.int32(0)
    for k in range(len(bits)):
        is_special |= np.int32((bits[k] & exponent) == exponent)
    return bool(is_special == 0)


@compiled
def stream_finite(source: Numba, target: Numba) -> bool:
    """Copies float32, as their bits, past the caches; True if all are finite.

    That takes no longer than to read them: what is overwritten is not read first.
    """
    size, width = len(source), 4 * STREAMED
    begin = min(size, (-target.ctypes.data % width) // 4)
    end = begin + (size - begin) // STREAMED * STREAMED
    target[:begin], target[end:] = source[:begin], source[end:]
    is_special = False
    for k in range(begin, end, STREAMED):
        is_special |= stream(source, target, k)
    fence()
    return not is_special and finite(source[:begin]) and finite(source[end:])


@compiled
def digest(words: Numba, first: int) -> Numba:
    """The sum of 32-bit words, each times an odd number of its place, modulo 2**64.

    Args:
        words: uint32.
        first: the place of the first of them.
    """
    total = np.uint64(0)
    for k in range(len(words)):
        factor = ((np.uint64(first + k) * _GOLDEN_32) & _LOW) | _ONE
        total += np.uint64(words[k]) * factor
    return total


# --- rows


@compiled
def gather(source: Floats, rows: Ints, out: Floats) -> None:
    """Copies rows; those whose number is negative are left out."""
    width = out.shape[1]
    for k in range(len(rows)):
        if k + AHEAD < len(rows):
            ahead = max(rows[k + AHEAD], 0)
            for j in range(0, width, LINE):
                prefetch(source, ahead, j)
        if rows[k] >= 0:
            to, row = out[k], source[rows[k]]
            for j in range(width):
                to[j] = row[j]


@compiled
def scatter(values: Floats, rows: Ints, target: Floats) -> None:
    """Copies rows to where ``rows`` says."""
    width = values.shape[1]
    for k in range(len(rows)):
        to, row = target[rows[k]], values[k]
        for j in range(width):
            to[j] = row[j]


@compiled
def segment_sum(values: Floats, inverse: Ints, seen: Bytes, out: Floats) -> None:
    """Adds up the rows that belong together, in the order in which they come.

    Args:
        values: the rows.
        inverse: to which row of ``out`` each belongs; none of those is without one.
        seen: for each row of ``out`` a zero; becomes all ones.
        out: gets the sums, whatever it held.
    """
    share_of_sums(values, inverse, seen, out, 0, 1)


@compiled
def share_of_sums(
    values: Floats, inverse: Ints, seen: Bytes, out: Floats, part: int, parts: int
) -> None:
    """Does so for one part of the rows of ``out``: each so many-th run of 64.

    Args:
        values: as above, as are the next three.
        inverse: see there.
        seen: see there.
        out: see there.
        part: which, from 0.
        parts: how many there are; a power of two.
    """
    width, mask = values.shape[1], parts - 1
    for k in range(len(inverse)):
        if k + AHEAD < len(inverse) and (inverse[k + AHEAD] >> 6) & mask == part:
            for j in range(0, width, LINE):
                prefetch(out, inverse[k + AHEAD], j)
                prefetch(values, k + AHEAD, j)
        place = inverse[k]
        if (place >> 6) & mask != part:
            continue
        to, row = out[place], values[k]
        if seen[place] == 0:
            seen[place] = 1
            for j in range(width):
                to[j] = row[j] + np.float32(0)  # a sum that begins with zero is never -0
        else:
            for j in range(width):
                to[j] += row[j]


@compiled
def add_rows(values: Floats, inverse: Ints, out: Floats) -> None:
    """Adds each row to the one of ``out`` that it belongs to."""
    width = values.shape[1]
    for k in range(len(inverse)):
        to, row = out[inverse[k]], values[k]
        for j in range(width):
            to[j] += row[j]


# --- initial values


@compiled
def uniform(out: Floats, places: Ints, ids: Ints, seed: int, low: float, high: float) -> None:
    """Fills rows with numbers from ``low`` to ``high`` that depend on seed, id and column only."""
    base, span = np.float32(low), np.float32(high) - np.float32(low)
    unit = np.float32(1.0 / 16777216.0)
    for k in range(len(places)):
        state = mix(np.uint64(ids[k]) ^ np.uint64(seed))
        row = out[places[k]]
        for j in range(len(row)):
            drawn = random(state + _GOLDEN * np.uint64(j + 1)) >> _S40
            row[j] = np.float32(np.int64(drawn)) * unit * span + base


@compiled
def normal(out: Floats, places: Ints, ids: Ints, seed: int, mean: float, std: float) -> None:
    """Fills rows with nearly normal numbers: each the sum of twelve uniform ones."""
    middle, width = np.float32(mean), np.float32(std)
    unit, offset = np.float32(1.0 / 65536.0), np.int64(6 * 65535)
    for k in range(len(places)):
        state = mix(np.uint64(ids[k]) ^ np.uint64(seed))
        row = out[places[k]]
        for j in range(len(row)):
            total = np.int64(0)
            for part in range(3):
                drawn = random(state + _GOLDEN * np.uint64(3 * j + part + 1))
                total += np.int64(drawn & _LOW_16) + np.int64((drawn >> np.uint64(16)) & _LOW_16)
                total += np.int64((drawn >> _S32) & _LOW_16) + np.int64(drawn >> _S48)
            row[j] = np.float32(total - offset) * unit * width + middle


# --- sixteen bits


@inlined
def _noise(identity: Numba, column: Numba, seed: Numba, update: Numba) -> Numba:
    state = mix(np.uint64(identity) ^ np.uint64(seed)) + _GOLDEN * np.uint64(update)
    return random(state + _GOLDEN * np.uint64(column + 1))


@compiled
def to_bfloat16(values: Floats, ids: Ints, seed: int, update: int, out: Halves) -> None:
    """Rounds up or down by chance; the chance comes from a hash, so that replicas agree."""
    for k in range(len(ids)):
        for j in range(values.shape[1]):
            pattern = np.uint64(bits(values[k, j]))
            if (pattern & np.uint64(0x7F800000)) != np.uint64(0x7F800000):
                pattern += _noise(ids[k], j, seed, update) & _LOW_16
            out[k, j] = np.uint16(pattern >> np.uint64(16))


@compiled
def to_float16(values: Floats, ids: Ints, seed: int, update: int, out: Halves) -> None:
    """Rounds up or down by chance to float16; what is too large becomes the largest number."""
    for k in range(len(ids)):
        for j in range(values.shape[1]):
            pattern = np.uint64(bits(values[k, j]))
            sign = (pattern >> np.uint64(16)) & np.uint64(0x8000)
            exponent = np.int64((pattern >> np.uint64(23)) & np.uint64(0xFF)) - 112
            mantissa = (pattern & np.uint64(0x7FFFFF)) | np.uint64(0x800000)
            noise = _noise(ids[k], j, seed, update)
            if exponent == 143:  # infinite, or not a number
                half = np.uint64(0x7C00 if mantissa == np.uint64(0x800000) else 0x7E00)
            elif exponent < -24:
                half = np.uint64(0)
            else:
                shift = np.uint64(13 if exponent > 0 else 14 - exponent)
                half = (mantissa + (noise & ((_ONE << shift) - _ONE))) >> shift
                if exponent > 0:
                    half += np.uint64((exponent - 1) << 10)
                if half > np.uint64(0x7BFF):
                    half = np.uint64(0x7BFF)
            out[k, j] = np.uint16(sign | half)
