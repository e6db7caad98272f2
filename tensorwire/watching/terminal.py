"""``rpcrun top``, ``status`` and ``stacks``: a job on a terminal."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from tensorwire.watching.hub import NoAnswerError, Viewer
from tensorwire.watching.jobs import JobNotFoundError, find_job
from tensorwire.watching.rates import Rates, rates, steps_of
from tensorwire.watching.views import JobView, WorkerView

COMMANDS: Final = ("top", "status", "stacks")

Ask = Callable[[dict[str, object]], Any]


def run(argv: Sequence[str]) -> int:
    """Runs one of :data:`COMMANDS`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="rpcrun", description="Looks at a job that runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    top = commands.add_parser("top", help="a table of the job's workers that updates by itself")
    top.add_argument("--once", action="store_true", help="print the table once")
    status = commands.add_parser("status", help="the job's state, for scripts")
    status.add_argument("--json", action="store_true", help="as JSON")
    stacks = commands.add_parser("stacks", help="the Python stacks of a worker")
    stacks.add_argument("worker", metavar="ROLE:N")
    for each in (top, status, stacks):
        each.add_argument("job", nargs="?", default=None, help="job id, or http[s]://HOST:PORT of "
                          "its page; default the only job of this user here")  # fmt: skip
        each.add_argument("--token", default=None, help="of the job's page")
    said = parser.parse_args(argv)
    try:
        with _connect(said.job, said.token) as source:
            return _do(said, source.ask)
    except (JobNotFoundError, NoAnswerError, OSError) as error:
        print(f"rpcrun: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _connect(job: str | None, token: str | None) -> Any:
    if job is not None and job.startswith(("http://", "https://")):
        from tensorwire.watching.dashboard.remote import PageClient

        return PageClient(job, token)
    return Viewer(find_job(job).path)


def _do(said: argparse.Namespace, ask: Ask) -> int:
    if said.command == "stacks":
        print(printable(str(ask({"ask": "stacks", "worker": said.worker}))))
        return 0
    view = _view(ask)
    if said.command == "status":
        print(json.dumps(json.loads(view.encode()), indent=2) if said.json else plain(view))
        return 0
    if said.once:
        time.sleep(1.0)
        after = _view(ask)
        _print_table(after, rates(view, after))
        return 0
    return _show(ask, view)


def _view(ask: Ask) -> JobView:
    return JobView.decode(json.dumps(ask({"ask": "job"})).encode())


def _show(ask: Ask, view: JobView) -> int:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        before = view
        while True:
            time.sleep(1.0)
            after = _view(ask)
            live.update(table(after, rates(before, after)), refresh=True)
            before = after


def _print_table(view: JobView, measured: dict[str, Rates]) -> None:
    from rich.console import Console

    console = Console()
    console.print(table(view, measured))


def table(view: JobView, measured: dict[str, Rates]) -> Any:
    """The job as a table of ``rich``."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = Table(title=f"{view.job}: {view.phase}, {len(view.nodes)} machine(s)", expand=True)
    for name in ("worker", "state", "life", "machine", "steps", "steps/s", "calls/s",
                 "p50 ms", "p99 ms", "memory", "CPU", "what"):  # fmt: skip
        rows.add_column(name, justify="left" if name in ("worker", "what") else "right")
    for worker in view.workers:
        row = cells(worker, measured.get(worker.name))
        rows.add_row(*(Text(printable(cell)) for cell in row))
    alarms = [Text(printable(f"! {alarm}"), style="bold red") for alarm in view.alarms[-3:]]
    return Group(rows, *alarms)


def cells(worker: WorkerView, rate: Rates | None) -> list[str]:
    """One row of the table, as text."""
    process, facts = worker.process, worker.facts or {}
    phase = facts.get("progress", {}).get("phase", "")
    state = "stopped" if process is not None and process.state in ("T", "t") else worker.state
    return [
        worker.name,
        state,
        str(worker.life),
        f"{worker.node} {worker.host}" if worker.node >= 0 else "",
        str(steps_of(worker)) if worker.facts else "",
        _number(rate.steps if rate else math.nan),
        _number(rate.calls if rate else math.nan),
        _number(rate.p50 * 1e3 if rate else math.nan),
        _number(rate.p99 * 1e3 if rate else math.nan),
        f"{process.resident_bytes / 1e6:.0f} MB" if process is not None else "",
        f"{rate.cpu:.0%}" if rate else "",
        phase or worker.why,
    ]


def plain(view: JobView) -> str:
    """The job in a few lines of text."""
    lines = [f"{view.job}: {view.phase}"]
    for worker in view.workers:
        row = cells(worker, None)
        lines.append("  ".join(cell for cell in (*row[:5], row[9], row[11]) if cell))
    return printable("\n".join([*lines, *(f"! {alarm}" for alarm in view.alarms)]))


def printable(text: str) -> str:
    """The text without what a terminal obeys, such as the escapes that move its cursor."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)


def _number(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
