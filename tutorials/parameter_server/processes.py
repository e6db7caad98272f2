"""Runs the job's processes on this machine and answers for them: none outlives another.

Two rules make that hold in every case, also when this process is killed outright:

* each child's standard input is a pipe from here, and a child ends when it
  closes, whatever closed it (see ``end_with_parent``);
* when one child fails, the others get a moment to say so themselves and are
  then ended; which one failed first, or was killed, is printed last, when all have
  spoken.

Children get their own session, so that Ctrl-C reaches only this process, which
then ends them in order instead of leaving each to die in the middle of something.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

_SECONDS_FOR_OTHERS_TO_SPEAK = 3.0
_SECONDS_TO_END = 3.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that is no more; ``status`` is its exit status, or minus the signal."""

    name: str
    status: int

    def __str__(self) -> str:
        if self.status < 0:
            return f"{self.name} was killed by {signal.Signals(-self.status).name}"
        return f"{self.name} ended with status {self.status}"


def run_together(commands: Mapping[str, Sequence[str]]) -> int:
    """Run one child per name until all have ended, or one has failed.

    Returns:
        The exit status for this process: 0, or 1 when a child failed, or 130 after Ctrl-C.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    children: dict[str, subprocess.Popen[bytes]] = {}
    ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
    try:
        for name, command in commands.items():
            children[name] = _start(name, command, ended)
        failed = _watch(set(children), ended)
    except KeyboardInterrupt:
        print("\ninterrupted: ending all processes", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        _end_all(list(children.values()))
    if failed is None:
        return 0
    print(f"the job has failed: {failed}", file=sys.stderr, flush=True)
    return 1


def end_with_parent() -> None:
    """Called in a child: end this process at once when the parent is gone."""
    threading.Thread(target=_exit_at_end_of_input, name="parent-watch", daemon=True).start()


def _exit_at_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _start(
    name: str, command: Sequence[str], ended: queue.SimpleQueue[Ended]
) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    threading.Thread(target=lambda: ended.put(Ended(name, child.wait())), daemon=True).start()
    return child


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


def _end_all(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.stdin is not None:
            child.stdin.close()
    for child in children:
        try:
            child.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
