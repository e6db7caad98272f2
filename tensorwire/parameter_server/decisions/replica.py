"""Decides what one server does for one shard: as head, or as a backup.

Puts together the clock, the pulls that wait and the log. Everything that changes the state is a
record of the log and is run on it in order, at the head and at the backups (``records``). Messages
that tell of a change wait until that change is safe at the whole chain (``gate``).
"""

from __future__ import annotations

from collections import deque

from tensorwire.parameter_server.decisions import orders, pushes, replication
from tensorwire.parameter_server.decisions.clock import Clock
from tensorwire.parameter_server.decisions.consistency import Consistency, staleness_of
from tensorwire.parameter_server.decisions.gate import Gate
from tensorwire.parameter_server.decisions.leases import Lease, Renewal
from tensorwire.parameter_server.decisions.pushes import Push, Ready, Refusal, Refused, Taken
from tensorwire.parameter_server.decisions.reads import Answer, Pull, Reads, Turn
from tensorwire.parameter_server.decisions.records import (
    After,
    Assign,
    Counted,
    Effect,
    Exported,
    Heard,
    Import,
    NotHead,
    Read,
    Record,
    ReplicaState,
    Respond,
    Run,
    Safe,
    StartCopy,
)
from tensorwire.parameter_server.decisions.replication import Forward, Replication
from tensorwire.parameter_server.decisions.samples import LeaseAsked
from tensorwire.parameter_server.decisions.views import Server, Shard


