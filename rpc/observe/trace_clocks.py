"""Estimates how far the clocks of traced workers are apart. Sans-IO.

A call tells four times: sent and answered on the caller's clock, arrived and
replied on the callee's. If the way there took as long as the way back, half the
sum of both differences is the offset; it cannot be wrong by more than half of
the time spent on the way. So of all samples between two workers the one with
the shortest round trip counts, and workers without a direct one are reached
over others, by the way with the smallest error.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from rpc.observe.trace_records import WorkerTrace


@dataclass(frozen=True, slots=True)
class ClockSample:
    """The clocks' times in one exchange of messages, in seconds.

    Args:
        here: id of the worker that sent the first message.
        there: id of the one that answered.
        sent: on ``here``'s clock.
        arrived: on ``there``'s clock.
        replied: on ``there``'s clock.
        received: on ``here``'s clock.
    """

    here: int
    there: int
    sent: float
    arrived: float
    replied: float
    received: float

    @property
    def offset(self) -> float:
        """Seconds to subtract from ``there``'s clock to get ``here``'s."""
        return ((self.arrived - self.sent) + (self.replied - self.received)) / 2

    @property
    def round_trip(self) -> float:
        """Seconds spent on the way; the offset is off by half of it at most."""
        return max((self.received - self.sent) - (self.replied - self.arrived), 0.0)


@dataclass(frozen=True, slots=True)
class Offset:
    """The offset of one worker's clock: ``seconds`` to subtract, and how wrong that may be."""

    seconds: float
    error: float


def samples_of(workers: Iterable[WorkerTrace]) -> list[ClockSample]:
    """The samples in the records of traced calls; workers in one process share its clock."""
    traces = list(workers)
    handlers = {h.span: (trace.worker, h) for trace in traces for h in trace.handlers}
    samples = [
        ClockSample(one.worker, other.worker, 0.0, 0.0, 0.0, 0.0)
        for one, other in combinations(traces, 2)
        if one.process == other.process
    ]
    for trace in traces:
        for call in trace.calls:
            there, handler = handlers.get(call.span, (-1, None))
            if handler is None or there == trace.worker or not call.replied:
                continue
            if call.sent and handler.arrived and handler.left and not handler.failed:
                times = (call.sent, handler.arrived, handler.left, call.replied)
                samples.append(ClockSample(trace.worker, there, *times))
    return samples


def estimate(root: int, samples: Iterable[ClockSample]) -> dict[int, Offset]:
    """The offset of every worker that samples connect with ``root``, whose own is 0."""
    best = _best(samples)
    known: dict[int, Offset] = {}
    reached = [(0.0, root, 0.0)]
    while reached:
        error, worker, seconds = heapq.heappop(reached)
        if worker in known:
            continue
        known[worker] = Offset(seconds, error)
        for neighbour, sample in best.get(worker, {}).items():
            step = sample.offset if sample.here == worker else -sample.offset
            way = (error + sample.round_trip / 2, neighbour, seconds + step)
            heapq.heappush(reached, way)
    return known


def _best(samples: Iterable[ClockSample]) -> Mapping[int, Mapping[int, ClockSample]]:
    best: dict[int, dict[int, ClockSample]] = {}
    for sample in samples:
        for one, other in ((sample.here, sample.there), (sample.there, sample.here)):
            known = best.setdefault(one, {}).get(other)
            if known is None or sample.round_trip < known.round_trip:
                best[one][other] = sample
    return best
