"""The processes of one column: starts them, makes some of them measure, stops and ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.commands import Answer, Column, Command, Place
from benchmarks.workloads import PEER_RANK, Row

_SECONDS_TO_LEAVE = 10.0
_LOG_LINES_SHOWN = 80


class MemberFailed(RuntimeError):
    """A process of a group ended or answered nonsense; carries the end of its log."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What one group did in one turn.

    Args:
        nanoseconds: the duration of each operation, of all callers.
        per_second: how many units they did together in a second.
    """

    nanoseconds: tuple[int, ...]
    per_second: float


class Group:
    """A column's processes. Use it as a context manager; they end with it."""

    def __init__(self, column: Column, size: int) -> None:
        self.column = column
        self._folder = tempfile.TemporaryDirectory(prefix="benchmarks_")
        self._members = [
            _Member(Place(column, rank, size, f"{self._folder.name}/meeting"), self._folder.name)
            for rank in range(size)
        ]

    def __enter__(self) -> Group:
        try:
            for member in self._members:
                member.answer()  # the first one says that it has joined
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self.awake():
            if kind is None:
                self._ask(self._members, Command("leave"))
            self._end(_SECONDS_TO_LEAVE if kind is None else 0.0)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the processes run inside this block; they are stopped outside it."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def prepare(self, row: Row) -> None:
        """Get ready for a row, one caller after the other, and warm up together."""
        for number, member in enumerate(self._callers(row)):
            member.ask(Command("prepare", row.key, number))
            member.answer()

    def measure(self, row: Row, seconds: float, least: int) -> Slice:
        """Run the row's operation in all callers at once for some seconds."""
        callers = self._callers(row)
        self._ask(callers, Command("measure", row.key, seconds=seconds, least=least))
        answers = [member.answer() for member in callers]
        return Slice(
            tuple(duration for answer in answers for duration in answer.nanoseconds),
            sum(row.units * len(answer.nanoseconds) / answer.seconds for answer in answers),
        )

    def forget(self, row: Row) -> None:
        """Drop what was prepared for a row."""
        callers = self._callers(row)
        self._ask(callers, Command("forget"))
        for member in callers:
            member.answer()

    def _callers(self, row: Row) -> list[_Member]:
        others = [member for rank, member in enumerate(self._members) if rank != PEER_RANK]
        return others[: row.callers]

    def _ask(self, members: list[_Member], command: Command) -> None:
        for member in members:
            member.ask(command)

    def _signal(self, number: signal.Signals) -> None:
        for member in self._members:
            member.signal(number)

    def _end(self, seconds: float = 0.0) -> None:
        for member in self._members:
            member.end(seconds)
        self._folder.cleanup()


class _Member:
    """The near end of one process."""

    def __init__(self, place: Place, folder: str) -> None:
        self._name = f"{place.column.name}, rank {place.rank}"
        self._log = Path(folder, f"log{place.rank}")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.member", place.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | place.column.environment,
                start_new_session=True,  # Ctrl-C is for the measuring process alone
            )

    def ask(self, command: Command) -> None:
        assert self._process.stdin is not None
        try:
            print(command.to_json(), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure() from None

    def answer(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return Answer.from_json(line)

    def signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def end(self, seconds: float) -> None:
        with self._process as process:  # closes the pipes and collects the process
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()

    def _failure(self) -> MemberFailed:
        last = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        return MemberFailed(f"{self._name} ended unexpectedly:\n  " + "\n  ".join(last))
