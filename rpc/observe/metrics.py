"""Counts what calls do, always; ``rpc.metrics()`` shows it.

Owns the counters and what they look like when read. A :class:`Series` holds the
counters of one method and one peer; the tables of ``caller`` and ``callee``
update them under the lock they hold anyway, once per call, when it ends. What
is in flight is not counted but looked up in those tables when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Final

import torch

from rpc.observe.names import MethodName, text_of

BUCKET_BOUNDS: Final = tuple(1e-5 * 2**k for k in range(24))
"""Upper bounds of the histograms' buckets in seconds, 10 µs to 84 s; one more is without."""

MAX_SERIES: Final = 2048
"""Methods × peers told apart on each side; what comes later is counted together."""

OVERFLOW_METHOD: Final = "(other)"


class ErrorKind(Enum):
    """The kinds of reasons why calls fail."""

    REMOTE = "remote"
    """The function raised, or its request or result could not be decoded or encoded."""
    TIMEOUT = "timeout"
    LOST = "lost"
    """The worker died, left or was cut off."""
    OTHER = "other"
    """The request could not be sent, or this worker shut down."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """The durations of calls, counted in buckets.

    Args:
        counts: calls per bucket of :data:`BUCKET_BOUNDS`, and those beyond the last.
        sum: of all durations, in seconds.
    """

    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Calls measured."""
        return sum(self.counts)

    def quantile(self, fraction: float) -> float:
        """An estimate in seconds, exact to a factor of two; NaN without calls.

        Args:
            fraction: 0.5 for the median, 0.99 for the 99th percentile.

        Raises:
            ValueError: ``fraction`` is not from 0 to 1.
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction={fraction!r} must be from 0 to 1: 0.99, not 99")
        rank = fraction * self.count
        below = 0
        for index, count in enumerate(self.counts):
            if count and below + count >= rank:
                low, high = _bounds(index)
                return low + (high - low) * (rank - below) / count
            below += count
        return float("nan")


@dataclass(frozen=True, slots=True)
class CallMetrics:
    """The calls of one method between this worker and one peer.

    ``calls`` is always ``in_flight + latency.count``, and errors are among the
    latter.

    Args:
        method: name of the function; ``RRef.name`` for a method called through an RRef.
        peer: name of the other worker.
        calls: begun so far.
        in_flight: of these, not over yet.
        errors: failed ones by kind.
        latency: seconds from sending a request to its reply; where requests are
            served, from a request's arrival until its reply was handed over.
        bytes_out: sent, of requests (or of replies, where served): headers, payloads
            and tensors.
        bytes_in: received, likewise.
    """

    method: str
    peer: str
    calls: int
    in_flight: int
    errors: dict[ErrorKind, int]
    latency: Histogram
    bytes_out: int
    bytes_in: int

    def __add__(self, other: CallMetrics) -> CallMetrics:
        """The sum of both, under this one's names."""
        counts = zip(self.latency.counts, other.latency.counts, strict=True)
        return CallMetrics(
            self.method,
            self.peer,
            self.calls + other.calls,
            self.in_flight + other.in_flight,
            {
                kind: self.errors.get(kind, 0) + other.errors.get(kind, 0)
                for kind in self.errors | other.errors
            },
            Histogram(tuple(map(sum, counts)), self.latency.sum + other.latency.sum),
            self.bytes_out + other.bytes_out,
            self.bytes_in + other.bytes_in,
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All metrics of one worker at one moment.

    ``made`` and ``served`` are each consistent in themselves; between reading
    the one and the other a few microseconds pass.

    Args:
        worker: this worker's name.
        made: its calls to others, by method and peer.
        served: others' calls to it.
    """

    worker: str
    made: tuple[CallMetrics, ...]
    served: tuple[CallMetrics, ...]

    def to_prometheus(self) -> str:
        """The snapshot in Prometheus' text exposition format, version 0.0.4."""
        lines: list[str] = []
        for side, rows in (("made", self.made), ("served", self.served)):
            for family in _FAMILIES:
                lines += family.lines(self.worker, side, rows)
        return "\n".join(lines) + "\n"


MOST_UNCOUNTED: Final = 64


class Series:
    """Counters of one method and one peer; updated by whoever holds the table's lock.

    Attributes:
        over: of calls that are over but not counted yet: seconds, bytes sent and received.
            Code that adds one calls :meth:`count` when there are ``MOST_UNCOUNTED``.
    """

    __slots__ = ("_buckets", "_errors", "_received", "_seconds", "_sent", "over")

    def __init__(self) -> None:
        self.over: list[tuple[float, int, int]] = []
        self._buckets = [0] * (len(BUCKET_BOUNDS) + 1)
        self._seconds = 0.0
        self._sent = 0
        self._received = 0
        self._errors: dict[ErrorKind, int] = {}

    def ended(self, seconds: float, sent: int, received: int) -> None:
        """Counts a call that is over."""
        self.over.append((seconds, sent, received))
        if len(self.over) >= MOST_UNCOUNTED:
            self.count()

    def count(self) -> None:
        """Counts the calls that are over, which many do at once for less."""
        over, self.over = self.over, []
        for seconds, sent, received in over:
            self._buckets[bisect_left(BUCKET_BOUNDS, seconds)] += 1
            self._seconds += seconds
            self._sent += sent
            self._received += received

    def failed(self, kind: ErrorKind) -> None:
        """Counts the failure of a call that is over."""
        self._errors[kind] = self._errors.get(kind, 0) + 1

    def received_late(self, size: int) -> None:
        """Counts a reply that came after its call had timed out."""
        self._received += size

    def read(self, method: str, peer: str, open_calls: Sequence[int]) -> CallMetrics:
        """The counters now; ``open_calls`` holds the bytes sent of each call in flight."""
        self.count()
        latency = Histogram(tuple(self._buckets), self._seconds)
        return CallMetrics(
            method,
            peer,
            latency.count + len(open_calls),
            len(open_calls),
            dict(self._errors),
            latency,
            self._sent + sum(open_calls),
            self._received,
        )


class Book(dict[tuple[MethodName, int], Series]):
    """The series of one side, by method and peer: of the calls made, or of those served.

    A series comes into being when it is asked for, on any thread.
    """

    def __missing__(self, key: tuple[MethodName, int]) -> Series:
        if len(self) >= MAX_SERIES:
            key = (OVERFLOW_METHOD, key[1])
        return self.setdefault(key, Series())

    def read(
        self, open_calls: Iterable[tuple[Series, int]], name_of: Callable[[int], str]
    ) -> tuple[CallMetrics, ...]:
        """Everything counted, sorted; with the table's lock held.

        Args:
            open_calls: series and bytes sent of each call in flight.
            name_of: the name of a worker, by id.
        """
        sent: dict[int, list[int]] = {}
        for series, size in open_calls:
            sent.setdefault(id(series), []).append(size)
        rows: dict[tuple[str, str], CallMetrics] = {}
        for (method, peer), series in list(self.items()):
            key = text_of(method), name_of(peer)
            row = series.read(*key, sent.get(id(series), ()))
            known = rows.get(key)
            rows[key] = row if known is None else known + row
        return tuple(row for _, row in sorted(rows.items()))


def tensor_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the tensors that travel beside header and payload."""
    size = 0
    for tensor in tensors:
        size += tensor.nbytes
    return size


def _bounds(bucket: int) -> tuple[float, float]:
    last = len(BUCKET_BOUNDS) - 1
    if bucket > last:
        return BUCKET_BOUNDS[last], BUCKET_BOUNDS[last]
    return (BUCKET_BOUNDS[bucket - 1] if bucket else 0.0), BUCKET_BOUNDS[bucket]


# --- Prometheus

_Labels = tuple[tuple[str, str], ...]
_Sample = tuple[str, _Labels, float]


@dataclass(frozen=True, slots=True)
class _Family:
    """One metric of the exposition: its name, meaning and samples."""

    suffix: str
    kind: str
    text: str
    samples: Callable[[CallMetrics], Iterable[_Sample]]

    def lines(self, worker: str, side: str, rows: Sequence[CallMetrics]) -> Iterator[str]:
        name = f"tensorwire_calls_{side}_{self.suffix}"
        yield f"# HELP {name} Calls {side}: {self.text}."
        yield f"# TYPE {name} {self.kind}"
        for row in rows:
            common = (("worker", worker), ("peer", row.peer), ("method", row.method))
            for ending, labels, value in self.samples(row):
                yield f"{name}{ending}{_labels(common + labels)} {_number(value)}"


def _errors(row: CallMetrics) -> Iterator[_Sample]:
    for kind in ErrorKind:
        yield "", (("kind", kind.value),), row.errors.get(kind, 0)


def _latency(row: CallMetrics) -> Iterator[_Sample]:
    bounds = (*BUCKET_BOUNDS, float("inf"))
    for bound, count in zip(bounds, accumulate(row.latency.counts), strict=True):
        yield "_bucket", (("le", _number(bound)),), count
    yield "_sum", (), row.latency.sum
    yield "_count", (), row.latency.count


_FAMILIES: Final = (
    _Family("total", "counter", "how many", lambda row: [("", (), row.calls)]),
    _Family("in_flight", "gauge", "not over yet", lambda row: [("", (), row.in_flight)]),
    _Family("errors_total", "counter", "failed, by kind", _errors),
    _Family("latency_seconds", "histogram", "how long they took", _latency),
    _Family("sent_bytes_total", "counter", "bytes sent", lambda row: [("", (), row.bytes_out)]),
    _Family(
        "received_bytes_total", "counter", "bytes received", lambda row: [("", (), row.bytes_in)]
    ),
)


def _labels(labels: _Labels) -> str:
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(value)
