"""Compares ways to train what a server keeps.

    python -m benchmarks.parameter_server [tables dense backups ... as below] [--quick]
    python -m benchmarks.parameter_server --tables 26 [--batch 2048] [--most 1] [--servers 1]

``tables``: each step looks up a batch of ids, Zipf distributed, takes a gradient for each of them
(the same at each step, as a model's own work is the same for all), and moves the rows by row-wise
Adagrad. One server and one trainer, each a process; each program with one and with two threads of
torch, and compared in the better setting.

=============================  ================================================================
``ours, on demand``            ``ps.Embedding`` under ``ps.BSP()``
``ours, ahead``                the same with ``ps.prefetch``: one message a step, the same bits
``ours, stale``                under ``ps.SSP(1)`` with ``ps.prefetch``
``sum of floors``              de-duplicate, gather, copy, expand, reduce, copy, update: one after
                               the other in one process, by our kernels into kept buffers
``by hand, torch RPC``         pull, reduce and push as a user writes them on torch's RPC
``by hand, our RPC``           the same program on this library's
``by hand, Ray``               the same program with an actor of Ray's, where that is installed
``autograd, torch RPC``        ``nn.EmbeddingBag`` at the server, distributed autograd, Adagrad
``autograd, our RPC``          the same on this library's RPC, autograd and optimizer
``by hand, one process``       the program by hand without any server
``EmbeddingBag, one process``  ``nn.EmbeddingBag(sparse=True)`` and Adagrad
=============================  ================================================================

``--tables``: a click model with so many tables: a collection, a module for each table, and what a
user writes by hand, with one message to each server and way; beside them modules in one process,
and TorchRec's fused collection in one process, where that is installed or ``--torchrec`` says where
(``torchrec==1.8.0`` and ``fbgemm-gpu-cpu==1.8.0``, installed with ``--no-deps`` beside torch 2.13).
``--most 20`` gives each example 1 to 20 ids a feature.

``dense``: gradients of 64 MB pushed, values pulled, moved by SGD: ours, and one call by hand.
``backups``: ``ours, ahead`` on two servers, and where each is the other's backup besides.
``rows``: ``ours, ahead`` with as many rows, and with ten times as many.
``memory``: fills a table of 20 million rows of 16, and tells the server's memory.
``published``: fills it, publishes a base, changes one row in 100, and publishes a delta.
``followers``: followers of versions, and an evaluator that asks the server, beside training.
``samples``: the click model's collection, read through a ``DataLoader`` in torch's order, and with
``cluster.samples``, by which each sample counts once.
``steps``: does 100 000 small steps, and tells the memory of both on the way.
``ahead``: the click model's collection with 1, 2, 4 and 8 batches ahead, trainer and server in
networks of their own, between which a relay delays packets by 1 and 5 ms and bounds the rate; tells
messages, rows and bytes of a step, too. It needs root.
``click``: ``--tables`` with 26 tables and 1 and 2 servers, 200 tables and 512 examples, 10 features
with 1 to 20 ids each; and one big table beside an earlier checkout, ``--before``, in turn.

All programs are alive at the same time; the measurement goes round them, and those whose turn it
is not are stopped. Each number is the median over the rounds, with its quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from tqdm import tqdm

from benchmarks.parameter_server import (
    ahead,
    by_hand,
    following,
    many,
    memory,
    ours,
    pairs,
    published,
)
from benchmarks.parameter_server.case import BATCHES, Case, Program
from benchmarks.stepping import SteppingGroup


@dataclass(frozen=True, slots=True)
class Column:
    """One program in one setting.

    Args:
        name: of the program.
        program: begins each of its processes.
        case: what it trains.
        size: how many processes it has.
    """

    name: str
    program: Program
    case: Case
    size: int = 2

    def start(self) -> SteppingGroup:
        """Its processes, which have done their first steps."""
        begin = partial(self.program, self.case)
        return SteppingGroup(begin, self.size, self.case.threads, BATCHES)


Times = dict[Column, list[float]]
"""Milliseconds per step of each column in each round."""


def compare(columns: Sequence[Column], rounds: int, steps: int) -> Times:
    """Goes round the columns."""
    found: Times = {column: [] for column in columns}
    with ExitStack() as stack:
        groups = {}
        for column in tqdm(columns, unit=" started", disable=None, leave=False):
            groups[column] = column.start()
            stack.callback(groups[column].close)
        for _ in tqdm(range(rounds), unit=" rounds", disable=None, leave=False):
            for column, group in groups.items():
                found[column].append(1e3 * group.measure(steps))
    return found


def best(found: Times) -> dict[str, Column]:
    """The better setting of each program."""
    chosen: dict[str, Column] = {}
    for column, taken in found.items():
        other = chosen.get(column.name)
        if other is None or statistics.median(taken) < statistics.median(found[other]):
            chosen[column.name] = column
    return chosen


def table(found: Times, base: str, setting: str) -> str:
    """Medians and quartiles of each program in each setting, and the ratio of the better ones.

    Args:
        found: the times.
        base: the program that the others are compared with, round by round.
        setting: the attribute of cases that differs between the columns of one program.
    """
    settings = sorted({getattr(column.case, setting) for column in found})
    chosen = best(found)
    reference = found[chosen[base]]
    heads = "".join(f"{f'{each} {setting}':>26}" for each in settings)
    lines = [f"{'ms a step':<26}{heads}   better / {base}"]
    for name, column in chosen.items():
        cells = ""
        for each in settings:
            taken = [
                t for c, t in found.items() if (c.name, getattr(c.case, setting)) == (name, each)
            ]
            cells += f"{_cell(taken[0]) if taken else '':>26}"
        ratio = statistics.median(b / a for a, b in zip(reference, found[column], strict=True))
        lines.append(f"{name:<26}{cells}   {ratio:.2f}")
    return "\n".join(lines)


def _cell(taken: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(taken, n=4)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def _settings(
    programs: Mapping[str, Program], case: Case, threads: Sequence[int], size: int = 2
) -> list[Column]:
    return [
        Column(name, program, replace(case, threads=each), size)
        for name, program in programs.items()
        for each in threads
    ]


def _tables(options: argparse.Namespace, case: Case) -> str:
    absent = by_hand.missing("ray", "torchrec")
    programs = ours.PROGRAMS | by_hand.PROGRAMS
    if "ray" not in absent:
        programs = programs | {"by hand, Ray": by_hand.rows_over_ray}
    chosen = {n: p for n, p in programs.items() if n in (ours.AHEAD, *(options.only or programs))}
    found = compare(_settings(chosen, case, options.threads), options.rounds, options.steps)
    head = f"{case.rows} rows of {case.dim}, {case.ids} ids a step"
    also = f"\nnot installed, so not compared: {', '.join(absent)}" if absent else ""
    return f"{head}\n{table(found, ours.AHEAD, 'threads')}{also}"


def _many(options: argparse.Namespace) -> str:
    case = _case_of_many(options, options.tables, 1)
    programs = dict(many.PROGRAMS)
    is_there = bool(options.torchrec) or not by_hand.missing("torchrec")
    if is_there:
        programs["torchrec, one process"] = many.torchrec_here
    chosen = {n: p for n, p in programs.items() if n in (many.BASE, *(options.only or programs))}
    columns = _settings(chosen, case, options.threads, 1 + case.servers)
    found = compare(columns, options.rounds, options.steps)
    also = "" if is_there else "\nnot installed, so not compared: torchrec"
    return f"{_name(case)}\n{table(found, many.BASE, 'threads')}{also}"


def _samples(options: argparse.Namespace, case: Case) -> str:
    tables = _case_of_many(options, options.tables or 26, 1)
    columns = _settings(many.READING, tables, options.threads, 1 + tables.servers)
    found = compare(columns, options.rounds, options.steps)
    return f"{_name(tables)}\n{table(found, many.SAMPLED, 'threads')}"


def _case_of_many(options: argparse.Namespace, tables: int, threads: int) -> many.Many:
    return many.Many(
        options.table_rows, options.batch, options.width, threads, 0.0, tables, options.most,
        options.servers, options.torchrec,
    )  # fmt: skip


def _name(case: many.Many) -> str:
    return (
        f"{case.tables} tables of {case.dim}, batch {case.ids}, 1 to {case.most} ids, "
        f"{case.servers} servers"
    )


def _dense(options: argparse.Namespace, case: Case) -> str:
    programs: dict[str, Program] = {
        "ours": ours.numbers,
        "by hand, torch RPC": by_hand.numbers_over_torch,
        "by hand, our RPC": by_hand.numbers_over_ours,
    }
    found = compare(_settings(programs, case, options.threads), options.rounds, options.steps)
    return f"{case.megabytes} MB dense, pushed and pulled\n{table(found, 'ours', 'threads')}"


def _backups(options: argparse.Namespace, case: Case) -> str:
    columns = _settings(ours.BACKED, case, options.threads, 3)
    found = compare(columns, options.rounds, options.steps)
    return f"{case.rows} rows, backups\n{table(found, next(iter(ours.BACKED)), 'threads')}"


def _rows(options: argparse.Namespace, case: Case) -> str:
    program, one = ours.PROGRAMS[ours.AHEAD], replace(case, threads=options.threads[0])
    columns = [
        Column(f"{rows} rows", program, replace(one, rows=rows))
        for rows in (case.rows, 10 * case.rows)
    ]
    found = compare(columns, options.rounds, options.steps)
    return table(found, columns[0].name, "threads")


def _memory(options: argparse.Namespace, case: Case) -> str:
    return memory.many_rows(replace(case, rows=options.many_rows, dim=16, threads=1))


def _steps(options: argparse.Namespace, case: Case) -> str:
    small = replace(case, rows=min(case.rows, 10_000), ids=min(case.ids, 64), dim=8, threads=1)
    return memory.many_steps(small, options.many_steps)


def _published(options: argparse.Namespace, case: Case) -> str:
    return published.published_rows(replace(case, rows=options.many_rows, dim=16, threads=1))


def _followers(options: argparse.Namespace, case: Case) -> str:
    return following.followers(replace(case, dim=16, threads=1), options.readers, options.seconds)


def _ahead(options: argparse.Namespace, case: Case) -> str:
    tables = replace(_case_of_many(options, options.tables or 26, options.threads[0]), servers=1)
    return f"{_name(tables)}, at {options.megabits:g} Mbit/s\n" + ahead.compare(
        tables, options.delays, options.known, options.megabits, options.rounds, options.steps
    )


def _click(options: argparse.Namespace, case: Case) -> str:
    batch, fewer = options.batch, max(1, options.batch // 4)
    for tables, examples, most, servers in (
        (26, batch, 1, 1),
        (26, batch, 1, 2),
        (200, fewer, 1, 1),
        (10, batch, 20, 1),
    ):
        sizes = {"tables": tables, "batch": examples, "most": most, "servers": servers}
        print(f"\n{_many(argparse.Namespace(**vars(options) | sizes))}", flush=True)
    arguments = ["--quick"] if options.quick else ["--rounds", "3", "--steps", str(options.steps)]
    return pairs.compare(options.before, arguments, options.pairs)


_SECTIONS = {
    "tables": _tables, "dense": _dense, "backups": _backups, "rows": _rows, "memory": _memory,
    "steps": _steps, "ahead": _ahead, "click": _click, "published": _published,
    "followers": _followers, "samples": _samples,
}  # fmt: skip


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("kinds", nargs="*", default=[], metavar="kind", help=f"of {', '.join(_SECTIONS)} (tables)")
    add("--quick", action="store_true", help="as small as can be, to see that all of it runs")
    add("--rows", type=int, default=1_000_000, help="(%(default)s)")
    add("--ids", type=int, default=65_536, help="in a batch (%(default)s)")
    add("--dim", type=int, default=64, help="(%(default)s)")
    add("--tables", type=int, metavar="N", help="compare a click model with so many tables")
    add("--batch", type=int, default=2048, help="examples of a step with --tables (%(default)s)")
    add("--most", type=int, default=1, help="ids of an example for a feature (%(default)s)")
    add("--width", type=int, default=16, help="columns of each of --tables (%(default)s)")
    add("--table-rows", type=int, default=100_000, help="of the largest (%(default)s)")
    add("--servers", type=int, default=1, choices=[1, 2], help="with --tables (%(default)s)")
    add("--known", type=int, nargs="+", default=[1, 2, 4, 8], help="batches, of ahead (1 2 4 8)")
    add("--delays", type=float, nargs="+", default=[1, 5], help="ms one way, of ahead (1 5)")
    add("--megabits", type=float, default=1000, help="a second, of ahead; 0: any (%(default)s)")
    add("--before", default="", metavar="FOLDER", help="an earlier checkout, for click")
    add("--pairs", type=int, default=3, help="of click (%(default)s)")
    add("--torchrec", default="", metavar="FOLDER", help="where TorchRec is installed")
    add("--megabytes", type=float, default=64.0, help="of dense parameters (%(default)s)")
    add("--threads", type=int, nargs="+", default=[1, 2], help="of torch (%(default)s)")
    add("--only", nargs="+", metavar="PROGRAM", help="of tables, e.g. 'sum of floors' (all)")
    add("--rounds", type=int, default=9, help="(%(default)s)")
    add("--steps", type=int, default=10, help="of a round (%(default)s)")
    add("--readers", type=int, default=10, help="of versions, at a time (%(default)s)")
    add("--seconds", type=float, default=60.0, help="for which they read (%(default)s)")
    add("--many-rows", type=int, default=20_000_000, help="to fill memory with (%(default)s)")
    add("--many-steps", type=int, default=100_000, help="to see memory stay (%(default)s)")
    options = parser.parse_args(arguments)
    strange = [each for each in options.kinds if each not in _SECTIONS]
    if strange:
        parser.error(f"{strange[0]!r} is none of {', '.join(_SECTIONS)}")
    if options.quick:
        vars(options).update(rows=2000, ids=256, dim=8, megabytes=0.25, threads=[1], rounds=2)
        vars(options).update(steps=2, many_rows=1 << 19, many_steps=2000)
        vars(options).update(batch=32, table_rows=200, readers=2, seconds=3.0)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit status."""
    options = _options(arguments)
    case = Case(options.rows, options.ids, options.dim, 1, options.megabytes)
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores")
    if options.tables is not None:
        print(f"\n{_many(options)}", flush=True)
    for kind in options.kinds or (["tables"] if options.tables is None else []):
        print(f"\n{_SECTIONS[kind](options, case)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
