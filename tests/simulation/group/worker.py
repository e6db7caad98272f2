"""One simulated worker: the decision modules of an agent, wired as the agent wires them.

Its control messages and its shutdown are the agent's own (``control_channel``, ``shutdown``).
Otherwise it does what the agent's files around the decisions do (``caller``, ``callee``,
``keeper``), without their threads, bytes and sockets. What comes out of the decisions is
carried out at once and shown to the ledger, which knows what must and must not be. It
chooses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from rpc.calls.control_channel import ControlChannel
from rpc.group.members import Group
from rpc.group.shutdown import Work
from rpc.ids import GlobalId, Life
from rpc.protocol.calls import CallTable, Ending
from rpc.protocol.cancellation import EarlyCancellations
from rpc.protocol.liveness import Liveness, Suspicion
from rpc.protocol.reference_terms import (
    Carrier,
    Effect,
    Failure,
    FailValue,
    FreeValue,
    Handle,
    HandleConfirmed,
    HandleFailed,
    OwnerHandle,
    Send,
)
from rpc.protocol.references import ReferenceTable
from rpc.protocol.retry import IdempotencyTable, RequestId, Verdict
from rpc.protocol.termination import Termination
from rpc.transports.base import Peer
from rpc.wire.control import (
    Accepted,
    Cancel,
    ControlMessage,
    DuplicateFilter,
    Passage,
    Passed,
    Ready,
)
from rpc.worker_info import WorkerInfo
from tests.simulation.group.leaving import NoTimers, Wire, WitnessedShutdown
from tests.simulation.group.packets import (
    Batch,
    CallOutcome,
    Causes,
    Job,
    OpenCall,
    Packet,
    SimReply,
    SimRequest,
    Value,
)
from tests.simulation.group.rules import Rule, require
from tests.simulation.group.steps import Addressing, Name

if TYPE_CHECKING:
    from tests.simulation.group.world import World


@dataclass(frozen=True, slots=True)
class Machines:
    """The decision modules that are put to the test; replace one to try another.

    Args:
        references: who keeps which value.
        calls: what ends a call.
        group: who is a member.
        termination: when a shutdown is over.
        duplicates: which control messages came before.
        cancellations: which requests were cancelled before they came.
        once: which requests ran before.
        liveness: who is asked for signs of life, and who is silent.
        suspicion: who may tell the others of a loss.
    """

    references: type[ReferenceTable] = ReferenceTable
    calls: type[CallTable[OpenCall]] = CallTable
    group: type[Group] = Group
    termination: type[Termination] = Termination
    duplicates: type[DuplicateFilter] = DuplicateFilter
    cancellations: type[EarlyCancellations] = EarlyCancellations
    once: type[IdempotencyTable[Name, Name]] = IdempotencyTable
    liveness: type[Liveness] = Liveness
    suspicion: type[Suspicion] = Suspicion


class SimWorker:
    """One life of one worker.

    Args:
        life: whose.
        world: the network, the clock and the ledger.
    """

    def __init__(self, life: Life, world: World) -> None:
        machines = world.machines
        self.life = life
        self.world = world
        self.info = info_of(life)
        self.references = machines.references(life.worker, life.incarnation)
        self.calls = machines.calls()
        self.group = machines.group()
        self.early = machines.cancellations()
        self.once = machines.once()
        self.control = ControlChannel(self.group, cast("Any", Wire(self)), machines.duplicates)
        self.is_expelled = False
        self.clock = self.timers = NoTimers()
        self.leaving = WitnessedShutdown(self)
        self.waiting: dict[Life, Causes] = {}
        """The causes of what is to be told to lives that are not known yet."""
        # What a program and the simulator know; the decisions are compared with it.
        self.view: dict[int, Life] = {}
        self.over: dict[int, int] = {}
        self.met: set[int] = set()
        self.told_over: dict[int, int] = {}  # what the reference protocol was told
        self.handles: dict[Name, Handle] = {}
        self.records: dict[Name, OpenCall] = {}
        self.jobs: dict[Name, Job] = {}
        self.values: dict[GlobalId, Value] = {}
        self.tries: dict[int, bool] = {}
        """The calls that may be tried again; the highest number so far is the last."""
        self.tries_until: dict[int, float] = {}
        """The time at which they are over even if they have no result."""
        self.activity = 0
        self.begun = False
        self.finished = False
        # While it is stopped, and when it wakes.
        self.asleep = False
        self.sends_left: int | None = None
        """The number of messages that leave before it is stopped; None if nothing stops it."""
        self.clock_stands = False
        self.behind = 0.0
        """The time for which its clock has stood."""
        self.is_late = False
        """Its timers have not run since it woke."""
        self.outbox: list[Packet] = []
        """The messages that it sends when it wakes."""

    @property
    def now(self) -> float:
        """The time by its own clock."""
        return self.world.now - self.behind

    def stop(self, sends: int | None, clock_stands: bool) -> None:
        """It does nothing from now on, or once it has sent so many more messages."""
        self.clock_stands = clock_stands
        self.asleep, self.sends_left = sends is None, sends

    def wake(self) -> list[Packet]:
        """Goes on; returns what it had been about to send."""
        self.asleep, self.sends_left, self.is_late = False, None, True
        outbox, self.outbox = self.outbox, []
        return outbox

    def keeps_back(self) -> bool:
        """True if what it is about to send leaves when it wakes; it may be stopped just then."""
        if self.sends_left == 0:
            self.asleep = True
        elif self.sends_left is not None:
            self.sends_left -= 1
        return self.asleep

    def fences(self, life: Life) -> bool:
        """True if ``life`` is known to be over, or this one's is: it listens to nobody then."""
        return self._is_over(life) or (self.is_expelled and life != self.life)

    def _is_over(self, life: Life) -> bool:
        return life.incarnation <= self.over.get(life.worker, -1)

    def knows(self, life: Life) -> bool:
        """True if ``life`` is a living member as far as this worker knows."""
        return self.view.get(life.worker) == life

    # --- Members

    def meet(self, members: Sequence[Peer]) -> None:
        """The group that this worker starts with, itself included."""
        for peer in members:
            life = peer.life
            self.view[life.worker] = life
            self.group.add(peer)
            if effects := self.references.worker_joined(life):
                self.perform(effects)
            self.leaving.worker_joined(life.worker)
            self.control.joined(life)
        self.met.update(self.view)
        self.world.ledger.membership_changed(self)

    def joined(self, life: Life) -> None:
        """``life`` is a member."""
        if self._is_over(life) or self.knows(life):
            return
        if life.worker == self.life.worker and life.incarnation > self.life.incarnation:
            self.hear_expelled("a later life of it joined")
            return
        if self.is_expelled:
            self.group.add(Peer(info_of(life), life.incarnation, b""))
            self.world.ledger.membership_changed(self)
            return
        before = self.view.get(life.worker)
        if before is not None:
            self.lost(before, "it was replaced")
        self.over[life.worker] = life.incarnation - 1
        for gone in [each for each in self.waiting if self.fences(each)]:
            del self.waiting[gone]
        self.view[life.worker] = life
        self.met.add(life.worker)
        self.group.add(Peer(info_of(life), life.incarnation, b""))
        self.perform(self.references.worker_joined(life))
        self.leaving.worker_joined(life.worker)
        self.world.causes |= self.waiting.pop(life, frozenset())
        self.control.joined(life)
        self.world.ledger.membership_changed(self)

    def lost(self, life: Life, reason: str) -> None:
        """``life`` is over; of a later life of itself it hears in other words."""
        if self.fences(life) or life.worker == self.life.worker:
            return
        self.over[life.worker] = life.incarnation
        for gone in [each for each in self.waiting if self.fences(each)]:
            del self.waiting[gone]
        known = self.view.get(life.worker)
        if known is not None and self.fences(known):
            del self.view[life.worker]
            error = self.group.lose(known, reason)
            self.world.ledger.loss_reported(self, known, error)
            self._lose_calls(known)
        self.told_over[life.worker] = life.incarnation
        self.perform(self.references.worker_lost(life, reason))
        if known is not None and self.fences(known):
            self.world.shutdowns.lost(self, known)
            self.leaving.worker_lost(life.worker)
            self.world.shutdowns.looked_at(self)
        self.world.ledger.membership_changed(self)

    def hear_expelled(self, reason: str) -> None:
        """The others declared this worker lost: to it, they are gone."""
        if self.is_expelled:
            return
        self.is_expelled = True
        self.waiting.clear()
        _, others = self.group.expel(self.life.worker, reason)
        expected = sorted(life for life in self.view.values() if life != self.life)
        require(others == expected, Rule.FENCED, self.life, "loses", others, "of", expected)
        self.view = {self.life.worker: self.life}
        for life in others:
            self.over[life.worker] = life.incarnation
            self._lose_calls(life)
            self.told_over[life.worker] = life.incarnation
            self.perform(self.references.worker_lost(life, reason))
            self.leaving.worker_lost(life.worker)
        self.perform(self.references.expelled(reason))
        self.world.ledger.membership_changed(self)

    def _lose_calls(self, life: Life) -> None:
        self.control.forget(life.worker)
        self.early.worker_lost(life.worker)
        self.once.worker_lost(life.worker)
        for job in [j for j in self.jobs.values() if j.sender == life and not j.runs]:
            self._forget(job)
        for ended in self.calls.lose(life.worker):
            self.world.ledger.call_lost(self, life, ended)
            self._request_over(ended.call)
            if ended.ending is Ending.LOST:
                self._settle(ended.call, CallOutcome.LOST)

    # --- Calls made

    def destination(self, to: int, address: Addressing) -> Life:
        """The life that a program means; raises what the program would get."""
        if address is Addressing.INFO:
            info = self.group.find(WorkerInfo(f"w{to}", to))
        else:
            info = self.group.find(f"w{to}" if address is Addressing.NAME else to)
        return self.group.life(info.id)

    def open(self, record: OpenCall, timeout: float) -> None:
        """Makes a call known before its request leaves."""
        record.correlation = self.calls.open(record, record.to.worker, self.now, timeout)
        self.records[record.name] = record
        self.activity += 1
        self.world.ledger.call_opened(self, record)

    def send_failed(self, record: OpenCall) -> None:
        """A request could not be sent."""
        withdrawn = self.calls.withdraw(record.correlation)
        self.world.ledger.call_withdrawn(self, record, withdrawn)
        passed = record.table if record.creates is None else (*record.table, record.creates)
        for each in passed:
            self.world.ledger.not_sent(self, each)
            self.perform(self.references.not_sent(each, "there was no way to send it"))
        if withdrawn:
            self._settle(record, CallOutcome.NOT_SENT)
        self.records.pop(record.name, None)

    def expire(self) -> None:
        """Time has passed: runs what an agent's pulse runs."""
        self.is_late = False
        while True:
            due = self.calls.next_expiry()
            if due is None or due > self.now:
                break
            expired = self.calls.expire(self.now)
            require(bool(expired), Rule.DEADLINES, self.life, "comes at", due, "for nothing")
            self.world.ledger.calls_expired(self, expired)
            for ended in expired:
                self._settle(ended.call, CallOutcome.TIMEOUT)
                self._tell_cancelled(ended.call)
        self.world.ledger.time_passed(self)

    def cancel(self, record: OpenCall) -> None:
        """The program gives a call up."""
        ended = self.calls.cancel(record.correlation)
        self.world.ledger.call_cancelled(self, record, ended)
        if ended is not None:
            self._settle(record, CallOutcome.CANCELLED)
            self._tell_cancelled(record)

    def _tell_cancelled(self, record: OpenCall) -> None:
        if self.knows(record.to):
            self.control.tell(record.to, Cancel((record.correlation,)))

    def oldest_try(self) -> int:
        """The oldest call that may be tried again, or what the next will be called."""
        return min((n for n, is_open in self.tries.items() if is_open), default=len(self.tries))

    def may_try(self, number: int) -> bool:
        """True while a call has neither a result nor come to the end of its time."""
        return self.tries[number] and self.tries_until[number] > self.now

    def replied(self, sender: Life, reply: SimReply) -> None:
        """A reply came, perhaps not for the first time, perhaps from somebody else."""
        ended = self.calls.close(reply.correlation, sender.worker)
        self.world.ledger.reply_taken(self, sender, reply, ended)
        if ended is None:
            return
        record = ended.call
        self._request_over(record)
        if ended.ending is Ending.REPLY:
            self._settle(record, CallOutcome.RESULT)
        for handle in self._adopt(reply.table).items():
            if ended.ending is Ending.REPLY and not self.begun:
                self.handles.update((handle,))
            else:
                self.drop(handle[1])

    def _request_over(self, record: OpenCall) -> None:
        record.answered = True
        self.records.pop(record.name, None)
        for passed in record.table:
            if passed.passage is Passage.BORROW:
                self.perform(self.references.borrow_ended(passed.fork))

    def _settle(self, record: OpenCall, outcome: CallOutcome) -> None:
        """The program that made the call learns how it ended."""
        self.world.ledger.call_settled(self, record, outcome)
        record.outcome = outcome
        if record.once is not None and outcome is CallOutcome.RESULT:
            self.tries[record.once] = False
        if record.job is not None:
            record.job.waits_for.discard(record.name)
        if record.creates is None or record.creates.passage is Passage.LOOPBACK:
            return
        if outcome is CallOutcome.NOT_SENT:
            return  # the reference protocol heard of it already
        if outcome is CallOutcome.RESULT:
            self.perform(self.references.creation_confirmed(record.creates.fork))
        else:
            self.world.ledger.creation_given_up(record.creates.fork)
            reason = f"the call ended with {outcome.value}"
            self.perform(self.references.creation_failed(record.creates.fork, reason))

    # --- Calls served

    def requested(self, packet: Packet, request: SimRequest) -> None:
        """A request came."""
        creates = request.creates
        if creates is not None:
            if creates.passage is not Passage.LOOPBACK:
                self.perform(self.references.creation_arrived(creates, packet.source))
            if self.references.is_kept(creates.reference.rref):
                self.values.setdefault(creates.reference.rref, Value.AWAITED)
        job = Job(self.world.name(), packet.source, request, {}, packet.causes | {self.life})
        self.jobs[job.name] = job
        job.cancelled = self.early.take(packet.source.worker, request.correlation)
        job.handles.update(self._adopt(request.table))
        self.world.ledger.request_taken(self, packet, request, job)
        if request.once is not None:
            self._admit(job, request.once)

    def _admit(self, job: Job, once: RequestId) -> None:
        """Runs a request that may come more than once only if it did not come before."""
        verdict, ran, _ = self.once.arrived(job.sender.worker, once, job.name, self.now)
        self.world.ledger.admitted(self, job, once, verdict, ran)
        job.runs = verdict is Verdict.RUN
        if verdict in (Verdict.REPEAT, Verdict.OVER):
            self._answer(job, (), ran)

    def cancelled(self, sender: Life, correlations: Iterable[int]) -> None:
        """A caller gave up requests; some of them may be still to come."""
        here = {j.request.correlation: j for j in self.jobs.values() if j.sender == sender}
        missing = {*correlations} - here.keys()
        self.early.note(sender.worker, missing)
        self.world.ledger.cancellations_noted(self, sender, missing)
        for correlation in {*correlations} & here.keys():
            here[correlation].cancelled = True

    def ready(self, job: Job) -> bool:
        """True if nothing keeps a handler from returning."""
        if job.waits_for or not job.runs:
            return False
        if job.request.fetches is not None:
            (handle,) = job.handles.values()
            if isinstance(handle, OwnerHandle):
                return self.values.get(job.request.fetches) is not Value.AWAITED
        return not job.request.patient or all(map(self._is_settled, job.handles.values()))

    def _is_settled(self, handle: Handle) -> bool:
        if isinstance(handle, OwnerHandle) or self.references.failure(handle) is not None:
            return True
        self.world.ledger.confirmation_asked(self, handle.fork)
        return self.references.is_confirmed(handle.fork)

    def serve(self, job: Job, returns: Iterable[Handle], raises: bool) -> None:
        """A handler returned or raised."""
        request = job.request
        creates = request.creates
        if creates is not None and creates.reference.rref in self.values:
            outcome = Value.FAILED if raises else Value.READY
            self.values[creates.reference.rref] = outcome
        once = request.once
        waiting = () if once is None else self._once_ended(job, once)
        for name in waiting or (job.name,):
            self.world.ledger.waiter_answered(self, name)
            self._answer(self.jobs[name], returns if name == job.name else (), job.name)
        self.world.ledger.served(self, job)

    def _once_ended(self, job: Job, once: RequestId) -> list[Name]:
        return self.once.ended(job.sender.worker, once.number, job.name, job.name)

    def _answer(self, job: Job, returns: Iterable[Handle], ran: Name | None) -> None:
        """Replies to one request with what a handler, maybe another's, returned."""
        request = job.request
        table = tuple(self.share(returns, job.sender, Carrier.REPLY))
        self._forget(job)
        if self.knows(job.sender):
            number, sender = request.correlation, job.sender
            reply = SimReply(request.call, number, table, self.life, sender, ran)
            self.world.post(self.life, job.sender, reply)
        else:
            self.unsent(table)
        self.activity += 1

    def _forget(self, job: Job) -> None:
        del self.jobs[job.name]
        if not job.runs:
            for handle in job.handles.values():
                self.drop(handle)

    # --- References

    def share(self, handles: Iterable[Handle], to: Life, carrier: Carrier) -> list[Passed]:
        """Prepares handles to travel; those that cannot be used any more are left out."""
        table: list[Passed] = []
        for handle in handles:
            passed = self.references.share(handle, to, carrier)
            self.world.ledger.shared(self, handle, to, carrier, passed)
            if isinstance(passed, Failure):
                continue
            if isinstance(handle, OwnerHandle):
                self.values.setdefault(handle.reference.rref, Value.READY)
            table.append(passed)
        return table

    def unsent(self, table: Iterable[Passed]) -> None:
        """A message with these references did not leave."""
        for passed in table:
            self.world.ledger.not_sent(self, passed)
            self.perform(self.references.not_sent(passed, "there was no way to send it"))

    def _adopt(self, table: Iterable[Passed]) -> dict[Name, Handle]:
        handles: dict[Name, Handle] = {}
        for passed in table:
            borrowed = passed.passage is Passage.BORROW
            missing = self.references.look_up(passed.reference) if borrowed else None
            handle, effects = self.references.receive(passed)
            if borrowed:
                self.world.ledger.looked_up(self, passed, missing, handle)
            name = self.world.name()
            handles[name] = self.handles[name] = handle  # counts as live for what follows
            self.world.ledger.received(self, passed, handle)
            if isinstance(handle, OwnerHandle):
                self.values.setdefault(handle.reference.rref, Value.AWAITED)
            self.perform(effects)
        for name in handles:
            del self.handles[name]
        return handles

    def drop(self, handle: Handle) -> None:
        """Nobody has ``handle`` any more; it was taken out of wherever it was kept."""
        self.perform(self.references.dropped(handle))
        self.references.failure(handle)  # may be asked at any time

    def perform(self, effects: Iterable[Effect]) -> None:
        """Carries out what the reference protocol decided."""
        for effect in effects:
            self.world.say(self.life, effect)
            match effect:
                case Send(to, message):
                    self.world.ledger.sent(self, to, message)
                    self._queue(to, message)
                case FreeValue(rref):
                    self.world.ledger.freed_value(self, rref)
                    self.values.pop(rref, None)
                case FailValue(rref, reason):
                    self.world.ledger.failed_value(self, rref, reason)
                    if self.references.is_kept(rref):
                        self.values[rref] = Value.FAILED
                case HandleConfirmed(fork):
                    self.world.ledger.handle_confirmed(self, fork)
                case HandleFailed(fork, failure):
                    self.world.ledger.handle_failed(self, fork, failure)
        self.control.flush()

    # --- Control messages

    def _queue(self, to: Life, message: ControlMessage) -> None:
        if not self.knows(to):
            self.waiting[to] = self.waiting.get(to, frozenset()) | self.world.causes
        self.control.queue(to, message)

    def tell(self, to: Life, message: ControlMessage) -> None:
        """Sends a control message at once."""
        self.control.tell(to, message)

    def noticed(self, sender: Life, batch: Batch) -> None:
        """A batch of control messages came, perhaps not for the first time."""
        messages = self.control.arrived(sender, batch.frame)
        self.world.ledger.batch_taken(self, sender, batch.sequence, bool(messages))
        for message in messages:
            if isinstance(message, Ready):
                self.world.shutdowns.told_ready(self, sender)
            if isinstance(message, Cancel):
                self.cancelled(sender, message.correlations)
            elif self.leaving.control_arrived(sender.worker, message):
                self.world.shutdowns.looked_at(self)
            else:
                if isinstance(message, Accepted):
                    self.world.ledger.accepted(self)
                self.perform(self.references.message_arrived(sender, message))
        self.control.acted_upon(sender, messages)

    # --- Shutting down

    def begin(self) -> None:
        """The program called ``shutdown``."""
        self.begun = True
        self.leaving.begin()

    def is_quiet(self) -> bool:
        """True if nothing is outstanding, running or being made known here."""
        if len(self.calls) or self.jobs:
            return False
        return self.references.counts().num_pending_users == 0

    def work(self) -> Work:
        """Counts what it has made, served and sent so far."""
        return Work(self.activity, *self.control.totals())

    def leaks(self) -> list[str]:
        """Its values that others still use."""
        return [str(leak.rref) for leak in self.references.leaks()]

    def under_way(self) -> list[str]:
        """Names nothing: nobody waits in vain here."""
        return []

    def release_references(self) -> None:
        """Does as :meth:`release`."""
        self.release()

    def release(self) -> None:
        """Lets go of all references at once."""
        self.world.ledger.released(self)
        self.perform(self.references.release_all_users())


def info_of(life: Life) -> WorkerInfo:
    """Name and id of a worker; the name is the same in all its lives."""
    return WorkerInfo(f"w{life.worker}", life.worker)
