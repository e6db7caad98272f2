"""Texts for people: why a job failed, and a line on the terminal that says how it is."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TextIO

from tensorwire.launch.plan import Failure, Order, Phase, Plan, Seat
from tensorwire.launch.supervisor import Ended

_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"
_SECONDS_BETWEEN_LINES = 1.0
_INDENT = "    "
_NOTHING_SAID = (
    "It left no traceback here: see its output, or decorate its main function with "
    "torch.distributed.elastic.multiprocessing.errors.record"
)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def describe_end(end: Ended) -> str:
    """The end of a process in words, after its name."""
    return "was stopped" if end.stopped else f"ended with {describe_exit(end.exit_code)}"


def describe_dismissal(failure: Failure) -> str:
    """Tells why an agent was taken out of a job, over several lines."""
    return _describe("this agent is out of the job, which goes on without it", failure)


def describe_failure(failure: Failure) -> str:
    """Tells why a job failed, over several lines."""
    return _describe("the job failed", failure)


def _describe(what: str, failure: Failure) -> str:
    if not failure.who:
        return f"{what}: {failure.said}"
    restarts = failure.life - 1
    again = f" after {restarts} restart{'s' * (restarts != 1)}" if restarts > 0 else ""
    head = (
        f"{what}: {failure.who} (id {failure.id}, process {failure.process} on "
        f"{failure.host}) failed first, with {describe_exit(failure.exit_code)}{again}"
    )
    said = [_INDENT + line for line in (failure.said or _NOTHING_SAID).splitlines()]
    return "\n".join([head, *said])


def describe_plan(plan: Plan, running: Callable[[Seat], bool]) -> str:
    """One line: workers by role and state, and restarts."""
    parts = [_describe_role(plan, state.role.name, running) for state in plan.roles]
    restarts = sum(max(0, seat.life - 1) for seat in plan.seats)
    if restarts:
        parts.append(f"{restarts} restart{'s' * (restarts != 1)}")
    if plan.phase is not Phase.RUNNING:
        parts.append(plan.phase.value)
    return " · ".join(parts)


def _describe_role(plan: Plan, role: str, running: Callable[[Seat], bool]) -> str:
    states = Counter(_state(seat, running) for seat in plan.seats_of(role))
    known = ("running", "starting", "stopping", "waiting", "vacant", "done")
    told = [f"{states[state]} {state}" for state in known if states[state]]
    return f"{role}: {', '.join(told) or 'none'}"


def _state(seat: Seat, running: Callable[[Seat], bool]) -> str:
    if seat.done:
        return "done"
    if not seat.holder:
        return "vacant"
    if seat.order is Order.RUN:
        return "running" if running(seat) else "starting"
    return {Order.STOP: "stopping", Order.WAIT: "waiting"}.get(seat.order, "done")


class ProgressLine:
    """Keeps the last line of a terminal for itself, and lets all else scroll above it.

    Args:
        terminal: where to write; nothing is written if it is no terminal.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._is_on = terminal.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._size = (0, 0)
        self._shown = ("", 0.0)
        self._began = time.monotonic()

    def show(self, text: str) -> None:
        """Shows the line, if it is another or the time in it has moved on."""
        now = time.monotonic()
        former, at = self._shown
        if not self._is_on or (text == former and now - at < _SECONDS_BETWEEN_LINES):
            return
        self._shown = (text, now)
        self._write("".join(self._drawing(f"rpcrun {now - self._began:.0f} s  {text}")))

    def _drawing(self, line: str) -> Iterator[str]:
        columns, rows = os.get_terminal_size(self._terminal.fileno())
        if rows < 2:
            return
        if (columns, rows) != self._size:
            self._size = (columns, rows)
            yield f"\n{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}\x1b[1A"
        yield f"{_SAVE}\x1b[{rows};1H{_CLEAR}{line[: columns - 1]}{_RESTORE}"

    def close(self) -> None:
        """Gives the line back."""
        if self._is_on and self._size[1]:
            rows = self._size[1]
            self._write(f"{_SAVE}\x1b[1;{rows}r\x1b[{rows};1H{_CLEAR}{_RESTORE}")
        self._is_on = False

    def _write(self, text: str) -> None:
        try:
            self._terminal.write(text)
            self._terminal.flush()
        except OSError:
            self._is_on = False
