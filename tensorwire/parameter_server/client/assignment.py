"""Finds out which batches of a sampler this trainer is to train.

Under BSP they are a function of the members: nobody is asked but for the account. Under SSP and
async a trainer takes batches on lease, as many at a time as ``decisions.samples`` says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tensorwire.parameter_server.decisions.consistency import BSP, Async
from tensorwire.parameter_server.decisions.samples import Leased

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster


class Assignment(ABC):
    """The batches of one trainer.

    Args:
        cluster: where the account is.
        name: of the sampler.
        window: the numbers of the batches that this is about: the first, and the one behind the
            last.

    Attributes:
        deal: which gave out what :meth:`look` returned last.
        seen: how often the cluster had gone back, and the clock's ``deals``, by then.
    """

    def __init__(self, cluster: Cluster, name: str, window: tuple[int, int]) -> None:
        self.deal = 0
        self.seen = (-1, -1)
        self._cluster = cluster
        self._name = name
        self._window = window

    @property
    def is_stale(self) -> bool:
        """True if samples were given out anew, or the cluster went back, since the last look."""
        session = self._cluster.session
        return self.seen != (session.rollbacks, session.deals)

    @property
    def went_back(self) -> bool:
        """True if the cluster went back since the last look."""
        return self.seen[0] != self._cluster.session.rollbacks

    @abstractmethod
    def look(self) -> tuple[Iterator[int], bool]:
        """The batches that are this trainer's, in order, and whether all batches are trained."""

    @abstractmethod
    def wait(self) -> None:
        """Others have batches under way, and this trainer has none: does what is due meanwhile."""


class Dealt(Assignment):
    """The batches that a deal gives to a trainer, under BSP."""

    def look(self) -> tuple[Iterator[int], bool]:
        """See :class:`Assignment`."""
        session = self._cluster.session
        rollbacks = session.rollbacks
        account = self._cluster.counting.account_of(self._name)
        self.seen, self.deal = (rollbacks, session.deals), account.deal.number
        batches = account.remaining(self._cluster.number, *self._window)
        return batches, account.is_done(*self._window)

    def wait(self) -> None:
        """Makes the empty step for which the others wait."""
        self._cluster.pass_step()


class OnLease(Assignment):
    """The batches that a trainer has on lease, under SSP and async."""

    _time = 0
    """Pushes of the fastest trainer, as far as is known."""

    def look(self) -> tuple[Iterator[int], bool]:
        """See :class:`Assignment`; what was given before and was not pushed is given again."""
        rollbacks = self._cluster.session.rollbacks
        leased = self._cluster.counting.lease(self._name, self._window, is_first=True)
        self._time = leased.time
        self.seen, self.deal = (rollbacks, leased.deals), leased.deal
        if leased.is_done and not self.went_back:
            self._keep_up()
            self._cluster.counting.await_trained(self._name, self._window)
        return self._batches(leased), leased.is_done

    def _batches(self, leased: Leased) -> Iterator[int]:
        """Yields batches on lease, and more while some are free; ends when they are dealt anew."""
        while leased.begin < leased.end:
            yield from range(leased.begin, leased.end)
            if self.is_stale:
                return
            leased = self._cluster.counting.lease(self._name, self._window, is_first=False)
            if self.is_stale or leased.deal != self.deal:
                return

    def wait(self) -> None:
        """Waits a while; does not keep others waiting meanwhile."""
        self._keep_up()
        self._cluster.counting.pause()

    def _keep_up(self) -> None:
        """Makes empty steps under SSP until it is where the fastest is, lest that one waits."""
        if isinstance(self._cluster.consistency, Async):
            return
        while self._cluster.session.trainer.next < self._time:
            self._cluster.pass_step()


def assignment(cluster: Cluster, name: str, window: tuple[int, int]) -> Assignment:
    """The kind that fits the cluster; arguments as of :class:`Assignment`."""
    kind = Dealt if isinstance(cluster.consistency, BSP) else OnLease
    return kind(cluster, name, window)
