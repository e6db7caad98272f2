"""Kernels that work on the rows of many tables in one call, and on the bags of many features.

Rows of several tables lie one table after the other; ``ends`` says where each table's end. A
server's tables are given by the addresses of their columns, so that a call takes the same few
arrays for any number of them.
"""

from __future__ import annotations

import numpy as np

from tensorwire.parameter_server.kernels.arrays import Bytes, Floats, Ints, Pairs
from tensorwire.parameter_server.kernels.numba_basis import (
    AHEAD,
    LINE,
    column_at,
    compiled,
    fma,
    home_of,
    index_at,
    mix,
    prefetch,
)

# --- indexes


@compiled
def find_many(indexes: Ints, sizes: Ints, ids: Ints, ends: Ints, rows: Ints) -> None:
    """Looks ids up, each in its table's index; -1 for those that are not there.

    Args:
        indexes: address of each table's index.
        sizes: places in each.
        ids: of all tables.
        ends: where each table's ids end.
        rows: gets the row of each id.
    """
    homes = np.empty(32, np.int64)
    start = 0
    for t in range(len(ends)):
        table = index_at(indexes[t], sizes[t])
        capacity, last = np.uint64(sizes[t]), sizes[t] - 1
        for begin in range(start, ends[t], 32):
            count = min(32, ends[t] - begin)
            for k in range(count):
                homes[k] = home_of(ids[begin + k], capacity)
                prefetch(table, homes[k], 0)
            for k in range(count):
                at, identity = homes[k], ids[begin + k]
                while table[at, 1] != -1 and table[at, 0] != identity:
                    at = at + 1 if at < last else 0
                rows[begin + k] = table[at, 1]
        start = ends[t]


@compiled
def gather_many(columns: Ints, rows: Ints, ends: Ints, begin: int, end: int, out: Floats) -> None:
    """Copies rows of many tables; those whose number is negative are left out.

    Args:
        columns: address of each table's column.
        rows: which rows.
        ends: where each table's end.
        begin: only from this one on.
        end: only up to this one.
        out: gets the rows.
    """
    width = out.shape[1]
    start = 0
    for t in range(len(ends)):
        source = column_at(columns[t], width)
        first, last = max(start, begin), min(ends[t], end)
        for k in range(first, last):
            if k + AHEAD < last:
                ahead = max(rows[k + AHEAD], 0)
                for j in range(0, width, LINE):
                    prefetch(source, ahead, j)
            if rows[k] >= 0:
                to, row = out[k], source[rows[k]]
                for j in range(width):
                    to[j] = row[j]
        start = ends[t]


# --- batches of ids


@compiled
def dedup_many(
    scratch: Pairs, ids: Ints, ends: Ints, unique: Ints, inverse: Ints, counts: Ints
) -> int:
    """Finds the different ids of each table, in the order in which they come.

    Args:
        scratch: an empty index with room for twice as many as a table has; empty afterwards.
        ids: of all tables.
        ends: where each table's end.
        unique: gets the different ones, one table's after the other's.
        inverse: gets, for each id, its place in ``unique``.
        counts: gets how many different ones each table has.

    Returns:
        How many different ones there are.
    """
    start = total = 0
    for t in range(len(ends)):
        size = max(2 * (ends[t] - start), 2)
        capacity, last = np.uint64(size), size - 1
        before = total
        for k in range(start, ends[t]):
            identity = ids[k]
            at = home_of(identity, capacity)
            while scratch[at, 1] != -1 and scratch[at, 0] != identity:
                at = at + 1 if at < last else 0
            place = scratch[at, 1]
            if place == -1:
                place = total
                scratch[at, 0] = identity
                scratch[at, 1] = place
                unique[place] = identity
                total += 1
            inverse[k] = place
        for k in range(before, total):
            at = home_of(unique[k], capacity)
            while scratch[at, 1] != -1:
                scratch[at, 1] = -1
                at = at + 1 if at < last else 0
        counts[t] = total - before
        start = ends[t]
    return total


