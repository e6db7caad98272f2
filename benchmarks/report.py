"""The results for a person: a table in the terminal, the numbers as JSON, a plot."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.bindings import OURS
from benchmarks.summary import Cell, Line, Spread
from benchmarks.workloads import ROWS, Measure

_TITLE_WIDTH = 32
_CELL_WIDTH = 22
_RATIO_WIDTH = 22


def header(columns: Sequence[str]) -> str:
    """Return the table's head."""
    cells = [f"{columns[0]:>{_CELL_WIDTH}}"]
    cells += [
        f"{name:>{_CELL_WIDTH}}{'times ' + columns[0]:>{_RATIO_WIDTH}}" for name in columns[1:]
    ]
    top = f"{'median (p99), or per second':<{_TITLE_WIDTH}}" + "".join(cells)
    return f"{top}\n{'-' * len(top)}"


def table_line(line: Line) -> str:
    """Return one row of the table; a ratio is followed by its quartiles over the rounds."""
    cells = list(line.cells.values())
    text = f"{line.title:<{_TITLE_WIDTH}}{_value(line.measure, cells[0]):>{_CELL_WIDTH}}"
    for cell in cells[1:]:
        text += f"{_value(line.measure, cell):>{_CELL_WIDTH}}{_ratio(cell.ratio):>{_RATIO_WIDTH}}"
    return text


def remarks(lines: Sequence[Line]) -> list[str]:
    """Return what the raw numbers say about the others."""
    rows = {line.key: line.cells for line in lines}
    said = []
    if {"empty", "unix"} <= rows.keys():
        floor = rows["unix"]["raw"].microseconds
        for name, cell in rows["empty"].items():
            said.append(f"empty call, {name}: {cell.microseconds / floor:.1f} raw round trips")
    if {"empty", "metrics"} <= rows.keys() and OURS in rows["empty"]:
        share = rows["metrics"]["raw"].microseconds / rows["empty"][OURS].microseconds
        said.append(f"empty call, {OURS}: {share:.1%} of its time is counting for rpc.metrics()")
    for name, cell in rows.get("empty", {}).items():
        if cell.known_core:
            rounds = f"{cell.shared_core} of {cell.known_core} rounds"
            said.append(f"empty call, {name}: both processes on one core in {rounds}")
    counts = [line for line in lines if line.key.startswith("callers")]
    for name in counts[0].cells if len(counts) > 1 else ():
        rates = [line.cells[name].per_second for line in counts]
        least = min(rate / max(rates[: n + 1]) for n, rate in enumerate(rates))
        said.append(f"more callers, {name}: at least {least:.2f} of the best with fewer")
    if {"job", "alone"} <= rows.keys():
        computing = rows["alone"]["raw"].microseconds / 1e6
        for name, cell in rows["job"].items():
            share = cell.per_second * computing / ROWS["job"].callers
            said.append(f"main job, {name}: {share:.0%} of each trainer's time is computing")
    return said


def save_json(lines: Sequence[Line], path: Path) -> None:
    """Write every number, and where it was measured."""
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    rows = [asdict(line) | {"measure": line.measure.value} for line in lines]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def save_plot(lines: Sequence[Line], path: Path) -> None:
    """Draw how many times better than the first column each other one is, row by row."""
    from matplotlib.figure import Figure

    compared = [line for line in lines if len(line.cells) > 1]
    if not compared:
        return
    names = list(compared[0].cells)
    figure = Figure(figsize=(9, 1.2 + 0.45 * len(compared)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / (len(names) - 1)
    for number, name in enumerate(names[1:]):
        ratios = [line.cells[name].ratio for line in compared]
        medians = [ratio.median for ratio in ratios]
        errors = [
            [ratio.median - ratio.low for ratio in ratios],
            [ratio.high - ratio.median for ratio in ratios],
        ]
        places = [place + number * height for place in range(len(compared))]
        axes.barh(places, medians, height, xerr=errors, label=name, capsize=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(compared)), [line.title for line in compared])
    axes.invert_yaxis()
    axes.set_xlabel(f"times better than {names[0]} (median and quartiles over the rounds)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def save_curve(lines: Sequence[Line], path: Path) -> bool:
    """Draw calls per second over the number of callers, of each column; False without any."""
    from matplotlib.figure import Figure

    drawn = [line for line in lines if line.key.startswith("callers")]
    if len(drawn) < 2:
        return False
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    callers = [ROWS[line.key].callers for line in drawn]
    for name in drawn[0].cells:
        axes.plot(callers, [line.cells[name].per_second for line in drawn], "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(callers, list(map(str, callers)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("processes that call one worker")
    axes.set_ylabel("empty calls per second, all together")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def _value(measure: Measure, cell: Cell) -> str:
    if measure is Measure.RATE:
        return f"{cell.per_second:,.0f} /s"
    return f"{_time(cell.microseconds)} ({_time(cell.microseconds_p99)})"


def _time(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{microseconds:.0f} µs"
    return f"{microseconds / 1000:.1f} ms"


def _ratio(ratio: Spread) -> str:
    return f"{ratio.median:.2f} [{ratio.low:.2f}-{ratio.high:.2f}]"
