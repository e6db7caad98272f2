"""Loads, before a server takes part, what its first push would otherwise wait for."""

from __future__ import annotations

import functools

import numpy as np

from tensorwire.parameter_server.declarations.initialisers import Uniform
from tensorwire.parameter_server.declarations.rules import RowwiseAdagrad
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.storage import tables
from tensorwire.parameter_server.storage.table import Part, Table


@functools.cache
def load_kernels() -> None:
    """Pulls from and pushes to a table that grows in this process, once.

    numba takes 1.3 s to load its kernels, and 6 s to compile them where it never did. Whoever
    waits for a push at a new server, as all trainers do in a resize, would wait for that, too.
    """
    spec = TableSpec("loading", 4, RowwiseAdagrad(lr=0.1), Uniform(0.01))
    table = Table(spec, kernels())
    ids, rows = np.arange(1000, dtype=np.int64), np.empty((1000, 4), np.float32)
    for time in range(2):
        places = table.pull(ids, rows, time)
        table.apply([Part(ids, np.ones_like(rows), places)], time)
    _load_those_for_many(Table(spec, kernels()), Table(spec, kernels()))
    bits = rows.reshape(-1).view(np.int32)
    kernels().stream_finite(bits, np.empty_like(bits))


def _load_those_for_many(*those: Table) -> None:
    """The same for two tables at a time, and the pushes of two trainers."""
    ids, rows = np.arange(20, dtype=np.int64), np.empty((20, 4), np.float32)
    for time in range(2):
        places = tables.pull(kernels(), those, (10, 10), ids, rows, time)
        part = tables.ManyParts((10, 10), ids, np.ones_like(rows), places)
        tables.apply(kernels(), those, [part, part][time:], time)
