"""The command line: ``python -m benchmarks --help``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

import benchmarks
from benchmarks import bindings
from benchmarks.commands import Column
from benchmarks.counts import ROWS_COUNTED
from benchmarks.counts import main as print_counts
from benchmarks.group import Launch, MemberFailed
from benchmarks.report import header, remarks, save_curve, save_json, save_plot, table_line
from benchmarks.rounds import Plan, measure
from benchmarks.summary import Line, summarize
from benchmarks.timeline import main as print_timelines
from benchmarks.workloads import DEFAULT_ROWS, ROWS

_TCP_ONLY = {"_transports": ["uv"], "_channels": ["mpt_uv", "basic"]}
_TORCH_COLUMNS = {
    "torch": Column("torch", bindings.TORCH, "TENSORPIPE", {}, {}),
    "torch-tcp": Column("torch-tcp", bindings.TORCH, "TENSORPIPE", _TCP_ONLY, {}),
    "torch-thp": Column(
        "torch-thp", bindings.TORCH, "TENSORPIPE", {}, {"THP_MEM_ALLOC_ENABLE": "1"}
    ),
}
_OUR_COLUMNS: dict[str, dict[str, dict[str, Any]]] = {
    "ours": {},
    "ours-tcp": {"TENSORPIPE": _TCP_ONLY, "TENSORWIRE": {"local_paths": False}},
    "ours-busy-poll": {"TENSORWIRE": {"busy_poll": 500e-6}},
}
"""The choices of each, by backend; what chooses nothing is for any."""


def main() -> int:
    """Measure, print, save; return the exit status."""
    options = parse()
    columns = [column(name, options) for name in options.columns]
    if options.count:
        keys = ROWS_COUNTED if options.rows is DEFAULT_ROWS else options.rows
        print_counts(columns[-1], keys, options.functions)
        return 0
    if options.timeline:
        print_timelines(columns[-1], options.rows)
        return 0
    launch = Launch(options.launch)
    plan = Plan(options.rounds, options.starts, options.seconds, options.least, launch)
    rows = [ROWS[key] for key in options.rows]
    lines: list[Line] = []
    print(header(options.columns), flush=True)
    try:
        with tqdm(total=len(rows) * plan.rounds, unit=" rounds", disable=None) as bar:
            for measured in measure(rows, columns, plan, bar.update):
                lines.append(summarize(measured))
                with tqdm.external_write_mode():
                    print(table_line(lines[-1]), flush=True)
    except MemberFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    for remark in remarks(lines):
        print(remark)
    save_json(lines, options.output.with_suffix(".json"))
    save_plot(lines, options.output.with_suffix(".png"))
    curve = options.output.with_name(options.output.name + "-callers.png")
    if save_curve(lines, curve):
        print(f"saved {curve}")
    print(f"saved {options.output.with_suffix('.json')} and .png")
    return 0


def parse() -> argparse.Namespace:
    about = (benchmarks.__doc__ or "").splitlines()[0].replace("``", "")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=about)
    add = parser.add_argument
    add(
        "--rows",
        nargs="+",
        choices=ROWS,
        default=DEFAULT_ROWS,
        metavar="ROW",
        help=f"any of {', '.join(ROWS)}; all but the callers unless given",
    )
    add(
        "--columns",
        nargs="+",
        choices=[*_TORCH_COLUMNS, *_OUR_COLUMNS],
        default=["torch", "ours"],
        help="the first is what the others are compared with (torch ours)",
    )
    add("--backend", default="TENSORPIPE", help="of ours (%(default)s)")
    add(
        "--options",
        type=json.loads,
        default={},
        metavar="JSON",
        help="for the options of our backend, such as '{\"num_worker_threads\": 1}' (none)",
    )
    add("--rounds", type=int, default=16, help="turns of each column per row (%(default)s)")
    add(
        "--starts",
        type=int,
        help="fresh starts of all processes that the rounds are dealt out over (half as many)",
    )
    add("--seconds", type=float, default=0.25, help="length of a turn (%(default)s)")
    add("--least", type=int, default=3, help="operations in a turn at least (%(default)s)")
    add(
        "--launch",
        choices=[each.value for each in Launch],
        default=Launch.APART.value,
        help="start the processes of a column each by itself, apart (in a session each, as "
        "torchrun does) or together (in one session), or forked from one parent (%(default)s)",
    )
    add(
        "--output",
        type=Path,
        default=Path("runs/benchmarks"),
        help="where to save, without extension (%(default)s)",
    )
    add(
        "--count",
        action="store_true",
        help="count the Python functions that the rows call in the last column, instead of "
        "measuring time",
    )
    add("--functions", action="store_true", help="with --count, name them")
    add(
        "--timeline",
        action="store_true",
        help="print what the threads at both ends of a median operation of each row do when, in "
        "the last column, which is ours over TENSORWIRE",
    )
    options = parser.parse_args()
    if options.starts is None:
        options.starts = max(1, options.rounds // 2)
    if not 1 <= options.starts <= options.rounds:
        parser.error(f"--starts {options.starts} is not from 1 to --rounds {options.rounds}")
    is_ours = options.columns[-1] in _OUR_COLUMNS and options.backend == "TENSORWIRE"
    if options.timeline and not is_ours:
        parser.error("--timeline needs --backend TENSORWIRE and one of our columns as the last")
    for name in options.columns:
        backends = _OUR_COLUMNS.get(name)
        if backends and options.backend not in backends:
            parser.error(f"--columns {name} needs --backend {' or '.join(backends)}")
    return options


def column(name: str, options: argparse.Namespace) -> Column:
    if name in _TORCH_COLUMNS:
        return _TORCH_COLUMNS[name]
    chosen = options.options | _OUR_COLUMNS[name].get(options.backend, {})
    return Column(name, bindings.OURS, options.backend, chosen, {})


if __name__ == "__main__":
    sys.exit(main())
