"""Decides how long a referenced value lives: the RRef ownership protocol. Sans-IO.

One :class:`ReferenceTable` per life of a worker. Its methods are events; they
return effects, which the agent performs after it let go of its lock, in order.
It owns no values, handles, locks or messages in flight, and never waits.

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

from collections.abc import Iterable
from typing import TypeVar

from rpc.ids import GlobalId, Life, Reference, new_tuple
from rpc.protocol.reference_state import ForkState, Hold, User, ValueEntry, is_pending
from rpc.protocol.reference_terms import (
    Carrier,
    Counts,
    Effect,
    Failure,
    FailureKind,
    FailValue,
    FreeValue,
    Handle,
    HandleConfirmed,
    HandleFailed,
    Leak,
    OwnerHandle,
    Send,
    UserHandle,
)
from rpc.wire.control import (
    Abandoned,
    Accepted,
    ControlMessage,
    Delete,
    DuplicateFilter,
    Passage,
    Passed,
    Register,
    Registered,
    Rejected,
)

_V = TypeVar("_V")

_DROPPED = Failure(FailureKind.DELETED, "the handle was dropped")


class ReferenceTable:
    """All references that one life of a worker owns or uses.

    Args:
        worker_id: this worker's id.
        incarnation: which life of it.
    """

    def __init__(self, worker_id: int, incarnation: int) -> None:
        self._life = Life(worker_id, incarnation)
        self._next_counter = 0
        self._lost: dict[int, int] = {}  # worker: its highest incarnation known to be over
        self._users: dict[GlobalId, User] = {}  # by fork
        self._holds: dict[GlobalId, Hold] = {}  # by the fork or token that was passed
        self._entries: dict[GlobalId, ValueEntry] = {}  # by RRef
        self._creations_made: dict[Life, int] = {}  # by owner
        self._creations_seen: dict[Life, DuplicateFilter] = {}  # by creator

    # --- Making references

    def create_here(self) -> OwnerHandle:
        """``remote()`` to this worker itself: the value's place is kept at once."""
        handle = self.new_value()
        self._entries[handle.reference.rref] = ValueEntry(local_references=1)
        return handle

    def new_value(self) -> OwnerHandle:
        """``RRef(value)``: only an id, nothing is kept until it is first shared."""
        return OwnerHandle(Reference(self._new_id(), self._life, 0))

    def create_remote(self, owner: Life) -> tuple[UserHandle, Passed]:
        """``remote()`` to another worker.

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
        """The reply of ``remote()`` came. Ignored if it was given up before."""
        user = self._users.get(fork)
        if user is None or user.failure is not None:
            return []
        user.state = ForkState.CONFIRMED
        return [HandleConfirmed(fork)]

    def creation_failed(self, fork: GlobalId, reason: str) -> list[Effect]:
        """``remote()`` failed or timed out after its request was sent.

        The owner may still get to run it: the fork is deleted there.
        """
        user = self._users.get(fork)
        if user is None:
            return []
        failed = self._fail(user, FailureKind.CREATION, f"RRef creation failed: {reason}")
        return failed + self._settle(user)

    # --- Passing references on

    def failure(self, handle: Handle) -> Failure | None:
        """Returns why ``handle`` must not be used; None if it may."""
        if isinstance(handle, OwnerHandle):
            return None
        user = self._users.get(handle.fork)
        if user is None:
            return _DROPPED
        return user.failure

    def share(self, handle: Handle, to: Life, carrier: Carrier) -> Passed | Failure:
        """Prepares ``handle`` to travel to ``to``, or says why it cannot be used.

        If the message does not leave, :meth:`not_sent` must follow.
        """
        if isinstance(handle, OwnerHandle):
            return self._share_owned(handle, to)
        user = self._users.get(handle.fork)
        if user is None:
            return _DROPPED
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

    def _share_owned(self, handle: OwnerHandle, to: Life) -> Passed:
        """An entry that is missing was never shared: a handle counts as a local reference."""
        rref = handle.reference.rref
        entry = self._entries.setdefault(rref, ValueEntry(local_references=1))
        fork = self._new_id()
        if to == self._life:
            entry.local_references += 1
            return Passed(handle.reference, fork, Passage.LOOPBACK)
        entry.forks[fork] = to
        return Passed(handle.reference, fork, Passage.GRANT)

    def not_sent(self, passed: Passed, reason: str) -> list[Effect]:
        """The message that was to carry ``passed`` did not leave.

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

    def borrow_ended(self, fork: GlobalId) -> list[Effect]:
        """The call that borrowed a reference as ``fork`` is over: its reply came, if late."""
        hold = self._holds.pop(fork, None)
        if hold is None:
            return []
        user = self._users[hold.user]
        user.held_for.discard(fork)
        is_kept = not user.dropped and user.failure is None
        return [] if is_kept else self._settle(user)

    def receive(self, passed: Passed) -> tuple[Handle, list[Effect]]:
        """A reference came in a message, as anything but a CREATION.

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

    def look_up(self, reference: Reference) -> str | None:
        """Looks up a value that a request is made through; it may be a placeholder.

        The request's caller holds its fork until the reply, so no handle is needed here.

        Returns:
            Why it is neither; None if it is.
        """
        found = self._entry_for(reference)
        return found if isinstance(found, str) else None

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

    def _receive_gone(self, handle: UserHandle, passed: Passed, reason: str) -> list[Effect]:
        user = User(handle, ForkState.GONE)
        self._users[handle.fork] = user
        return self._fail(user, FailureKind.STALE, reason) + self._accept(passed)

    def _accept(self, passed: Passed) -> list[Effect]:
        if passed.passage in (Passage.CHILD, Passage.RETURN):
            return self._tell_parent(passed.fork)
        return []

    def _tell_parent(self, fork: GlobalId) -> list[Effect]:
        """A worker that passed a reference to itself needs no message to hear of it."""
        if fork.life == self._life:
            return self.borrow_ended(fork)
        return self._send(fork.life, Accepted(fork))

    def dropped(self, handle: Handle) -> list[Effect]:
        """Nobody has ``handle`` any more; exactly once per handle."""
        if isinstance(handle, OwnerHandle):
            return self._remove_local_reference(handle.reference.rref)
        user = self._users.get(handle.fork)
        if user is None:
            return []
        user.dropped = True
        return self._settle(user)

    # --- What arrives

    def creation_arrived(self, passed: Passed, sender: Life) -> list[Effect]:
        """The request of a ``remote()`` is here; comes before its function is run.

        ``FreeValue`` among the effects says that its result is not wanted any more.
        """
        reference = passed.reference
        if self._is_lost(sender) or not self._seen(reference.rref.life).accept(reference.creation):
            return []
        entry = self._entries.setdefault(reference.rref, ValueEntry())
        entry.awaits_creation = False
        if passed.fork not in entry.deleted_early:
            entry.forks[passed.fork] = sender
        return self._free_if_unused(reference.rref)

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

    def _on_register(self, sender: Life, message: Register) -> list[Effect]:
        if self._is_lost(sender):
            return []
        entry = self._entry_for(message.reference)
        if isinstance(entry, str):
            return self._send(sender, Rejected(message.fork, entry))
        entry.forks[message.fork] = sender
        return self._send(sender, Registered(message.fork))

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

    def _on_delete(self, sender: Life, message: Delete) -> list[Effect]:
        """While a creation is awaited, the only fork it can be unknown for is its own."""
        entry = None if self._is_lost(sender) else self._entry_for(message.reference)
        if entry is None or isinstance(entry, str):
            return []
        if entry.awaits_creation and message.fork not in entry.forks:
            entry.deleted_early |= {message.fork}
        return self._remove_fork(message.reference.rref, message.fork)

    def _on_abandoned(self, sender: Life, message: Abandoned) -> list[Effect]:
        stand_in = Passed(message.reference, message.fork, Passage.CREATION)
        effects = self.creation_arrived(stand_in, sender)
        rref = message.reference.rref
        if rref in self._entries:
            effects.append(FailValue(rref, f"RRef creation failed: {message.reason}"))
        return effects

    # --- Who comes and goes

    def worker_joined(self, life: Life) -> list[Effect]:
        """``life`` is a member now, so that the earlier ones of that worker are over."""
        before = Life(life.worker, life.incarnation - 1)
        return self.worker_lost(before, f"it was replaced by incarnation {life.incarnation}")

    def worker_lost(self, life: Life, reason: str) -> list[Effect]:
        """``life`` and all before it are over. Nothing of theirs may arrive afterwards."""
        if self._is_lost(life):
            return []
        self._lost[life.worker] = life.incarnation
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

    def _user_lost_owner(self, user: User, reason: str) -> list[Effect]:
        """The parent of a fork that never registered may still reach the owner: it is told."""
        failed = self._fail(user, FailureKind.OWNER_LOST, reason)
        fork = user.handle.fork
        accepts = user.state is ForkState.REGISTERING
        accepted = self._tell_parent(fork) if accepts else []
        return failed + accepted + self._gone(user)

    def _entry_lost_worker(self, rref: GlobalId, reason: str) -> list[Effect]:
        entry = self._entries[rref]
        entry.forks = {fork: user for fork, user in entry.forks.items() if not self._is_lost(user)}
        failed = entry.awaits_creation and self._is_lost(rref.life)
        if failed:
            entry.awaits_creation = False
        freed = self._free_if_unused(rref)
        if failed and not freed:
            why = f"RRef creation failed: {rref.life} was lost before its request came: {reason}"
            return [FailValue(rref, why)]
        return freed

    def release_all_users(self) -> list[Effect]:
        """Shutdown: every user handle is as good as dropped, though somebody may have it.

        Handles that wait for an answer, or are held for others, follow when they can.
        """
        effects: list[Effect] = []
        for user in list(self._users.values()):
            effects += self._fail(user, FailureKind.DELETED, "this worker shut down")
            effects += self._settle(user)
        return effects

    # --- What there is

    def is_kept(self, rref: GlobalId) -> bool:
        """True while this worker has to keep the value of ``rref``, or a place for it."""
        return rref in self._entries

    def is_confirmed(self, fork: GlobalId) -> bool:
        """True if the owner is known to know ``fork``."""
        user = self._users.get(fork)
        return user is not None and user.state is ForkState.CONFIRMED

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

    def leaks(self) -> list[Leak]:
        """Values that users still hold; after everyone released theirs, each is a leak."""
        return [
            Leak(rref, tuple(sorted(set(entry.forks.values()))))
            for rref, entry in self._entries.items()
            if entry.forks
        ]

    def users(self) -> list[tuple[UserHandle, str]]:
        """The handles of this worker to others' values, and how far each got; for dumps."""
        return [(user.handle, user.state.name.lower()) for user in self._users.values()]

    # --- Shared by the above

    def _new_id(self) -> GlobalId:
        counter = self._next_counter
        self._next_counter += 1
        return new_tuple(GlobalId, (*self._life, counter))

    def _is_lost(self, life: Life) -> bool:
        return life.incarnation <= self._lost.get(life.worker, -1)

    def _without_lost(self, by_life: dict[Life, _V]) -> dict[Life, _V]:
        return {life: value for life, value in by_life.items() if not self._is_lost(life)}

    def _send(self, to: Life, message: ControlMessage) -> list[Effect]:
        return [] if self._is_lost(to) else [Send(to, message)]

    def _seen(self, creator: Life) -> DuplicateFilter:
        return self._creations_seen.setdefault(creator, DuplicateFilter())

    def _entry_for(self, reference: Reference) -> ValueEntry | str:
        """The entry of a value said to be here, a placeholder, or why there is neither."""
        creator = reference.rref.life
        if reference.owner != self._life:
            return f"{reference.owner}, which owned the value, was replaced by {self._life}"
        entry = self._entries.get(reference.rref)
        if entry is not None:
            return entry
        if self._is_lost(creator):
            return f"{creator}, which created it, was lost, and nobody else kept it alive"
        if creator == self._life or reference.creation in self._seen(creator):
            return "its value was freed, because workers that kept it alive were lost"
        placeholder = ValueEntry(awaits_creation=True)
        self._entries[reference.rref] = placeholder
        return placeholder

    def _free_if_unused(self, rref: GlobalId) -> list[Effect]:
        entry = self._entries[rref]
        if entry.awaits_creation or entry.forks or entry.local_references:
            return []
        del self._entries[rref]
        return [FreeValue(rref)]

    def _remove_fork(self, rref: GlobalId, fork: GlobalId) -> list[Effect]:
        entry = self._entries.get(rref)
        if entry is None or entry.forks.pop(fork, None) is None:
            return []
        return self._free_if_unused(rref)

    def _remove_local_reference(self, rref: GlobalId) -> list[Effect]:
        entry = self._entries.get(rref)
        if entry is None:
            return []
        entry.local_references -= 1
        return self._free_if_unused(rref)

    def _fail(self, user: User, kind: FailureKind, reason: str) -> list[Effect]:
        """The first failure of a handle is the one it keeps."""
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
        """The owner does not know the fork any more: nothing needs to be held for it."""
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
