"""The simulated world: processes, the network between them, the clock; carries out steps.

What the transports promise is modelled exactly, for the protocols may rely on it:

- A packet that was sent is taken at most once, or more often if it is a reply
  or a batch of control messages, which know how to be taken twice.
- A connection that breaks and is replaced only makes packets late, as any may be
  (``resumption``, which is played by its own tests).
- A packet that is lost for good takes its link with it: both ends hear that the other
  is gone, at some time each, and nothing passes between them ever after.
- A worker hears nothing from a life that it does not know yet (the packet waits)
  or that it took for lost (the packet is refused).
- A death is reported to everybody some time. A worker's leaving is reported after what
  it had sent.
- A worker that is stopped wakes with its messages, calls and timers as they were, maybe between a
  decision and what it sends for it. If it is lost meanwhile, it hears so some time after it woke.

How a loss is noticed, and how word of it spreads, is not played (``liveness``,
``membership``): here a loss is news that reaches everybody some time.

Everything else is left to chance: packets are delivered in any order, after any
time; what a process sent before its death arrives or not, whichever; news of
deaths, joins and returns overtake each other and every packet; a life may be
heard of after its successor. Nothing here is random: a step that cannot happen
is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rpc.errors import RpcError
from rpc.ids import GlobalId, Life
from rpc.protocol.reference_terms import Carrier, Handle, UserHandle
from rpc.protocol.retry import RequestId
from rpc.transports.base import Peer
from rpc.wire.control import Passage, Passed
from tests.simulation.group import steps
from tests.simulation.group.at_rest import AtRest
from tests.simulation.group.leaving import EscapedError
from tests.simulation.group.ledger import Ledger
from tests.simulation.group.packets import (
    Batch,
    Body,
    Causes,
    News,
    NewsKind,
    OpenCall,
    Packet,
    SimReply,
    SimRequest,
    Value,
)
from tests.simulation.group.shutdowns import Shutdowns
from tests.simulation.group.steps import Act, Name, Step, describe, short
from tests.simulation.group.worker import Machines, SimWorker, info_of

_NOBODY: Causes = frozenset()
_TRY_SECONDS = (0.0, 0.6, 0.0, 0.1)
_FOREVER = 3600.0


class World:
    """The whole state of one run.

    Args:
        machines: what decides.
        size: workers at the start, with ids from 0.
        transcript: where to tell what happens, line by line; default nowhere.
    """

    def __init__(self, machines: Machines, size: int, transcript: list[str] | None = None) -> None:
        self.machines = machines
        self.transcript = transcript
        self.now = 0.0
        self.living: dict[Life, SimWorker] = {}
        self.closed: set[Life] = set()
        self.latest: dict[int, Life] = {}
        self.network: dict[Name, Packet] = {}
        self.taken: set[Name] = set()
        self.news: dict[Name, News] = {}
        self.cut: set[frozenset[Life]] = set()
        self.island: frozenset[int] = frozenset()
        self.expelled: set[Life] = set()
        self.losses = False
        self.messages = 0
        self.causes = _NOBODY
        self.ledger = Ledger(self)
        self.shutdowns = Shutdowns(self)
        self.step = -1
        self._made = 0
        self._carry_out = self._table()
        for worker in range(size):
            self._spawn(Life(worker, 0))
        members = [Peer(info_of(life), life.incarnation, b"") for life in self.living]
        for each in self.living.values():
            each.meet(members)

    def _table(self) -> dict[type[Act], Callable[[Any], bool]]:
        return {
            steps.Create: self._create,
            steps.Keep: self._keep,
            steps.CallWorker: self._call,
            steps.Try: self._try,
            steps.CancelCall: self._cancel,
            steps.Fetch: self._fetch,
            steps.Drop: self._drop,
            steps.Serve: self._serve,
            steps.Begin: self._begin,
            steps.Release: self._release,
            steps.Deliver: self._deliver,
            steps.Duplicate: self._duplicate,
            steps.Stray: self._stray,
            steps.Fail: self._fail,
            steps.Lose: self._lose,
            steps.Cut: self._cut_link,
            steps.Partition: self._partition,
            steps.Heal: self._heal,
            steps.Hear: self._hear,
            steps.Crash: self._crash,
            steps.Stop: self._stop,
            steps.Declare: self._declare,
            steps.Wake: self._wake,
            steps.Pulse: self._pulse,
            steps.Depart: self._depart,
            steps.Start: self._start,
            steps.Close: self._close,
            steps.Pass: self._pass,
        }

    def apply(self, step: Step) -> bool:
        """Carries out one step; False if it cannot happen here."""
        self.step = step.number
        self._made = 0
        self.causes = _NOBODY
        if self.transcript is not None:
            self.transcript.append(f"{step.number:4}  {describe(step.act)}")
        try:
            return self._apply(step.act)
        except EscapedError as escaped:
            raise escaped.error from None

    def _apply(self, act: Act) -> bool:
        done = self._carry_out[type(act)](act)
        if not done:
            if self.transcript is not None:
                self.transcript.pop()
            return False
        for worker in list(self.living.values()):
            if not worker.asleep:
                worker.leaving.activity_changed()
        return True

    # --- What workers need

    def name(self) -> Name:
        """A new name for something that this step makes."""
        self._made += 1
        return self.step, self._made

    def say(self, who: Life, effect: object) -> None:
        """Tells what a worker decided."""
        if self.transcript is not None:
            self.transcript.append(f"          {short(who)}: {effect}")

    def post(self, source: Life, to: Life, body: Body) -> None:
        """Sends something; what is sent to the dead, or over a cut link, is lost."""
        self.messages += 1
        if to in self.living and frozenset((source, to)) not in self.cut:
            causes = self.causes | {source, to}
            name = self.name()
            packet = Packet(name, name, source, to, body, causes)
            sender = self.living.get(source)
            if sender is not None and sender.keeps_back():
                sender.outbox.append(packet)
            else:
                self.network[packet.name] = packet

    def divides(self, one: Life, other: Life) -> bool:
        """True if nothing passes between two lives for a while."""
        return (one.worker in self.island) != (other.worker in self.island)

    def deliverable(self, packet: Packet) -> bool:
        """True if a packet may arrive now."""
        if self.divides(packet.source, packet.to):
            return False
        receiver = self.living[packet.to]
        known = receiver.knows(packet.source) or receiver.fences(packet.source)
        return known and not receiver.asleep

    def awake(self, life: Life) -> SimWorker | None:
        """A living worker that is not stopped."""
        worker = self.living.get(life)
        return None if worker is None or worker.asleep else worker

    def audible(self, news: News) -> bool:
        """True if news may reach their listener now."""
        if self.living[news.listener].asleep:
            return False
        if not news.after_its_packets:
            return True
        link = (news.about, news.listener)
        return all((p.source, p.to) != link for p in self.network.values())

    # --- Programs

    def _at_work(self, life: Life, job: Name | None) -> SimWorker | None:
        """The worker, if its program, or one of its handlers, may act."""
        worker = self.awake(life)
        if worker is None or worker.finished:
            return None
        if job is None:
            self.causes = frozenset((life,))
            return None if worker.begun else worker
        if job not in worker.jobs:
            return None
        self.causes = worker.jobs[job].causes
        return worker

    def _create(self, act: steps.Create) -> bool:
        worker = self._at_work(act.by, act.job)
        if worker is None or act.to not in worker.view:
            return False
        to = worker.view[act.to]
        if to == worker.life:
            handle: Handle = worker.references.create_here()
            worker.values[handle.reference.rref] = Value.AWAITED
            passed = Passed(handle.reference, handle.reference.rref, Passage.LOOPBACK)
        else:
            handle, passed = worker.references.create_remote(to)
            self.ledger.created(worker, passed)
        worker.handles[self.name()] = handle
        leaves = act.leaves or to == worker.life
        self._request(worker, to, (), act.timeout, leaves, creates=passed)
        return True

    def _keep(self, act: steps.Keep) -> bool:
        worker = self._at_work(act.by, None)
        if worker is not None:
            worker.handles[self.name()] = worker.references.new_value()
        return worker is not None

    def _call(self, act: steps.CallWorker) -> bool:
        worker = self._at_work(act.by, act.job)
        if worker is None:
            return False
        try:
            to = worker.destination(act.to, act.address)
        except RpcError as error:
            self.ledger.resolved(worker, act.to, error)
            return True
        self.ledger.resolved(worker, act.to, to)
        lends = [worker.handles[name] for name in act.lends if name in worker.handles]
        table = tuple(worker.share(lends, to, Carrier.REQUEST))
        record = self._request(
            worker, to, table, act.timeout, act.leaves, job=act.job, patient=act.patient
        )
        if act.job is not None and act.waits:
            worker.jobs[act.job].waits_for.add(record.name)
            record.job = worker.jobs[act.job]
        self._drop_all(worker, act.drops)
        return True

    def _try(self, act: steps.Try) -> bool:
        worker = self._at_work(act.by, None)
        if worker is None or act.to not in worker.view:
            return False
        number = len(worker.tries) if act.number is None else act.number
        if number > len(worker.tries):
            return False
        if not worker.tries.setdefault(number, True):
            return False
        limit = _TRY_SECONDS[number % len(_TRY_SECONDS)]
        until = worker.tries_until.setdefault(number, worker.now + (limit or _FOREVER))
        if until <= worker.now:
            return False
        left = until - worker.now if limit else 0.0
        once = RequestId(number, worker.oldest_try(), left)
        self._request(worker, worker.view[act.to], (), act.timeout, True, once=once)
        return True

    def _cancel(self, act: steps.CancelCall) -> bool:
        worker = self.awake(act.by)
        record = worker and worker.records.get(act.call)
        if not worker or not record or not record.leaves:
            return False
        self.causes = record.causes
        worker.cancel(record)
        return True

    def _fetch(self, act: steps.Fetch) -> bool:
        worker = self._at_work(act.by, None)
        handle = None if worker is None else worker.handles.get(act.handle)
        if worker is None or not isinstance(handle, UserHandle):
            return False
        owner = handle.reference.owner
        if not worker.knows(owner):
            return False
        table = tuple(worker.share((handle,), owner, Carrier.REQUEST))
        if table:
            fetches = handle.reference.rref
            self._request(worker, owner, table, act.timeout, True, fetches=fetches)
        return True

    def _request(
        self,
        worker: SimWorker,
        to: Life,
        table: tuple[Passed, ...],
        timeout: float,
        leaves: bool,
        *,
        creates: Passed | None = None,
        fetches: GlobalId | None = None,
        job: Name | None = None,
        patient: bool = False,
        once: RequestId | None = None,
    ) -> OpenCall:
        now = worker.now
        deadline = now + timeout if timeout else None
        causes = self.causes | {worker.life}
        record = OpenCall(self.name(), to, table, creates, now, deadline, None, causes)
        record.leaves = leaves
        record.once = once.number if once is not None else None
        worker.open(record, timeout)
        if leaves:
            number = record.correlation
            body = SimRequest(record.name, number, table, creates, fetches, patient, once)
            self.post(worker.life, to, body)
        return record

    def _fail(self, act: steps.Fail) -> bool:
        worker = self.awake(act.by)
        record = worker and worker.records.get(act.call)
        if not worker or not record or record.leaves:
            return False
        self.causes = record.causes
        worker.send_failed(record)
        return True

    def _drop(self, act: steps.Drop) -> bool:
        worker = self.awake(act.by)
        if worker is None or act.handle not in worker.handles:
            return False
        self.causes = frozenset((worker.life,))
        self._drop_all(worker, (act.handle,))
        return True

    @staticmethod
    def _drop_all(worker: SimWorker, names: tuple[Name, ...]) -> None:
        for name in names:
            if name in worker.handles:
                worker.drop(worker.handles.pop(name))

    def _serve(self, act: steps.Serve) -> bool:
        worker = self.awake(act.by)
        job = worker and worker.jobs.get(act.job)
        if not worker or not job or not worker.ready(job):
            return False
        self.causes = job.causes
        arguments = dict(job.handles)
        known = worker.handles | arguments
        plain = job.request.creates is None and job.request.fetches is None
        returns = [known[name] for name in act.returns if name in known and plain]
        keeps = act.keeps if job.request.fetches is None else ()
        for name in keeps:
            if name in arguments:
                worker.handles[name] = arguments.pop(name)
        worker.serve(job, returns, act.raises)
        for handle in arguments.values():
            worker.drop(handle)
        self._drop_all(worker, act.drops)
        return True

    def _begin(self, act: steps.Begin) -> bool:
        worker = self.awake(act.by)
        if worker is None or worker.begun:
            return False
        self.causes = frozenset((worker.life,))
        worker.begin()
        return True

    def _release(self, act: steps.Release) -> bool:
        worker = self.awake(act.by)
        if worker is not None:
            self.causes = frozenset((worker.life,))
            worker.release()
        return worker is not None

    # --- The network

    def _deliver(self, act: steps.Deliver) -> bool:
        packet = self.network.get(act.packet)
        if packet is None or not self.deliverable(packet):
            return False
        if self.transcript is not None:
            self.transcript[-1] += f": {packet}"
        del self.network[act.packet]
        receiver = self.living[packet.to]
        if receiver.fences(packet.source):
            return True
        self.taken.add(packet.origin)
        self.causes = packet.causes
        if isinstance(packet.body, SimRequest):
            receiver.requested(packet, packet.body)
        elif isinstance(packet.body, SimReply):
            receiver.replied(packet.source, packet.body)
        else:
            receiver.noticed(packet.source, packet.body)
        return True

    def _duplicate(self, act: steps.Duplicate) -> bool:
        packet = self.network.get(act.packet)
        if packet is None or not isinstance(packet.body, SimReply | Batch):
            return False
        copy = replace(packet, name=self.name())
        self.network[copy.name] = copy
        return True

    def _stray(self, act: steps.Stray) -> bool:
        packet = self.network.get(act.packet)
        receiver = packet and self.living[packet.to]
        if not packet or not receiver or not isinstance(packet.body, SimReply):
            return False
        is_stray = packet.source.worker != act.sender.worker and receiver.knows(act.sender)
        if not is_stray or receiver.asleep:
            return False
        receiver.replied(act.sender, packet.body)
        return True

    def _lose(self, act: steps.Lose) -> bool:
        packet = self.network.get(act.packet)
        if packet is None or packet.source == packet.to:
            return False
        del self.network[act.packet]
        if packet.source in self.living:
            self._cut(packet.source, packet.to)
        return True

    def _cut_link(self, act: steps.Cut) -> bool:
        if act.one == act.other or act.one not in self.living or act.other not in self.living:
            return False
        self._cut(act.one, act.other)
        return True

    def _cut(self, one: Life, other: Life) -> None:
        self.losses = True
        link = frozenset((one, other))
        if link not in self.cut:
            self.cut.add(link)
            self._spread(one, other, NewsKind.LOST)
            self._spread(other, one, NewsKind.LOST)

    def _partition(self, act: steps.Partition) -> bool:
        self.island = act.island
        return True

    def _heal(self, act: steps.Heal) -> bool:
        healed = bool(self.island)
        self.island = frozenset()
        return healed

    # --- Processes

    def _spawn(self, life: Life) -> SimWorker:
        worker = SimWorker(life, self)
        self.living[life] = worker
        self.latest[life.worker] = life
        return worker

    def _start(self, act: steps.Start) -> bool:
        before = self.latest.get(act.worker)
        if before in self.living and before not in self.expelled:
            return False
        life = Life(act.worker, 0 if before is None else before.incarnation + 1)
        others = list(self.living)
        members = list(self.latest.values())
        worker = self._spawn(life)
        for member in members:
            if member.worker != act.worker and member not in self.closed:
                worker.joined(member)
                if member not in self.living or member in self.expelled:
                    self._spread(life, member, NewsKind.LOST)
        worker.joined(life)
        for other in others:
            self._spread(other, life, NewsKind.JOINED)
        return True

    def _crash(self, act: steps.Crash) -> bool:
        if act.who not in self.living or len(self.living) == 1:
            return False
        self.losses = True
        self._vanish(act.who, after_its_packets=False)
        return True

    def _stop(self, act: steps.Stop) -> bool:
        worker = self.awake(act.who)
        if worker is None or worker.sends_left is not None:
            return False
        worker.stop(act.sends, act.clock_stands)
        return True

    def _declare(self, act: steps.Declare) -> bool:
        worker = self.living.get(act.who)
        others = [each for each in self.living if each != act.who and each not in self.expelled]
        if worker is None or not worker.asleep or act.who in self.expelled or not others:
            return False
        self.losses = True
        self.expelled.add(act.who)
        for other in self.living.values():
            if other.life != act.who and not other.finished:
                self._spread(other.life, act.who, NewsKind.LOST)
                self._spread(act.who, other.life, NewsKind.LOST)
        self._spread(act.who, act.who, NewsKind.EXPELLED)
        return True

    def _wake(self, act: steps.Wake) -> bool:
        worker = self.living.get(act.who)
        if worker is None or not worker.asleep:
            return False
        for packet in worker.wake():
            if packet.to in self.living and frozenset((act.who, packet.to)) not in self.cut:
                self.network[packet.name] = packet
        return True

    def _pulse(self, act: steps.Pulse) -> bool:
        worker = self.awake(act.who)
        if worker is not None and worker.is_late:
            self.causes = frozenset((worker.life,))
            worker.expire()
            return True
        return False

    def _depart(self, act: steps.Depart) -> bool:
        worker = self.awake(act.who)
        if worker is None or not worker.is_expelled or worker.handles:
            return False
        under_way = any(packet.source == packet.to == act.who for packet in self.network.values())
        goes_on = under_way or any(map(worker.ready, worker.jobs.values()))
        if goes_on or not all(r.leaves for r in worker.records.values()):
            return False
        AtRest(self).check_departing(worker)
        self._vanish(act.who, after_its_packets=False)
        return True

    def _close(self, act: steps.Close) -> bool:
        worker = self.awake(act.who)
        if worker is None or not worker.finished:
            return False
        self.closed.add(act.who)
        self._vanish(act.who, after_its_packets=True)
        return True

    def _vanish(self, life: Life, *, after_its_packets: bool) -> None:
        del self.living[life]
        for name in [name for name, p in self.network.items() if p.to == life]:
            del self.network[name]
        for name in [name for name, news in self.news.items() if news.listener == life]:
            del self.news[name]
        for other, worker in self.living.items():
            heard = life in self.expelled or worker.finished  # such a one does not care any more
            if not heard:
                self._spread(other, life, NewsKind.LOST, after_its_packets)

    def _spread(
        self, listener: Life, about: Life, kind: NewsKind, after_its_packets: bool = False
    ) -> None:
        news = News(self.name(), listener, about, kind, after_its_packets)
        self.news[news.name] = news

    def _hear(self, act: steps.Hear) -> bool:
        news = self.news.get(act.news)
        if news is None or not self.audible(news):
            return False
        del self.news[act.news]
        listener = self.living[news.listener]
        self.causes = frozenset((listener.life,))
        if self.transcript is not None:
            self.transcript[-1] += (
                f": {short(listener.life)} hears that {short(news.about)} {news.kind.value}"
            )
        if news.kind is NewsKind.JOINED:
            listener.joined(news.about)
        elif news.kind is NewsKind.EXPELLED:
            listener.hear_expelled("it was silent")
        else:
            listener.lost(news.about, "it died")
        return True

    def _pass(self, act: steps.Pass) -> bool:
        self.now += act.seconds
        for worker in list(self.living.values()):
            if worker.asleep:
                worker.behind += act.seconds if worker.clock_stands else 0.0
            else:
                self.causes = frozenset((worker.life,))
                worker.expire()
        return True
