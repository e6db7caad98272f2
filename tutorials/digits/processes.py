"""Runs the job's processes on this machine and answers for them: none outlives another.

This process loads what they all need, once, and forks them. So they start sooner, and before
they meet, as a torch that looks out for messages leaves little time to load more. And their
code lies at the same addresses, so that on shared cores they do not mislead each other's
branch prediction. Eight epochs of the main job took 16 s on two cores when each process
was started by itself, and take 10 s.

Two rules see to it that none is left over, also when this process is killed outright:

* each child holds one end of a pipe and ends when this process no longer holds the
  other, whatever closed it;
* when one child fails, the others get a moment to say so themselves and are
  then ended; which one failed first, or was killed, is printed last, when all have
  spoken.

Children get their own session, so that Ctrl-C reaches only this process, which
then ends them in order instead of leaving each to die in the middle of something.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType

_SECONDS_FOR_OTHERS_TO_SPEAK = 3.0
_SECONDS_TO_END = 3.0
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
_collecting = threading.Lock()


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that is no more; ``status`` is its exit status, or minus the signal."""

    name: str
    status: int

    def __str__(self) -> str:
        if self.status < 0:
            return f"{self.name} was killed by {signal.Signals(-self.status).name}"
        return f"{self.name} ended with status {self.status}"


def load_for_all(*modules: str) -> None:
    """Import what children will use. Ctrl-C ends this process meanwhile."""
    before = [signal.signal(number, _leave) for number in _INTERRUPTS]
    for module in modules:
        importlib.import_module(module)
    for number, handler in zip(_INTERRUPTS, before, strict=True):
        signal.signal(number, handler)


def run_together(children: Mapping[str, Callable[[], int]]) -> int:
    """Run one child per name until all have ended, or one has failed.

    Args:
        children: by name, what each does; it returns its exit status.

    Returns:
        The exit status for this process: 0, or 1 when a child failed, or 130 after Ctrl-C.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    running: dict[str, ForkProcess] = {}
    ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
    leash, held = os.pipe()
    try:
        with _interrupts_kept_for_later():  # a child has to be in its own session first
            for name, child in children.items():
                running[name] = _start(name, child, leash, held)
        for name, process in running.items():
            threading.Thread(target=_wait, args=(name, process, ended), daemon=True).start()
        failed = _watch(set(running), ended)
    except KeyboardInterrupt:
        print("\ninterrupted: ending all processes", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        os.close(held)
        os.close(leash)
        _end_all(list(running.values()))
    if failed is None:
        return 0
    print(f"the job has failed: {failed}", file=sys.stderr, flush=True)
    return 1


@contextmanager
def _interrupts_kept_for_later() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    # Nothing is under way; and an import would turn an exception into one of its own.
    print("\ninterrupted", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _start(name: str, child: Callable[[], int], leash: int, held: int) -> ForkProcess:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_live, args=(name, child, leash, held), name=name)
    process.start()
    return process


def _live(name: str, child: Callable[[], int], leash: int, held: int) -> None:
    """In the child."""
    os.setsid()
    os.close(held)
    for number in _INTERRUPTS:  # they end this process on the spot, even inside native code
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
    with contextlib.suppress(OSError):  # what ps, top and pkill call it, on Linux
        Path("/proc/self/comm").write_text(name)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    threading.Thread(target=_exit_with_parent, args=(leash,), name="leash", daemon=True).start()
    sys.exit(child())


def _exit_with_parent(leash: int) -> None:
    os.read(leash, 1)  # nobody writes, so that it returns when all other ends are closed
    os._exit(1)


def _wait(name: str, process: ForkProcess, ended: queue.SimpleQueue[Ended]) -> None:
    wait([process.sentinel])
    ended.put(Ended(name, _status(process)))


def _status(process: ForkProcess) -> int:
    """The exit status of a process that has ended, or is about to."""
    with _collecting:  # of two threads that join a process one learns nothing
        process.join()
        status = process.exitcode
    assert status is not None
    return status


def _watch(running: set[str], ended: queue.SimpleQueue[Ended]) -> Ended | None:
    while running:
        child = ended.get()
        running.discard(child.name)
        if child.status != 0:
            print(f"{child}; ending the others", file=sys.stderr, flush=True)
            others = _let_others_speak(running, ended)
            # Whoever lost a killed child may have ended before the system had done away with it.
            return next((each for each in (child, *others) if each.status < 0), child)
    return None


def _let_others_speak(running: set[str], ended: queue.SimpleQueue[Ended]) -> list[Ended]:
    others: list[Ended] = []
    deadline = time.monotonic() + _SECONDS_FOR_OTHERS_TO_SPEAK
    while running:
        try:
            other = ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        running.discard(other.name)
        others.append(other)
    return others


def _end_all(children: Sequence[ForkProcess]) -> None:
    for child in children:
        if not wait([child.sentinel], _SECONDS_TO_END):
            child.kill()
        _status(child)
