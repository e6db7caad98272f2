"""Asks servers for accounts of samples, and for batches on lease."""

from __future__ import annotations

import logging
import time
from typing import Final

from rpc import extend
from tensorwire.parameter_server.client.servers import PAUSE
from tensorwire.parameter_server.client.session import Session
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.records import Counted
from tensorwire.parameter_server.decisions.samples import Account, LeaseAsked, Leased, NoLessor
from tensorwire.parameter_server.messaging import messages

_logger: Final = logging.getLogger("tensorwire")

Window = tuple[int, int]
"""Some batches: the number of the first, and the one behind the last."""


class Counting:
    """The samplers of one worker's cluster.

    Args:
        session: of the worker in the cluster.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked = 0

    def begin(self, name: str, text: str) -> str:
        """Has the samples of a sampler counted; returns its description by the first to name it."""
        declared: str = self._session.servers.declare(orders.CountSamples(name, text))
        self._session.refresh()
        return declared

    def account_of(self, sampler: str) -> Account:
        """The account of the samples of a sampler."""
        session = self._session
        while True:
            session.news.raise_failure()
            seen, shard = session.news.count, session.view.active[0]
            answer = session.servers.ask_head(shard, messages.AccountOf(shard, sampler))
            if isinstance(answer, Counted) and session.takes_deals(shard, answer.deals):
                session.servers.reached(sampler)
                return answer.account
            session.servers.found_nobody(sampler, f"that keeps the account of sampler {sampler!r}")
            session.news.wait(seen, PAUSE)
            session.refresh()

    def lease(self, sampler: str, window: Window, is_first: bool, least: int = 1) -> Leased:
        """Takes batches of a sampler, under SSP or async.

        Args:
            sampler: its name.
            window: the batches among which it chooses.
            is_first: gives back what this trainer was given before and has not pushed.
            least: how many the trainer can use at once.
        """
        session, log = self._session, extend.WaitLog(time.monotonic())
        self._asked += 1
        while True:
            session.news.raise_failure()
            seen, shard = session.news.count, session.view.active[0]
            me = session.trainer
            asked = LeaseAsked(me.number, sampler, self._asked, *window, me.next, is_first, least)
            answer = session.servers.ask_head(shard, messages.LeaseOf(shard, asked))
            if isinstance(answer, Leased) and session.takes_deals(shard, answer.deals):
                session.servers.reached(sampler)
                return answer
            if isinstance(answer, NoLessor):
                session.require_trainer()
                session.servers.reached(sampler)
            session.servers.found_nobody(sampler, f"that gives out batches of sampler {sampler!r}")
            _say_if_long(log, sampler, "next batches")
            session.news.wait(seen, PAUSE)
            session.refresh()

    def await_trained(self, sampler: str, window: Window) -> None:
        """Waits until batches that are part of one shard's state are part of all shards' state.

        Args:
            sampler: its name.
            window: the batches.
        """
        session, log = self._session, extend.WaitLog(time.monotonic())
        rollbacks = session.rollbacks
        while rollbacks == session.rollbacks:
            seen = session.news.count
            told = session.servers.ask_heads(lambda shard: messages.AccountOf(shard, sampler))
            if all(isinstance(e, Counted) and e.account.is_done(*window) for e in told):
                return
            _say_if_long(log, sampler, "last pushes")
            session.news.wait(seen, PAUSE)

    def pause(self) -> None:
        """Waits a moment, or until there is news."""
        self._session.news.wait(self._session.news.count, PAUSE)


def _say_if_long(log: extend.WaitLog, sampler: str, what: str) -> None:
    if log.is_due(now := time.monotonic()):
        _logger.warning("sampler %r has waited %.0f s for its %s", sampler, now - log.began, what)
