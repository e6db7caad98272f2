"""Puts an agent's own control channel and shutdown into a simulated worker.

Takes the channel's frames to the simulated network, and shows every step of the shutdown to
the checks. Decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rpc.errors import UnknownWorkerError
from rpc.group.shutdown import GroupShutdown
from rpc.ids import Life
from rpc.protocol.termination import Effect as TerminationEffect
from rpc.protocol.termination import Enter, Finished, Tell
from rpc.transports.base import Frame
from rpc.wire.control import Ready, decode_batch
from tests.simulation.group.packets import Batch

if TYPE_CHECKING:
    from tests.simulation.group.worker import SimWorker


class EscapedError(BaseException):
    """Something was raised as a shutdown went on, which would survive any ``Exception``.

    Args:
        error: the error.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Wire:
    """Takes the frames of a worker's control channel to the simulated network."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker

    def send(self, to: int, frame: Frame) -> None:
        worker = self._worker
        if to not in worker.view:
            raise UnknownWorkerError(f"worker {to} was removed")
        sequence, messages = decode_batch(frame.payload)
        batch = Batch(sequence, tuple(messages), frame)
        worker.world.post(worker.life, worker.view[to], batch)


class WitnessedShutdown(GroupShutdown):
    """A worker's shutdown, whose every step is shown to the checks."""

    def __init__(self, worker: SimWorker) -> None:
        super().__init__(cast("Any", worker), worker.world.machines.termination)
        self._worker = worker
        self._waves = (-1, 0)

    def carry_out(self, effect: TerminationEffect) -> None:
        worker, shutdowns = self._worker, self._worker.world.shutdowns
        try:
            worker.world.say(worker.life, effect)
            if isinstance(effect, Enter | Finished):
                shutdowns.entered(worker, effect.phase if isinstance(effect, Enter) else None)
                worker.finished = isinstance(effect, Finished)
            elif isinstance(effect, Tell) and _tells_ready(effect, worker.life):
                shutdowns.told_ready(worker, worker.life)
            super().carry_out(effect)
        except Exception as error:
            raise EscapedError(error) from error

    def answer_if_quiet(self) -> None:
        worker, world = self._worker, self._worker.world
        if not (self.awaits_quiet and worker.is_quiet()):
            return
        step, waves = self._waves
        self._waves = world.step, waves + 1 if step == world.step else 1
        world.shutdowns.answered(worker, self._waves[1])
        causes, world.causes = world.causes, frozenset((worker.life,))
        super().answer_if_quiet()
        world.causes = causes


class NoTimers:
    """A clock that stands, and timers that never run: nobody speaks of slow shutdowns here."""

    def now(self) -> float:
        return 0.0

    def at(self, when: float, task: object) -> None:
        return


def _tells_ready(effect: Tell, me: Life) -> bool:
    """True for the leader that tells itself that its program is ready to leave."""
    return effect.to == me.worker and isinstance(effect.message, Ready)
