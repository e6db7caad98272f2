"""The processes of one column: starts them, makes some of them measure, stops and ends them."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.commands import Answer, Birth, Column, Command, Place, Span
from benchmarks.workloads import PEER_RANK, Row

_SECONDS_TO_LEAVE = 10.0
_LOG_LINES_SHOWN = 80


class Launch(enum.Enum):
    """The ways in which the processes of a group come into being.

    Linux shares the cores out among sessions first, then among the processes of each,
    unless autogroups are off (``kernel.sched_autogroup_enabled``, see sched(7)). So it
    matters whether they have one session or several where there are more than cores.
    """

    APART = "apart"
    """Each is started by itself, in a session of its own, as torchrun does."""
    TOGETHER = "together"
    """Each is started by itself, all in one session, as a shell script does."""
    FORKED = "forked"
    """All are forked from one parent that has imported what they need."""


class MemberFailed(RuntimeError):
    """A process of a group ended or answered nonsense; carries the end of its log."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The results of one group in one turn.

    Args:
        nanoseconds: the duration of each operation, of all callers.
        per_second: how many units they did together in a second.
        shared_core: whether a caller was on the core of the one it calls at the end; None if
            there are more processes than cores, or the kernel does not tell.
    """

    nanoseconds: tuple[int, ...]
    per_second: float
    shared_core: bool | None = None


class Group:
    """A column's processes. Use it as a context manager; they end with it.

    Args:
        column: what they measure.
        size: how many there are.
        launch: how they are started; those that are forked share a nursery.
        counts: whether the functions that they call are counted.
        modules: imported before they form a group.
        timeline: whether they record what their threads do when.
    """

    def __init__(
        self,
        column: Column,
        size: int,
        launch: Launch = Launch.APART,
        *,
        counts: bool = False,
        modules: Sequence[str] = (),
        timeline: bool = False,
    ) -> None:
        self.column = column
        self._folder = tempfile.TemporaryDirectory(prefix="benchmarks_")
        meeting = f"{self._folder.name}/meeting"
        self._members = [
            _Member(
                Place(column, rank, size, meeting, counts, tuple(modules), timeline),
                self._folder.name,
            )
            for rank in range(size)
        ]
        forked = launch is Launch.FORKED
        families = [self._members] if forked else [[each] for each in self._members]
        self._nurseries = [_start_nursery(column, members, launch) for members in families]

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
            self._shares_core(callers),
        )

    def _shares_core(self, callers: Sequence[_Member]) -> bool | None:
        if not 1 < len(self._members) <= (os.cpu_count() or 1):
            return None
        asked = [self._members[PEER_RANK], *callers]
        self._ask(asked, Command("locate"))
        peer, *cores = (member.answer().core for member in asked)
        return None if peer is None or None in cores else peer in cores

    def count(self, row: Row, operations: int) -> tuple[dict[str, int], dict[str, int]]:
        """Run the row's operation so often; return what the first caller and the peer called."""
        caller, callee = self._watch(row, operations, "count")
        return caller.calls, callee.calls

    def record(self, row: Row, operations: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """Run the row's operation so often; return what the first caller and the peer did when."""
        caller, callee = self._watch(row, operations, "record")
        return caller.spans, callee.spans

    def _watch(self, row: Row, operations: int, verb: str) -> tuple[Answer, Answer]:
        both = [self._callers(row)[0], self._members[PEER_RANK]]
        self._ask(both, Command(verb))
        for member in both:
            member.answer()
        self._ask(both[:1], Command("measure", row.key, seconds=0.0, least=operations))
        both[0].answer()
        self._ask(both, Command(verb))
        caller, callee = (member.answer() for member in both)
        return caller, callee

    def forget(self, row: Row) -> None:
        """Drop what was prepared for a row."""
        callers = self._callers(row)
        self._ask(callers, Command("forget"))
        for member in callers:
            member.answer()

    def _callers(self, row: Row) -> list[_Member]:
        others = [member for rank, member in enumerate(self._members) if rank != PEER_RANK]
        return others[: row.callers]

    def _ask(self, members: Sequence[_Member], command: Command) -> None:
        for member in members:
            member.ask(command)

    def _signal(self, number: signal.Signals) -> None:
        for nursery in self._nurseries:
            if nursery.poll() is None:
                os.killpg(nursery.pid, number)  # it leads a group of all that it started

    def _end(self, seconds: float = 0.0) -> None:
        for member in self._members:
            member.close()
        for nursery in self._nurseries:
            try:
                nursery.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(nursery.pid, signal.SIGKILL)
                nursery.wait()
        self._folder.cleanup()


class _Member:
    """The near end of one process."""

    def __init__(self, place: Place, folder: str) -> None:
        self._place = place
        self._log = Path(folder, f"log{place.rank}")
        commands, write_end = os.pipe()
        self._commands = os.fdopen(write_end, "w")
        read_end, answers = os.pipe()
        self._answers = os.fdopen(read_end)
        self.birth = Birth(place, commands, answers, str(self._log))

    def ask(self, command: Command) -> None:
        try:
            print(command.to_json(), file=self._commands, flush=True)
        except BrokenPipeError:
            raise self._failure() from None

    def answer(self) -> Answer:
        line = self._answers.readline()
        if not line:
            raise self._failure()
        return Answer.from_json(line)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is gone, and left something unread
            self._commands.close()
        self._answers.close()

    def _failure(self) -> MemberFailed:
        name = f"{self._place.column.name}, rank {self._place.rank}"
        last = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        return MemberFailed(f"{name} ended unexpectedly:\n  " + "\n  ".join(last))


def _start_nursery(
    column: Column, members: Sequence[_Member], launch: Launch
) -> subprocess.Popen[bytes]:
    births = [member.birth for member in members]
    theirs = [end for birth in births for end in (birth.commands, birth.answers)]
    with Path(births[0].log).open("ab") as log:
        nursery = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.nursery", *(each.to_json() for each in births)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=theirs,
            env=os.environ | column.environment,
            # Either way Ctrl-C is for the measuring process alone.
            preexec_fn=os.setpgrp if launch is Launch.TOGETHER else os.setsid,
        )
    for end in theirs:
        os.close(end)
    return nursery
