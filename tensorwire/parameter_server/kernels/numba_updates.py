"""The updates of rows by the rules of the package, compiled by numba.

Each works on the rows of several tables that move alike, one table's after the other's: a table's
columns are given by their addresses, and ``ends`` says where its rows end. Only rows from
``begin`` up to ``end`` are moved, so that several threads can share the work.

Products and sums are rounded one by one, except where torch's own vector kernels fuse them
(``fma``): so an update gives the bits that torch's optimizers give. Square roots are torch's,
taken between two kernels, as the math library that torch calls does not round them correctly.
"""

from __future__ import annotations

import numpy as np

from tensorwire.parameter_server.kernels.arrays import Floats, Ints
from tensorwire.parameter_server.kernels.numba_basis import (
    AHEAD,
    LINE,
    column_at,
    compiled,
    fma,
    prefetch,
)
from tensorwire.parameter_server.opaque import Numba


@compiled
def sgd(
    weights: Ints, rows: Ints, ends: Ints, begin: int, end: int, grad: Floats,
    lr: float, decay: float,
) -> None:  # fmt: skip
    """``torch.optim.SGD`` without momentum."""
    step, factor = -np.float32(lr), np.float32(decay)
    width, start = grad.shape[1], 0
    for t in range(len(ends)):
        weight = column_at(weights[t], width)
        last = min(ends[t], end)
        for k in range(max(start, begin), last):
            if k + AHEAD < last:
                for j in range(0, width, LINE):
                    prefetch(weight, rows[k + AHEAD], j)
            row, slope = weight[rows[k]], grad[k]
            if factor == 0:
                for j in range(width):
                    row[j] = fma(step, slope[j], row[j])
            else:
                for j in range(width):
                    row[j] = fma(step, fma(factor, row[j], slope[j]), row[j])
        start = ends[t]


@compiled
def momentum(
    weights: Ints, buffers: Ints, rows: Ints, ends: Ints, begin: int, end: int, grad: Floats,
    lr: float, factor: float, nesterov: bool, decay: float,
) -> None:  # fmt: skip
    """``torch.optim.SGD`` with momentum."""
    step, kept, shrink = -np.float32(lr), np.float32(factor), np.float32(decay)
    width, start = grad.shape[1], 0
    for t in range(len(ends)):
        weight, buffer = column_at(weights[t], width), column_at(buffers[t], width)
        last = min(ends[t], end)
        for k in range(max(start, begin), last):
            if k + AHEAD < last:
                for j in range(0, width, LINE):
                    prefetch(weight, rows[k + AHEAD], j)
                    prefetch(buffer, rows[k + AHEAD], j)
            row, moved, slope = weight[rows[k]], buffer[rows[k]], grad[k]
            for j in range(width):
                value = slope[j] if shrink == 0 else fma(shrink, row[j], slope[j])
                moved[j] = moved[j] * kept + value
                value = fma(kept, moved[j], value) if nesterov else moved[j]
                row[j] = fma(step, value, row[j])
        start = ends[t]


@compiled
def adagrad_sums(
    weights: Ints, sums: Ints, rows: Ints, ends: Ints, begin: int, end: int, grad: Floats,
    decay: float, out: Floats,
) -> None:  # fmt: skip
    """``torch.optim.Adagrad`` as far as the square root; ``out`` gets what to take it of."""
    shrink = np.float32(decay)
    width, start = grad.shape[1], 0
    for t in range(len(ends)):
        weight, total_of = column_at(weights[t], width), column_at(sums[t], width)
        last = min(ends[t], end)
        for k in range(max(start, begin), last):
            if k + AHEAD < last:
                for j in range(0, width, LINE):
                    prefetch(total_of, rows[k + AHEAD], j)
            total, slope, under, row = total_of[rows[k]], grad[k], out[k - begin], weight[rows[k]]
            for j in range(width):
                value = slope[j] if shrink == 0 else fma(shrink, row[j], slope[j])
                total[j] = fma(value, value, total[j])
                under[j] = total[j]
        start = ends[t]


@compiled
def adagrad_step(
    weights: Ints, rows: Ints, ends: Ints, begin: int, end: int, grad: Floats, roots: Floats,
    lr: float, eps: float, decay: float,
) -> None:  # fmt: skip
    """``torch.optim.Adagrad`` after the square root."""
    step, least, shrink = -np.float32(lr), np.float32(eps), np.float32(decay)
    width, start = grad.shape[1], 0
    for t in range(len(ends)):
        weight = column_at(weights[t], width)
        last = min(ends[t], end)
        for k in range(max(start, begin), last):
            if k + AHEAD < last:
                for j in range(0, width, LINE):
                    prefetch(weight, rows[k + AHEAD], j)
            row, slope, root = weight[rows[k]], grad[k], roots[k - begin]
            for j in range(width):
                value = slope[j] if shrink == 0 else fma(shrink, row[j], slope[j])
                row[j] = row[j] + (step * value) / (root[j] + least)
        start = ends[t]


@compiled
def square_sums(grad: Floats, out: Numba) -> None:
    """The sum of the squares of each row, column after column, eight rows at a time."""
    count, width = grad.shape
    whole = count - count % 8
    totals = np.empty(8, np.float32)
    for k in range(0, whole, 8):
        a = b = c = d = e = f = g = h = np.float32(0)
        for j in range(width):
            a += grad[k, j] * grad[k, j]
            b += grad[k + 1, j] * grad[k + 1, j]
            c += grad[k + 2, j] * grad[k + 2, j]
            d += grad[k + 3, j] * grad[k + 3, j]
            e += grad[k + 4, j] * grad[k + 4, j]
            f += grad[k + 5, j] * grad[k + 5, j]
            g += grad[k + 6, j] * grad[k + 6, j]
            h += grad[k + 7, j] * grad[k + 7, j]
        totals[0], totals[1], totals[2], totals[3] = a, b, c, d
        totals[4], totals[5], totals[6], totals[7] = e, f, g, h
        for i in range(8):
            out[k + i] = totals[i]
    for k in range(whole, count):
        total = np.float32(0)
        for j in range(width):
            total += grad[k, j] * grad[k, j]
        out[k] = total


