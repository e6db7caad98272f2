"""Answers questions of a launcher about this worker, over a Unix socket.

The environment variable ``RPC_WATCH`` names the socket of whoever may ask. Without it there is no
reporter; with it one thread waits for questions, and nothing is gathered before one comes. Each
question and each answer is one line of JSON. Questions: ``facts``, ``stacks``, ``trace``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import heapq
import json
import operator
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Final, Protocol

from rpc.observe.debug_dump import DumpedWorker, describe
from rpc.observe.metrics import CallMetrics, Histogram, Snapshot
from rpc.observe.progress import Progress
from rpc.observe.sampling import sample
from rpc.runtime.threads import Thread, running_stacks

WATCH: Final = "RPC_WATCH"
"""Environment variable: path of the Unix socket at which a launcher listens."""

_LONGEST_LINE: Final = 1 << 16
_MOST_CALLS: Final = 50
_MOST_PEERS: Final = 50
"""Of each worker; a job of a thousand that all call each other would be told as a million rows."""
_DEEPEST: Final = 40
_LONGEST_TRACE: Final = 60.0


class ReportedWorker(DumpedWorker, Protocol):
    """The worker of which a reporter tells."""

    def metrics(self) -> Snapshot:
        """Counts of its calls."""


class Collections:
    """Notices how long the garbage collection that runs now has been running."""

    def __init__(self) -> None:
        self._since = 0.0
        gc.callbacks.append(self._heard)

    def _heard(self, phase: str, info: dict[str, int]) -> None:
        self._since = time.monotonic() if phase == "start" else 0.0

    def seconds(self) -> float:
        """Seconds since it began; 0 if none runs."""
        since = self._since
        return time.monotonic() - since if since else 0.0

    def close(self) -> None:
        """Notices no more."""
        gc.callbacks.remove(self._heard)


class Reporter:
    """Tells what one worker counts, does and waits for, to whom it connects.

    Args:
        path: of the Unix socket that asks.
        worker: the worker.
        progress: of the worker.
        run: calls a function with the worker as the current one.
    """

    def __init__(
        self,
        path: str,
        worker: ReportedWorker,
        progress: Progress,
        run: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._worker, self._progress, self._run = worker, progress, run
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(2.0)
        self._collections = Collections()
        self._closing = threading.Event()
        try:
            self._socket.connect(path)
            self._send({"name": worker.info.name, "pid": os.getpid()})
        except BaseException:
            self._let_go()
            raise
        self._socket.settimeout(None)
        self._thread = Thread(target=self._serve, name="rpc-reporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hangs up, and waits for the thread."""
        self._closing.set()
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._let_go()

    def _let_go(self) -> None:
        self._socket.close()
        self._collections.close()

    def _serve(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                while line := lines.readline(_LONGEST_LINE):
                    self._send(self._answer(json.loads(line)))
        except (OSError, ValueError):
            return  # whoever asked is gone, or no launcher of ours

    def _send(self, answer: dict[str, object]) -> None:
        self._socket.sendall(json.dumps(answer, default=str).encode() + b"\n")

    def _answer(self, question: dict[str, Any]) -> dict[str, object]:
        """The answer to one question; says why, if there is none."""
        answer: dict[str, object] = {"number": question.get("number")}
        try:
            answer["answer"] = self._told(question)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        return answer

    def _told(self, question: dict[str, Any]) -> object:
        what = question.get("ask")
        if what == "facts":
            return self._run(self._facts)
        if what == "stacks":
            return self._run(lambda: describe(self._worker))
        if what == "trace":
            return sample(self._closing, min(float(question.get("seconds", 5.0)), _LONGEST_TRACE))
        raise ValueError(f"ask={what!r} must be facts, stacks or trace")

    def _facts(self) -> dict[str, object]:
        counted, doing = self._worker.metrics(), self._worker.debug_info()
        name_of = self._worker.name_of
        return {
            "progress": asdict(self._progress.report()),
            "made": by_peer(counted.made),
            "served": by_peer(counted.served),
            "waiting": [
                {"to": name_of(row["to"]), "call": row["call"], "age": row["age"]}
                for row in _oldest(doing["calls"])
            ],
            "serving": [
                {"from": name_of(row["from"]), "call": row["call"], "age": row["age"]}
                for row in _oldest(doing["serving"])
            ],
            "expected": [str(each) for each in doing["waiting_for"]],
            "collecting": self._collections.seconds(),
            "threads": _threads(),
            "sources": self._progress.facts(),
        }


def _threads() -> list[dict[str, object]]:
    """The innermost functions of each thread but this one, innermost first; the main one's too."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        {
            "name": names.get(ident, "?"),
            "stack": [f"{at.function} ({at.file}:{at.line})" for at in stack[:_DEEPEST]],
        }
        for ident, stack in running_stacks().items()
        if ident != threading.get_ident()
    ]


def _oldest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: -row["age"])[:_MOST_CALLS]


def by_peer(rows: Iterable[CallMetrics]) -> list[dict[str, Any]]:
    """The calls with each other worker, of all functions together; the many with few as one."""
    totals: dict[str, CallMetrics] = {}
    for row in rows:
        known = totals.get(row.peer)
        totals[row.peer] = row if known is None else known + row
    return [
        {
            "peer": peer,
            "calls": total.calls,
            "in_flight": total.in_flight,
            "errors": sum(total.errors.values()),
            "bytes_out": total.bytes_out,
            "bytes_in": total.bytes_in,
            "seconds": total.latency.sum,
            "buckets": list(total.latency.counts),
        }
        for peer, total in sorted(_busiest(totals).items())
    ]


def _busiest(totals: dict[str, CallMetrics]) -> dict[str, CallMetrics]:
    if len(totals) <= _MOST_PEERS:
        return totals
    busiest = dict(heapq.nlargest(_MOST_PEERS, totals.items(), key=lambda each: each[1].calls))
    others = [total for peer, total in totals.items() if peer not in busiest]
    return {**busiest, f"{len(others)} others": functools.reduce(operator.add, others)}


def quantile(buckets: Iterable[int], fraction: float) -> float:
    """An estimate of a quantile of latencies, in seconds; NaN without calls.

    Args:
        buckets: calls per bucket of latency, as a reporter tells them.
        fraction: 0.5 for the median, 0.99 for the 99th percentile.

    Raises:
        ValueError: ``fraction`` is not from 0 to 1.
    """
    return Histogram(tuple(buckets), 0.0).quantile(fraction)
