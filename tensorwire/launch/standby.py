"""Processes that have imported what workers import, and wait to become one: ``--warm N``.

Unlike a forked worker, each has begun as any program of Python's does, and has imported everything
for itself; it has not touched CUDA. The agent keeps as many as were asked for, and begins a new one
when one was taken, or died, one after the other and not while workers start, whom it would slow
down. One whose agent is gone ends.

The agent's end is :class:`Standbys`; ``python -m tensorwire.launch.standby`` is the other.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from tensorwire.launch.becoming import Order, become
from tensorwire.launch.template import NotReadyError, call, receive, send

_logger = logging.getLogger("rpcrun")

QUIET_SECONDS: Final = 5.0
"""Seconds after the latest start of a worker before another process is made ready."""
_READY: Final = "ready"
_MODULE: Final = "tensorwire.launch.standby"


@dataclass(slots=True)
class _Standby:
    """One process, the agent's end of its socket, and whether it has imported everything."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    is_ready: bool = False

    def end(self) -> None:
        self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Standbys:
    """The processes of one agent that wait to become workers.

    Args:
        count: how many.
        imports: modules that each imports.
        prepare: functions that each calls after that, as ``MODULE:NAME``.
    """

    def __init__(self, count: int, imports: Sequence[str], prepare: Sequence[str]) -> None:
        self._count = count
        self._words = (",".join(imports), ",".join(prepare))
        self._standbys: list[_Standby] = []

    @property
    def ready(self) -> int:
        """The number of processes that wait for an order."""
        return sum(each.is_ready for each in self._standbys)

    def tend(self, now: float, started_at: float) -> None:
        """Looks who is ready or gone, and begins another one if that slows nobody down.

        Args:
            now: the time.
            started_at: when a worker was last started.
        """
        for each in list(self._standbys):
            if each.process.poll() is not None:
                _logger.warning("a warm process (%d) has died", each.process.pid)
                self._standbys.remove(each)
                each.end()
            elif not each.is_ready and select.select([each.socket], [], [], 0)[0]:
                each.is_ready = receive(each.socket) == _READY
                _logger.info("a warm process (%d) is ready", each.process.pid)
        is_quiet = now - started_at >= QUIET_SECONDS
        if is_quiet and self.ready == len(self._standbys) < self._count:
            self._standbys.append(self._begin())

    def start(self, order: Order) -> subprocess.Popen[bytes]:
        """Has one that is ready become a worker.

        Raises:
            NotReadyError: there is none.
        """
        for each in [each for each in self._standbys if each.is_ready]:
            self._standbys.remove(each)
            try:
                send(each.socket, asdict(order))
            except OSError:
                each.end()
                continue
            each.socket.close()
            return each.process
        raise NotReadyError("there is no warm process")

    def close(self) -> None:
        """Ends those that wait."""
        while self._standbys:
            self._standbys.pop().end()

    def _begin(self) -> _Standby:
        ours, theirs = socket.socketpair()
        number = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", _MODULE, str(number), *self._words],
            pass_fds=[number],
            start_new_session=True,
        )
        theirs.close()
        return _Standby(process, ours)


def main(number: str, imports: str, prepare: str) -> None:
    """Imports, waits for an order, and becomes the worker; ends if the agent does.

    Args:
        number: of the descriptor of the socket.
        imports: modules, with commas between.
        prepare: functions, likewise.
    """
    agent = socket.socket(fileno=int(number))
    for module in filter(None, imports.split(",")):
        importlib.import_module(module)
    for function in filter(None, prepare.split(",")):
        call(function)
    gc.collect()
    gc.freeze()
    try:
        send(agent, _READY)
        fields = receive(agent)
    except OSError:
        fields = None
    if fields is None:
        os._exit(0)
    agent.close()
    become(Order(**{**fields, "program": tuple(fields["program"])}))


if __name__ == "__main__":
    main(*sys.argv[1:])
