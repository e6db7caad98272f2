"""The records that a worker makes of traced calls, and their bytes.

Plain data: times are seconds on the clock of the worker that wrote them; 0 means
that it did not happen. ``tracing`` decides who records, and ``trace_view`` what
becomes of the records.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")


class CallKind(str, Enum):
    """The way a call was made."""

    SYNC = "sync"
    ASYNC = "async"
    REMOTE = "remote"
    TO_HERE = "to_here"
    MESSAGE = "message"
    """An extension's own, e.g. gradients of a distributed backward pass."""


@dataclass(slots=True)
class CallRecord:
    """One call, at its caller.

    Args:
        span: the same number as in the :class:`HandlerRecord`; unique in the trace.
        kind: how it was made.
        name: of the function.
        to: id of the worker asked.
        thread: native id of the calling thread.
        begun: it was made.
        sent: its arguments are encoded; it leaves.
        replied: the reply arrived, or it is known that none will.
        ended: the result is decoded.
        failed: it raised.
    """

    span: int
    kind: CallKind
    name: str
    to: int
    thread: int
    begun: float
    sent: float = 0.0
    replied: float = 0.0
    ended: float = 0.0
    failed: bool = False


@dataclass(slots=True)
class HandlerRecord:
    """One call, at its callee.

    Args:
        span: see :class:`CallRecord`.
        name: of the function.
        sender: id of the worker that asked.
        thread: native id of the thread that ran it.
        arrived: the request came; it is queued.
        started: a thread took it on, and decodes it.
        running: the function began.
        returned: the function gave its thread back.
        ran: the function's result is there, which for asynchronous ones is later.
        encoded: the result is encoded.
        replied: the reply was handed to the transport.
        failed: it raised.
    """

    span: int
    name: str
    sender: int
    thread: int
    started: float
    arrived: float = 0.0
    running: float = 0.0
    returned: float = 0.0
    ran: float = 0.0
    encoded: float = 0.0
    replied: float = 0.0
    failed: bool = False

    @property
    def left(self) -> float:
        """The time when the reply was ready to be sent; later, a peer may have it already."""
        return self.replied if self.failed else self.encoded or self.ran or self.replied


@dataclass(slots=True)
class OperatorRecord:
    """One torch operator; ``device`` is empty on the CPU, and there ``thread`` its thread."""

    name: str
    thread: int
    began: float
    ended: float
    device: str = ""


@dataclass(slots=True)
class WorkerTrace:
    """Everything that one worker recorded.

    Args:
        worker: its id.
        name: its name.
        process: the same for workers in one process, which share threads and clock.
        threads: names of its threads by native id.
        dropped: records that were too many.
    """

    worker: int
    name: str
    process: str
    calls: list[CallRecord] = field(default_factory=list)
    handlers: list[HandlerRecord] = field(default_factory=list)
    operators: list[OperatorRecord] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)
    dropped: int = 0


def to_json(trace: WorkerTrace) -> bytes:
    """Packs a worker's records."""
    head = {
        "worker": trace.worker,
        "name": trace.name,
        "process": trace.process,
        "threads": trace.threads,
        "dropped": trace.dropped,
    }
    rows = {name: [_row(r) for r in getattr(trace, name)] for name in _LISTS}
    return json.dumps({**head, **rows}, separators=(",", ":")).encode()


def from_json(data: bytes) -> WorkerTrace:
    """Unpacks what :func:`to_json` packed."""
    fields = json.loads(data)
    lists = {name: _records(kind, fields[name]) for name, kind in _LISTS.items()}
    for call in lists["calls"]:
        call.kind = CallKind(call.kind)
    threads = {int(thread): name for thread, name in fields["threads"].items()}
    return WorkerTrace(
        fields["worker"], fields["name"], fields["process"],
        lists["calls"], lists["handlers"], lists["operators"], threads, fields["dropped"],
    )  # fmt: skip


_LISTS: dict[str, type[Any]] = {
    "calls": CallRecord,
    "handlers": HandlerRecord,
    "operators": OperatorRecord,
}


def _row(record: Any) -> list[Any]:
    return [getattr(record, name) for name in record.__slots__]


def _records(kind: type[T], rows: Sequence[Sequence[Any]]) -> list[T]:
    return [kind(*row) for row in rows]
