"""The same kernels in numpy and torch, for use without numba: same results, slower.

Updates are not among them: those of the rules themselves are torch (``rules``).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from tensorwire.parameter_server.kernels.arrays import Bytes, Floats, Halves, Ints, Pairs
from tensorwire.parameter_server.opaque import Untyped

_MULTIPLIER: Final = np.uint64(0xD6E8FEB86659FD93)
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_LOW: Final = np.uint64(0xFFFFFFFF)
_LOW_16: Final = np.uint64(0xFFFF)

_BLOCK: Final = 1 << 16

NAME: Final = "torch"
UPDATES: Final = None
"""Empty, so that rules move rows by their own torch code."""


def _u(number: int) -> Untyped:
    return np.uint64(number)


def _mix(values: Untyped) -> Untyped:
    with np.errstate(over="ignore"):
        mixed = values.astype(np.uint64)
        for _ in range(2):
            mixed = (mixed ^ (mixed >> _u(32))) * _MULTIPLIER
        return mixed ^ (mixed >> _u(32))


def _random(state: Untyped) -> Untyped:
    with np.errstate(over="ignore"):
        mixed = (state ^ (state >> _u(30))) * _u(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> _u(27))) * _u(0x94D049BB133111EB)
        return mixed ^ (mixed >> _u(31))


def _homes(pairs: Pairs, ids: Ints) -> Untyped:
    return (((_mix(ids) & _LOW) * _u(pairs.shape[0])) >> _u(32)).astype(np.int64)


# --- index


def find(pairs: Pairs, ids: Ints, rows: Ints) -> None:
    """Looks ids up; -1 for those that are not there."""
    rows[:] = -1
    at, left = _homes(pairs, ids), np.arange(len(ids))
    while len(left):
        keys, entries = pairs[at, 0], pairs[at, 1]
        hit = (entries != -1) & (keys == ids[left])
        rows[left[hit]] = entries[hit]
        on = (entries != -1) & ~hit
        left, at = left[on], (at[on] + 1) % pairs.shape[0]


def upsert(pairs: Pairs, ids: Ints, rows: Ints, following: int) -> int:
    """Looks ids up; those that are not there get the rows from ``following`` on, in order."""
    find(pairs, ids, rows)
    missing = rows == -1
    new, first, inverse = np.unique(ids[missing], return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    number = np.empty(len(new), np.int64)
    number[order] = np.arange(following, following + len(new))
    rows[missing] = number[inverse.reshape(-1)]
    _enter(pairs, new, number)
    return following + len(new)


def _enter(pairs: Pairs, ids: Ints, rows: Ints) -> None:
    """Enters ids that are not there; of those that want one place, the last one gets it."""
    at, left = _homes(pairs, ids), np.arange(len(ids))
    while len(left):
        free = pairs[at, 1] == -1
        pairs[at[free], 0] = ids[left[free]]
        pairs[at[free], 1] = rows[left[free]]
        placed = free & (pairs[at, 0] == ids[left])
        left, at = left[~placed], (at[~placed] + 1) % pairs.shape[0]


def rehash(old: Pairs, pairs: Pairs) -> None:
    """Enters everything into a larger table, which is empty."""
    kept = old[old[:, 1] != -1]
    _enter(pairs, kept[:, 0].copy(), kept[:, 1].copy())


def _places(pairs: Pairs, ids: Ints) -> Untyped:
    """The places of ids that are there."""
    places = np.empty(len(ids), np.int64)
    at, left = _homes(pairs, ids), np.arange(len(ids))
    while len(left):
        hit = (pairs[at, 1] != -1) & (pairs[at, 0] == ids[left])
        places[left[hit]] = at[hit]
        left, at = left[~hit], (at[~hit] + 1) % pairs.shape[0]
    return places


def set_rows(pairs: Pairs, ids: Ints, rows: Ints) -> None:
    """Changes the rows of ids that the table has."""
    pairs[_places(pairs, ids), 1] = rows


def remove(pairs: Pairs, ids: Ints) -> None:
    """Takes ids out that are there."""
    pairs[_places(pairs, ids), 1] = -1
    kept = pairs[pairs[:, 1] != -1]
    pairs[:, 1] = -1
    _enter(pairs, kept[:, 0].copy(), kept[:, 1].copy())


# --- batches of ids


def dedup(scratch: Pairs, ids: Ints, unique: Ints, inverse: Ints) -> int:
    """Finds the different ids, in the order in which they come, and where each one is."""
    distinct, first, where = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    place = np.empty(len(distinct), np.int64)
    place[order] = np.arange(len(distinct))
    unique[: len(distinct)] = distinct[order]
    inverse[: len(ids)] = place[where.reshape(-1)]
    return len(distinct)


def dedup_many(
    scratch: Pairs, ids: Ints, ends: Ints, unique: Ints, inverse: Ints, counts: Ints
) -> int:
    """Finds the different ids of each table, in the order in which they come."""
    start = total = 0
    for t, end in enumerate(ends.tolist()):
        counts[t] = dedup(scratch, ids[start:end], unique[total:], inverse[start:end])
        inverse[start:end] += total
        total += int(counts[t])
        start = end
    return total


def partition(shard_of: Ints, shards: int, ids: Ints, ends: Ints, order: Ints, sizes: Ints) -> None:
    """Orders ids by the shard that keeps each, and leaves the order within a shard."""
    shard_at = np.empty(len(ids), np.int64)
    slots(ids, shard_at)
    shard_at = shard_of[shard_at]
    order[:] = np.argsort(shard_at, kind="stable")
    table = np.searchsorted(ends, np.arange(len(ids)), "right")
    counts = np.bincount(shard_at * len(ends) + table, minlength=shards * len(ends))
    sizes[:] = counts.reshape(shards, len(ends))


def slots(ids: Ints, out: Ints) -> None:
    """The slot of each id, by the high bits of its hash."""
    out[:] = (_mix(ids) >> _u(54)).astype(np.int64)


def split(places: Ints, count: int, position: Ints, sizes: Ints) -> None:
    """Orders things by their groups, and keeps the order within each group."""
    order = np.argsort(places, kind="stable")
    position[order] = np.arange(len(places))
    sizes[:] = np.bincount(places, minlength=count)


def permute(values: Ints, position: Ints, out: Ints) -> None:
    """Puts each value where ``position`` says."""
    out[position] = values


def translate(values: Ints, position: Ints) -> None:
    """Replaces each value by the position of what it names."""
    values[:] = position[values]


def claim(pending: Bytes, rows: Ints, out: Ints) -> int:
    """Finds the rows that are marked, unmarks them, and returns how many there are."""
    within = rows[(rows >= 0) & (rows < len(pending))]
    marked = within[pending[within] == 1]
    pending[marked] = 0
    out[: len(marked)] = marked
    return len(marked)


# --- rows


def finite(bits: Untyped) -> bool:
    """True if none of these float32, as their bits, is infinite or not a number."""
    return bool(np.isfinite(bits.view(np.float32)).all())


def digest(words: Untyped, first: int) -> Untyped:
    """The sum of 32-bit words, each times an odd number of its place, modulo 2**64.

    Args:
        words: uint32.
        first: the place of the first of them.
    """
    total = np.uint64(0)
    for begin in range(0, len(words), _BLOCK):
        block = words[begin : begin + _BLOCK].astype(np.uint64)
        places = np.arange(first + begin, first + begin + len(block), dtype=np.uint64)
        factors = ((places * _u(0x9E3779B1)) & _u(0xFFFFFFFF)) | _u(1)
        total += (block * factors).sum(dtype=np.uint64)
    return total


def stream_finite(source: Untyped, target: Untyped) -> bool:
    """Copies float32, as their bits; True if all are finite."""
    is_finite = True
    for begin in range(0, len(source), _BLOCK):
        block = source[begin : begin + _BLOCK]
        is_finite &= finite(block)
        target[begin : begin + _BLOCK] = block  # which is in the cache now
    return is_finite


def gather(source: Floats, rows: Ints, out: Floats) -> None:
    """Copies rows; those whose number is negative are left out."""
    there = rows >= 0
    if there.all():
        torch.index_select(
            torch.from_numpy(source), 0, torch.from_numpy(rows), out=torch.from_numpy(out)
        )
    else:
        out[there] = source[rows[there]]


def scatter(values: Floats, rows: Ints, target: Floats) -> None:
    """Copies rows to where ``rows`` says."""
    target[rows] = values


def segment_sum(values: Floats, inverse: Ints, seen: Bytes, out: Floats) -> None:
    """Adds up the rows that belong together, in the order in which they come."""
    seen[:] = 1
    out[:] = 0
    add_rows(values, inverse, out)


def add_rows(values: Floats, inverse: Ints, out: Floats) -> None:
    """Adds each row to the one of ``out`` that it belongs to."""
    torch.from_numpy(out).index_add_(0, torch.from_numpy(inverse), torch.from_numpy(values))


# --- initial values


def _states(ids: Ints, seed: int) -> Untyped:
    return _mix(ids.astype(np.uint64) ^ np.int64(seed).astype(np.uint64))[:, None]


def uniform(out: Floats, places: Ints, ids: Ints, seed: int, low: float, high: float) -> None:
    """Fills rows with numbers from ``low`` to ``high`` that depend on seed, id and column only."""
    base, span = np.float32(low), np.float32(high) - np.float32(low)
    columns = np.arange(1, out.shape[1] + 1).astype(np.uint64)
    with np.errstate(over="ignore"):
        drawn = _random(_states(ids, seed) + _GOLDEN * columns) >> _u(40)
    unit = np.float32(1.0 / 16777216.0)
    out[places] = drawn.astype(np.int64).astype(np.float32) * unit * span + base


def normal(out: Floats, places: Ints, ids: Ints, seed: int, mean: float, std: float) -> None:
    """Fills rows with nearly normal numbers: each the sum of twelve uniform ones."""
    count = out.shape[1]
    steps = np.arange(1, 3 * count + 1).astype(np.uint64)
    with np.errstate(over="ignore"):
        drawn = _random(_states(ids, seed) + _GOLDEN * steps)
    pieces = [(drawn >> _u(shift)) & _LOW_16 for shift in (0, 16, 32, 48)]
    sums = sum(piece.astype(np.int64) for piece in pieces)
    totals = np.asarray(sums).reshape(len(ids), count, 3).sum(axis=2) - 6 * 65535
    unit = np.float32(1.0 / 65536.0)
    out[places] = totals.astype(np.float32) * unit * np.float32(std) + np.float32(mean)


# --- sixteen bits


def _noise(ids: Ints, width: int, seed: int, update: int) -> Untyped:
    columns = np.arange(1, width + 1).astype(np.uint64)
    with np.errstate(over="ignore"):
        state = _states(ids, seed) + _GOLDEN * np.int64(update).astype(np.uint64)
        return _random(state + _GOLDEN * columns)


def to_bfloat16(values: Floats, ids: Ints, seed: int, update: int, out: Halves) -> None:
    """Rounds up or down by chance; the chance comes from a hash, so that replicas agree."""
    bits = values.view(np.uint32).astype(np.uint64)
    finite = (bits & _u(0x7F800000)) != _u(0x7F800000)
    noise = _noise(ids, values.shape[1], seed, update) & _LOW_16
    out[:] = ((bits + np.where(finite, noise, _u(0))) >> _u(16)).astype(np.uint16)


def to_float16(values: Floats, ids: Ints, seed: int, update: int, out: Halves) -> None:
    """Rounds up or down by chance to float16; what is too large becomes the largest number."""
    bits = values.view(np.uint32).astype(np.uint64)
    sign = (bits >> _u(16)) & _u(0x8000)
    exponent = ((bits >> _u(23)) & _u(0xFF)).astype(np.int64) - 112
    mantissa = (bits & _u(0x7FFFFF)) | _u(0x800000)
    noise = _noise(ids, values.shape[1], seed, update)
    shift = np.where(exponent > 0, 13, np.clip(14 - exponent, 0, 38)).astype(np.uint64)
    half = (mantissa + (noise & ((_u(1) << shift) - _u(1)))) >> shift
    half = half + np.where(exponent > 0, (exponent - 1) << 10, 0).astype(np.uint64)
    half = np.minimum(half, _u(0x7BFF))
    half = np.where(exponent < -24, _u(0), half)
    special = np.where(mantissa == _u(0x800000), _u(0x7C00), _u(0x7E00))
    half = np.where(exponent == 143, special, half)
    out[:] = (sign | half).astype(np.uint16)
