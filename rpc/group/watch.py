"""Watching others for one agent: the I/O half of ``liveness``.

Runs on the agent's pulse, a few times per bound; whatever a loss entails happens on
the agent's own threads, so that nobody who is slow or stuck can hold up the watch.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Set
from typing import Protocol

from rpc.group.members import Group
from rpc.group.probes import Prober
from rpc.ids import Life
from rpc.protocol.liveness import Ask, Evidence, Forget, Liveness, Part, Reach, Silent, neighbour
from rpc.worker_info import WorkerInfo

_logger = logging.getLogger("rpc")

_OUT_OF_TOUCH = 0.3
"""The bounds without an answer of the store after which, of two halves, this one is cut off. A
silence of twice as much is a loss, and the store is asked after a quarter of a bound."""


class WatchingWorker(Protocol):
    """The worker that watches, as far as its watch uses it."""

    @property
    def info(self) -> WorkerInfo:
        """Its name and id."""

    @property
    def life(self) -> Life:
        """Its id and incarnation."""

    @property
    def group(self) -> Group:
        """The workers that it knows."""

    def destinations(self) -> set[int]:
        """The workers that it expects replies from."""

    def declare_lost(self, life: Life, reason: str, evidence: Evidence) -> None:
        """Removes a lost worker soon, and tells the others; must not block."""

    def take_as_expelled(self, reason: str) -> None:
        """Does soon what is to be done if the others declared this worker lost."""

    def give_up(self, reason: str) -> None:
        """Takes this worker for lost, and has the others do so; must not block."""

    def look_at_store(self) -> None:
        """Asks the store of a dynamic group soon whether it answers; must not block."""

    def was_out_of_touch(self, seconds: float, within: float) -> bool:
        """True if the store of a dynamic group has lately left this worker without an answer.

        Args:
            seconds: for as long as that at least.
            within: seconds; it was so at some time in the last so many.
        """

    def hurry(self) -> None:
        """Makes :meth:`Watch.beat` run soon."""


class Watch:
    """One agent's watch over the workers it depends on.

    Args:
        agent: the worker.
        bound: seconds from the moment a worker falls silent until it is declared lost.
        prober: asks for signs of life, and gives them.
        decides: makes what decides, given the bound.
    """

    def __init__(
        self,
        agent: WatchingWorker,
        bound: float,
        prober: Prober,
        decides: Callable[[float], Liveness] = Liveness,
    ) -> None:
        self._agent = agent
        self._bound = bound
        self._liveness = decides(bound)
        self._reach = Reach()
        self._sounded: set[Life] = set()
        self._reached_few_at = -math.inf
        self._doubted: dict[Life, float] = {}
        """Lost workers that may live, and the time until when they are asked."""
        self._prober = prober
        self._to_expel: deque[tuple[str, str]] = deque()
        self._version = -1
        self._neighbour: Life | None = None
        self._expelled = False
        self._lacking = False
        self._lacked = False

    def start(self) -> str:
        """Begins to give signs of life; returns what the others need to ask for them."""
        return self._prober.start(self._agent.life)

    def beat(self, now: float) -> float:
        """Looks after everybody; returns when to come back."""
        self._leave_notes()
        due = self._liveness.due(now)
        if now < due:
            return due
        self._collect()
        watched = self._watched()
        for effect in self._liveness.tick(now, watched):
            if isinstance(effect, Ask):
                self._ask(effect.life)
            elif isinstance(effect, Forget):
                self._prober.forget(effect.life)
            else:
                self._fell_silent(effect, now)
        self._sound(watched)
        self._ask_the_doubted(now)
        self._lacked, self._lacking = self._lacking, False
        return self._liveness.due(now)

    def tell_lost(self, life: Life, reason: str) -> None:
        """Leaves a note for a worker that was declared lost, in case it lives."""
        address = self._address(life)
        if address:
            me = self._agent.life
            self._to_expel.append((address, f"{me.worker} {me.incarnation} {reason}"))
            self._agent.hurry()

    def reached_few(self, now: float) -> bool:
        """True if this worker was cut off from most of the group when it lately lost somebody."""
        return now - self._reached_few_at <= self._bound

    def doubt(self, life: Life, until: float) -> None:
        """Asks a worker that was lost if it lives; if it does, takes this worker for lost.

        For a worker that was cut off from most of the group, but is back.

        Args:
            life: which.
            until: the time until when it is asked.
        """
        self._doubted[life] = until
        self._agent.hurry()

    def verdict(self) -> str | None:
        """The reason why this worker was declared lost, if others say that it was."""
        note = self._prober.verdict()
        if note is None:
            return None
        worker, incarnation, reason = note.split(" ", 2)
        alone = len(self._agent.group.living()) == 1
        believed = alone or not self._is_lost(Life(int(worker), int(incarnation)))
        return reason if believed else None

    def _is_lost(self, life: Life) -> bool:
        """True of one whose word does not count: all were silent to it if it was cut off."""
        group = self._agent.group
        known = group.latest(life.worker)
        if known is None or known.incarnation < life.incarnation:
            return False
        return known.incarnation > life.incarnation or group.lost_error(life.worker) is not None

    def close(self) -> None:
        """Stops giving signs of life; the pulse must have stopped."""
        self._leave_notes()
        self._prober.close()

    def _ask(self, life: Life) -> None:
        try:
            self._prober.ask(life, self._address(life))
        except OSError as error:
            self._liveness.not_asked(life)
            self._lacks(error)

    def _leave_notes(self) -> None:
        while self._to_expel:
            try:
                self._prober.expel(*self._to_expel[0])
            except OSError as error:
                self._lacks(error)
                return
            self._to_expel.popleft()

    def _lacks(self, error: OSError) -> None:
        """Logs once, until it is over, that this worker lacks something to ask others with."""
        if not (self._lacked or self._lacking):
            _logger.error(
                "%r cannot ask other workers for signs of life, and will not notice when one "
                "freezes: %s",
                self._agent.info.name,
                error,
            )
        self._lacking = True

    def _collect(self) -> None:
        reason = self.verdict()  # says more than the others' answers
        if reason is not None:
            self._learn(reason)
        for answer in self._prober.collect():
            self._liveness.answered(answer.life)
            self._reach.answered(answer.life)
            if answer.life in self._doubted:
                name = self._agent.group.peer(answer.life.worker).info.name
                self._doubted.clear()
                reason = f"it was cut off from the others, and lost {name!r}, which lives"
                self._agent.give_up(reason)
            if answer.expelled and not self._is_lost(answer.life):
                name = self._agent.group.peer(answer.life.worker).info.name
                self._learn(f"worker {name!r} says that it was declared lost")

    def _learn(self, reason: str) -> None:
        if not self._expelled:
            self._expelled = True
            self._agent.take_as_expelled(reason)

    def _sound(self, watched: Set[Life]) -> None:
        """Finds out whether it is this worker that is cut off, while an answer is late."""
        group, me = self._agent.group, self._agent.info.id
        is_late = self._liveness.is_late
        if is_late:
            self._agent.look_at_store()
        elif not self._reach.asks:
            return
        others = [each.id for each in group.living() if each.id != me]
        lives = [group.life(other) for other in others if group.peer(other).liveness]
        to_ask = self._reach.to_ask(is_late, lives)
        for life in to_ask:
            if life not in watched:
                self._sounded.add(life)
                self._ask(life)
        if not is_late:
            for life in self._sounded - watched - self._doubted.keys():
                self._prober.forget(life)
            self._sounded.clear()

    def _ask_the_doubted(self, now: float) -> None:
        for life, until in list(self._doubted.items()):
            if now < until:
                self._ask(life)
            else:
                del self._doubted[life]
                self._prober.forget(life)

    def _fell_silent(self, effect: Silent, now: float) -> None:
        part, bound = self._reach.part(), self._bound
        if part is Part.HALF and self._agent.was_out_of_touch(bound * _OUT_OF_TOUCH, bound):
            part = Part.FEW
        if part is Part.FEW:
            self._reached_few_at = now
        reason = f"it gave no sign of life for {effect.seconds:.1f} s"
        self._agent.declare_lost(effect.life, reason, Evidence.SILENT)

    def _watched(self) -> Set[Life]:
        agent = self._agent
        group = agent.group
        if group.version != self._version:
            self._version = group.version
            able = [worker.id for worker in group.living() if group.peer(worker.id).liveness]
            nearest = neighbour(agent.info.id, able)
            self._neighbour = None if nearest is None else group.life(nearest)
        wanted = {
            group.life(to)
            for to in agent.destinations()
            if to != agent.info.id and group.lost_error(to) is None and group.peer(to).liveness
        }
        if self._neighbour is not None:
            wanted.add(self._neighbour)
        return wanted

    def _address(self, life: Life) -> str:
        peer = self._agent.group.latest(life.worker)
        return peer.liveness if peer is not None and peer.incarnation == life.incarnation else ""
