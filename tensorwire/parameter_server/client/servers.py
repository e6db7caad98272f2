"""The servers of one cluster, as a client asks them: the coordinator, heads of shards, all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillWaiting
from typing import Any, Final

from rpc import extend
from tensorwire.parameter_server import errors
from tensorwire.parameter_server.client.news import News
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.lives import Verdict
from tensorwire.parameter_server.decisions.replica import NotHead
from tensorwire.parameter_server.decisions.views import Server, View
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.calling import LOST, Caller, verdict_on

_logger: Final = logging.getLogger("tensorwire")
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
    """

    def __init__(
        self,
        worker: extend.Worker,
        caller: Caller,
        news: News,
        view: Callable[[], View],
        refresh: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._caller = caller
        self._news = news
        self._view = view
        self._refresh = refresh

    def spread(self) -> None:
        """Tells all servers of the view, lest none of them knows that it is to coordinate."""
        view = self._view()
        text = view.encode()
        for server in view.servers:
            self._caller.call(server, messages.See(text), lambda _: None)

    def ask_coordinator(
        self, what: orders.Request, patient: bool = True, waits_for: str = "it"
    ) -> Any:
        """Asks until the coordinator answers.

        Args:
            what: the request.
            patient: asks again if the coordinator was lost in the middle.
            waits_for: says in the log for whom or what the answer may wait.

        Raises:
            ParameterServerError: it cannot be done; or the coordinator was lost.
        """
        pause, log = PAUSE, extend.WaitLog(time.monotonic())
        while True:
            seen, coordinator = self._news.count, self._view().coordinator
            reply: Any = messages.Rejected("")
            if verdict_on(self._worker, coordinator) is not Verdict.OVER:
                answer = self._ask(coordinator, messages.Asking(what))
                reply = _awaited(answer, log, what, coordinator, waits_for)
            if isinstance(reply, messages.Granted):
                return reply.result
            if isinstance(reply, messages.Rejected) and reply.reason:
                raise errors.ParameterServerError(reply.reason)
            if reply is LOST and not patient and self._has_heard_of(coordinator):
                raise errors.ParameterServerError("the coordinator was lost meanwhile")
            self._news.wait(seen, pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)
            self._refresh()
            self.spread()

    def _has_heard_of(self, server: Server) -> bool:
        """False if calls to that life may have met the one before it."""
        return verdict_on(self._worker, server) is not Verdict.UNHEARD

    def _ask(self, server: Server, message: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        self._caller.call(server, message, answer.set_result)
        return answer

    def ask_head(self, shard: int, message: Any) -> Any:
        """One call to the head of a shard; ``LOST`` if there is none."""
        found = self._view().shard(shard)
        if found is None or not found.chain:
            return LOST
        return self._ask(found.head, message).result()

    def ask_heads(self, message: Callable[[int], Any]) -> list[Any]:
        """Asks the head of every shard, again if the map changes meanwhile.

        Args:
            message: of a shard's number.
        """
        while True:
            seen, epoch, shards = self._news.count, self._view().epoch, self._view().active
            answers = [self.ask_head(shard, message(shard)) for shard in shards]
            if not any(answer is LOST or isinstance(answer, NotHead) for answer in answers):
                self._refresh()
                if self._view().epoch == epoch:
                    return answers
            self._news.wait(seen, PAUSE)
            self._refresh()

    def ask_all(self, message: Any) -> Mapping[Server, Any]:
        """One call to each server that keeps anything."""
        keepers = sorted({each for shard in self._view().shards for each in shard.chain})
        answers = {server: self._ask(server, message) for server in keepers}
        return {server: answer.result() for server, answer in answers.items()}


def _awaited(
    answer: Future[Any], log: extend.WaitLog, what: object, coordinator: Server, waits_for: str
) -> Any:
    """The answer, however long it takes; the log says so if that is long."""
    while True:
        try:
            return answer.result(max(log.next_at() - time.monotonic(), 0.0))
        except StillWaiting:
            pass
        if log.is_due(now := time.monotonic()):
            _logger.warning(
                "%s has waited %.0f s for %s; server %r coordinates",
                type(what).__name__.lower(), now - log.began, waits_for, coordinator.name,
            )  # fmt: skip
