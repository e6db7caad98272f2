"""The processes of one agent: starting one, asking it to end, ending it, and how it ended.

Torch's ``start_processes`` starts each. The orphan watch, a process of its own, ends them if this
agent is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.elastic.multiprocessing import (
    PContext,
    ProcessFailure,
    SubprocessContext,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.run import run_script_path

from rpc.extend import ENDING_FILE
from tensorwire.launch import orphan_watch
from tensorwire.launch.becoming import Order
from tensorwire.launch.logs import WorkerLogs
from tensorwire.launch.plan import Seat
from tensorwire.launch.supervisor import Ended, before_the_kill
from tensorwire.launch.template import ForkedProcess, NotReadyError, TemplateLostError

_logger = logging.getLogger("rpcrun")
_NOT_STARTED = 127
_LONGEST_STORY = 16_000
_SECONDS_TO_TELL = 5.0
_SECONDS_BETWEEN_POLLS = 0.02
_NOTHING = "<NONE>"
"""The message that torch has of a process that left no error file."""


class OrphanWatch:
    """Ends this agent's processes if it is killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", orphan_watch.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        self._is_open = True
        os.register_at_fork(after_in_child=self._let_go)

    def tell(self, line: str) -> None:
        """Says one line, as the orphan watch's docstring has them."""
        stdin = self._process.stdin
        if not self._is_open or stdin is None:
            return
        try:
            stdin.write(f"{line}\n")
            stdin.flush()
        except BrokenPipeError:
            self._is_open = False
            _logger.error("the orphan watch is gone: if this agent is killed, its workers are not")

    def _let_go(self) -> None:
        """Closes its pipe in a forked worker, which would keep it from seeing this agent's end."""
        stdin = self._process.stdin
        if self._is_open and stdin is not None:
            self._is_open = False
            os.close(stdin.fileno())

    def dismiss(self) -> None:
        """Ends it, as all is well: nothing is left to guard."""
        self.tell("well")
        self._is_open = False
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class Program:
    """The program that a worker runs.

    Args:
        entrypoint: a command, or a function.
        arguments: of it.
        start_method: how processes of functions begin: spawn, fork or forkserver.
        numa_options: torch's, or None.
        source: what has a process for it that imported much; None if a command starts it.
    """

    entrypoint: Callable[..., Any] | str
    arguments: tuple[Any, ...]
    start_method: str = "spawn"
    numa_options: Any = None
    source: Source | None = None

    @property
    def of_python(self) -> tuple[str, ...] | None:
        """The program as after ``python -u``; None if it is not for this Python."""
        arguments = tuple(map(str, self.arguments))
        if self.entrypoint is run_script_path:
            return arguments
        if self.entrypoint is _run_module:
            return ("-m", *arguments)
        is_ours = self.entrypoint == sys.executable and arguments[:1] == ("-u",)
        return arguments[1:] if is_ours else None


def module_program(
    module: str, job: Callable[..., Any] | str
) -> tuple[Callable[..., Any] | str, tuple[str, ...]]:
    """The program that runs a module, and its first arguments.

    Args:
        module: its name.
        job: the program of the job's other roles: a service begins as they do.
    """
    if isinstance(job, str):
        return sys.executable, ("-u", "-m", module)
    return _run_module, (module,)


def _run_module(module: str, *arguments: str) -> None:
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class _Function:
    """A worker's function, which a forked process begins without its agent's signal handlers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__qualname__ = getattr(function, "__qualname__", repr(function))  # torch's log asks

    def __call__(self, *arguments: Any) -> Any:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return self._function(*arguments)


class Source(Protocol):
    """A source of processes that have imported what workers import."""

    def start(self, order: Order) -> ForkedProcess | subprocess.Popen[bytes]:
        """Returns the process, which becomes that worker.

        Raises:
            NotReadyError: there is none.
        """


class _Handler:
    """Torch's handler of a process."""

    def __init__(self, process: ForkedProcess | subprocess.Popen[bytes]) -> None:
        self.proc = process

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Ends it, and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


class _ReadyContext(SubprocessContext):
    """Torch's context of a command, but that its process was there before."""

    def __init__(self, source: Source, name: str, program: tuple[str, ...], **given: Any) -> None:
        self._source, self._program = source, program
        super().__init__(name=name, entrypoint=sys.executable, args={0: program}, **given)

    def _start(self) -> None:
        environment = {**os.environ, **self.envs[0]}
        files = self.stdouts[0] or None, self.stderrs[0] or None
        process = self._source.start(Order(environment, self._program, *files))
        handlers: dict[int, Any] = {0: _Handler(process)}
        self.subprocess_handlers = handlers


