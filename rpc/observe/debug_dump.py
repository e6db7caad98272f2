"""Tells people what a worker is doing, in words; on a signal, if they ask for that.

Owns the text and the way from a signal to it. The signal may come at any moment,
even while its thread holds a lock or waits inside torch, so nothing is done in
its handler: a thread of our own is told that a signal was received, and writes.
"""

from __future__ import annotations

import contextvars
import enum
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType
from typing import IO, Any, Protocol

from rpc.current import find_agent
from rpc.errors import RpcError
from rpc.runtime import prompt_signals
from rpc.runtime.threads import Thread, running_stacks
from rpc.worker_info import WorkerInfo


class _Request(enum.Enum):
    """Requests to the thread that writes."""

    DUMP = enum.auto()
    STOP = enum.auto()


class DumpedWorker(Protocol):
    """The worker that is described."""

    @property
    def info(self) -> WorkerInfo:
        """Its name and id."""

    def get_worker_infos(self) -> list[WorkerInfo]:
        """The workers that are not lost."""

    def debug_info(self) -> dict[str, Any]:
        """Its calls, requests and counts; see :func:`rpc.debug_info`."""

    def inventory(self) -> tuple[list[str], list[str]]:
        """Its values that others hold, and its references to others' values, in words."""

    def name_of(self, worker_id: int) -> str:
        """The name of a worker, also of one that is lost."""


def describe(agent: DumpedWorker) -> str:
    """Tells what a worker waits for, serves, keeps and runs: a line each, stacks of its threads."""
    sections: tuple[tuple[str, Callable[[DumpedWorker], list[str]]], ...] = (
        ("workers", _workers),
        ("calls that wait for their reply", _calls),
        ("calls that will be tried again", _paused),
        ("requests being served", _requests),
        ("values that others hold", lambda agent: agent.inventory()[0]),
        ("references to others' values", lambda agent: agent.inventory()[1]),
        ("counts", _counts),
    )
    lines = [f"=== {agent.info}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')} ==="]
    for title, tell in sections:
        try:
            facts = tell(agent)
        except Exception as error:  # a dump of something broken should say what it can
            facts = [f"cannot tell: {error!r}"]
        lines.append(f"{title}: {len(facts) or 'none'}")
        lines += (f"    {line}" for line in facts)
    return "\n".join([*lines, *_threads(agent)]) + "\n"


def install_debug_signal(
    signal_number: int | None = None, file: IO[str] | None = None
) -> DebugSignal:
    """Makes this process tell, at each signal from now on, what its worker is doing.

    For programs that hang: ``kill -USR1 <pid>`` prints every outstanding call with
    its age and destination, the requests being served, references and their
    holders, and the stacks of all threads. The program goes on. It also works
    while the main thread waits inside torch.

    Call it in the main thread; before or after ``init_rpc``. It stays until the
    returned object is closed or the process ends.

    Args:
        signal_number: default ``signal.SIGUSR1``; its previous handler is replaced.
        file: where to write; default the standard error stream.

    Raises:
        TypeError: ``signal_number`` is no whole number.
        ValueError: this is not the main thread, there is no such signal, or the system
            lets no program handle it.
        RpcError: this system has no ``SIGUSR1``.

    Example::

        rpc.install_debug_signal()
    """
    if signal_number is None:
        signal_number = getattr(signal, "SIGUSR1", None)
        if signal_number is None:
            raise RpcError("this system has no SIGUSR1; choose another signal_number")
    if not isinstance(signal_number, int):
        kind = type(signal_number).__name__
        raise TypeError(f"signal_number={signal_number!r} is a {kind}, not a whole number")
    return DebugSignal(signal_number, file)


class DebugSignal:
    """A signal that makes this process tell what it does; see :func:`install_debug_signal`.

    The thread that hears of signals hears of this one at once, whatever the main thread does. Where
    an asyncio loop in the main thread hears of them instead, the handler asks for the dump, as soon
    as the main thread is back in Python.
    """

    def __init__(self, signal_number: int, file: IO[str] | None) -> None:
        self._number = signal_number
        self._file = file
        self._context = contextvars.copy_context()
        self._asked: SimpleQueue[_Request] = SimpleQueue()  # its put may be called in a handler
        self._thread = Thread(target=self._serve, name="rpc-debug-signal", daemon=True)
        try:
            self._handler_before: Any = signal.signal(signal_number, self._received)
        except OSError as error:
            raise ValueError(f"signal {signal_number} cannot be handled: {error}") from error
        self._stop_listening = prompt_signals.listen(signal_number, self._ask)
        self._thread.start()

    def close(self) -> None:
        """Restores what the signal did before; call it in the main thread."""
        signal.signal(self._number, self._handler_before)
        self._stop_listening()
        self._asked.put(_Request.STOP)
        self._thread.join()

    def __enter__(self) -> DebugSignal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ask(self) -> None:
        self._asked.put(_Request.DUMP)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if not prompt_signals.is_heard():
            self._ask()

    def _serve(self) -> None:
        while self._asked.get() is _Request.DUMP:
            agent = self._context.copy().run(find_agent)
            text = describe(agent) if agent is not None else _without_agent()
            file = self._file or sys.stderr
            file.write(text)
            file.flush()


# --- Sections


def _name(agent: DumpedWorker, worker: int) -> str:
    return agent.name_of(worker)


def _workers(agent: DumpedWorker) -> list[str]:
    return [str(worker) for worker in agent.get_worker_infos()]


def _calls(agent: DumpedWorker) -> list[str]:
    return [
        f"{row['age']:9.3f} s  {row['call']} -> {_name(agent, row['to'])}"
        for row in agent.debug_info()["calls"]
    ]


def _paused(agent: DumpedWorker) -> list[str]:
    return [
        f"in {row['again_in']:6.3f} s  {row['call']} -> {row['to']}, after {row['after']}"
        for row in agent.debug_info()["retrying"]
    ]


def _requests(agent: DumpedWorker) -> list[str]:
    return [
        f"{row['age']:9.3f} s  {row['call']} <- {_name(agent, row['from'])} ({row['operation']})"
        for row in agent.debug_info()["serving"]
    ]


def _counts(agent: DumpedWorker) -> list[str]:
    counts = agent.debug_info().items()
    return [f"{name}: {value}" for name, value in counts if isinstance(value, int | str)]


# --- Threads


def _without_agent() -> str:
    lines = [f"=== process {os.getpid()}: RPC is not initialized ===", *_threads(None)]
    return "\n".join(lines) + "\n"


def _threads(agent: DumpedWorker | None) -> Iterator[str]:
    """The stacks of all threads, the worker's first; those that wait for work only counted."""
    stacks = running_stacks()
    prefix = f"rpc-{agent.info.name}" if agent is not None else "rpc-"
    known = sorted(threading.enumerate(), key=lambda t: (not t.name.startswith(prefix), t.name))
    idle: dict[str, int] = {}
    for thread in known:
        stack = stacks.get(thread.ident or 0)
        if stack is None or thread is threading.current_thread():
            continue
        if any(at.function == "_take" and at.file.endswith("executor.py") for at in stack):
            idle[thread.name] = idle.get(thread.name, 0) + 1
            continue
        yield f"thread {thread.name} [{thread.native_id}]:"
        entries = [(at.file, at.line, at.function, None) for at in reversed(stack)]
        lines = traceback.StackSummary.from_list(entries).format()
        yield from "".join(lines).rstrip().split("\n")
    for name, count in idle.items():
        yield f"threads {name}: {count} without work"
