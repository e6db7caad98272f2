"""Sends the steps of one worker, and waits for what comes back.

Looks at each push before it goes: gradients that are not finite, what packing has left out before,
and the samples that it trains.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tensorwire.parameter_server import errors
from tensorwire.parameter_server.client.account import Account
from tensorwire.parameter_server.client.declared import Declared
from tensorwire.parameter_server.client.exchange import (
    Answer,
    Exchanging,
    KnownRows,
    PendingPull,
    Step,
    StepGradient,
    StepPush,
)
from tensorwire.parameter_server.client.membership import Membership
from tensorwire.parameter_server.client.session import Session
from tensorwire.parameter_server.client.splitting import RowGradients, WholeDense
from tensorwire.parameter_server.client.table import Table
from tensorwire.parameter_server.client.tracking import Given
from tensorwire.parameter_server.decisions.pushes import PushKind
from tensorwire.parameter_server.kernels.copying import is_finite
from tensorwire.parameter_server.messaging.messages import TableIds
from tensorwire.parameter_server.rows.device_memory import to_host


class NanPolicy(enum.Enum):
    """The treatment of a step with a gradient that is infinite or not a number."""

    RAISE = "raise"
    """Raises ``GradientError``; nothing is pushed, and no clock moves."""
    SKIP = "skip"
    """Pushes an empty push in its place, which is counted in ``Cluster.stats``."""
    COUNT = "count"
    """Pushes it as it is, and counts it."""


class Stepper:
    """The pushes and pulls of one worker.

    Has no lock: one thread makes the steps of a trainer, and others only pull.

    Args:
        session: what carries them.
        membership: makes this worker a trainer before its first push.
        declared: the tables and dense groups that there are.
        account: counts exchanges.
        given: the batches whose samples the next push has trained.
        nans: what happens to gradients that are not finite.
        pushed: is called after each push, once servers have it.

    Attributes:
        nans: see the argument.
        bad_steps: pushes that were not finite, and were pushed or skipped.
    """

    def __init__(
        self,
        session: Session,
        membership: Membership,
        declared: Declared,
        account: Account,
        given: Given,
        nans: NanPolicy,
        pushed: Callable[[], object],
    ) -> None:
        self.nans = nans
        self.bad_steps = 0
        self._session = session
        self._membership = membership
        self._declared = declared
        self._account = account
        self._given = given
        self._pushed = pushed

    def send(
        self,
        push: Step | None,
        wanted: Sequence[TableIds] = (),
        dense: tuple[str, ...] = (),
        skip: bool = False,
        known: Sequence[KnownRows] = (),
    ) -> Exchanging[Answer | None]:
        """Pushes, pulls, or both, in one message to each server.

        Args:
            push: the gradients; None for none.
            wanted: ids of rows to pull; no table twice.
            dense: names of dense groups to pull.
            skip: pushes an empty step if ``push`` is None.
            known: of each of ``wanted`` what is known of rows that are kept here; empty if none
                are.

        Returns:
            Its ``wait`` returns an ``Answer``, or None if nothing was asked for.

        Raises:
            GradientError: gradients are not finite; see :class:`NanPolicy`.
            RolledBack: see there.
            RuntimeError: the batch of a tracked loop was pushed already.
        """
        self._session.servers.require_own_process()
        if push is not None and self._given.pushed == self._session.rollbacks:
            raise self._given.pushed_twice()
        if push is not None or skip:
            self._membership.join()
        gone: StepPush | None = None
        with self._account.timed("sending"):
            if push is not None or skip:
                gone = self._whole(push)
                if self._given:
                    gone.batches = self._given.take(self._session.rollbacks)
            number, asked = self._session.send(gone, wanted, dense, known)
        if gone is not None:
            self._session.worker.progress.count()

        def finish(timeout: float | None) -> Answer | None:
            answer = None
            try:
                with self._account.timed("waiting"):
                    if asked is not None:
                        joined = self._session.wait_for(asked, timeout)
                        answer = self._account.counted(asked, joined)
                    elif number >= 0:
                        self._session.wait_until_safe(number, timeout)
            finally:
                self._session.keep(number)
            if gone is not None:  # a version that is due now has this push
                self._pushed()
            return answer

        return Exchanging(finish)

    def send_aside(self, wanted: Sequence[TableIds], known: Sequence[KnownRows]) -> PendingPull:
        """Pulls rows of later batches, beside a step; arguments as of :meth:`send`."""
        with self._account.timed("sending"):
            _, asked = self._session.send(None, wanted, (), known, is_aside=True)
        assert asked is not None
        return asked

    def wait_aside(self, asked: PendingPull) -> Answer:
        """Waits for the answer to :meth:`send_aside`."""
        with self._account.timed("waiting"):
            return self._account.counted(asked, self._session.wait_for(asked, None))

    def _whole(self, push: Step | None) -> StepPush:
        if push is None:
            return StepPush(PushKind.SKIP)
        dense = {}
        for name, grads in push.dense.items():
            group = self._declared.dense[name]
            flat = [None if g is None else to_host(g.detach()).reshape(-1) for g in grads]
            dense[name] = WholeDense(group.spec, flat, group.hyper())
        tables: list[RowGradients] = []
        whole = StepPush(PushKind.UPDATE, tables, dense)
        is_good = all(is_finite(each.grad) for each in push.rows)
        if not (self._session.packer.gather(whole, self._session.view) and is_good):
            if self.nans is NanPolicy.RAISE:
                raise errors.GradientError(f"the gradient of {_not_finite(push)} is not finite")
            self.bad_steps += 1
            if self.nans is NanPolicy.SKIP:
                return StepPush(PushKind.SKIP)
        for each in push.rows:
            own = [self._declared.tables[name] for name in each.ids.tables]
            hyper = tuple([table.hyper for table in own])
            tables.append(RowGradients(own[0].spec, each.ids, _corrected(own, each), hyper))
        return whole


def _corrected(tables: Sequence[Table], gradient: StepGradient) -> Tensor:
    """Gradients with what packing has left out of those before."""
    if tables[0].feedback is None:
        return gradient.grad
    ids, sizes = gradient.ids.ids, gradient.ids.sizes
    parts = zip(
        tables, ids.split_with_sizes(sizes), gradient.grad.split_with_sizes(sizes), strict=True
    )
    return torch.cat([t.feedback.corrected(own, g) for t, own, g in parts if t.feedback])


def _not_finite(push: Step) -> str:
    """The table or dense group with a gradient that is not finite; empty if there is none."""
    for each in push.rows:
        parts = each.grad.split_with_sizes(each.ids.sizes)
        for name, grad in zip(each.ids.tables, parts, strict=True):
            if not is_finite(grad):
                return f"table {name!r}"
    for name, grads in push.dense.items():
        for place, slope in enumerate(grads):
            if slope is not None and not is_finite(slope):
                return f"parameter {place} of {name!r}"
    return ""
