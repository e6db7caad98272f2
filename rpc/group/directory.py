"""Finds the worker that a name, an id or a ``WorkerInfo`` means, which may be yet to join.

In a static group everybody is known. In a dynamic one, a worker of a name that was never a
member may join at any time, and is waited for.
"""

from __future__ import annotations

from typing import SupportsFloat, TypeGuard

from rpc.constants import UNSET_RPC_TIMEOUT
from rpc.group.members import Group
from rpc.group.membership import Membership, error_of
from rpc.runtime.deadlines import Timeouts
from rpc.worker_info import WorkerInfo, may_exist

Destination = WorkerInfo | str | int
"""A worker as users name it."""


class Directory:
    """The workers that one worker can call.

    Args:
        group: those that it knows.
        timeouts: how long one that is yet to join is waited for.

    Attributes:
        membership: learns who joins; None in a static group.
    """

    def __init__(self, group: Group, timeouts: Timeouts) -> None:
        self._group = group
        self._timeouts = timeouts
        self.membership: Membership | None = None

    def find(self, to: Destination, timeout: SupportsFloat = UNSET_RPC_TIMEOUT) -> WorkerInfo:
        """The worker meant, waited for if it has not joined yet.

        Raises:
            UnknownWorkerError: there is no such worker.
            WorkerLostError: it is gone.
            AgentClosedError: this worker left the group meanwhile.
        """
        membership = self.membership_of(to)
        if membership is not None:
            membership.wait_for(to, self._timeouts.of(timeout))  # type: ignore[arg-type]
        return self._group.find(to)

    def find_now(self, to: Destination) -> WorkerInfo:
        """Finds a worker without waiting; a ``WorkerInfo`` is looked up by its name."""
        membership = self.membership_of(to)
        if membership is not None:
            membership.refuse_name(to)  # type: ignore[arg-type]
        return self._group.find(to.name if isinstance(to, WorkerInfo) else to)

    def look_up(self, to: str | int) -> WorkerInfo:
        """Finds a worker; asks the store instead of waiting."""
        membership = self.membership_of(to)
        if membership is not None:
            membership.look_again(self._timeouts.of(UNSET_RPC_TIMEOUT))
            membership.refuse(to)
        return self._group.find(to)

    def await_return(self, to: str | int, seconds: float) -> WorkerInfo:
        """Finds a worker, and waits also for one that left or was lost; 0: no limit."""
        membership = self.membership
        if membership is not None and isinstance(to, str | int) and may_exist(to):
            membership.wait_for(to, seconds, for_return=True)
        return self._group.find(to)

    def refuse_departed(self, to: Destination) -> None:
        """Raises if a worker that this one never knew as a member has left or was lost.

        Raises:
            WorkerLostError: it is gone; says how, when and who says so.
        """
        membership = self.membership_of(to)
        departure = membership.departure(to) if membership is not None else None  # type: ignore[arg-type]
        if departure is not None:
            raise error_of(departure)

    def membership_of(self, to: Destination) -> Membership | None:
        """The membership that tells of a worker that may be yet to join; None for any other."""
        return self.membership if self.membership is not None and self._may_join(to) else None

    def _may_join(self, to: Destination) -> TypeGuard[str | int]:
        """True if a worker that was never a member may be meant."""
        return isinstance(to, str | int) and not self._group.knows(to) and may_exist(to)
