"""The servers of one cluster, as a client asks them: the coordinator, heads of shards, all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from rpc import extend
from tensorwire.parameter_server import errors
from tensorwire.parameter_server.client.news import News
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.lives import Verdict
from tensorwire.parameter_server.decisions.views import Server, View
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.calling import LOST, Caller, verdict_on

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

    def ask_coordinator(self, what: orders.Request, patient: bool = True) -> Any:
        """Asks until the coordinator answers.

        Args:
            what: the request.
            patient: asks again if the coordinator was lost in the middle.

        Raises:
            ParameterServerError: it cannot be done; or the coordinator was lost.
        """
        pause = PAUSE
        while True:
            seen, coordinator = self._news.count, self._view().coordinator
            reply = self._ask_unless_lost(coordinator, messages.Asking(what))
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

    def _ask_unless_lost(self, server: Server, message: Any) -> Any:
        if verdict_on(self._worker, server) is Verdict.OVER:
            return messages.Rejected("")
        return self._ask(server, message).result()

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

    def ask_all(self, message: Any) -> Mapping[Server, Any]:
        """One call to each server that keeps anything."""
        keepers = sorted({each for shard in self._view().shards for each in shard.chain})
        answers = {server: self._ask(server, message) for server in keepers}
        return {server: answer.result() for server, answer in answers.items()}
