"""Finds out which batches of a sampler this trainer is to train.

Under BSP they are a function of the members: nobody is asked but for the account. Under SSP and
async a trainer takes batches on lease, as many at a time as ``decisions.samples`` says. A static
assignment asks nobody either: each trainer has every k-th batch.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from rpc import extend
from tensorwire.parameter_server.decisions.consistency import BSP, Async
from tensorwire.parameter_server.decisions.files import Begun
from tensorwire.parameter_server.decisions.samples import LONGEST_LEASE, Account, Leased

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster
    from tensorwire.parameter_server.declarations.samplers import SamplerSpec

_logger: Final = logging.getLogger("tensorwire")


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
        begun: of files, those that are this trainer's of which a part is trained.
        at_hand: at least so many batches follow the last one without a wait, unless all are over.
        shares: the batches of whoever has nothing left are to be others'.
    """

    shares = False

    def __init__(self, cluster: Cluster, name: str, window: tuple[int, int]) -> None:
        self.deal = 0
        self.seen = (-1, -1)
        self.begun: dict[int, Begun] = {}
        self.at_hand = LONGEST_LEASE
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

    def _look_at_account(self) -> Account:
        """The account of the sampler as it is now, to which ``deal`` and ``seen`` belong."""
        session = self._cluster.session
        rollbacks = session.rollbacks
        account = self._cluster.counting.account_of(self._name)
        self.seen, self.deal = (rollbacks, session.deals), account.deal.number
        self.begun = {each.file: each for each in account.begun}
        return account

    @abstractmethod
    def look(self) -> tuple[Iterator[int], bool]:
        """The batches that are this trainer's, in order, and whether all batches are trained."""

    @abstractmethod
    def wait(self) -> None:
        """Does what is due while others have batches under way, and this trainer has none."""


class Dealt(Assignment):
    """The batches that a deal gives to a trainer, under BSP."""

    shares = True

    def look(self) -> tuple[Iterator[int], bool]:
        """See :class:`Assignment`."""
        account = self._look_at_account()
        batches = account.remaining(self._cluster.number, *self._window)
        return batches, account.is_done(*self._window)

    def wait(self) -> None:
        """Makes the empty step for which the others wait."""
        self._cluster.pass_step()


class OnLease(Assignment):
    """The batches that a trainer has on lease, under SSP and async.

    Args:
        cluster: see :class:`Assignment`.
        name: likewise.
        window: likewise.
        least: batches, or files, that its loader reads at once.
    """

    _time = 0
    """Pushes of the fastest trainer, as far as is known."""

    def __init__(
        self, cluster: Cluster, name: str, window: tuple[int, int], least: int = 1
    ) -> None:
        super().__init__(cluster, name, window)
        self._least = least

    def look(self) -> tuple[Iterator[int], bool]:
        """See :class:`Assignment`; what was given before and was not pushed is given again."""
        rollbacks = self._cluster.session.rollbacks
        leased = self._lease(is_first=True)
        self.begun.clear()
        self._time = leased.time
        self.seen, self.deal = (rollbacks, leased.deals), leased.deal
        if leased.is_done and not self.went_back:
            _keep_up(self._cluster, self._time)
            self._cluster.counting.await_trained(self._name, self._window)
        return self._batches(leased), leased.is_done

    def _lease(self, *, is_first: bool) -> Leased:
        return self._cluster.counting.lease(
            self._name, self._window, is_first=is_first, least=self._least
        )

    def _batches(self, leased: Leased) -> Iterator[int]:
        """Yields batches on lease, and more while some are free; ends when they are dealt anew."""
        while leased.begin < leased.end:
            self.begun |= {each.file: each for each in leased.begun}
            for number in range(leased.begin, leased.end):
                self.at_hand = leased.end - number - 1
                yield number
            if self.is_stale:
                return
            leased = self._lease(is_first=False)
            if self.is_stale or leased.deal != self.deal:
                return

    def wait(self) -> None:
        """Waits a while; does not keep others waiting meanwhile."""
        _keep_up(self._cluster, self._time)
        self._cluster.counting.pause()


class Static(Assignment):
    """Every k-th batch, whoever else is there, but for those that are trained.

    Args:
        cluster: see :class:`Assignment`.
        spec: of the sampler.
        window: see :class:`Assignment`.
        rank: which of the ``num_replicas`` of the sampler this trainer is.
    """

    def __init__(
        self, cluster: Cluster, spec: SamplerSpec, window: tuple[int, int], rank: int
    ) -> None:
        super().__init__(cluster, spec.name, window)
        self._spec, self._rank = spec, rank
        self._is_bsp = isinstance(cluster.consistency, BSP)
        self._log: extend.WaitLog | None = None

    def look(self) -> tuple[Iterator[int], bool]:
        """See :class:`Assignment`."""
        account = self._look_at_account()
        is_done = account.is_done(*self._window)
        if self._is_bsp and self._cluster.number not in account.deal.members:
            return iter(()), is_done  # before its first step: the deal will be another by then
        if is_done and not self._is_bsp and not self.went_back:
            self._keep_up()
            self._cluster.counting.await_trained(self._name, self._window)
        return account.untrained(self._spec.share(self._rank, *self._window)), is_done

    def wait(self) -> None:
        """Makes the empty steps for which others wait; says for whose batches it waits."""
        if self._log is None:
            self._log = extend.WaitLog(time.monotonic())
        if self._log.is_due(now := time.monotonic()):
            _logger.warning(
                "sampler %r has waited %.0f s for batches of rank %s, which only trainers of that "
                "rank train",
                self._name, now - self._log.began, ", ".join(map(str, self._missing())),
            )  # fmt: skip
        if self._is_bsp:
            self._cluster.pass_step()
        else:
            self._keep_up()
            self._cluster.counting.pause()

    def _missing(self) -> list[int]:
        """The ranks that have batches left."""
        account, spec = self._cluster.counting.account_of(self._name), self._spec
        left = (account.untrained(spec.share(r, *self._window)) for r in range(spec.num_replicas))
        return [rank for rank, each in enumerate(left) if next(each, None) is not None]

    def _keep_up(self) -> None:
        if not isinstance(self._cluster.consistency, Async):
            nothing = self._window[1], self._window[1]
            asked = self._cluster.counting.lease(self._name, nothing, is_first=False)
            _keep_up(self._cluster, asked.time)


def _keep_up(cluster: Cluster, fastest: int) -> None:
    """Makes empty steps under SSP until it is where the fastest is, lest that one waits."""
    if isinstance(cluster.consistency, Async):
        return
    while cluster.session.trainer.next < fastest:
        cluster.pass_step()


def assignment(
    cluster: Cluster, spec: SamplerSpec, window: tuple[int, int], rank: int, least: int = 1
) -> Assignment:
    """Makes the kind that fits the sampler and the cluster; arguments as of the kinds."""
    if spec.num_replicas:
        return Static(cluster, spec, window, rank)
    if isinstance(cluster.consistency, BSP):
        return Dealt(cluster, spec.name, window)
    return OnLease(cluster, spec.name, window, least)
