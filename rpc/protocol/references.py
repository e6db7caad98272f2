"""Decides how long a referenced value lives: the RRef ownership protocol. Sans-IO.

One :class:`ReferenceTable` per life of a worker. Its methods are events; they
return effects, which the agent performs after it let go of its lock, in order.
It owns no values, handles, locks or messages in flight, and never waits. The
owner's half is in ``owned_values``, the user's in ``user_handles``; here are
the events that may concern both.

The idea
    A value has one *owner* and any number of *forks*, each held by one *user*.
    The owner frees the value when it knows of no fork and has no local handle.
    So a fork has to be known to the owner before whatever kept the value alive
    until then goes away: the parent of a fork keeps its own until it hears
    ACCEPTED. The transport delivers each message once, in any order, or
    reports the receiver lost; any worker may be lost at any moment.

How a reference travels (``control.Passage``)
    CREATION  remote(): the request brings the creator's fork. The creator's
              handle is usable at once and confirmed by the reply.
    GRANT     owner to user: the owner notes the fork first. Nothing else to do.
    CHILD     user A to user B: A holds. B sends REGISTER to the owner, which
              answers REGISTERED; B is confirmed and sends ACCEPTED to A.
    RETURN    user A to the owner in a reply: A holds; the owner takes a local
              reference and sends ACCEPTED.
    BORROW    user A to the owner in a request: A holds until the call is over,
              which is when its reply (late or not) came or the owner is lost. No
              messages. Of the one that the request is made through (``to_here``,
              a method) the owner makes no handle, but looks the value up.
    LOOPBACK  owner to itself: a local reference travels along.

    A handle that was dropped sends DELETE once nothing is held for its sake and
    no REGISTER of it is under way. So REGISTER and BORROW are never overtaken
    by their DELETE, and owners need no tombstones for them.

What overtakes a creation
    REGISTER, RETURN, BORROW and DELETE may reach the owner before the
    ``remote()`` request. Then the owner keeps a *placeholder* until the request
    comes; a DELETE noted in it is the tombstone. Whether the request is still
    to come cannot be told from who is alive: a value may come, lose its users
    and be freed while a REGISTER from a grandchild is under way. Therefore
    creations are numbered per creator and owner, and the owner remembers which
    numbers came. If the number came, or its creator is lost, the value is gone:
    a REGISTER is answered REJECTED, a handle that arrives is stale. The creator
    answers for each number: a request that could not leave is replaced by
    ABANDONED, which counts as a creation that failed.

When a worker is lost
    As owner: its forks and holds go; placeholders for its creations fail. As
    user: handles it owned fail, and the parents of those that were registering are
    told, for they may not have lost it. Forks whose chain of parents broke before they
    registered may find their value gone; their handles then fail with a reason.

What the agent promises
    - Each event once per cause; messages of lost lives are dropped before they
      get here; every entry of a message's table goes to :meth:`receive`, even
      if nobody wants it, and is then dropped like any other.
    - A send effect goes to that *life*: kept until the worker is known under
      that incarnation, discarded if it is lost. A worker that cannot be reached
      or was replaced is reported with :meth:`worker_lost`.
    - ``FreeValue`` may name a value that is still being computed, or for which
      there is only a waiter: discard the result, fail the waiter. It is final.

DELETE is not acknowledged. A shutting-down worker knows that its own have left
when it performed the effects of :meth:`release_all_users` and ``num_user_rrefs``
is 0; that they arrived is seen at the owners, whose ``num_forks`` falls to 0.
"""

from __future__ import annotations

from rpc.ids import GlobalId, Life, new_tuple
from rpc.protocol.owned_values import OwnedValues
from rpc.protocol.reference_state import ForkState, Hold, User, is_pending
from rpc.protocol.reference_terms import (
    Carrier,
    Counts,
    Effect,
    Failure,
    Handle,
    HandleConfirmed,
    OwnerHandle,
    UserHandle,
)
from rpc.protocol.user_handles import DROPPED, UserHandles
from rpc.wire.control import (
    Abandoned,
    Accepted,
    ControlMessage,
    Delete,
    Passage,
    Passed,
    Register,
    Registered,
    Rejected,
)


