"""The owner's half of the reference protocol: values of this worker, who uses them. Sans-IO.

Events of ``references`` that concern only this half are here; that module tells the protocol.
"""

from __future__ import annotations

from rpc.ids import GlobalId, Life, Reference
from rpc.protocol.reference_lives import Lives
from rpc.protocol.reference_state import ValueEntry
from rpc.protocol.reference_terms import (
    Effect,
    FailValue,
    FreeValue,
    Leak,
    OwnerHandle,
)
from rpc.wire.control import (
    Abandoned,
    Delete,
    DuplicateFilter,
    Passage,
    Passed,
    Register,
    Registered,
    Rejected,
)


class OwnedValues(Lives):
    """The values of one life of a worker, and the forks by which others use them.

    Args:
        worker_id: this worker's id.
        incarnation: which life of it.
    """

    def __init__(self, worker_id: int, incarnation: int) -> None:
        super().__init__(worker_id, incarnation)
        self._entries: dict[GlobalId, ValueEntry] = {}  # by RRef
        self._creations_seen: dict[Life, DuplicateFilter] = {}  # by creator

    def create_here(self) -> OwnerHandle:
        """Keeps a place for the value of a ``remote()`` to this worker itself."""
        handle = self.new_value()
        self._entries[handle.reference.rref] = ValueEntry(local_references=1)
        return handle

    def new_value(self) -> OwnerHandle:
        """Makes an id for ``RRef(value)``; nothing is kept until it is first shared."""
        return OwnerHandle(Reference(self._new_id(), self._life, 0))

    def look_up(self, reference: Reference) -> str | None:
        """Looks up a value that a request is made through; it may be a placeholder.

        The request's caller holds its fork until the reply, so no handle is needed here.

        Returns:
            Why it is neither; None if it is.
        """
        entry = self._entry_for(reference)
        return entry if isinstance(entry, str) else None

    def _share_owned(self, handle: OwnerHandle, to: Life) -> Passed:
        """Shares a value of this worker; one without an entry was never shared before."""
        rref = handle.reference.rref
        entry = self._entries.setdefault(rref, ValueEntry(local_references=1))
        fork = self._new_id()
        if to == self._life:
            entry.local_references += 1
            return Passed(handle.reference, fork, Passage.LOOPBACK)
        entry.forks[fork] = to
        return Passed(handle.reference, fork, Passage.GRANT)

    # --- What arrives

    def creation_arrived(self, passed: Passed, sender: Life) -> list[Effect]:
        """Takes the request of a ``remote()``, before its function is run.

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

    def _on_register(self, sender: Life, message: Register) -> list[Effect]:
        if self._is_lost(sender):
            return []
        entry = self._entry_for(message.reference)
        if isinstance(entry, str):
            return self._send(sender, Rejected(message.fork, entry))
        entry.forks[message.fork] = sender
        return self._send(sender, Registered(message.fork))

    def _on_delete(self, sender: Life, message: Delete) -> list[Effect]:
        """Removes a fork; one that is unknown while a creation is awaited is the creation's own."""
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

    # --- Who goes

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

    # --- What there is

    def is_kept(self, rref: GlobalId) -> bool:
        """True while this worker has to keep the value of ``rref``, or a place for it."""
        return rref in self._entries

    def leaks(self) -> list[Leak]:
        """Values that users still hold; after everyone released theirs, each is a leak."""
        return [
            Leak(rref, tuple(sorted(set(entry.forks.values()))))
            for rref, entry in self._entries.items()
            if entry.forks
        ]

    # --- Shared by the above

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
