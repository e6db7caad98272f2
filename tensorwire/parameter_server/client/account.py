"""One worker's account of its exchanges: where its time goes, and what and how old it pulls."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tensorwire.parameter_server.client.exchange import Answer, PendingPull
from tensorwire.parameter_server.decisions.reads import AT_ONCE
from tensorwire.parameter_server.opaque import Json


class Account:
    """The counts of one worker.

    Attributes:
        seconds: by stage: packing and sending, and waiting for answers.
        staleness: how many pulls lacked so many pushes of the slowest trainer, counted from
            those that their sender had made.
        rows: that were pulled: those that somebody waited for, and those of later batches that
            came beside steps.
    """

    def __init__(self) -> None:
        self.seconds = {"sending": 0.0, "waiting": 0.0}
        self.staleness: Counter[int] = Counter()
        self.rows = {"waited for": 0, "beside steps": 0}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the time that this block takes."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - begin

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Counts no time of this block, as it is none of a step's."""
        before = dict(self.seconds)
        try:
            yield
        finally:
            self.seconds.update(before)

    def counted(self, asked: PendingPull, answer: Answer) -> Answer:
        """Counts an answer, and returns it."""
        if asked.step != AT_ONCE:
            self.staleness[max(0, asked.step - answer.low)] += 1
        kind = "beside steps" if asked.is_aside else "waited for"
        for rows in answer.rows:
            self.rows[kind] += rows.shape[0]
        for parts in answer.changes:
            for part in parts:
                self.rows[kind] += part.rows.shape[0]
        return answer

    def told(self) -> dict[str, Json]:
        """Returns the counts for ``Cluster.stats``."""
        return {
            "staleness": dict(sorted(self.staleness.items())),
            "seconds": dict(self.seconds),
            "rows": dict(self.rows),
        }
