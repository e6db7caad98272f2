"""The servers of one cluster, as a client asks them: the coordinator, heads of shards, all."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillWaiting
from typing import Final

import rpc
from rpc import extend
from tensorwire.parameter_server import errors
from tensorwire.parameter_server.client.news import News
from tensorwire.parameter_server.client.patience import Patience
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.lives import CUT_OFF, Verdict
from tensorwire.parameter_server.decisions.records import NotHead
from tensorwire.parameter_server.decisions.views import Server, View
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.calling import LOST, Caller, latest_life, verdict_on
from tensorwire.parameter_server.messaging.messages import Message
from tensorwire.parameter_server.opaque import Response

_logger: Final = logging.getLogger("tensorwire")
_COORDINATOR: Final = "coordinator"
_ALL: Final = "all heads"
PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 0.5


class Servers:
    """Asks the servers of one cluster, whoever they are by then.

    Args:
        worker: who asks.
        caller: makes the calls.
        news: what to wait for before asking again.
        view: returns the latest view that the client has heard of.
        refresh: looks for a later one.
        patience: says when to give up.

    Attributes:
        patience: likewise.
    """

    def __init__(
        self,
        worker: extend.Worker,
        caller: Caller,
        news: News,
        view: Callable[[], View],
        refresh: Callable[[], None],
        patience: Patience,
    ) -> None:
        self._worker = worker
        self._caller = caller
        self._news = news
        self._view = view
        self._refresh = refresh
        self.patience = patience
        self._process = os.getpid()

    def require_own_process(self) -> None:
        """Refuses to wait in a forked child, to which no answer comes.

        Raises:
            AgentClosedError: this process was forked from the one that connected.
        """
        if os.getpid() != self._process:
            raise rpc.AgentClosedError(
                f"this process was forked from worker {self._worker.info.name!r}, whose connection "
                "to the servers it cannot use; pull and push rows in the worker itself, and have "
                "the workers of a DataLoader return ids"
            )

    def declare(self, what: orders.Announce | orders.CountSamples) -> Response:
        """Tells the coordinator of something new; returns the description by the first to name it.

        Raises:
            UnreachableError: that took too long; rows may be moving to other servers.
        """
        waits_for = f"the declaration of {what.name!r}, which waits while rows move or are saved"
        return self.ask_coordinator(what, waits_for=waits_for, within=self.patience.limit)

    def spread(self) -> None:
        """Tells all servers of the view, lest none of them knows that it is to coordinate."""
        view = self._view()
        text = view.encode()
        for server in view.servers:
            self._caller.call(server, messages.See(text), lambda _: None)

    def ask_coordinator(
        self,
        what: orders.Request,
        patient: bool = True,
        waits_for: str = "it",
        within: float | None = None,
    ) -> Response:
        """Asks until the coordinator answers.

        Args:
            what: the request.
            patient: asks again if the coordinator was lost in the middle.
            waits_for: says in the log for whom or what the answer may wait.
            within: seconds in which an answer has to come. Default none, as that may be up to
                others.

        Raises:
            ParameterServerError: it cannot be done; or the coordinator was lost.
            UnreachableError: no server coordinates, or none can decide, for too long; or the
                answer did not come in time.
        """
        pause, log = PAUSE, extend.WaitLog(time.monotonic())
        end = math.inf if within is None else log.began + within
        while True:
            self._news.raise_failure()
            seen, coordinator = self._news.count, self._view().coordinator
            reply: Response = messages.Rejected("")
            if verdict_on(self._worker, coordinator) is not Verdict.OVER:
                answer = self._ask(coordinator, messages.Asking(what))
                reply = _awaited(answer, log, what, coordinator, waits_for, end)
            if isinstance(reply, messages.Granted):
                self.patience.answered(_COORDINATOR)
                return reply.result
            if isinstance(reply, messages.Rejected) and reply.reason:
                raise errors.ParameterServerError(reply.reason)
            if reply is LOST and not patient and self._has_heard_of(coordinator):
                raise errors.ParameterServerError("the coordinator was lost meanwhile")
            self.found_nobody(_COORDINATOR, "that coordinates")
            self._news.wait(seen, pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)
            self._refresh()
            self.spread()

    def found_nobody(self, whom: Hashable, which: str) -> None:
        """Notes a try to reach a server that found nobody.

        Args:
            whom: see ``Patience``.
            which: says which server, for the error.

        Raises:
            NotATrainerError: the group has expelled this worker, so that it reaches nobody.
            UnreachableError: that is so for too long.
        """
        view = self._view()
        if any(latest_life(self._worker, each.name) == CUT_OFF for each in view.servers):
            raise errors.NotATrainerError(
                f"worker {self._worker.info.name!r} was declared lost by the others; "
                "call rpc.shutdown(), then it may join again"
            )
        if self.patience.failed(whom, time.monotonic()):
            names = ", ".join(str(each) for each in view.servers)
            raise errors.UnreachableError(
                f"no server {which} has answered for {self.patience.limit:g} s; the servers of "
                f"the cluster are {names}"
            )

    def reached(self, whom: Hashable) -> None:
        """Notes that a server has answered."""
        self.patience.answered(whom)

    def _has_heard_of(self, server: Server) -> bool:
        """False if calls to that life may have met the one before it."""
        return verdict_on(self._worker, server) is not Verdict.UNHEARD

    def _ask(self, server: Server, message: Message) -> Future[Response]:
        self.require_own_process()
        answer: Future[Response] = Future()
        self._caller.call(server, message, answer.set_result)
        return answer

    def ask_head(self, shard: int, message: Message) -> Response:
        """One call to the head of a shard; ``LOST`` if there is none."""
        described = self._view().shard(shard)
        if described is None or not described.chain:
            return LOST
        return self._within_patience(self._ask(described.head, message))

    def ask_heads(self, message: Callable[[int], Message]) -> list[Response]:
        """Asks the head of every shard, again if the map changes meanwhile.

        Args:
            message: of a shard's number.
        """
        while True:
            self._news.raise_failure()
            seen, epoch, shards = self._news.count, self._view().epoch, self._view().active
            answers = [self.ask_head(shard, message(shard)) for shard in shards]
            if not any(answer is LOST or isinstance(answer, NotHead) for answer in answers):
                self._refresh()
                if self._view().epoch == epoch:
                    self.reached(_ALL)
                    return answers
            self.found_nobody(_ALL, "that keeps a share")
            self._news.wait(seen, PAUSE)
            self._refresh()

    def ask_all(self, message: Message) -> Mapping[Server, Response]:
        """One call to each server that keeps anything."""
        keepers = sorted({each for shard in self._view().shards for each in shard.chain})
        answers = {server: self._ask(server, message) for server in keepers}
        return {server: self._within_patience(answer) for server, answer in answers.items()}

    def _within_patience(self, answer: Future[Response]) -> Response:
        """The answer; ``LOST`` if it takes too long, or there is nothing to wait for any more."""
        try:
            return answer.result(self.patience.limit)
        except StillWaiting:
            return LOST


def _awaited(
    answer: Future[Response],
    log: extend.WaitLog,
    what: object,
    coordinator: Server,
    waits_for: str,
    end: float,
) -> Response:
    """The answer, if it comes before ``end``; the log says so if it takes long.

    Raises:
        UnreachableError: it did not come.
    """
    while True:
        try:
            return answer.result(max(min(log.next_at(), end) - time.monotonic(), 0.0))
        except StillWaiting:
            pass
        if log.is_due(now := time.monotonic()):
            _logger.warning(
                "%s has waited %.0f s for %s; server %r coordinates",
                type(what).__name__.lower(), now - log.began, waits_for, coordinator.name,
            )  # fmt: skip
        if now >= end:
            raise errors.UnreachableError(
                f"server {coordinator.name!r}, which coordinates, has not done within "
                f"{end - log.began:g} s what this worker waits for: {waits_for}"
            )
