"""The user's half of the reference protocol: this worker's handles to others' values. Sans-IO.

Events of ``references`` that concern only this half are here; that module tells the protocol.
"""

from __future__ import annotations

from collections.abc import Iterable

from rpc.ids import GlobalId, Life, Reference, new_tuple
from rpc.protocol.reference_lives import Lives
from rpc.protocol.reference_state import ForkState, Hold, User
from rpc.protocol.reference_terms import (
    Effect,
    Failure,
    FailureKind,
    Handle,
    HandleConfirmed,
    HandleFailed,
    OwnerHandle,
    UserHandle,
)
from rpc.wire.control import (
    Accepted,
    Delete,
    Passage,
    Passed,
    Registered,
    Rejected,
)

DROPPED = Failure(FailureKind.DELETED, "the handle was dropped")


class UserHandles(Lives):
    """The handles of one life of a worker, and why it must keep them for others.

    Args:
        worker_id: this worker's id.
        incarnation: which life of it.
    """

    def __init__(self, worker_id: int, incarnation: int) -> None:
        super().__init__(worker_id, incarnation)
        self._users: dict[GlobalId, User] = {}  # by fork
        self._holds: dict[GlobalId, Hold] = {}  # by the fork or token that was passed
        self._creations_made: dict[Life, int] = {}  # by owner

    def create_remote(self, owner: Life) -> tuple[UserHandle, Passed]:
        """Makes the handle of a ``remote()`` to another worker.

        Returns:
            The handle, usable at once, and what its request must carry.
        """
        creation = self._creations_made.get(owner, 0)
        self._creations_made[owner] = creation + 1
        reference: Reference = new_tuple(Reference, (self._new_id(), owner, creation))
        fork = self._new_id()
        handle: UserHandle = new_tuple(UserHandle, (reference, fork))
        self._users[fork] = User(handle, ForkState.CREATING)
        return handle, new_tuple(Passed, (reference, fork, Passage.CREATION))

    def creation_confirmed(self, fork: GlobalId) -> list[Effect]:
        """Takes the reply of ``remote()``. Ignored if it was given up before."""
        user = self._users.get(fork)
        if user is None or user.failure is not None:
            return []
        user.state = ForkState.CONFIRMED
        return [HandleConfirmed(fork)]

    def creation_failed(self, fork: GlobalId, reason: str) -> list[Effect]:
        """Takes the failure of a ``remote()`` whose request was sent.

        The owner may still get to run it: the fork is deleted there.
        """
        user = self._users.get(fork)
        if user is None:
            return []
        failed = self._fail(user, FailureKind.CREATION, f"RRef creation failed: {reason}")
        return failed + self._settle(user)

    def failure(self, handle: Handle) -> Failure | None:
        """Returns why ``handle`` must not be used; None if it may."""
        if isinstance(handle, OwnerHandle):
            return None
        user = self._users.get(handle.fork)
        if user is None:
            return DROPPED
        return user.failure

    def borrow_ended(self, fork: GlobalId) -> list[Effect]:
        """Ends the borrowing of a reference as ``fork``: the reply of its call came, if late."""
        hold = self._holds.pop(fork, None)
        if hold is None:
            return []
        user = self._users[hold.user]
        user.held_for.discard(fork)
        is_kept = not user.dropped and user.failure is None
        return [] if is_kept else self._settle(user)

    # --- What arrives

    def _receive_gone(self, handle: UserHandle, passed: Passed, reason: str) -> list[Effect]:
        user = User(handle, ForkState.GONE)
        self._users[handle.fork] = user
        return self._fail(user, FailureKind.STALE, reason) + self._accept(passed)

    def _accept(self, passed: Passed) -> list[Effect]:
        if passed.passage in (Passage.CHILD, Passage.RETURN):
            return self._tell_parent(passed.fork)
        return []

    def _tell_parent(self, fork: GlobalId) -> list[Effect]:
        """Tells a fork's parent that it is known; a worker needs no message to tell itself."""
        if fork.life == self._life:
            return self.borrow_ended(fork)
        return self._send(fork.life, Accepted(fork))

    def _on_registered(self, message: Registered) -> list[Effect]:
        user = self._users.get(message.fork)
        if user is None or user.state is not ForkState.REGISTERING:
            return []
        user.state = ForkState.CONFIRMED
        accepted = self._tell_parent(message.fork)
        return [HandleConfirmed(message.fork), *accepted, *self._settle(user)]

    def _on_rejected(self, message: Rejected) -> list[Effect]:
        user = self._users.get(message.fork)
        if user is None or user.state is not ForkState.REGISTERING:
            return []
        failed = self._fail(user, FailureKind.STALE, message.reason)
        accepted = self._tell_parent(message.fork)
        return failed + accepted + self._gone(user)

    # --- Who goes

    def _user_lost_owner(self, user: User, reason: str) -> list[Effect]:
        """Tells the parent of a fork that never registered, which may still reach the owner."""
        failed = self._fail(user, FailureKind.OWNER_LOST, reason)
        fork = user.handle.fork
        accepts = user.state is ForkState.REGISTERING
        accepted = self._tell_parent(fork) if accepts else []
        return failed + accepted + self._gone(user)

    def release_all_users(self) -> list[Effect]:
        """Drops every user handle, as a shutdown does, though somebody may have it.

        Handles that wait for an answer, or are held for others, follow when they can.
        """
        effects: list[Effect] = []
        for user in list(self._users.values()):
            effects += self._fail(user, FailureKind.DELETED, "this worker shut down")
            effects += self._settle(user)
        return effects

    # --- What there is

    def is_confirmed(self, fork: GlobalId) -> bool:
        """True if the owner is known to know ``fork``."""
        user = self._users.get(fork)
        return user is not None and user.state is ForkState.CONFIRMED

    def users(self) -> list[tuple[UserHandle, str]]:
        """The handles of this worker to others' values, and how far each got; for dumps."""
        return [(user.handle, user.state.name.lower()) for user in self._users.values()]

    # --- Shared by the above

    def _fail(self, user: User, kind: FailureKind, reason: str) -> list[Effect]:
        """Fails a handle, unless it has failed before: it keeps the first failure."""
        if user.failure is not None:
            return []
        user.failure = Failure(kind, reason)
        return [HandleFailed(user.handle.fork, user.failure)]

    def _settle(self, user: User) -> list[Effect]:
        """Deletes a fork that nobody can use any more, and forgets a dropped handle."""
        usable = not user.dropped and user.failure is None
        if user.state is ForkState.GONE:
            self._forget_if_dropped(user)
            return []
        if usable or user.held_for or user.state is ForkState.REGISTERING:
            return []
        reference, fork = user.handle.reference, user.handle.fork
        return self._send(reference.owner, Delete(reference, fork)) + self._gone(user)

    def _gone(self, user: User) -> list[Effect]:
        """Lets go of all that was held for a fork which the owner does not know any more."""
        user.state = ForkState.GONE
        self._drop_holds(user.held_for)
        user.held_for.clear()
        self._forget_if_dropped(user)
        return []

    def _drop_holds(self, tokens: Iterable[GlobalId]) -> None:
        for token in tokens:
            del self._holds[token]

    def _forget_if_dropped(self, user: User) -> None:
        if user.dropped:
            self._users.pop(user.handle.fork, None)
