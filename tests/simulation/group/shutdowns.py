"""Checks the shutdown of a simulated group.

Knows which worker entered which phase, with which others. Sees what is under way and
what is decided, never how.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpc.ids import Life
from rpc.protocol.termination import Phase
from rpc.wire.control import Cancel, Leaving, Probe, Quiet, Ready
from tests.simulation.group.packets import Batch, Packet
from tests.simulation.group.rules import Rule, require

if TYPE_CHECKING:
    from tests.simulation.group.worker import SimWorker
    from tests.simulation.group.world import World

_MOST_WAVES = 20
_UNCOUNTED = (Ready, Probe, Quiet, Leaving, Cancel)


class Shutdowns:
    """The truth about the shutdown of one run's group.

    Args:
        world: what happens.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._entered: set[tuple[Life, Phase | None]] = set()
        self._ready: set[tuple[Life, Life]] = set()
        self._phases: dict[Phase, frozenset[Life]] = {}

    def entered(self, worker: SimWorker, phase: Phase | None) -> None:
        """A worker got on with its shutdown, or is through with it (None)."""
        again = (worker.life, phase) in self._entered
        require(not again, Rule.TOLD_ONCE, worker.life, "enters", phase, "again")
        self._entered.add((worker.life, phase))
        if worker.life in self._world.expelled:
            return  # what it thinks of the others counts once one of them does as it says
        if (phase or Phase.CLOSE) not in self._phases:
            self._check_everybody_began(worker)
        decided = self._phases.setdefault(phase or Phase.CLOSE, frozenset(worker.view.values()))
        closes = phase is not None or (worker.life, Phase.CLOSE) in self._entered
        require(closes, Rule.SHUTDOWN_WAITS, worker.life, "ends before it closes")
        self._check_missing(worker)
        if phase is None:
            decided = self._phases[Phase.CLOSE]
            self._check_leader_is_last(worker, decided)
        notices = phase is not Phase.RELEASE
        left = self._left_for(decided, notices=notices)
        require(not left, Rule.SHUTDOWN_WAITS, worker.life, phase, left)
        if notices and not self._world.losses:
            held = worker.references.leaks()
            leaks = [leak for leak in held if not decided.isdisjoint(leak.users)]
            require(not leaks, Rule.ALWAYS_FREED, worker.life, leaks)

    def _check_everybody_began(self, worker: SimWorker) -> None:
        """Nobody is shut down whose program works, as far as the one that decides knows."""
        members = [self._world.living.get(life) for life in worker.view.values()]
        working = [other.life for other in members if other is not None and not other.begun]
        require(not working, Rule.SHUTDOWN_WAITS, worker.life, "does not wait for", working)

    def told_ready(self, worker: SimWorker, sender: Life) -> None:
        """A worker hears that another's program called ``shutdown``."""
        self._ready.add((worker.life, sender))

    def looked_at(self, worker: SimWorker) -> None:
        """Something happened to a worker: whom does it say that it waits for?"""
        if worker.begun and not worker.finished:
            self._check_missing(worker)

    def _check_missing(self, worker: SimWorker) -> None:
        if min(worker.view) != worker.life.worker:
            return
        missing = worker.leaving.machine.missing()
        right = missing == sorted({*missing} & worker.view.keys())
        require(right, Rule.SHUTDOWN_WAITS, worker.life, "waits for", missing)
        if worker.leaving.machine.phase is Phase.CLOSE:
            alone = worker.life.worker not in missing
            require(alone, Rule.SHUTDOWN_WAITS, worker.life, "waits for itself")
            return
        unready = {i for i, life in worker.view.items() if (worker.life, life) not in self._ready}
        known = {*missing} == unready if unready else bool(missing)
        require(known, Rule.SHUTDOWN_WAITS, worker.life, "waits for", missing, "not", unready)

    def lost(self, worker: SimWorker, life: Life) -> None:
        """A worker hears that another is gone; who left in good order has told its leader."""
        if worker.life in self._world.expelled:
            return
        leads = min(worker.view) == worker.life.worker and worker.begun and not worker.finished
        was_last = self._world.latest[life.worker] == life  # else news of the next came first
        has_left = life in self._world.closed and was_last
        if has_left and leads and worker.leaving.machine.phase is Phase.CLOSE:
            told = life.worker not in worker.leaving.machine.missing()
            require(told, Rule.SHUTDOWN_WAITS, worker.life, "was not told that", life, "left")

    def _check_leader_is_last(self, worker: SimWorker, group: frozenset[Life]) -> None:
        """Checks that the leader leaves after the others."""
        if min(worker.view) != worker.life.worker:
            return
        for life in group & frozenset(worker.view.values()):
            other = self._world.living.get(life)
            gone = other is None or other is worker or other.finished
            gone = gone or life in self._world.expelled
            require(gone, Rule.SHUTDOWN_WAITS, worker.life, "leaves before", life)

    def answered(self, worker: SimWorker, waves: int) -> None:
        """A worker answers its leader for the ``waves``-th time without anything between."""
        few = waves < _MOST_WAVES
        require(few, Rule.SHUTDOWN_ENDS, worker.life, "runs in circles")

    def _left_for(self, group: frozenset[Life], *, notices: bool) -> list[object]:
        """Returns what is under way, or runs, and was not caused by a worker that died."""
        world = self._world
        absent = {life for life in group if life not in world.living and life not in world.closed}
        present = group - absent - world.expelled
        left: list[object] = [
            packet
            for packet in world.network.values()
            if self._must_arrive(packet, notices)
            and packet.origin not in world.taken
            and packet.causes <= present
        ]
        for worker in world.living.values():
            if worker.jobs:
                left += [job for job in worker.jobs.values() if job.causes <= present]
        return left

    @staticmethod
    def _must_arrive(packet: Packet, notices: bool) -> bool:
        """Requests and replies always; what shutdowns are about never."""
        if not isinstance(packet.body, Batch):
            return True
        return notices and not all(isinstance(m, _UNCOUNTED) for m in packet.body.messages)

    def check_everybody_left(self) -> None:
        """A shutdown is over."""
        stuck = [
            (worker.life, worker.leaving.machine.phase, worker.leaving.machine.missing())
            for worker in self._world.living.values()
        ]
        require(not stuck, Rule.SHUTDOWN_ENDS, stuck)