class ReferenceTable(OwnedValues, UserHandles):
    """All references that one life of a worker owns or uses.

    Args:
        worker_id: this worker's id.
        incarnation: which life of it.
    """

    # --- Passing references on

    def share(self, handle: Handle, to: Life, carrier: Carrier) -> Passed | Failure:
        """Prepares ``handle`` to travel to ``to``, or says why it cannot be used.

        If the message does not leave, :meth:`not_sent` must follow.
        """
        if isinstance(handle, OwnerHandle):
            return self._share_owned(handle, to)
        user = self._users.get(handle.fork)
        if user is None:
            return DROPPED
        if user.failure is not None:
            return user.failure
        if to != handle.reference.owner:
            passage = Passage.CHILD
        elif carrier is Carrier.REPLY:
            passage = Passage.RETURN
        else:
            passage = Passage.BORROW
        fork: GlobalId = new_tuple(GlobalId, (*self._life, self._next_counter))
        self._next_counter += 1
        self._holds[fork] = new_tuple(Hold, (handle.fork, to, passage))
        user.held_for.add(fork)
        passed: Passed = new_tuple(Passed, (handle.reference, fork, passage))
        return passed

    def not_sent(self, passed: Passed, reason: str) -> list[Effect]:
        """Takes back ``passed``, as the message that was to carry them did not leave.

        A creation's number is used up: the owner hears that it will not come.
        """
        if passed.passage is Passage.CREATION:
            abandoned = Abandoned(passed.reference, passed.fork, reason)
            sent = self._send(passed.reference.owner, abandoned)
            return sent + self.creation_failed(passed.fork, reason)
        if passed.passage is Passage.GRANT:
            return self._remove_fork(passed.reference.rref, passed.fork)
        if passed.passage is Passage.LOOPBACK:
            return self._remove_local_reference(passed.reference.rref)
        return self.borrow_ended(passed.fork)

    def receive(self, passed: Passed) -> tuple[Handle, list[Effect]]:
        """Takes a reference that came in a message, as anything but a CREATION.

        Returns:
            What the new handle stands for, and effects. A handle that is never
            given to anybody must be dropped. A user handle may wait for
            ``HandleConfirmed`` or ``HandleFailed``, which may be among the effects.
        """
        if passed.reference.owner == self._life:
            return self._receive_owned(passed)
        handle = UserHandle(passed.reference, passed.fork)
        if passed.passage is Passage.GRANT:
            self._users[passed.fork] = User(handle, ForkState.CONFIRMED)
            return handle, [HandleConfirmed(passed.fork)]
        owner = passed.reference.owner
        if passed.passage is not Passage.CHILD or self._is_lost(owner):
            reason = f"{owner}, which owned the value, is gone"
            return handle, self._receive_gone(handle, passed, reason)
        self._users[passed.fork] = User(handle, ForkState.REGISTERING)
        return handle, self._send(owner, Register(passed.reference, passed.fork))

    def _receive_owned(self, passed: Passed) -> tuple[Handle, list[Effect]]:
        handle = OwnerHandle(passed.reference)
        if passed.passage is Passage.LOOPBACK:
            return handle, []
        entry = self._entry_for(passed.reference)
        if isinstance(entry, str):
            stale = UserHandle(passed.reference, passed.fork)
            return stale, self._receive_gone(stale, passed, entry)
        entry.local_references += 1
        return handle, self._accept(passed)

    def dropped(self, handle: Handle) -> list[Effect]:
        """Notes that nobody has ``handle`` any more; exactly once per handle."""
        if isinstance(handle, OwnerHandle):
            return self._remove_local_reference(handle.reference.rref)
        user = self._users.get(handle.fork)
        if user is None:
            return []
        user.dropped = True
        return self._settle(user)

    # --- What arrives

    def message_arrived(self, sender: Life, message: ControlMessage) -> list[Effect]:
        """Handles a control message; of those that are not about references, nothing comes."""
        match message:
            case Register():
                return self._on_register(sender, message)
            case Registered():
                return self._on_registered(message)
            case Rejected():
                return self._on_rejected(message)
            case Accepted():
                return self.borrow_ended(message.fork)
            case Delete():
                return self._on_delete(sender, message)
            case Abandoned():
                return self._on_abandoned(sender, message)
            case _:
                return []

    # --- Who comes and goes

    def worker_joined(self, life: Life) -> list[Effect]:
        """Ends the earlier lives of a worker, as ``life`` is a member now."""
        before = Life(life.worker, life.incarnation - 1)
        return self.worker_lost(before, f"it was replaced by incarnation {life.incarnation}")

    def worker_lost(self, life: Life, reason: str) -> list[Effect]:
        """Ends ``life`` and all before it. Nothing of theirs may arrive afterwards."""
        if self._is_lost(life):
            return []
        self._lost[life.worker] = life.incarnation
        return self._end_what_is_lost(reason)

    def expelled(self, reason: str) -> list[Effect]:
        """Ends every life but this worker's own, as the others declared it lost.

        Also those that it knows from references only, and of whose end nobody will tell it.
        """
        self._is_expelled = True
        return self._end_what_is_lost(reason)

    def _end_what_is_lost(self, reason: str) -> list[Effect]:
        self._creations_made = self._without_lost(self._creations_made)
        self._creations_seen = self._without_lost(self._creations_seen)
        effects: list[Effect] = []
        for rref in list(self._entries):
            effects += self._entry_lost_worker(rref, reason)
        for user in list(self._users.values()):
            if user.state is not ForkState.GONE and self._is_lost(user.handle.reference.owner):
                effects += self._user_lost_owner(user, reason)
        for token, hold in list(self._holds.items()):
            if self._is_lost(hold.to):
                effects += self.borrow_ended(token)
        return effects

    # --- What there is

    def counts(self) -> Counts:
        """Counts everything; takes time in proportion."""
        known = [user for user in self._users.values() if user.state is not ForkState.GONE]
        borrows = sum(hold.passage is Passage.BORROW for hold in self._holds.values())
        return Counts(
            num_user_rrefs=len(known),
            num_owner_rrefs=len(self._entries),
            num_pending_users=sum(map(is_pending, known)),
            num_forks=sum(len(entry.forks) for entry in self._entries.values()),
            num_pending_children=len(self._holds) - borrows,
            num_borrows=borrows,
        )
