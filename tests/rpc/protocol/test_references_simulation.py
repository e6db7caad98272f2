"""Random programs over many reference tables, a network without order, and deaths at any step.

``Simulation`` plays agents, network and user programs, and keeps its own record
of what every value owes its life to, against which each freed value is checked.
A failing seed names the command that replays it with a trace.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from rpc.ids import GlobalId, Life
from rpc.protocol.reference_terms import (
    Carrier,
    Effect,
    Failure,
    FailureKind,
    FailValue,
    FreeValue,
    Handle,
    HandleConfirmed,
    HandleFailed,
    OwnerHandle,
    Send,
    UserHandle,
)
from rpc.protocol.references import ReferenceTable, _Entry, _State, _User
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
)

# --- What is under way --------------------------------------------------------


@dataclass(frozen=True)
class Control:
    message: ControlMessage


@dataclass(frozen=True)
class Create:
    call: int
    passed: Passed


@dataclass(frozen=True)
class Call:
    call: int
    table: tuple[Passed, ...]
    fetches: GlobalId | None = None


@dataclass(frozen=True)
class Reply:
    call: int
    table: tuple[Passed, ...] = ()


@dataclass(frozen=True)
class Lost:
    life: Life


@dataclass(frozen=True)
class Joined:
    life: Life


@dataclass(frozen=True)
class Unsent:
    passed: Passed


Item = Control | Create | Call | Reply | Lost | Joined | Unsent


@dataclass(frozen=True)
class InFlight:
    source: Life
    to: Life
    item: Item


# --- Who there is -------------------------------------------------------------


@dataclass
class Outstanding:
    to: Life
    table: tuple[Passed, ...] = ()
    creates: GlobalId | None = None
    timed_out: bool = False


@dataclass
class Job:
    """A request being served."""

    sender: Life
    call: int
    handles: list[Handle] = field(default_factory=list)
    fetches: GlobalId | None = None
    creates: GlobalId | None = None
    waits_for_confirmation: bool = False


@dataclass
class Truth:
    """What the simulation itself knows of one fork or token."""

    rref: GlobalId
    holder: Life
    parent: GlobalId | None
    known_to_owner: bool
    gone: bool = False


@dataclass(eq=False)
class Worker:
    life: Life
    table: ReferenceTable
    members: dict[int, Life] = field(default_factory=dict)
    over: dict[int, int] = field(default_factory=dict)
    handles: list[Handle] = field(default_factory=list)
    calls: dict[int, Outstanding] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    values: dict[GlobalId, str] = field(default_factory=dict)

    def fences(self, life: Life) -> bool:
        return life.incarnation <= self.over.get(life.worker, -1)


class Simulation:
    def __init__(
        self,
        seed: int,
        losses: bool,
        table: type[ReferenceTable] = ReferenceTable,
        trace: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.losses = losses
        self.table = table
        self.trace = trace
        self.network: list[InFlight] = []
        self.living: dict[Life, Worker] = {}
        self.truth: dict[GlobalId, Truth] = {}
        self.freed: set[GlobalId] = set()
        self.next_call = 0
        self.choose_habits()
        for worker in range(self.random.choice((3, 4, 4))):
            self.start(Life(worker, 0))

    def choose_habits(self) -> None:
        """Every seed exaggerates something else: rare orders of events become common in one."""
        draw = self.random
        self.actions = (self.create, self.hand_made, self.call, self.fetch, self.finish_job)
        self.actions += (self.drop, self.time_out, self.die)
        usual = (12, 4, 40, 8, 40, 12, 4, 2 if self.losses else 0)
        self.weights = [weight * draw.choice((0.2, 1, 1, 3)) for weight in usual]
        self.delivery_rate = draw.choice((0.2, 0.5, 0.7))
        self.slow_kinds = draw.choice(
            ((), (Create,), (Create, Lost), (Register,), (Register,), (Delete,), (Reply, Accepted))
        )
        links = [(source, to) for source in range(4) for to in range(4)]
        self.slow_links = draw.sample(links, draw.choice((0, 1, 2, 4)))
        self.malice = draw.choice((0, 0.01, 0.05)) if self.losses else 0
        self.unsent_rate = draw.choice((0, 0.1))
        self.keep_rate = draw.choice((0.4, 0.9))
        self.drop_after_sharing = draw.choice((0, 0.6, 1))
        self.wait_rate = draw.choice((0, 0.8))

    # --- Running

    def run(self) -> None:
        for _ in range(self.random.randint(20, 250)):
            self.step()
        self.drain()
        self.check_survivors_handles()
        self.drop_everything()
        self.drain()
        self.check_nothing_is_left()

    def step(self) -> None:
        if self.random.random() < self.malice:
            self.strike()
        if self.network and self.random.random() < self.delivery_rate:
            self.deliver_any()
            return
        action = self.random.choices(self.actions, self.weights)[0]
        if self.living:
            action(self.random.choice(list(self.living.values())))

    def drain(self) -> None:
        while True:
            if self.network:
                self.deliver_any()
            elif not any(self.finish_job(worker) for worker in list(self.living.values())):
                return

    def say(self, *words: object) -> None:
        if self.trace:
            print(*words)

    # --- What programs do

    def create(self, worker: Worker) -> None:
        to = self.choose_member(worker)
        if to == worker.life:
            handle: Handle = worker.table.create_here()
            worker.handles.append(handle)
            worker.values[handle.reference.rref] = "ready"
            return
        handle, passed = worker.table.create_remote(to)
        worker.handles.append(handle)
        self.truth[handle.fork] = Truth(handle.reference.rref, worker.life, None, True)
        self.say(worker.life, "creates", passed)
        if self.random.random() < self.unsent_rate:
            self.unsent(worker, passed)
        else:
            call = self.open_call(worker, Outstanding(to, creates=handle.fork))
            self.send(worker, to, Create(call, passed))

    def hand_made(self, worker: Worker) -> None:
        worker.handles.append(worker.table.new_value())

    def call(self, worker: Worker) -> None:
        to = self.choose_member(worker)
        table = self.share_some(worker, to, Carrier.REQUEST)
        if self.random.random() < self.unsent_rate:
            for passed in table:
                self.unsent(worker, passed)
        else:
            call = self.open_call(worker, Outstanding(to, table))
            self.send(worker, to, Call(call, table))

    def fetch(self, worker: Worker) -> None:
        users = [handle for handle in worker.handles if isinstance(handle, UserHandle)]
        users = [handle for handle in users if not worker.fences(handle.reference.owner)]
        if not users:
            return
        handle = self.random.choice(users)
        passed = self.share(worker, handle, handle.reference.owner, Carrier.REQUEST)
        if passed is not None:
            owner = handle.reference.owner
            call = self.open_call(worker, Outstanding(owner, (passed,)))
            self.send(worker, owner, Call(call, (passed,), fetches=passed.reference.rref))

    def drop(self, worker: Worker) -> None:
        if worker.handles:
            handle = worker.handles.pop(self.random.randrange(len(worker.handles)))
            self.drop_handle(worker, handle)

    def time_out(self, worker: Worker) -> None:
        waiting = [call for call in worker.calls.values() if not call.timed_out]
        if waiting:
            call = self.random.choice(waiting)
            call.timed_out = True
            if call.creates is not None:
                self.say(worker.life, "gives up creating", call.creates)
                self.perform(worker, worker.table.creation_failed(call.creates, "timed out"))

    def strike(self) -> None:
        """Kills whom it hurts most: the parent of a fork that has yet to register."""
        flying = [passed for flying in self.network for passed in _passed(flying.item)]
        parents = [passed.fork.life for passed in flying if passed.passage is Passage.CHILD]
        victim = self.living.get(self.random.choice(parents)) if parents else None
        if victim is not None:
            self.die(victim)

    def die(self, worker: Worker) -> None:
        if len(self.living) == 1:
            return
        self.say(worker.life, "dies")
        del self.living[worker.life]
        self.network = [
            flying
            for flying in self.network
            if flying.source != worker.life or self.random.random() < 0.5
        ]
        returned = self.random.random() < 0.7
        for other in self.living.values():
            self.network.append(InFlight(other.life, other.life, Lost(worker.life)))
        if returned:
            self.start(Life(worker.life.worker, worker.life.incarnation + 1))

    def start(self, life: Life) -> None:
        worker = Worker(life, self.table(life.worker, life.incarnation))
        self.living[life] = worker
        for member in self.living:
            self.perform(worker, worker.table.worker_joined(member))
            worker.members[member.worker] = member
            worker.over[member.worker] = member.incarnation - 1
            self.network.append(InFlight(member, member, Joined(life)))

    def choose_member(self, worker: Worker) -> Life:
        others = [life for life in worker.members.values() if life != worker.life]
        return self.random.choice([*others * 5, worker.life])

    # --- What agents do

    def open_call(self, worker: Worker, call: Outstanding) -> int:
        self.next_call += 1
        worker.calls[self.next_call] = call
        return self.next_call

    def share_some(self, worker: Worker, to: Life, carrier: Carrier) -> tuple[Passed, ...]:
        count = self.random.choice((1, 1, 2))
        users = [handle for handle in worker.handles if isinstance(handle, UserHandle)]
        users = [handle for handle in users if worker.table.failure(handle) is None]
        candidates = users if users and self.random.random() < 0.7 else worker.handles
        recent = candidates[-self.random.choice((1, 100)) :]
        chosen = self.random.sample(recent, min(count, len(recent)))
        shared = [self.share(worker, handle, to, carrier) for handle in chosen]
        for handle in chosen:
            if self.random.random() < self.drop_after_sharing:
                worker.handles.remove(handle)
                self.drop_handle(worker, handle)
        return tuple(passed for passed in shared if passed is not None)

    def share(self, worker: Worker, handle: Handle, to: Life, carrier: Carrier) -> Passed | None:
        passed = worker.table.share(handle, to, carrier)
        assert (worker.table.failure(handle) is None) == isinstance(passed, Passed)
        if isinstance(passed, Failure):
            return None
        if isinstance(handle, OwnerHandle):
            worker.values.setdefault(handle.reference.rref, "ready")
        rref = handle.reference.rref
        parent = handle.fork if isinstance(handle, UserHandle) else None
        granted = passed.passage is Passage.GRANT
        self.truth[passed.fork] = Truth(rref, to, parent, known_to_owner=granted)
        self.say(worker.life, "passes", passed, "to", to)
        return passed

    def unsent(self, worker: Worker, passed: Passed) -> None:
        self.network.append(InFlight(worker.life, worker.life, Unsent(passed)))

    def send(self, worker: Worker, to: Life, item: Item) -> None:
        self.network.append(InFlight(worker.life, to, item))
        if to not in self.living and not worker.fences(to):
            self.network.append(InFlight(worker.life, worker.life, Lost(to)))

    def drop_handle(self, worker: Worker, handle: Handle) -> None:
        self.say(worker.life, "drops", handle)
        self.perform(worker, worker.table.dropped(handle))

    def receive(self, worker: Worker, table: tuple[Passed, ...]) -> list[Handle]:
        handles = []
        for passed in table:
            handle, effects = worker.table.receive(passed)
            handles.append(handle)
            worker.handles.append(handle)  # so that what follows counts it as live
            self.perform(worker, effects)
            worker.handles.remove(handle)
        return handles

    def finish_job(self, worker: Worker) -> bool:
        ready = [job for job in worker.jobs if self.can_finish(worker, job)]
        if not ready:
            return False
        job = self.random.choice(ready)
        worker.jobs.remove(job)
        reply: tuple[Passed, ...] = ()
        if job.creates in worker.values:
            worker.values[job.creates] = "ready"
        for handle in job.handles:
            if job.fetches is None and self.random.random() < self.keep_rate:
                worker.handles.append(handle)
            else:
                self.drop_handle(worker, handle)
        if job.creates is None and job.fetches is None and not worker.fences(job.sender):
            reply = self.share_some(worker, job.sender, Carrier.REPLY)
        self.send(worker, job.sender, Reply(job.call, reply))
        return True

    def can_finish(self, worker: Worker, job: Job) -> bool:
        if job.fetches is not None and isinstance(job.handles[0], OwnerHandle):
            return worker.values.get(job.fetches) in ("ready", "failed")
        if not job.waits_for_confirmation:
            return True
        users = [handle for handle in job.handles if isinstance(handle, UserHandle)]
        return all(
            worker.table.failure(handle) or worker.table.is_confirmed(handle.fork)
            for handle in users
        )

    # --- Delivery

    def choose_message(self) -> int:
        """Any message may be next; slow ones seldom are."""
        for _ in range(5):
            index = self.random.randrange(len(self.network))
            flying = self.network[index]
            link = (flying.source.worker, flying.to.worker)
            what = flying.item.message if isinstance(flying.item, Control) else flying.item
            if not isinstance(what, self.slow_kinds) and link not in self.slow_links:
                break
        return index

    def deliver_any(self) -> None:
        index = self.choose_message()
        self.network[index], self.network[-1] = self.network[-1], self.network[index]
        flying = self.network.pop()
        worker = self.living.get(flying.to)
        if worker is None or worker.fences(flying.source):
            return
        self.say(flying.source, "->", flying.to, flying.item)
        if worker.members.get(flying.source.worker) != flying.source:
            self.on_joined(worker, Joined(flying.source))
        handlers: dict[type, Callable[..., None]] = {
            Control: self.on_control,
            Create: self.on_create,
            Call: self.on_call,
            Reply: self.on_reply,
            Lost: self.on_lost,
            Joined: self.on_joined,
            Unsent: self.on_unsent,
        }
        if isinstance(flying.item, Control | Create | Call):
            handlers[type(flying.item)](worker, flying.item, flying.source)
        else:
            handlers[type(flying.item)](worker, flying.item)

    def on_control(self, worker: Worker, item: Control, source: Life) -> None:
        self.perform(worker, worker.table.message_arrived(source, item.message))

    def on_create(self, worker: Worker, item: Create, source: Life) -> None:
        rref = item.passed.reference.rref
        worker.values[rref] = "running"
        worker.jobs.append(Job(source, item.call, creates=rref))
        self.perform(worker, worker.table.creation_arrived(item.passed, source))

    def on_call(self, worker: Worker, item: Call, source: Life) -> None:
        sent = [self.truth[passed.fork].parent for passed in item.table]
        expected = [parent is not None and self.truth[parent].known_to_owner for parent in sent]
        handles = self.receive(worker, item.table)
        waits = self.random.random() < self.wait_rate
        job = Job(source, item.call, handles, item.fetches, waits_for_confirmation=waits)
        worker.jobs.append(job)
        if item.fetches is not None:
            certain = expected[0] or not self.losses
            assert isinstance(handles[0], OwnerHandle) or not certain, "a fetch was refused"

    def on_reply(self, worker: Worker, item: Reply) -> None:
        call = worker.calls.pop(item.call)
        for passed in call.table:
            self.perform(worker, worker.table.call_ended(passed))
        if call.creates is not None:
            self.perform(worker, worker.table.creation_confirmed(call.creates))
        for handle in self.receive(worker, item.table):
            if call.timed_out or self.random.random() > self.keep_rate:
                self.drop_handle(worker, handle)
            else:
                worker.handles.append(handle)

    def on_lost(self, worker: Worker, item: Lost) -> None:
        if worker.fences(item.life):
            return
        worker.over[item.life.worker] = item.life.incarnation
        if worker.fences(worker.members.get(item.life.worker, worker.life)):
            del worker.members[item.life.worker]
        gone = [number for number, call in worker.calls.items() if worker.fences(call.to)]
        for number in gone:
            del worker.calls[number]
        self.perform(worker, worker.table.worker_lost(item.life, "it died"))

    def on_joined(self, worker: Worker, item: Joined) -> None:
        if worker.fences(item.life) or worker.members.get(item.life.worker) == item.life:
            return
        if item.life.incarnation > 0:
            self.on_lost(worker, Lost(Life(item.life.worker, item.life.incarnation - 1)))
        worker.members[item.life.worker] = item.life

    def on_unsent(self, worker: Worker, item: Unsent) -> None:
        self.truth[item.passed.fork].gone = item.passed.passage is not Passage.CREATION
        self.perform(worker, worker.table.not_sent(item.passed, "no route"))

    # --- Effects and what must hold

    def perform(self, worker: Worker, effects: list[Effect]) -> None:
        self.random.shuffle(effects)
        for effect in effects:
            self.say("   ", worker.life, effect)
            match effect:
                case Send(to, message):
                    self.send(worker, to, Control(message))
                case FreeValue(rref):
                    self.check_may_free(worker, rref)
                    worker.values.pop(rref, None)
                case FailValue(rref, reason):
                    assert reason
                    worker.values[rref] = "failed"
                case HandleConfirmed(fork):
                    self.truth[fork].known_to_owner = True
                case HandleFailed(fork, failure):
                    self.note_failure(fork, failure)

    def note_failure(self, fork: GlobalId, failure: Failure) -> None:
        assert failure.reason
        usual = failure.kind in (FailureKind.CREATION, FailureKind.DELETED)
        assert usual or self.losses, f"{fork} failed although nobody was lost: {failure}"
        if not usual:
            self.truth[fork].gone = True

    def reaches(self, fork: GlobalId) -> bool:
        """Whether ``fork`` has a claim on its value: known to the owner, or held for by one."""
        truth = self.truth[fork]
        if truth.gone or truth.holder not in self.living:
            return False
        return truth.known_to_owner or (truth.parent is not None and self.reaches(truth.parent))

    def check_may_free(self, owner: Worker, rref: GlobalId) -> None:
        assert rref not in self.freed, f"{rref} was freed twice"
        self.freed.add(rref)
        for worker in self.living.values():
            jobs = [handle for job in worker.jobs for handle in job.handles]
            for handle in worker.handles + jobs:
                if handle.reference.rref == rref:
                    assert not self.may_use(worker, handle), f"freed {rref}, in use at {handle}"
        for flying in self.network:
            for passed in _passed(flying.item):
                if passed.reference.rref == rref and flying.to in self.living:
                    assert not self.is_valid(flying, passed), f"freed {rref}, in flight: {passed}"

    def may_use(self, worker: Worker, handle: Handle) -> bool:
        if isinstance(handle, OwnerHandle):
            return True
        return worker.table.failure(handle) is None and self.reaches(handle.fork)

    def is_valid(self, flying: InFlight, passed: Passed) -> bool:
        if flying.source not in self.living:
            return False
        if passed.passage in (Passage.CREATION, Passage.LOOPBACK):
            return True
        return self.reaches(passed.fork)

    def check_survivors_handles(self) -> None:
        for worker in self.living.values():
            assert not worker.calls, f"calls of {worker.life} were never answered"
            assert not worker.jobs, f"{worker.life} still waits to serve {worker.jobs}"
            assert worker.table.counts().num_pending_users == 0
            for handle in worker.handles:
                if isinstance(handle, UserHandle) and worker.table.failure(handle) is None:
                    assert worker.table.is_confirmed(handle.fork)
                    owner = self.living[handle.reference.owner]
                    assert handle.reference.rref in owner.values, f"{handle} dangles"

    def drop_everything(self) -> None:
        for worker in self.living.values():
            if self.random.random() < 0.3:
                self.perform(worker, worker.table.release_all_users())
                self.drain()
                assert worker.table.counts().num_user_rrefs == 0
        for worker in list(self.living.values()):
            while worker.handles:
                self.drop(worker)

    def check_nothing_is_left(self) -> None:
        for worker in self.living.values():
            table = worker.table
            left = (table._users, table._holds, table._entries)
            assert not any(left), f"left at {worker.life}: {left}"
            assert table.leaks() == []
            assert not worker.values, f"never freed at {worker.life}: {worker.values}"
            for creator, seen in table._creations_seen.items():
                assert creator not in self.living or seen.ranges <= 1, f"{creator} skipped numbers"


def _passed(item: Item) -> tuple[Passed, ...]:
    match item:
        case Create(_, passed):
            return (passed,)
        case Call(_, table) | Reply(_, table):
            return table
        case Control(Register(reference, fork)):
            return (Passed(reference, fork, Passage.CHILD),)
        case _:
            return ()


# --- Tests --------------------------------------------------------------------


def run_seeds(seeds: range, losses: bool, table: type[ReferenceTable] = ReferenceTable) -> None:
    for seed in seeds:
        try:
            Simulation(seed, losses, table).run()
        except Exception as error:
            replay = f"python tests/rpc/protocol/test_references_simulation.py {seed} {losses}"
            raise AssertionError(f"{error!r}; replay with: PYTHONPATH=. {replay}") from error


MUTANT_SEEDS = 3000
BATCHES = [range(start, start + 250) for start in range(0, 1000, 250)]


@pytest.mark.parametrize("seeds", BATCHES, ids=str)
def test_values_live_exactly_as_long_as_somebody_can_reach_them(seeds: range) -> None:
    run_seeds(seeds, losses=False)


@pytest.mark.parametrize("seeds", BATCHES, ids=str)
def test_survivors_work_or_fail_with_a_reason_whoever_is_lost(seeds: range) -> None:
    run_seeds(seeds, losses=True)


# --- Mutants: each leaves out one thing the protocol needs ---------------------


class HoldsNothingForChildren(ReferenceTable):
    def share(self, handle: Handle, to: Life, carrier: Carrier) -> Passed | Failure:
        passed = super().share(handle, to, carrier)
        if isinstance(passed, Passed) and passed.passage is Passage.CHILD:
            self._end_hold(passed.fork)
        return passed


class HoldsNothingForBorrows(ReferenceTable):
    def share(self, handle: Handle, to: Life, carrier: Carrier) -> Passed | Failure:
        passed = super().share(handle, to, carrier)
        if isinstance(passed, Passed) and passed.passage is Passage.BORROW:
            self._end_hold(passed.fork)
        return passed


class AcceptsBeforeRegistered(ReferenceTable):
    def receive(self, passed: Passed) -> tuple[Handle, list[Effect]]:
        handle, effects = super().receive(passed)
        return handle, effects + self._accept(passed)


class NeverAccepts(ReferenceTable):
    def _on_registered(self, message: Registered) -> list[Effect]:
        effects = super()._on_registered(message)
        return [effect for effect in effects if not _sends(effect, Accepted)]


class DeletesWhileRegistering(ReferenceTable):
    def dropped(self, handle: Handle) -> list[Effect]:
        user = self._users.get(handle.fork) if isinstance(handle, UserHandle) else None
        if user is not None and user.state is _State.REGISTERING:
            user.state = _State.CONFIRMED
        return super().dropped(handle)


class DropsTombstones(ReferenceTable):
    def _on_delete(self, sender: Life, message: Delete) -> list[Effect]:
        if message.reference.rref not in self._entries:
            return []
        return super()._on_delete(sender, message)


class ForgetsEarlyDeletes(ReferenceTable):
    def creation_arrived(self, passed: Passed, sender: Life) -> list[Effect]:
        entry = self._entries.get(passed.reference.rref, _Entry())
        entry.deleted_early = frozenset()
        return super().creation_arrived(passed, sender)


class FreesPlaceholders(ReferenceTable):
    def _free_if_unused(self, rref: GlobalId) -> list[Effect]:
        if rref in self._entries:
            self._entries[rref].awaits_creation = False
        return super()._free_if_unused(rref)


class ForgetsWhichCreationsCame(ReferenceTable):
    def _seen(self, creator: Life) -> DuplicateFilter:
        return DuplicateFilter()


class SkipsUnsentCreations(ReferenceTable):
    def not_sent(self, passed: Passed, reason: str) -> list[Effect]:
        effects = super().not_sent(passed, reason)
        return [effect for effect in effects if not _sends(effect, Abandoned)]


class KeepsUnsentGrants(ReferenceTable):
    def not_sent(self, passed: Passed, reason: str) -> list[Effect]:
        return [] if passed.passage is Passage.GRANT else super().not_sent(passed, reason)


class GrantsWithoutNotingTheFork(ReferenceTable):
    def _share_owned(self, handle: OwnerHandle, to: Life) -> Passed:
        passed = super()._share_owned(handle, to)
        self._entries[handle.reference.rref].forks.pop(passed.fork, None)
        return passed


class TakesNoReferenceForReturns(ReferenceTable):
    def _receive_owned(self, passed: Passed) -> tuple[Handle, list[Effect]]:
        handle, effects = super()._receive_owned(passed)
        if passed.passage is Passage.RETURN and isinstance(handle, OwnerHandle):
            self._entries[handle.reference.rref].local_references -= 1
        return handle, effects


class KeepsTimedOutCreations(ReferenceTable):
    def creation_failed(self, fork: GlobalId, reason: str) -> list[Effect]:
        effects = super().creation_failed(fork, reason)
        return [effect for effect in effects if not _sends(effect, Delete)]


class DeletesTimedOutCreationsAtOnce(ReferenceTable):
    def creation_failed(self, fork: GlobalId, reason: str) -> list[Effect]:
        user = self._users.get(fork)
        if user is not None:
            self._drop_holds(user.held_for)
            user.held_for.clear()
        return super().creation_failed(fork, reason)


class KeepsHoldsForTheLost(ReferenceTable):
    def worker_lost(self, life: Life, reason: str) -> list[Effect]:
        kept = {token: hold for token, hold in self._holds.items() if hold.passage is Passage.CHILD}
        for token in kept:
            self._holds[token] = replace(kept[token], to=self._life)
        return super().worker_lost(life, reason)


class KeepsForksOfTheLost(ReferenceTable):
    def _entry_lost_worker(self, rref: GlobalId, reason: str) -> list[Effect]:
        entry = self._entries[rref]
        forks = dict(entry.forks)
        entry.forks = dict.fromkeys(forks, self._life)
        return super()._entry_lost_worker(rref, reason)


class WaitsForCreationsOfTheLost(ReferenceTable):
    def _entry_lost_worker(self, rref: GlobalId, reason: str) -> list[Effect]:
        waits = self._entries[rref].awaits_creation
        return [] if waits else super()._entry_lost_worker(rref, reason)


class TellsNobodyThatAValueFailed(ReferenceTable):
    def _entry_lost_worker(self, rref: GlobalId, reason: str) -> list[Effect]:
        effects = super()._entry_lost_worker(rref, reason)
        return [effect for effect in effects if not isinstance(effect, FailValue)]


class TellsNobodyThatAnOwnerIsLost(ReferenceTable):
    def _fail(self, user: _User, kind: FailureKind, reason: str) -> list[Effect]:
        return [] if kind is FailureKind.OWNER_LOST else super()._fail(user, kind, reason)


MUTANTS = [
    HoldsNothingForChildren,
    HoldsNothingForBorrows,
    AcceptsBeforeRegistered,
    NeverAccepts,
    DeletesWhileRegistering,
    DropsTombstones,
    ForgetsEarlyDeletes,
    FreesPlaceholders,
    ForgetsWhichCreationsCame,
    SkipsUnsentCreations,
    KeepsUnsentGrants,
    GrantsWithoutNotingTheFork,
    TakesNoReferenceForReturns,
    KeepsTimedOutCreations,
    DeletesTimedOutCreationsAtOnce,
    KeepsHoldsForTheLost,
    KeepsForksOfTheLost,
    WaitsForCreationsOfTheLost,
    TellsNobodyThatAValueFailed,
    TellsNobodyThatAnOwnerIsLost,
]


def _sends(effect: Effect, message: type[ControlMessage]) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, message)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_protocol_that_leaves_something_out_is_caught(mutant: type[ReferenceTable]) -> None:
    with pytest.raises(AssertionError):
        run_seeds(range(MUTANT_SEEDS), losses=True, table=mutant)


if __name__ == "__main__":
    Simulation(int(sys.argv[1]), sys.argv[2] == "True", trace=True).run()
