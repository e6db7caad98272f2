"""Decides what waits until a change is safe at a shard's whole chain. Sans-IO.

An answer that tells of a change, news of it for other shards, and the count of a trainer's pushes
wait until every server of the chain has the record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from tensorwire.parameter_server.decisions.pushes import Ready
from tensorwire.parameter_server.decisions.records import Effect, Inform, Record, Respond
from tensorwire.parameter_server.decisions.replication import Fenced, Replication


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An answer that waits until all before a position of the log is safe."""

    position: int
    call: object
    answer: object


@dataclass(frozen=True, slots=True)
class _Uncounted:
    """A count of pushes that is told once all before a position of the log is safe."""

    position: int
    trainer: int
    count: int


class Gate:
    """The answers, news and counts that wait at one server of a shard.

    Args:
        log: says what is safe.
    """

    def __init__(self, log: Replication[Record]) -> None:
        self._log = log
        self._answers: deque[_Waiting] = deque()
        self._news: deque[tuple[int, Ready]] = deque()
        """Positions of the log, and what other shards are told once all before them is safe."""
        self._uncounted: deque[_Uncounted] = deque()
        self._counts: dict[int, int] = {}
        """The number of each trainer's pushes that are safe."""

    def safe_count(self, trainer: int) -> int:
        """The number of a trainer's pushes that are safe at the whole chain."""
        return self._counts.get(trainer, 0)

    def begin_with(self, counts: Mapping[int, int]) -> None:
        """Begins with as many safe pushes of each trainer, as this server begins from a copy."""
        self._counts = dict(counts)

    def answer(self, call: object, answer: object, position: int | None = None) -> list[Effect]:
        """Answers once everything until now, or before ``position``, is safe."""
        if call is None:
            return []
        at = self._log.position if position is None else position
        if self._log.durable >= at:
            return [Respond(call, answer)]
        self._answers.append(_Waiting(at, call, answer))
        return []

    def inform(self, ready: Ready) -> list[Effect]:
        """Tells other shards of pushes once everything until now is safe."""
        if self._log.durable >= self._log.position:
            return [Inform(ready)]
        self._news.append((self._log.position, ready))
        return []

    def count(self, trainer: int, count: int) -> None:
        """Counts pushes of a trainer once everything until now is safe."""
        self._uncounted.append(_Uncounted(self._log.position, trainer, count))
        self._count_safe()

    def _count_safe(self) -> None:
        while self._uncounted and self._uncounted[0].position <= self._log.durable:
            safe = self._uncounted.popleft()
            self._counts[safe.trainer] = max(safe.count, self.safe_count(safe.trainer))

    def open(self) -> list[Effect]:
        """Lets go of what waited for this much to be safe."""
        self._count_safe()
        done: list[Effect] = []
        while self._news and self._news[0][0] <= self._log.durable:
            done.append(Inform(self._news.popleft()[1]))
        waiting, self._answers = self._answers, deque()
        for each in waiting:
            if each.position <= self._log.durable:
                done.append(Respond(each.call, each.answer))
            else:
                self._answers.append(each)
        return done

    def fence(self, version: int) -> list[Effect]:
        """Refuses answers that came too early, in versions of the chain before this one."""
        here = self._log.position
        early = [each for each in self._answers if each.position > here]
        self._answers = deque(each for each in self._answers if each.position <= here)
        return [Respond(each.call, Fenced(version)) for each in early]

    def clear(self) -> list[object]:
        """Forgets answers and news; returns the calls that nobody will answer."""
        calls = [each.call for each in self._answers]
        self._answers.clear()
        self._news.clear()
        return calls
