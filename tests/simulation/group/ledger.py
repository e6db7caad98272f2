"""Keeps the truth about a run, and compares every decision with it.

Owns what each fork owes its life to, which values were freed, what was promised
to every call. It sees what happens and what was decided, never how. The rules
that it enforces are in ``rules``, but for shutdowns, which have books of their own.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rpc.errors import UnknownWorkerError, WorkerLostError
from rpc.ids import GlobalId, Life
from rpc.protocol.calls import Ended, Ending
from rpc.protocol.reference_terms import (
    Carrier,
    Failure,
    FailureKind,
    Handle,
    OwnerHandle,
    UserHandle,
)
from rpc.protocol.retry import RequestId, Verdict
from rpc.wire.control import Accepted, ControlMessage, Delete, Passage, Passed, Register
from tests.simulation.group.packets import (
    CallOutcome,
    Job,
    OpenCall,
    Packet,
    SimReply,
    SimRequest,
    passed_in,
)
from tests.simulation.group.rules import Rule, require

if TYPE_CHECKING:
    from tests.simulation.group.steps import Name
    from tests.simulation.group.worker import SimWorker
    from tests.simulation.group.world import World

_GRAIN = 1 / 64
_KEPT_WITHOUT_LIMIT = 3600.0
_ACKNOWLEDGED = (Passage.CHILD, Passage.RETURN)


@dataclass(slots=True)
class _Claim:
    """The state of one fork, or of one passage of a reference."""

    rref: GlobalId
    owner: Life
    holder: Life
    parent: GlobalId | None
    passage: Passage
    known_to_owner: bool
    gone: bool = False


class Ledger:
    """The truth about one run.

    Args:
        world: what happens.

    Attributes:
        failed: why handles failed, by fork.
        confirmed: forks whose holders know that their owners do.
        batches: the numbers of the batches that came, by receiver and sender.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._claims: dict[GlobalId, _Claim] = {}
        self.failed: dict[GlobalId, Failure] = {}
        self.confirmed: set[GlobalId] = set()
        self._freed: set[GlobalId] = set()
        self._arrived: set[GlobalId] = set()
        self._given_up: set[GlobalId] = set()
        self._released: set[Life] = set()
        self._told: set[tuple[type[ControlMessage], GlobalId]] = set()
        self._creations: Counter[tuple[Life, Life]] = Counter()
        self._passing: Counter[Life] = Counter()
        self._ran: dict[tuple[Life, Life, int], Name] = {}
        self._kept: defaultdict[tuple[Life, Life], set[int]] = defaultdict(set)
        self._kept_until: dict[tuple[Life, Life, int], float] = {}
        self._oldest: Counter[tuple[Life, Life]] = Counter()
        self._early: set[tuple[Life, Life, int]] = set()
        self.batches: defaultdict[tuple[Life, Life], set[int]] = defaultdict(set)

    # --- Members

    def membership_changed(self, worker: SimWorker) -> None:
        """A worker heard of another; it must now say what it was told."""
        group = worker.group
        view = {info.id: group.life(info.id) for info in group.living()}
        require(view == worker.view, Rule.MEMBERS, worker.life, view, worker.view)
        order = [info.id for info in group.living()]
        require(order == sorted(order), Rule.MEMBERS, worker.life, "order", order)
        for record in worker.records.values():
            require(worker.knows(record.to), Rule.CALLS_END, worker.life, "waits", record)
        for life in worker.view.values():
            require(group.lost_error(life.worker) is None, Rule.MEMBERS, life, "lost")
            require(group.has(life), Rule.MEMBERS, worker.life, "refuses", life)

    def loss_reported(self, worker: SimWorker, life: Life, error: WorkerLostError | None) -> None:
        """``worker`` was told that ``life`` is gone."""
        for found in (error, worker.group.lost_error(life.worker)):
            named = found is not None and (found.name, found.incarnation) == (
                f"w{life.worker}",
                life.incarnation,
            )
            require(named, Rule.MEMBERS, worker.life, "lost", life, "and says", found)
        require(not worker.group.has(life), Rule.MEMBERS, worker.life, "listens to", life)
        again = worker.group.lose(life, "twice")
        require(again is None, Rule.MEMBERS, worker.life, "loses twice", life)

    def resolved(self, worker: SimWorker, to: int, found: Life | Exception) -> None:
        """A program named a worker, living, lost or unknown."""
        living = worker.view.get(to)
        if living is not None:
            require(found == living, Rule.RIGHT_LIFE, worker.life, to, "is", found)
        elif to in worker.met or worker.is_expelled:
            name = f"w{worker.life.worker if worker.is_expelled else to}"
            named = isinstance(found, WorkerLostError) and found.name == name
            require(named, Rule.MEMBERS, worker.life, to, "is", found)
        else:
            unknown = isinstance(found, UnknownWorkerError)
            require(unknown, Rule.MEMBERS, worker.life, to, "is", found)

    # --- Calls

    def call_opened(self, worker: SimWorker, record: OpenCall) -> None:
        """A call is outstanding now."""
        self._count_calls(worker)

    def call_withdrawn(self, worker: SimWorker, record: OpenCall, withdrawn: bool) -> None:
        """A request did not leave; ``withdrawn`` unless the call ended before that was known."""
        was_open = record.outcome is None
        require(withdrawn == was_open, Rule.CALLS_END_ONCE, worker.life, record, withdrawn)

    def call_settled(self, worker: SimWorker, record: OpenCall, outcome: CallOutcome) -> None:
        """The program is told how its call ended."""
        first = record.outcome is None
        require(first, Rule.CALLS_END_ONCE, worker.life, record, "ends with", outcome)

    def calls_expired(self, worker: SimWorker, expired: Sequence[Ended[OpenCall]]) -> None:
        """Deadlines passed."""
        now = worker.now
        deadlines: list[float] = []
        for ended in expired:
            record = ended.call
            due = record.deadline is not None and record.deadline <= now
            require(due, Rule.DEADLINES, worker.life, record, "at", now)
            right = ended.ending is Ending.DEADLINE
            require(right, Rule.CALLS_END_ONCE, worker.life, ended)
            deadlines.append(record.deadline or 0.0)
        pairs = itertools.pairwise(deadlines)
        ordered = all(later >= earlier - _GRAIN for earlier, later in pairs)
        require(ordered, Rule.DEADLINES, worker.life, "order", deadlines)

    def time_passed(self, worker: SimWorker) -> None:
        """Nothing that is overdue may be left."""
        for record in worker.records.values():
            overdue = record.deadline is not None and record.deadline + _GRAIN <= worker.now
            over = record.outcome is not None
            require(over or not overdue, Rule.DEADLINES, worker.life, record, "is overdue")
        self._count_calls(worker)
        self._check_running_counts(worker)
        rows = [(r.call_id, r.call, r.to, r.opened_at) for r in worker.calls.outstanding()]
        still = [r for r in worker.records.values() if r.outcome is None]
        expected = [(r.correlation, r, r.to.worker, r.opened_at) for r in still]
        require(rows == expected, Rule.COUNTS, worker.life, rows, expected)

    def _check_running_counts(self, worker: SimWorker) -> None:
        """Checks the counts that a worker reports while there is work."""
        counts = worker.references.counts()
        users = [
            (state, worker.references.failure(handle))
            for handle, state in worker.references.users()
        ]
        known = sum(state != "gone" for state, _ in users)
        creating = sum(state == "creating" and failure is None for state, failure in users)
        pending = creating + sum(state == "registering" for state, _ in users)
        found = (counts.num_user_rrefs, counts.num_pending_users)
        require(found == (known, pending), Rule.COUNTS, worker.life, counts, users)
        if not self._world.losses:
            tables = [record.table for record in worker.records.values()]
            borrows = sum(p.passage is Passage.BORROW for table in tables for p in table)
            passing = (counts.num_pending_children, counts.num_borrows)
            expected = (self._passing[worker.life], borrows)
            require(passing == expected, Rule.COUNTS, worker.life, counts, expected)

    def confirmation_asked(self, worker: SimWorker, fork: GlobalId) -> None:
        """Somebody wants to know whether the owner knows ``fork``."""
        said = worker.references.is_confirmed(fork)
        true = not said or fork in self.confirmed
        require(true, Rule.HANDLES_WORK, worker.life, fork, "is not confirmed")

    def call_lost(self, worker: SimWorker, life: Life, ended: Ended[OpenCall]) -> None:
        """A call, or what a deadline left of it, ended because its worker is lost."""
        record = ended.call
        require(record.to == life, Rule.CALLS_END_ONCE, worker.life, life, "ends", record)
        expected = Ending.LOST if record.outcome is None else Ending.GHOST_LOST
        right = ended.ending is expected and not record.answered
        require(right, Rule.CALLS_END_ONCE, worker.life, ended)

    def reply_taken(
        self, worker: SimWorker, sender: Life, reply: SimReply, ended: Ended[OpenCall] | None
    ) -> None:
        """A reply came; ``ended`` is what the table of calls made of it."""
        record = worker.records.get(reply.answers)
        if record is None or sender.worker != record.to.worker:
            ignored = ended is None
            require(ignored, Rule.CALLS_END_ONCE, worker.life, "takes", sender, reply)
            return
        right = reply.served_by == record.to and reply.for_life == worker.life
        require(right, Rule.RIGHT_LIFE, worker.life, record, reply)
        if record.once is not None:
            ran = self._ran.get((reply.served_by, worker.life, record.once))
            late = reply.ran is None and not (worker.may_try(record.once) and not worker.behind)
            require(late or ran == reply.ran, Rule.RUNS_ONCE, worker.life, record, reply)
        expected = Ending.REPLY if record.outcome is None else Ending.LATE_REPLY
        taken = ended is not None and ended.call is record and ended.ending is expected
        require(taken, Rule.CALLS_END_ONCE, worker.life, record, "got", ended)

    def _count_calls(self, worker: SimWorker) -> None:
        table, records = worker.calls, worker.records.values()
        right = len(table) == len(records)
        require(right, Rule.CALLS_END, worker.life, len(table), "calls, not", len(records))

    # --- Requests

    def request_taken(
        self, worker: SimWorker, packet: Packet, request: SimRequest, job: Job
    ) -> None:
        """A request is about to be served."""
        require(packet.to == worker.life, Rule.RIGHT_LIFE, worker.life, packet)
        early = (worker.life, packet.source, request.correlation) in self._early
        require(job.cancelled == early, Rule.CANCELLED, worker.life, request, early)
        self._early.discard((worker.life, packet.source, request.correlation))
        if request.creates is not None:
            self._arrived.add(request.creates.reference.rref)
        if request.fetches is None:
            return
        (handle,) = job.handles.values()
        parent = self._claims[request.table[0].fork].parent
        certain = not self._world.losses or (parent is not None and self._reaches(parent))
        reached = isinstance(handle, OwnerHandle)
        require(reached or not certain, Rule.HANDLES_WORK, worker.life, "refused", request)

    def cancellations_noted(self, worker: SimWorker, sender: Life, correlations: set[int]) -> None:
        """Requests were cancelled that are not here."""
        self._early |= {(worker.life, sender, number) for number in correlations}

    def call_cancelled(
        self, worker: SimWorker, record: OpenCall, ended: Ended[OpenCall] | None
    ) -> None:
        """A program gave up a call; ``ended`` is what the table of calls made of it."""
        if record.outcome is not None:
            require(ended is None, Rule.CALLS_END_ONCE, worker.life, record, ended)
            return
        right = ended is not None and ended.call is record and ended.ending is Ending.CANCELLED
        require(right, Rule.CALLS_END_ONCE, worker.life, record, ended)

    def admitted(
        self, worker: SimWorker, job: Job, once: RequestId, verdict: Verdict, ran: Name | None
    ) -> None:
        """A request that may come more than once came."""
        key = (worker.life, job.sender, once.number)
        before = self._ran.get(key)
        if verdict is Verdict.RUN:
            require(before is None, Rule.RUNS_ONCE, worker.life, job.sender, once)
            self._ran[key] = job.name
        self._check_outcomes_kept(worker, job, once, verdict)
        if verdict is Verdict.RUN:
            return
        if verdict is Verdict.OVER:
            caller = self._world.living.get(job.sender)
            needed = caller is not None and caller.may_try(once.number) and not caller.behind
            require(not needed, Rule.RUNS_ONCE, worker.life, job.sender, once, "refused")
            return
        same = ran is None if before in worker.jobs else ran == before
        require(same, Rule.RUNS_ONCE, worker.life, job.sender, once, verdict, ran)

    def _check_outcomes_kept(
        self, worker: SimWorker, job: Job, once: RequestId, verdict: Verdict
    ) -> None:
        """Checks that those outcomes are kept that may be asked for or are still to come."""
        now, here = worker.now, (worker.life, job.sender)
        self._oldest[here] = oldest = max(self._oldest[here], once.oldest)

        def is_kept(number: int) -> bool:
            request = (*here, number)
            over = number < oldest or self._kept_until[request] <= now
            return self._ran[request] in worker.jobs or not over or number == once.number

        self._kept[here] = {number for number in self._kept[here] if is_kept(number)}
        if verdict is not Verdict.OVER:
            self._kept[here].add(once.number)
            request = (*here, once.number)
            until = now + (once.seconds or _KEPT_WITHOUT_LIMIT)
            self._kept_until[request] = max(self._kept_until.get(request, 0.0), until)
        callers = [key for key in self._kept if key[0] == worker.life]
        kept = sum(len(self._kept[key]) for key in callers if not worker.fences(key[1]))
        require(len(worker.once) == kept, Rule.COUNTS, worker.life, len(worker.once), kept)

    def waiter_answered(self, worker: SimWorker, name: Name) -> None:
        """A request gets the outcome of its like."""
        require(name in worker.jobs, Rule.RUNS_ONCE, worker.life, "answers", name)

    def served(self, worker: SimWorker, job: Job) -> None:
        """A handler ended, and whoever waited for it was answered."""
        once = job.request.once
        waiting = [
            other
            for other in worker.jobs.values()
            if once is not None and other is not job
            if other.request.once is not None
            and (other.sender, other.request.once.number) == (job.sender, once.number)
        ]
        require(not waiting, Rule.RUNS_ONCE, worker.life, "leaves waiting", waiting)

    def batch_taken(self, worker: SimWorker, sender: Life, sequence: int, fresh: bool) -> None:
        """A batch of control messages came and was, or was not, recognised as new."""
        seen = self.batches[worker.life, sender]
        right = fresh == (sequence not in seen)
        require(right, Rule.DUPLICATES, worker.life, sender, sequence, fresh)
        seen.add(sequence)

    # --- References

    def created(self, worker: SimWorker, passed: Passed) -> None:
        """``remote()`` made a handle."""
        reference = passed.reference
        made = self._creations[worker.life, reference.owner]
        numbered = reference.creation == made
        require(numbered, Rule.COUNTS, worker.life, passed, "is number", made)
        self._creations[worker.life, reference.owner] += 1
        self._claims[passed.fork] = _Claim(
            reference.rref, reference.owner, worker.life, None, Passage.CREATION, True
        )

    def creation_given_up(self, fork: GlobalId) -> None:
        """The call behind ``remote()`` ended without a result."""
        self._given_up.add(fork)

    def shared(
        self,
        worker: SimWorker,
        handle: Handle,
        to: Life,
        carrier: Carrier,
        passed: Passed | Failure,
    ) -> None:
        """A reference was prepared to travel to ``to``."""
        failure = worker.references.failure(handle)
        if isinstance(handle, UserHandle):
            known = self.failed.get(handle.fork)
            right = failure == known and isinstance(passed, Failure) == (known is not None)
            require(right, Rule.FAILURES_HAVE_CAUSES, handle, failure, known)
        if isinstance(passed, Failure):
            return
        right = passed.passage is _passage(worker.life, handle, to, carrier)
        require(right, Rule.TOLD_ONCE, worker.life, "passes", handle, "as", passed)
        reference, passage = passed.reference, passed.passage
        parent = handle.fork if isinstance(handle, UserHandle) else None
        granted = passage is Passage.GRANT
        unused = passed.fork not in self._claims
        require(unused, Rule.HANDLES_WORK, worker.life, "reuses", passed.fork)
        claim = _Claim(reference.rref, reference.owner, to, parent, passage, granted)
        self._claims[passed.fork] = claim
        self._passing[worker.life] += passage in _ACKNOWLEDGED

    def sent(self, worker: SimWorker, to: Life, message: ControlMessage) -> None:
        """The reference protocol decided to send something."""
        require(to != worker.life, Rule.TOLD_ONCE, worker.life, "tells itself", message)
        living = to.incarnation > worker.told_over.get(to.worker, -1)
        require(living, Rule.TOLD_ONCE, worker.life, "tells", to, message)
        if not isinstance(message, Register | Delete | Accepted):
            return
        claim = self._claims[message.fork]
        told = (type(message), message.fork)
        needed = told not in self._told
        if isinstance(message, Accepted):
            needed = needed and claim.passage in _ACKNOWLEDGED and to == message.fork.life
        require(needed, Rule.TOLD_ONCE, worker.life, "tells", to, message)
        self._told.add(told)

    def accepted(self, worker: SimWorker) -> None:
        """A parent hears that it need not hold its fork for a child any more."""
        self._passing[worker.life] -= 1

    def received(self, worker: SimWorker, passed: Passed, handle: Handle) -> None:
        """A reference arrived and became a handle."""
        mine = passed.reference.owner == worker.life
        same = handle.reference == passed.reference and (mine or isinstance(handle, UserHandle))
        require(same, Rule.HANDLES_WORK, worker.life, passed, "became", handle)

    def looked_up(
        self, worker: SimWorker, passed: Passed, missing: str | None, handle: Handle
    ) -> None:
        """A value was looked up without a handle, as for a call made through a reference."""
        same = (missing is None) == isinstance(handle, OwnerHandle)
        require(same, Rule.HANDLES_WORK, worker.life, passed, "looked up", missing, "is", handle)

    def not_sent(self, worker: SimWorker, passed: Passed) -> None:
        """The message that was to carry ``passed`` did not leave."""
        if passed.passage is Passage.CREATION:
            self._given_up.add(passed.fork)
        else:
            self._claims[passed.fork].gone = True
            self._passing[worker.life] -= passed.passage in _ACKNOWLEDGED

    def handle_confirmed(self, worker: SimWorker, fork: GlobalId) -> None:
        """The owner is said to know ``fork``."""
        twice = fork in self.confirmed
        require(not twice, Rule.HANDLES_WORK, worker.life, "confirms twice", fork)
        self.confirmed.add(fork)
        self._claims[fork].known_to_owner = True
        own_child = self._claims[fork].passage is Passage.CHILD and fork.life == worker.life
        self._passing[worker.life] -= own_child  # nobody tells it so

    def handle_failed(self, worker: SimWorker, fork: GlobalId, failure: Failure) -> None:
        """A handle must not be used any more."""
        claim = self._claims[fork]
        first = fork not in self.failed
        require(first, Rule.FAILURES_HAVE_CAUSES, worker.life, fork, "fails twice", failure)
        caused = bool(failure.reason) and self._has_cause(worker, fork, claim, failure.kind)
        require(caused, Rule.FAILURES_HAVE_CAUSES, worker.life, fork, failure)
        self.failed[fork] = failure
        if failure.kind in (FailureKind.STALE, FailureKind.OWNER_LOST):
            claim.gone = True

    def _has_cause(
        self, worker: SimWorker, fork: GlobalId, claim: _Claim, kind: FailureKind
    ) -> bool:
        if kind is FailureKind.CREATION:
            return fork in self._given_up
        if kind is FailureKind.DELETED:
            return worker.life in self._released
        if kind is FailureKind.OWNER_LOST:
            return worker.fences(claim.owner)
        return worker.fences(claim.owner) or (self._world.losses and not self._reaches(fork))

    def released(self, worker: SimWorker) -> None:
        """A worker lets go of all its references."""
        self._released.add(worker.life)

    def _reaches(self, fork: GlobalId) -> bool:
        """Returns whether ``fork`` has a claim: its owner, or one that has a claim, knows it.

        Nobody has a claim through a worker that took the next one for lost.
        """
        claim = self._claims[fork]
        world = self._world
        if claim.gone or claim.holder not in world.living:
            return False
        if claim.known_to_owner:
            owner = world.living.get(claim.owner)
            return owner is not None and not owner.fences(claim.holder)
        if claim.parent is None:
            return False
        holds = world.living.get(self._claims[claim.parent].holder)
        trusted = holds is not None and not holds.fences(claim.holder)
        return trusted and self._reaches(claim.parent)

    def failed_value(self, worker: SimWorker, rref: GlobalId, reason: str) -> None:
        """A value is said never to come."""
        kept = worker.references.is_kept(rref)
        justified = bool(reason) and kept and rref not in self._arrived
        require(justified, Rule.FAILURES_HAVE_CAUSES, worker.life, rref, reason)

    def freed_value(self, owner: SimWorker, rref: GlobalId) -> None:
        """A value is gone."""
        require(rref not in self._freed, Rule.FREED_ONCE, owner.life, rref)
        self._freed.add(rref)
        for worker in self._world.living.values():
            jobs = (handle for job in worker.jobs.values() for handle in job.handles.values())
            for handle in (*worker.handles.values(), *jobs):
                if handle.reference.rref == rref:
                    used = self._may_use(worker, handle)
                    require(not used, Rule.NOT_FREED_IN_USE, rref, "at", worker.life, handle)
        for packet, passed in passed_in(self._world.network.values(), rref):
            valid = self._is_valid(packet, passed)
            require(not valid, Rule.NOT_FREED_IN_USE, rref, "under way", packet)

    def _may_use(self, worker: SimWorker, handle: Handle) -> bool:
        if isinstance(handle, OwnerHandle):
            return True
        return worker.references.failure(handle) is None and self._reaches(handle.fork)

    def _is_valid(self, packet: Packet, passed: Passed) -> bool:
        living = self._world.living
        receiver = living.get(packet.to)
        if packet.source not in living or receiver is None or receiver.fences(packet.source):
            return False
        if packet.origin in self._world.taken:
            return False
        if passed.passage in (Passage.CREATION, Passage.LOOPBACK):
            return True
        return self._reaches(passed.fork)


def _passage(life: Life, handle: Handle, to: Life, carrier: Carrier) -> Passage:
    """Returns how a reference has to travel."""
    if isinstance(handle, OwnerHandle):
        return Passage.LOOPBACK if to == life else Passage.GRANT
    if to != handle.reference.owner:
        return Passage.CHILD
    return Passage.RETURN if carrier is Carrier.REPLY else Passage.BORROW