@compiled
def rowwise_sums(
    sums: Ints, rows: Ints, ends: Ints, begin: int, end: int, squares: Numba, width: int
) -> None:
    """Adds each row's mean square to its sum; ``squares`` gets the sums."""
    start = 0
    for t in range(len(ends)):
        total_of = column_at(sums[t], 1)
        for k in range(max(start, begin), min(ends[t], end)):
            total = total_of[rows[k], 0] + squares[k - begin] / np.float32(width)
            total_of[rows[k], 0] = total
            squares[k - begin] = total
        start = ends[t]


@compiled
def rowwise_step(
    weights: Ints, rows: Ints, ends: Ints, begin: int, end: int, grad: Floats, steps: Numba
) -> None:
    """Moves each row against its gradient by its own step."""
    width, start = grad.shape[1], 0
    for t in range(len(ends)):
        weight = column_at(weights[t], width)
        last = min(ends[t], end)
        for k in range(max(start, begin), last):
            if k + AHEAD < last:
                for j in range(0, width, LINE):
                    prefetch(weight, rows[k + AHEAD], j)
            row, slope, step = weight[rows[k]], grad[k], -steps[k - begin]
            for j in range(width):
                row[j] = fma(step, slope[j], row[j])
        start = ends[t]


@compiled
def adam_moments(
    firsts: Ints, seconds: Ints, rows: Ints, ends: Ints, begin: int, end: int, grad: Floats,
    one: float, two: float, out: Floats,
) -> None:  # fmt: skip
    """``torch.optim.SparseAdam`` as far as the square root; ``out`` gets what to take it of."""
    share, square_share = np.float32(one), np.float32(two)
    width, start = grad.shape[1], 0
    for t in range(len(ends)):
        first, second = column_at(firsts[t], width), column_at(seconds[t], width)
        last = min(ends[t], end)
        for k in range(max(start, begin), last):
            if k + AHEAD < last:
                for j in range(0, width, LINE):
                    prefetch(first, rows[k + AHEAD], j)
                    prefetch(second, rows[k + AHEAD], j)
            mean, square, slope = first[rows[k]], second[rows[k]], grad[k]
            under = out[k - begin]
            for j in range(width):
                mean[j] = (slope[j] - mean[j]) * share + mean[j]
                square[j] = (slope[j] * slope[j] - square[j]) * square_share + square[j]
                under[j] = square[j]
        start = ends[t]


@compiled
def adam_step(
    weights: Ints, firsts: Ints, rows: Ints, ends: Ints, begin: int, end: int, roots: Floats,
    step: float, eps: float,
) -> None:  # fmt: skip
    """``torch.optim.SparseAdam`` after the square root."""
    size, least = -np.float32(step), np.float32(eps)
    width, start = roots.shape[1], 0
    for t in range(len(ends)):
        weight, first = column_at(weights[t], width), column_at(firsts[t], width)
        last = min(ends[t], end)
        for k in range(max(start, begin), last):
            if k + AHEAD < last:
                for j in range(0, width, LINE):
                    prefetch(weight, rows[k + AHEAD], j)
            row, mean, root = weight[rows[k]], first[rows[k]], roots[k - begin]
            for j in range(width):
                row[j] = row[j] + size * (mean[j] / (root[j] + least))
        start = ends[t]


@compiled
def ftrl_sums(
    sums: Ints, rows: Ints, ends: Ints, begin: int, end: int, grad: Floats,
    old: Floats, new: Floats,
) -> None:  # fmt: skip
    """FTRL as far as the square roots of the sums before and after this update."""
    width, start = grad.shape[1], 0
    for t in range(len(ends)):
        total_of = column_at(sums[t], width)
        for k in range(max(start, begin), min(ends[t], end)):
            total, slope = total_of[rows[k]], grad[k]
            for j in range(width):
                old[k - begin, j] = total[j]
                total[j] = total[j] + slope[j] * slope[j]
                new[k - begin, j] = total[j]
        start = ends[t]


@compiled
def ftrl_step(
    weights: Ints, linears: Ints, rows: Ints, ends: Ints, begin: int, end: int, grad: Floats,
    old: Floats, new: Floats, lr: float, l1: float, l2: float, beta: float,
) -> None:  # fmt: skip
    """FTRL after the square roots."""
    rate, sparse, ridge, slack = np.float32(lr), np.float32(l1), np.float32(l2), np.float32(beta)
    width, start = grad.shape[1], 0
    for t in range(len(ends)):
        weight, linear = column_at(weights[t], width), column_at(linears[t], width)
        for k in range(max(start, begin), min(ends[t], end)):
            row, line, slope = weight[rows[k]], linear[rows[k]], grad[k]
            for j in range(width):
                drift = (new[k - begin, j] - old[k - begin, j]) / rate
                line[j] = line[j] + (slope[j] - drift * row[j])
                if abs(line[j]) <= sparse:
                    row[j] = np.float32(0)
                else:
                    pull = sparse if line[j] > 0 else -sparse
                    row[j] = (pull - line[j]) / ((slack + new[k - begin, j]) / rate + ridge)
        start = ends[t]
