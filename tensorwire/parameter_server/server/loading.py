"""Loads, before a server takes part, what its first push would otherwise wait for."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType
from typing import Final

import numpy as np

from tensorwire.parameter_server.declarations.initialisers import Initialiser, Normal, Uniform
from tensorwire.parameter_server.declarations.rules import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    RowwiseAdagrad,
    Rule,
)
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.kernels import kernels, meanwhile
from tensorwire.parameter_server.kernels.arrays import Array
from tensorwire.parameter_server.storage import tables
from tensorwire.parameter_server.storage.table import Part, TableShard

_NUMBA: Final = "tensorwire.parameter_server.kernels.numba_kernels"
_NICE: Final = 10
_RULES: Final = (
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9),
    Adagrad(lr=0.1),
    RowwiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    FTRL(lr=0.1, l1=0.1),
)


@functools.cache
def load_kernels() -> None:
    """Pulls from and pushes to a table that grows in this process, once.

    numba takes 1.3 s to load its kernels. Whoever waits for a push at a new server, as all trainers
    do in a resize, would wait for that, too.
    """
    exercise(kernels())


def load_for_workers() -> None:
    """Loads what servers and trainers would each load for themselves, in what becomes or forks one.

    That is the kernels, if they were compiled on this machine, and the modules that torch imports
    when a process makes its first optimizer, which takes more than a second.
    """
    if importlib.util.find_spec("numba") is not None and meanwhile.are_compiled():
        load_kernels()
    importlib.import_module("torch._dynamo")


def exercise(k: ModuleType) -> None:
    """Uses the kernels that most pulls and pushes do.

    Args:
        k: their module.
    """
    rows = _use(k, RowwiseAdagrad(lr=0.1), Uniform(0.01))
    bits = rows.reshape(-1).view(np.int32)
    k.stream_finite(bits, np.empty_like(bits))


def _use(k: ModuleType, rule: Rule, init: Initialiser) -> Array:
    spec = TableSpec("loading", 4, rule, init)
    table = TableShard(spec, k)
    ids, rows = np.arange(1000, dtype=np.int64), np.empty((1000, 4), np.float32)
    for time in range(2):
        places = table.pull(ids, rows, time)
        table.apply([Part(ids, np.ones_like(rows), places)], time)
    _use_those_for_many(k, TableShard(spec, k), TableShard(spec, k))
    return rows


def _use_those_for_many(k: ModuleType, *those: TableShard) -> None:
    """Uses the kernels for two tables at a time, and the pushes of two trainers."""
    ids, rows = np.arange(20, dtype=np.int64), np.empty((20, 4), np.float32)
    for time in range(2):
        places = tables.pull(k, those, (10, 10), ids, rows, time)
        part = tables.ManyParts((10, 10), ids, np.ones_like(rows), places)
        tables.apply(k, those, [part, part][time:], time)


def compile_kernels() -> None:
    """Has numba compile what any rule uses, and says on this machine that it has."""
    compiled = importlib.import_module(_NUMBA)
    for rule in _RULES:
        for init in (Uniform(0.01), Normal(0.01)):
            _use(compiled, rule, init)
    exercise(compiled)
    meanwhile.note_compiled()


def main() -> None:
    """Compiles kernels in a process of its own, which gives way to others."""
    os.nice(_NICE)
    compile_kernels()