class Replica:
    """One shard at one server.

    Args:
        me: the server.
        shard: the shard's number.
        consistency: when pushes are applied.
        position: of the log, if this begins from a copy.
        version: of the chain, likewise.
    """

    def __init__(
        self,
        me: Server,
        shard: int,
        consistency: Consistency,
        position: int = 0,
        version: int = -1,
    ) -> None:
        self.me = me
        self.shard = shard
        self.clock = Clock(shard, consistency)
        self.is_head = False
        self.is_primed = False
        self._reads = Reads(staleness_of(consistency))
        self._log = Replication[Record](me, position, version)
        self._gate = Gate(self._log)
        self._lease = Lease()
        self._pushes: dict[tuple[int, int], list[tuple[int, object]]] = {}
        self._going: dict[int, list[object]] = {}
        self._opens: list[object] = []
        self._stash: dict[int, Import] = {}
        self._news: list[Heard] = []
        self._control = 0
        self._copies: dict[Server, list[object]] = {}
        self._binding: list[object] = []
        self._bound: Server | None = None

    @property
    def parked(self) -> int:
        """Pulls that wait for pushes of others."""
        return len(self._reads)

    @property
    def version(self) -> int:
        """The latest version of the chain that this server knows."""
        return self._log.version

    def safe_count(self, trainer: int) -> int:
        """The number of a trainer's pushes that are safe at the whole chain."""
        return self._gate.safe_count(trainer)

    # --- calls to the head

    def pushed(self, push: Push, call: object) -> list[Effect]:
        """Takes a trainer's push; answered with ``Taken`` or ``Refused``, or it must ask again."""
        if not self.is_head or not self.is_primed:
            return [Respond(call, NotHead())]
        self._pushes.setdefault((push.trainer, push.number), []).append((push.epoch, call))
        return self._enter(push)

    def pulled(self, pull: Pull, now: float) -> list[Effect]:
        """Takes a trainer's pull; its ``ask`` is the call, answered by ``Read`` or ``Refusal``."""
        if not self.is_head:
            return [Respond(pull.ask, NotHead())]
        if not self.is_primed:
            self._reads.park(pull)
            return []
        renewal = self._renew(now) if now >= self._lease.renew_at else []
        if self._log.durable < self._control:
            self._reads.park(pull)
            return renewal
        answers = [self._answer(each) for each in self._reads.ask(pull, self.clock)]
        return [*renewal, *answers]

    def looked_at(self, now: float) -> tuple[bool, list[Effect]]:
        """Says whether somebody may read the state beside pulls: only at a proven head."""
        is_head = self.is_head and self.is_primed
        effects = self._renew(now) if is_head and now >= self._lease.renew_at else []
        return is_head and self._lease.is_valid(now), effects

    def _renew(self, now: float) -> list[Effect]:
        """Renews the lease; pulls wait for that if it is over."""
        effects: list[Effect] = []
        if self._lease.is_to_ask(now):
            self._lease.asked(self._log.position + 1, now)
            effects = self._enter(Renewal())
            self._lease.durable(self._log.durable)
        if not self._lease.is_valid(now):
            self._control = max(self._control, self._lease.end)
        return effects

    def ordered(self, order: orders.Order, call: object) -> list[Effect]:
        """Takes an order of the coordinator."""
        if isinstance(order, orders.Copy):
            return self._begin_copy(order, call)
        if not self.is_head:
            return [Respond(call, NotHead())]
        if isinstance(order, orders.Query):
            return self._gate.answer(call, self.clock.status() if self.is_primed else None)
        if isinstance(order, orders.Open):
            self._opens.append(call)
            return self._answer_opens()
        if isinstance(order, orders.Go):
            self._going.setdefault(order.cut.change, []).append(call)
            return self._enter(order, is_control=True) + self._answer_gone(order.cut.change)
        return self._enter(order, call, is_control=True)

    def imported(self, rows: Import, call: object) -> list[Effect]:
        """Takes rows that another shard sends; answered once they are safe."""
        if not self.is_head:
            return [Respond(call, NotHead())]
        return self._enter(rows, call, is_control=True)

    def exported(self, target: int, epoch: int) -> list[Effect]:
        """Notes that another shard has taken rows."""
        return self._enter(Exported(target, epoch)) if self.is_head else []

    def assigned(self, values: Assign, call: object) -> list[Effect]:
        """Takes values to be set, once what they replace is here; answered once they are safe."""
        if not self.is_head or not self.is_primed or not self.clock.is_open:
            return [Respond(call, NotHead())]
        return self._enter(values, call, is_control=True)

    def counted(self, sampler: str, call: object) -> list[Effect]:
        """Answers a question for a sampler's account of samples, once that is safe."""
        if not self.is_head or not self.is_primed:
            return [Respond(call, NotHead())]
        account = self.clock.accounts.get(sampler)
        return self._gate.answer(
            call, None if account is None else Counted(account, self.clock.deals)
        )

    def leased(self, asked: LeaseAsked, call: object) -> list[Effect]:
        """Answers a trainer that asks for batches, once it is safe whose they are."""
        if not self.is_head or not self.is_primed:
            return [Respond(call, NotHead())]
        return self._enter(asked, call)

    def told(self, heard: Heard, call: object) -> list[Effect]:
        """Notes how many pushes another shard has."""
        if not self.is_head:
            return [Respond(call, NotHead())]
        if self._log.has_follower:
            self._news.append(heard)
        return [*self._follow(self.clock.heard(heard.source, heard.ready)), Respond(call, True)]

    def inform_again(self) -> list[Effect]:
        """Tells the heads of other shards, or of this one, what they must know: they may be new."""
        ready = self.clock.told
        return self._inform(ready) if ready is not None else []

    def _inform(self, ready: Ready) -> list[Effect]:
        """Tells other shards of pushes, as soon as they are safe here."""
        return self._gate.inform(ready) if self.is_head else []

    # --- the chain

    def rechained(self, shard: Shard) -> list[Effect]:
        """Takes part in another version of its chain. Does nothing if a later one is known."""
        if shard.version < self.version:
            return []
        was_head, self.is_head = self.is_head, shard.head == self.me
        effects: list[Effect] = []
        if shard.chain[-1] != self.me:
            self._bound = None
            effects += [Respond(call, NotHead()) for call in self._binding]
            self._binding = []
        effects += self._fence(shard.version)
        effects += self._carry_out(self._log.rechained(shard.version, shard.chain))
        if was_head and not self.is_head:
            effects += self.deposed()
        return effects

    def deposed(self) -> list[Effect]:
        """Turns all calls away, as this server is not head, or keeps the shard, any longer."""
        self.is_head = False
        calls = [call for waiting in self._pushes.values() for _, call in waiting]
        calls += [call for waiting in self._going.values() for call in waiting]
        calls += [pull.ask for pull in self._reads.clear()]
        calls += [call for waiting in self._copies.values() for call in waiting]
        calls += [*self._opens, *self._binding, *self._gate.clear()]
        self._pushes, self._going, self._copies = {}, {}, {}
        self._opens, self._binding = [], []
        self._news.clear()
        return [Respond(call, NotHead()) for call in calls]

    def received(self, version: int, position: int, record: Record, call: object) -> list[Effect]:
        """Takes a record of the server before this one in the chain; answered once it is safe."""
        done = self._fence(version) if version > self._log.heard_of else []
        effects = self._log.receive(version, position, record)
        if effects and isinstance(effects[0], replication.Fenced):
            return [Respond(call, effects[0])]
        done += self._carry_out(effects)
        return done + self._gate.answer(call, Safe(position + 1), position + 1)

    def _fence(self, version: int) -> list[Effect]:
        """Refuses answers that came too early, in versions of the chain before this one."""
        return self._gate.fence(version) if self._log.raise_fence(version) else []

    def acknowledged(self, by: Server, position: int, version: int) -> list[Effect]:
        """Notes that the next server of the chain has all of that version before a position."""
        safe = self._carry_out(self._log.acknowledged(by, position, version))
        return [*safe, *self._answer_bound()]

    def _begin_copy(self, order: orders.Copy, call: object) -> list[Effect]:
        if self._log.has_next:
            return [Respond(call, NotHead())]
        if order.to in self._copies:
            self._copies[order.to].append(call)
            return []
        if order.to == self._bound:
            self._binding.append(call)
            return self._answer_bound()
        effects = [] if self._bound is None else self.heir_lost(self._bound)
        self._copies[order.to] = [call]
        position, version = self._log.adopt(order.to), self._log.version
        return [*effects, StartCopy(order.to, position, version, self._dump())]

    def copied(self, heir: Server) -> list[Effect]:
        """Notes that a new backup has its copy; the order is answered once it has the rest, too."""
        calls = self._copies.pop(heir, [])
        if not calls:
            return []
        self._bound = heir
        self._binding += calls
        return [*self._carry_out(self._log.bind(heir)), *self._answer_bound()]

    def _answer_bound(self) -> list[Effect]:
        if not self._log.heir_is_whole:
            return []
        calls, self._binding = self._binding, []
        return [effect for call in calls for effect in self._gate.answer(call, True)]

    def heir_lost(self, heir: Server) -> list[Effect]:
        """Drops a new backup that did not get its copy, or was lost before the view named it."""
        calls = self._copies.pop(heir, [])
        if self._bound == heir:
            self._bound = None
            calls, self._binding = [*calls, *self._binding], []
        effects = self._carry_out(self._log.disown(heir))
        return [*effects, *(Respond(call, False) for call in calls)]

    def _dump(self) -> ReplicaState:
        return ReplicaState(self.clock.dump(), self.is_primed, dict(self._stash))

    def load(self, dumped: ReplicaState) -> None:
        """Becomes what the replica was from which a copy was made."""
        self.clock.load(dumped.clock)
        self.is_primed = dumped.is_primed
        self._stash = dict(dumped.stash)
        self._gate.begin_with(self.clock.status().counts)

    # --- running records

    def _enter(self, record: Record, call: object = None, is_control: bool = False) -> list[Effect]:
        """Takes a record, at the head."""
        news, self._news = self._news, []
        position, sent = self._log.append(After(tuple(news), record) if news else record)
        if is_control:
            self._control = position + 1
        effects, answer = self._run(record)
        if call is not None:
            effects += self._gate.answer(call, answer, position + 1)
        return effects + self._carry_out(sent)

    def _carry_out(self, effects: list[replication.Effect[Record]]) -> list[Effect]:
        done: list[Effect] = []
        for effect in effects:
            if isinstance(effect, replication.Append):
                done += self._follow_head(effect.record)
            elif isinstance(effect, replication.Durable):
                done += self._now_durable()
            elif isinstance(effect, Forward):
                done.append(effect)
        return done

    def _follow_head(self, record: Record) -> list[Effect]:
        """Takes a record, at a backup, and with it what the head had heard before."""
        done: list[Effect] = []
        if isinstance(record, After):
            for heard in record.news:
                done += self._follow(self.clock.heard(heard.source, heard.ready))
            record = record.record
        return done + self._run(record)[0]

    def _run(self, record: Record) -> tuple[list[Effect], object]:
        """Changes the clock; returns what follows, and the answer to who sent the record."""
        answer: object = None
        effects: list[Effect] = []
        moved: list[pushes.Effect] = []
        if isinstance(record, Push):
            moved = self.clock.push(record)
        elif isinstance(record, orders.Hold):
            self.clock.hold(record.change)
            answer = self.clock.status()
        elif isinstance(record, orders.Release):
            moved = self.clock.release(record.change)
        elif isinstance(record, orders.Go):
            moved = self.clock.cut(record.cut)
        elif isinstance(record, orders.Silence):
            answer = self.clock.silence(record.trainer)
        elif isinstance(record, orders.Settle):
            moved = self.clock.settle(record.trainer, record.keep)
        elif isinstance(record, LeaseAsked):
            answer = self.clock.lease(record)
        elif isinstance(record, orders.Prime):
            effects, moved = self._prime(record)
        elif isinstance(record, Import):
            effects, moved = self._import(record)
        elif isinstance(record, orders.Declare | orders.Published | Exported | Assign):
            effects = [Run(record)]
        return effects + self._follow(moved), answer

    def _prime(self, order: orders.Prime) -> tuple[list[Effect], list[pushes.Effect]]:
        """Primes the shard; once more if the move for which it began is made anew."""
        if self.is_primed and not self._is_as_primed(order):
            return [], []
        self.is_primed = True
        active = frozenset(order.slots)
        self.clock.prime(
            order.counts, order.time, order.epoch, order.awaited, active, order.accounts
        )
        effects: list[Effect] = [Run(order)]
        moved: list[pushes.Effect] = []
        for rows in self._take_stash():
            more, on = self._import(rows)
            effects += more
            moved += on
        return effects, moved

    def _is_as_primed(self, order: orders.Prime) -> bool:
        """True if nothing arrived since this shard was primed for the same epoch."""
        return order.epoch == self.clock.epoch and bool(order.awaited) and all(
            self.clock.awaits(source) for source in order.awaited
        )  # fmt: skip

    def _import(self, rows: Import) -> tuple[list[Effect], list[pushes.Effect]]:
        if not self.is_primed or rows.epoch > self.clock.epoch:
            self._stash[rows.source] = rows
            return [], []
        if rows.epoch < self.clock.epoch or not self.clock.awaits(rows.source):
            return [], []
        return [Run(rows)], self.clock.imported(rows.source, rows.accounts)

    def _take_stash(self) -> list[Import]:
        ready = [rows for rows in self._stash.values() if rows.epoch <= self.clock.epoch]
        for rows in ready:
            del self._stash[rows.source]
        return ready

    def _follow(self, effects: list[pushes.Effect]) -> list[Effect]:
        """Carries out what the clock decided: on the state, and on those who wait."""
        done: list[Effect] = []
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            if isinstance(effect, Taken):
                done += self._tell_taken(effect)
            elif isinstance(effect, Refused):
                done += self._tell_refused(effect)
            elif isinstance(effect, Ready):
                done += self._inform(effect)
            else:
                done.append(Run(effect))
            if isinstance(effect, pushes.Reached):
                done += self._answer_gone(effect.cut.change)
                for rows in self._take_stash():
                    more, on = self._import(rows)
                    done += more
                    queue.extend(on)
        done += self._answer_opens()
        return done + self._due_reads()

    def _tell_taken(self, taken: Taken) -> list[Effect]:
        self._gate.count(taken.trainer, taken.number + 1)
        waiting = self._pushes.pop((taken.trainer, taken.number), [])
        done: list[Effect] = []
        for _, call in waiting:
            done += self._gate.answer(call, taken)
        return done

    def _tell_refused(self, refused: Refused) -> list[Effect]:
        key = (refused.trainer, refused.number)
        waiting = self._pushes.pop(key, [])
        staying = [(epoch, call) for epoch, call in waiting if epoch > refused.epoch]
        if staying and refused.reason is Refusal.MOVED:
            self._pushes[key] = staying
        else:
            staying = []
        done: list[Effect] = []
        for entry in waiting:
            if entry not in staying:
                done += self._gate.answer(entry[1], refused)
        return done

    # --- answers

    def _now_durable(self) -> list[Effect]:
        if self._lease.pending is not None:
            self._lease.durable(self._log.durable)
        return self._gate.open() + self._due_reads()

    def _due_reads(self) -> list[Effect]:
        if not self.is_head or not self.is_primed or self._log.durable < self._control:
            return []
        return [self._answer(each) for each in self._reads.due(self.clock)]

    def _answer(self, effect: Answer | Turn) -> Effect:
        if isinstance(effect, Answer):
            low, time = self.clock.low, self.clock.time
            return Read(effect.pull, time, time if low is None else low, self._log.version)
        return Respond(effect.pull.ask, effect.reason)

    def _answer_gone(self, change: int) -> list[Effect]:
        """Answers who waits for a cut that was reached, now or before."""
        status = self.clock.status()
        if status.cut is None or not status.reached or status.cut.change < change:
            return []
        done: list[Effect] = []
        for call in self._going.pop(change, []):
            done += self._gate.answer(call, self.clock.accounts_at_cut)
        return done

    def _answer_opens(self) -> list[Effect]:
        if not self.clock.is_open or not self.is_primed:
            return []
        opens, self._opens = self._opens, []
        return [effect for call in opens for effect in self._gate.answer(call, True)]