@compiled
def partition(shard_of: Ints, shards: int, ids: Ints, ends: Ints, order: Ints, sizes: Ints) -> None:
    """Orders ids by the shard that keeps each, and leaves the order within a shard.

    Args:
        shard_of: the place of its shard for each slot.
        shards: how many there are.
        ids: of all tables.
        ends: where each table's end.
        order: gets the places in ``ids``, one shard's after the other's.
        sizes: ``(shards, tables)``; gets how many ids of each table each shard keeps.
    """
    shift = np.uint64(54)
    shard_at = np.empty(len(ids), np.int64)
    begins = np.zeros(shards + 1, np.int64)
    sizes[:] = 0
    start = 0
    for t in range(len(ends)):
        for k in range(start, ends[t]):
            shard = shard_of[np.int64(mix(ids[k]) >> shift)]
            shard_at[k] = shard
            sizes[shard, t] += 1
            begins[shard + 1] += 1
        start = ends[t]
    for shard in range(shards):
        begins[shard + 1] += begins[shard]
    for k in range(len(ids)):
        order[begins[shard_at[k]]] = k
        begins[shard_at[k]] += 1


# --- bags of many features


@compiled
def pool(
    rows: Floats, places: Ints, ends: Ints, columns: Ints, means: Bytes, weights: Floats,
    out: Floats,
) -> None:  # fmt: skip
    """Adds up the rows of each bag, as ``torch.nn.functional.embedding_bag`` does.

    Args:
        rows: the rows of all tables.
        places: the row of each id, bag after bag, and feature after feature.
        ends: ``(features, bags)``: where each bag's ids end in ``places``.
        columns: the first column of each feature in ``out``.
        means: for each feature 1 if its sums are divided by the number of ids.
        weights: ``(ids, 1)``, the factor of each id; or ``(0, 1)``.
        out: ``(bags, columns)``.
    """
    width, weighted = rows.shape[1], len(weights) > 0
    begin = 0
    for f in range(ends.shape[0]):
        first = columns[f]
        for b in range(ends.shape[1]):
            to = out[b, first : first + width]
            end = ends[f, b]
            if end + AHEAD < len(places):
                for j in range(0, width, LINE):
                    prefetch(rows, places[end + AHEAD], j)
            for j in range(width):
                to[j] = np.float32(0)
            for k in range(begin, end):
                row = rows[places[k]]
                if weighted:
                    for j in range(width):
                        to[j] = fma(weights[k, 0], row[j], to[j])
                else:
                    for j in range(width):
                        to[j] += row[j]
            if means[f] and end - begin > 1:
                count = np.float32(end - begin)
                for j in range(width):
                    to[j] /= count
            begin = end


@compiled
def pool_back(
    grad: Floats, order: Ints, places: Ints, bags: Ints, ends: Ints, columns: Ints,
    factors: Floats, seen: Bytes, out: Floats,
) -> None:  # fmt: skip
    """Adds up the gradients of each row, as torch does: feature by feature, from the last one on.

    Args:
        grad: ``(bags, columns)``.
        order: the ids of each feature, those of the same row together.
        places: the row of each id.
        bags: the bag of each id.
        ends: where each feature's ids end.
        columns: the first column of each feature in ``grad``.
        factors: ``(ids, 1)``, by which the gradient of each id's bag is multiplied; or ``(0, 1)``.
        seen: for each row a zero; becomes all ones.
        out: gets the sums, whatever it held.
    """
    width, scaled = out.shape[1], len(factors) > 0
    part = np.empty(width, np.float32)
    for back in range(len(ends)):
        f = len(ends) - 1 - back
        begin = ends[f - 1] if f else 0
        first = columns[f]
        k = begin
        while k < ends[f]:
            place = places[order[k]]
            for j in range(width):
                part[j] = np.float32(0)
            while k < ends[f] and places[order[k]] == place:
                slope = grad[bags[order[k]], first : first + width]
                if k + AHEAD < ends[f]:
                    prefetch(grad, bags[order[k + AHEAD]], first)
                if scaled:
                    for j in range(width):
                        part[j] = fma(factors[order[k], 0], slope[j], part[j])
                else:
                    for j in range(width):
                        part[j] += slope[j]
                k += 1
            to = out[place]
            if seen[place]:
                for j in range(width):
                    to[j] += part[j]
            else:
                seen[place] = 1
                for j in range(width):
                    to[j] = part[j]
