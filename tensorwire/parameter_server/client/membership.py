"""Joining and leaving of one trainer: when it may push, and when nobody waits for it any more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from rpc import extend
from tensorwire.parameter_server import errors
from tensorwire.parameter_server.client.exchange import StepPush
from tensorwire.parameter_server.client.servers import LONGEST_PAUSE, PAUSE
from tensorwire.parameter_server.client.session import Session
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.pushes import PushKind
from tensorwire.parameter_server.messaging import messages

_logger: Final = logging.getLogger("tensorwire")


class Membership:
    """Makes a worker a trainer, and ends that.

    Args:
        session: of the worker in the cluster.
        started: trainers that had been started by the time that this one was.
        next_session: counts how often this worker has been a client of the cluster.
    """

    def __init__(self, session: Session, started: int, next_session: Callable[[], int]) -> None:
        self._session = session
        self._started = started
        self._next_session = next_session
        self._has_finished = False

    def join(self, *, again: bool = False) -> None:
        """Becomes a trainer, if this is none yet; returns when it may push.

        Args:
            again: also one that has finished, as a trainer with a number of its own.

        Raises:
            NotATrainerError: it has finished, and ``again`` is False.
        """
        session = self._session
        if session.trainer.number >= 0:
            return
        if self._has_finished:
            if not again:
                raise errors.NotATrainerError(
                    f"worker {session.client.name!r} has finished in cluster {session.cluster!r}, "
                    "so that nobody waits for its pushes, and takes none; call cluster.join() to "
                    "be a trainer again"
                )
            session.come_again(self._next_session())
            self._has_finished = False
        join = orders.Join(session.client, self._started)
        number = session.servers.ask_coordinator(join, waits_for=self._beginning())
        pause = PAUSE
        while True:
            seen = session.news.count
            session.news.raise_failure()
            session.refresh()
            for shard in session.view.active:
                count = session.servers.ask_head(shard, messages.CountOf(number))
                if isinstance(count, int):
                    session.servers.reached((number,))
                    session.begin(number, count)
                    return
            session.servers.found_nobody((number,), f"that knows trainer {number}")
            session.news.wait(seen, pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)

    def _beginning(self) -> str:
        """The trainers that a trainer waits for when it joins, as far as it knows."""
        said = int(self._session.view.settings.get("trainers", 1))
        told = f"ps.connect(trainers={said})" if said else f"{self._started} had been started"
        return f"the trainers with which cluster {self._session.cluster!r} begins ({told})"

    def finish(self) -> None:
        """Pushes the last push, and leaves when it is safe everywhere; nothing if no trainer."""
        session = self._session
        trainer = session.trainer
        if trainer.number < 0:
            return
        session.begin_to_finish()
        number, _ = session.send(StepPush(PushKind.FINISH))
        self._await_last_push(number)
        refused = session.take_refusals()
        generation = session.view.generation
        try:
            leave = orders.Leave(trainer.number, generation, trainer.first, number)
            session.servers.ask_coordinator(leave, waits_for="servers to let this trainer go")
        except errors.ParameterServerError:
            session.refresh()
            session.raise_failure()  # the cluster went back in the middle of this
            raise
        trainer.number = -1
        self._has_finished = True
        if refused:
            raise refused[0]

    def _await_last_push(self, number: int) -> None:
        """Waits until a push is safe, and says in the log at which servers it is not."""
        session, log = self._session, extend.WaitLog(time.monotonic())
        while not session.is_safe_within(number, max(0.0, log.next_at() - time.monotonic())):
            if log.is_due(now := time.monotonic()):
                _logger.warning(
                    "finish has waited %.0f s until the pushes of trainer %r are safe at %s",
                    now - log.began, session.client.name, session.unsafe_at(number),
                )  # fmt: skip