class WorkerProcess:
    """The process of one life of a seat's worker.

    Args:
        seat: whose.
        program: what it runs.
        variables: its environment, beyond this agent's.
        logs: where it writes.
        prefix: of its lines on the terminal.
        ending_note: the file that is there once it begins to end by itself.

    Attributes:
        tails: what else reads its output.
    """

    def __init__(
        self,
        seat: Seat,
        program: Program,
        variables: dict[str, str],
        logs: Any,
        prefix: str,
        ending_note: str,
    ) -> None:
        self.seat = seat
        self.value: Any = None
        self.tails: list[TailLog] = []
        self._asked_by: int | None = None
        self._exit_code: int | None = None
        self._gone_since: float | None = None
        self._ending_note = Path(ending_note)
        variables = variables | {ENDING_FILE: ending_note}
        given = {"envs": {0: variables}, "logs_specs": logs, "log_line_prefixes": {0: prefix}}
        self._context = _ready(seat, program, given) or _started(seat, program, given)
        self.id: int = self._context.pids()[0]
        self.folder: str = logs.root_log_dir

    def poll(self) -> tuple[Ended, ProcessFailure | None] | None:
        """Returns how it ended; None while it runs."""
        if has_ended := self._has_ended():
            _drop_torn(Path(self._context.error_files[0]))
        try:
            result = self._context.wait(0)
        except Exception:  # at what it was killed while it wrote; torch now forgets that it ended
            return self._untold("it was killed as it wrote its error")
        if result is None:
            return self._untold("") if has_ended and self._is_long_gone() else None
        self._clean_up()
        if not result.is_failed():
            self.value = result.return_values.get(0)
            return Ended(self.seat.id, 0, self.id), None
        failure = result.failures[0]
        return ended_badly(self.seat, self.id, failure, self._asked_by), failure

    def _untold(self, said: str) -> tuple[Ended, ProcessFailure | None]:
        """The report on a process of whose end torch does not tell."""
        self._clean_up()
        code = 1 if self._exit_code is None else self._exit_code
        return Ended(self.seat.id, code, self.id, said, _is_as_asked(code, self._asked_by)), None

    def _is_long_gone(self) -> bool:
        """True if torch had the time to tell of its end, and did not.

        It never does if the program left by ``os._exit``. A fork server tells it a little later.
        """
        if self._exit_code is not None:
            return True
        now = time.monotonic()
        self._gone_since = now if self._gone_since is None else self._gone_since
        return now - self._gone_since > _SECONDS_TO_TELL

    def _has_ended(self) -> bool:
        try:
            state = os.waitid(os.P_PID, self.id, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # somebody else's child, as a fork server's, or torch asked
            return not Path(f"/proc/{self.id}").exists()
        if state is not None:
            is_exit = state.si_code == os.CLD_EXITED
            self._exit_code = state.si_status if is_exit else -state.si_status
        return state is not None

    def _clean_up(self) -> None:
        """Ends what the process left running of what it had started, and who reads its output."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.id, signal.SIGKILL)
        self._ending_note.unlink(missing_ok=True)
        for tail in self.tails:
            tail.stop()

    def send(self, number: int) -> None:
        """Sends it a signal, and whatever it started."""
        orphan_watch.send(self.id, number)

    @property
    def is_ending(self) -> bool:
        """True if its program is over, or has failed and said so, and what is left is to end."""
        error = Path(self._context.error_files[0])
        return error.is_file() or self._ending_note.is_file()

    def ask_to_end(self, number: int, again: float = 0.0) -> None:
        """Sends it the signal by which it is to end, unless it has ended by itself.

        Args:
            number: of the signal.
            again: seconds since that was done for the first time, if this is not that.
        """
        if self._has_ended():
            return
        if again:
            _logger.warning(
                "%s did not end within %g s; it is sent %s once more, and is then killed",
                self.seat.name,
                again,
                signal.Signals(number).name,
            )
        self._asked_by = number
        self.send(number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGKILL)


def _ready(seat: Seat, program: Program, given: dict[str, Any]) -> PContext | None:
    """Has a process that is there become the worker; None if it cannot."""
    of_python = program.of_python
    if program.source is None or of_python is None or program.numa_options is not None:
        return None
    context = _ReadyContext(program.source, seat.role, of_python, **given)
    try:
        context.start()
    except NotReadyError as error:
        level = logging.WARNING if isinstance(error, TemplateLostError) else logging.DEBUG
        _logger.log(level, "%s is started by a command, as %s", seat.name, error)
        return None
    return context


def _started(seat: Seat, program: Program, given: dict[str, Any]) -> PContext:
    entrypoint = program.entrypoint
    return start_processes(
        name=seat.role,
        entrypoint=entrypoint if isinstance(entrypoint, str) else _Function(entrypoint),
        args={0: program.arguments},
        start_method=program.start_method,
        numa_options=program.numa_options,
        **given,
    )


def _drop_torn(path: Path) -> None:
    """Removes an error file whose writer was killed before it was whole.

    Torch raises at such a file when it tells how the process ended, and forgets that it did.
    """
    if not path.is_file():
        return
    try:
        message = json.loads(path.read_text())["message"]
        is_whole = isinstance(message, str) or "timestamp" in message["extraInfo"]
    except (KeyError, TypeError, ValueError):
        is_whole = False
    if not is_whole:
        path.unlink()


def story(failure: ProcessFailure) -> str:
    """The traceback that a process left, or what is known instead."""
    data = failure.error_file_data
    message = data.get("message") if isinstance(data, dict) else None
    if isinstance(message, dict):
        told = message.get("extraInfo", {}).get("py_callstack") or message.get("message")
        return str(told)[-_LONGEST_STORY:]
    return "" if message == _NOTHING else str(message or "")[-_LONGEST_STORY:]


def ended_badly(seat: Seat, process: int, failure: ProcessFailure, asked_by: int | None) -> Ended:
    """The report on a process that did not end well.

    Args:
        seat: whose it was.
        process: its id.
        failure: torch's report.
        asked_by: the signal by which the agent had asked it to end, if it had.
    """
    code = failure.exitcode
    return Ended(seat.id, code, process, story(failure), _is_as_asked(code, asked_by))


def end_all(
    processes: Mapping[int, WorkerProcess],
    number: int,
    grace: float,
    note: Callable[[int, tuple[Ended, ProcessFailure | None]], object],
) -> None:
    """Ends processes, and waits for that: asks, asks once more, kills.

    Args:
        processes: by seat.
        number: the signal that asks.
        grace: seconds from asking to killing.
        note: takes the end of one, and removes it from ``processes``.
    """
    for process in processes.values():
        process.ask_to_end(number)
    kill_at = time.monotonic() + grace
    repeat_at: float | None = kill_at - before_the_kill(grace)
    while processes:
        now = time.monotonic()
        if repeat_at is not None and now >= repeat_at:
            for process in processes.values():
                process.ask_to_end(number, grace - before_the_kill(grace))
            repeat_at = None
        if now > kill_at:
            for process in processes.values():
                process.kill()
        for seat, process in list(processes.items()):
            result = process.poll()
            if result is not None:
                note(seat, result)
        time.sleep(_SECONDS_BETWEEN_POLLS)


def _is_as_asked(exit_code: int, asked_by: int | None) -> bool:
    """True if a process ended by the very signal by which it was asked to end."""
    return asked_by is not None and exit_code == -asked_by


def not_started(seat: Seat, error: Exception) -> Ended:
    """The report on a process that could not be started."""
    said = f"it could not be started: {type(error).__name__}: {error}"
    return Ended(seat.id, _NOT_STARTED, 0, said)


def by_cause(ended: Iterable[tuple[Ended, ProcessFailure | None]]) -> list[Ended]:
    """Puts those first that may have made the others fail, among what was seen at once.

    A process that a signal ended has no story, and its peers' errors come after it, unless the
    agent had asked it to end; of those that left an error file, the older counts.
    """

    def when(each: tuple[Ended, ProcessFailure | None]) -> tuple[int, float]:
        end, failure = each
        if end.exit_code < 0:
            return (2 if end.stopped else 0), 0.0
        path = Path(failure.error_file) if failure is not None else None
        return 1, path.stat().st_mtime if path is not None and path.is_file() else 0.0

    return [end for end, _ in sorted(ended, key=when)]


__all__ = [
    "OrphanWatch",
    "Program",
    "WorkerLogs",
    "WorkerProcess",
    "by_cause",
    "end_all",
    "ended_badly",
    "module_program",
    "not_started",
    "story",
]
