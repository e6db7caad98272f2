"""Checks what must follow when workers fall silent.

Sees what happens to the workers and what they decide. Times are in bounds. What is
allowed on top of what ``liveness`` promises is what the simulated network takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rpc.errors import WorkerLostError
from rpc.ids import Life
from rpc.protocol.liveness import Ask, Effect, Forget, Silent
from tests.simulation.group.faults import BRIEF, LASTING
from tests.simulation.group.rules import Rule, require

if TYPE_CHECKING:
    from tests.simulation.group.watchers import Watcher, WatcherGroup

_PERIOD = 0.2
_PATIENCE = 0.6
_FOUND = 0.8
_ALL_TOLD = 1.0
_SLACK = 0.06
_LEARNS = 0.7
_LOWER_SPEAKS = 0.7
_HIGHER_SPEAKS = 1.5
_LONG_AGO = 8.0


@dataclass(frozen=True, slots=True)
class _Span:
    start: float
    end: float

    def overlap(self, start: float, end: float) -> float:
        return max(0.0, min(self.end, end) - max(self.start, start))


class SilenceChecks:
    """The truth about one run.

    Args:
        watchers: what happens.
    """

    def __init__(self, watchers: WatcherGroup) -> None:
        self._run = watchers
        self._silences: defaultdict[Life, list[_Span]] = defaultdict(list)
        self._sleeps: defaultdict[Life, list[_Span]] = defaultdict(list)
        self._since: defaultdict[Life, dict[Life, float]] = defaultdict(dict)
        self._last_watched: defaultdict[Life, dict[Life, float]] = defaultdict(dict)
        self._may_be_lost: set[Life] = set()
        self._alone: set[Life] = set()
        self._parted: set[frozenset[Life]] = set()

    # --- What befalls them

    def silent(self, watcher: Watcher, until: float, *, asleep: bool) -> None:
        """A worker gives no sign of life, and gets none unless it is asleep, too."""
        now = self._run.now
        observed = any(
            other is not watcher and other.sees(watcher.life) for other in self._undisturbed(now)
        )
        self._silences[watcher.life].append(_Span(now, until))
        if asleep:
            self.asleep(watcher, until)
        if until - now <= BRIEF:
            return
        self._may_be_lost.add(watcher.life)
        if not asleep:
            self._alone.add(watcher.life)
        if until - now < LASTING:
            return
        self._run.at(now + _FOUND + _SLACK, lambda: self._check_found(watcher, now))
        if not self._run.plan.paired:
            self._run.at(now + _ALL_TOLD, lambda: self._check_all_told(watcher, now))
            if until < float("inf") and observed:
                self._run.at(until + _LEARNS, lambda: self._check_fenced(watcher))

    def asleep(self, watcher: Watcher, until: float) -> None:
        """A worker does nothing."""
        self._sleeps[watcher.life].append(_Span(self._run.now, until))

    def unplugged(self, watcher: Watcher) -> None:
        """All connections of a worker break at once."""
        others = watcher.view() - {watcher.life}
        self._alone.add(watcher.life)
        self._may_be_lost.add(watcher.life)
        if len(others) == 1:
            (other,) = others
            self.parted(watcher, self._run.all[other])
        elif others and not self._run.plan.paired:
            self._alone.discard(watcher.life)  # it may lose them, but must report nobody
            self._parted |= {frozenset((watcher.life, other)) for other in others}
            later = self._run.now + _HIGHER_SPEAKS
            self._run.at(later, lambda: self._check_fenced(watcher))

    def parted(self, one: Watcher, other: Watcher) -> None:
        """The connection between two workers breaks: the one with the higher id has to go."""
        lower, higher = sorted((one, other), key=lambda watcher: watcher.life)
        self._parted.add(frozenset((lower.life, higher.life)))
        self._may_be_lost.add(higher.life)
        self._may_be_lost.discard(lower.life)
        if self._run.plan.paired:
            self._may_be_lost.add(lower.life)
        else:
            later = self._run.now + _LOWER_SPEAKS
            self._run.at(later, lambda: self._check_fenced(higher))

    def called(self, watcher: Watcher, to: Life) -> None:
        """A worker depends on another, for a while."""
        now, end = self._run.now, watcher.calls[to]
        if end - now > _FOUND + _SLACK:
            self._run.at(now + _FOUND + _SLACK, lambda: self._check_called(watcher, to, now))

    # --- What they decide

    def ticked(self, watcher: Watcher, watched: Set[Life], effects: Sequence[Effect]) -> None:
        """A worker looked after those whom it watches."""
        now, own = self._run.now, self._run.time_of(watcher)
        looked_at = sorted(e.life for e in effects if isinstance(e, Ask | Silent))
        require(looked_at == sorted(watched), Rule.ASKED, watcher.life, looked_at, watched)
        since, last = self._since[watcher.life], self._last_watched[watcher.life]
        for life in since.keys() - watched:
            del since[life]
        for life in watched:
            since.setdefault(life, now)
            last[life] = own
        let_go = {e.life for e in effects if isinstance(e, Forget)}
        due = {life for life in watcher.lines - watched if own - last[life] >= 1.0}
        early = {life for life in let_go if own - last[life] < 1.0}
        right = due <= let_go and not early
        require(right, Rule.ASKED, watcher.life, "forgets", let_go, "not", due)
        for life in let_go:  # once, unless it is watched again
            del last[life]
        for effect in effects:
            if isinstance(effect, Silent):
                self._check_silence(watcher, effect)

    def sleeps_until(self, watcher: Watcher, due: float) -> None:
        """A worker will look again at a time."""
        ahead = due - self._run.time_of(watcher)
        require(-1e-9 < ahead <= _PERIOD + 1e-9, Rule.ASKED, watcher.life, "looks again in", ahead)

    def lost(self, watcher: Watcher, life: Life) -> None:
        """A worker takes a life for lost."""
        pair = frozenset((watcher.life, life))
        cause = life in self._may_be_lost or watcher.life in self._alone or pair in self._parted
        require(cause, Rule.NOT_REPORTED, watcher.life, "loses", life)

    def reported(self, watcher: Watcher, life: Life) -> None:
        """A worker tells the others of a loss."""
        cause = life in self._may_be_lost or watcher.life in self._alone
        require(cause, Rule.NOT_REPORTED, watcher.life, "reports", life)

    def expelled(
        self, watcher: Watcher, before: Set[Life], error: WorkerLostError, others: list[Life]
    ) -> None:
        """A worker learns that it was declared lost, and loses everybody."""
        life, group = watcher.life, watcher.group
        require(life in self._may_be_lost, Rule.FENCED, life, "is expelled")
        require(others == sorted(before), Rule.FENCED, life, "loses", others, "of", before)
        require(watcher.view() == {life}, Rule.FENCED, life, "still sees", watcher.view())
        for who in {other.worker for other in self._run.all} - {life.worker}:
            known = group.lost_error(who) if group.latest(who) is not None else error
            named = known is not None and (known.name, known.incarnation) == (
                f"w{life.worker}",
                life.incarnation,
            )
            require(named, Rule.FENCED, life, "says of", who, known)

    # --- What must follow

    def _check_silence(self, watcher: Watcher, effect: Silent) -> None:
        now = self._run.now
        slept = sum(s.overlap(now - _LONG_AGO, now) for s in self._sleeps[watcher.life])
        right = _PATIENCE <= effect.seconds <= _PATIENCE + _PERIOD + _SLACK
        require(right, Rule.FOUND_IN_TIME, watcher.life, effect)
        spans = [*self._silences[effect.life], *self._silences[watcher.life]]
        silent = sum(span.overlap(now - _FOUND - _SLACK - slept, now) for span in spans)
        enough = silent >= _PATIENCE - _PERIOD - _SLACK
        require(enough, Rule.NOT_REPORTED, watcher.life, effect, "silent for", silent)

    def _undisturbed(self, since: float) -> list[Watcher]:
        """Those to whom nothing happened since then, who must have noticed everything."""
        now = self._run.now

        def calm(life: Life) -> bool:
            spans = [*self._silences[life], *self._sleeps[life]]
            return not any(span.overlap(since - _PERIOD - _SLACK, now) for span in spans)

        members = self._run.all.values()
        return [w for w in members if w.alive and not w.expelled and calm(w.life)]

    def _check_found(self, watcher: Watcher, since: float) -> None:
        for other in self._undisturbed(since):
            watched = self._since[other.life].get(watcher.life, since + 1) <= since
            found = not watched or not other.sees(watcher.life)
            require(found, Rule.FOUND_IN_TIME, other.life, "watched", watcher.life)

    def _check_called(self, watcher: Watcher, to: Life, since: float) -> None:
        now = self._run.now
        silent = any(s.start <= since and s.end >= now for s in self._silences[to])
        if silent and watcher in self._undisturbed(since):
            found = not watcher.sees(to)
            require(found, Rule.FOUND_IN_TIME, watcher.life, "called", to)

    def _check_all_told(self, watcher: Watcher, since: float) -> None:
        for other in self._undisturbed(since):
            told = other is watcher or not other.sees(watcher.life)
            require(told, Rule.FOUND_IN_TIME, other.life, "was not told of", watcher.life)

    def _check_fenced(self, watcher: Watcher) -> None:
        fenced = watcher.expelled or not watcher.alive
        require(fenced, Rule.FENCED, watcher.life, "does not know that it was declared lost")

    def check_at_rest(self) -> None:
        """Checks everything long after the last fault."""
        there = {w.life for w in self._run.all.values() if w.alive and not w.expelled}
        for watcher in self._run.all.values():
            if watcher.life not in there:
                continue
            view = watcher.view()
            require(view == there, Rule.CONVERGENCE, watcher.life, view, "not", there)
            asked = self._since[watcher.life].keys()
            require(watcher.lines == asked, Rule.ASKED, watcher.life, watcher.lines, asked)
