"""The reference table of one worker, its lock and values, and the effects of what it decides.

Decisions are made under the lock; messages are sent, values freed and waiters told after it was
let go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from rpc.errors import RRefCreationError, RRefDeletedError, StaleRRefError
from rpc.ids import GlobalId, Life
from rpc.outcomes.completions import Completions
from rpc.outcomes.slot import Slot
from rpc.protocol.reference_terms import (
    Effect,
    FailValue,
    FreeValue,
    HandleConfirmed,
    HandleFailed,
    Send,
    UserHandle,
)
from rpc.protocol.references import ReferenceTable
from rpc.rrefs.collaborators import SendsControl
from rpc.rrefs.transfer import Countdown


class ReferenceLedger:
    """The references of one worker as it knows them now.

    Args:
        life: its id and incarnation.
        control: tells other workers of references.
        completions: runs what may take long.

    Attributes:
        lock: guards the others, and each call of the table.
        table: decides.
        values: the places of this worker's values.
    """

    def __init__(self, life: Life, control: SendsControl, completions: Completions) -> None:
        self._control = control
        self._completions = completions
        self.lock = threading.Lock()
        self.table = ReferenceTable(life.worker, life.incarnation)
        self.values: dict[GlobalId, Slot] = {}
        self._settling: dict[GlobalId, list[Callable[[], None]]] = {}  # guarded by the lock

    def close(self) -> None:
        """Frees every value, and lets nobody wait any longer."""
        with self.lock:
            values = list(self.values.values())
            self.values.clear()
            settling = [callback for group in self._settling.values() for callback in group]
            self._settling.clear()
        for slot in values:
            slot.fail(RRefDeletedError("the owner of the value shut down"))
        for callback in settling:
            callback()

    def place(self, rref: GlobalId) -> Slot:
        """The place of a value that is kept, made if need be. Needs the lock."""
        slot = self.values.get(rref)
        if slot is None:
            slot = self.values[rref] = Slot()
        return slot

    def slot_of(self, rref: GlobalId) -> Slot | None:
        """The place of a value, if it is here."""
        with self.lock:
            return self.values.get(rref)

    def when_settled(self, handles: Iterable[UserHandle], callback: Callable[[], None]) -> None:
        """Calls ``callback`` once each handle is confirmed or has failed."""
        countdown = Countdown(callback)
        with self.lock:
            for handle in handles:
                if self.is_pending(handle):
                    countdown.add()
                    self._settling.setdefault(handle.fork, []).append(countdown.one_less)
        countdown.one_less()

    def is_pending(self, handle: UserHandle) -> bool:
        """True until a handle is confirmed or has failed. Needs the lock."""
        settled = self.table.is_confirmed(handle.fork) or self.table.failure(handle)
        return not settled

    # --- Effects

    def perform(self, effects: Iterable[Effect]) -> None:
        """Does what the table decided, in order; without the lock."""
        queued = False
        freed: list[Slot] = []
        for effect in effects:
            match effect:
                case Send():
                    self._control.queue(effect.to, effect.message)
                    queued = True
                case FreeValue():
                    self._free(effect.rref, freed)
                case FailValue():
                    self._fail_value(effect.rref, effect.reason)
                case HandleConfirmed() | HandleFailed():
                    self._settled(effect.fork)
        if queued:
            self._control.flush()
        if freed:  # their destructors may make calls, which nobody would deliver here
            self._completions.submit(freed.clear)

    def _free(self, rref: GlobalId, freed: list[Slot]) -> None:
        """Lets go of a value, or adds it to ``freed`` if its end may run code."""
        with self.lock:
            slot = self.values.pop(rref, None)
        if slot is None:
            return
        if not slot.done():
            slot.fail(StaleRRefError(f"the value of {rref} was given up before it was made"))
        elif not slot.runs_no_code():
            freed.append(slot)

    def _fail_value(self, rref: GlobalId, reason: str) -> None:
        with self.lock:
            if not self.table.is_kept(rref):
                return
            slot = self.place(rref)
        slot.fail(RRefCreationError(reason))

    def _settled(self, fork: GlobalId) -> None:
        with self.lock:
            callbacks = self._settling.pop(fork, ())
        for callback in callbacks:
            callback()
