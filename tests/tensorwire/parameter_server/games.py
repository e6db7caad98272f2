"""Plays whole clusters without I/O: servers, trainers, a coordinator, a store, a network.

A seed says what happens in which order: messages arrive in any order and some twice, servers and
trainers are killed or cut off, come back, join, finish; snapshots are taken, shards move. The
decisions are the real ones. The state is a list of what was applied to each of a few ids; at the
end, and at each cut, it is compared with what the trainers know that they sent.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tensorwire.parameter_server.decisions import orders, views
from tensorwire.parameter_server.decisions.clock import (
    Apply,
    Cut,
    Push,
    PushKind,
    Reached,
    Refusal,
    Refused,
    Taken,
)
from tensorwire.parameter_server.decisions.consistency import (
    BSP,
    SSP,
    Async,
    Consistency,
    staleness_of,
)
from tensorwire.parameter_server.decisions.coordination import Coordinator
from tensorwire.parameter_server.decisions.lives import Fate, Latest, Lives, Verdict
from tensorwire.parameter_server.decisions.reads import Pull
from tensorwire.parameter_server.decisions.replica import (
    Exported,
    Heard,
    Import,
    Inform,
    NotHead,
    Read,
    Replica,
    Respond,
    Run,
    Safe,
    StartCopy,
)
from tensorwire.parameter_server.decisions.replication import Forward
from tensorwire.parameter_server.decisions.slots import SLOTS
from tensorwire.parameter_server.decisions.tasks import (
    Alarm,
    Conclude,
    Fail,
    Publish,
    Reply,
    Resign,
    Store,
    Tell,
)
from tensorwire.parameter_server.decisions.unacknowledged import Unacknowledged
from tensorwire.parameter_server.decisions.views import Client, Server, Snapshot, View
from tensorwire.parameter_server.settings import settings_of

IDS = tuple(range(0, SLOTS, SLOTS // 7))
"""Some ids; an id is its own slot."""

_PATIENCE = 60_000

History = tuple[tuple[tuple[int, int], ...], ...]
"""By update: the pushes in it, each a trainer's number and its own."""


class Broken(AssertionError):
    """A rule does not hold."""


@dataclass(frozen=True)
class Plan:
    """The things that may happen in a game."""

    consistency: Consistency
    servers: int
    spare: int
    backups: int
    trainers: int
    steps: int
    kills: int
    trainer_kills: int
    snapshots: int
    resizes: int
    duplicates: bool
    zombies: bool
    newcomers: bool
    """Servers came back just before, of which not all have heard."""
    snapshot_follows: bool
    """A snapshot is asked for right behind each resize, while rows are on their way."""
    slow_rows: bool
    """Rows that move are long under way, as they are more bytes than anything else."""


def draw_plan(seed: int) -> Plan:
    """The plan of a seed."""
    r = random.Random(seed)
    servers = r.randint(1, 3)
    backups = r.choice([0, 1, 1, 1, 2])
    return Plan(
        consistency=r.choice([BSP(), BSP(), SSP(0), SSP(2), Async()]),
        servers=servers,
        spare=r.randint(0, 2),
        backups=backups,
        trainers=r.randint(1, 3),
        steps=r.randint(2, 7),
        kills=r.choice([0, 0, 1, 1, 2, 3]),
        trainer_kills=r.choice([0, 0, 0, 1]),
        snapshots=r.choice([0, 1, 2]),
        resizes=r.choice([0, 0, 1, 2]),
        duplicates=r.random() < 0.5,
        zombies=r.random() < 0.3,
        newcomers=r.random() < 0.4,
        snapshot_follows=r.random() < 0.5,
        slow_rows=r.random() < 0.5,
    )


class Process:
    """A life of a worker."""

    def __init__(self, game: Game, name: str, incarnation: int) -> None:
        self.game = game
        self.name = name
        self.life = Server(name, incarnation)
        self.calls: dict[int, Callable[[Any], None]] = {}
        self.callees: dict[int, Server] = {}
        self.heard: dict[str, Latest] = {}

    def call(self, to: Server, what: Any, then: Callable[[Any], None]) -> None:
        """Calls; ``then`` gets the answer, or None if the callee is lost."""
        game = self.game
        game.numbers += 1
        number = game.numbers
        self.calls[number], self.callees[number] = then, to
        if to not in game.living or game.cut_off(self.life, to) or not self.has_heard_of(to):
            game.network.append((to, self.life, ("lost", number)))
        else:
            game.send(self.life, to, ("call", number, what))

    def answered(self, number: int, answer: Any) -> None:
        then = self.calls.pop(number, None)
        self.callees.pop(number, None)
        if then is not None:
            then(answer)

    def has_heard_of(self, life: Server) -> bool:
        """A call to a life that came back meets the one before, which is dead."""
        latest = self.heard.get(life.name)
        return latest is not None and latest.incarnation >= life.incarnation

    def hear_came(self, life: Server) -> None:
        """Lives that came and went between two looks into the store are never heard of."""
        if self.has_heard_of(life) or (life in self.game.dead and life not in self.game.islands):
            return
        former = self.heard.get(life.name)
        if former is not None and former.lives:
            self.hear_lost(Server(life.name, former.incarnation))
        self.heard[life.name] = Latest(life.incarnation, True)
        self.came(life)

    def came(self, life: Server) -> None:
        pass

    def hear_lost(self, life: Server) -> None:
        if not self.has_heard_of(life):
            return
        if self.heard[life.name].incarnation == life.incarnation:
            self.heard[life.name] = Latest(life.incarnation, False)
        for number, to in list(self.callees.items()):
            if to == life:
                self.answered(number, None)
        self.lost(life)

    def lost(self, life: Server) -> None:
        raise NotImplementedError

    def handle(self, sender: Server, number: int, what: Any) -> None:
        raise NotImplementedError


@dataclass
class State:
    """The state that storage holds of one shard."""

    number: int
    slots: tuple[int, ...] = ()
    rows: dict[int, History] = field(default_factory=dict)
    frozen: dict[int, dict[int, History]] = field(default_factory=dict)
    exports: dict[tuple[int, int], dict[int, History]] = field(default_factory=dict)

    def owned(self) -> list[int]:
        return [each for each in IDS if self.slots and self.slots[each] == self.number]


class ServerProcess(Process):
    def __init__(self, game: Game, name: str, incarnation: int) -> None:
        super().__init__(game, name, incarnation)
        self.view: View | None = None
        self.term = -1
        self.replicas: dict[int, Replica] = {}
        self.states: dict[int, State] = {}
        self.early: dict[int, list[tuple[Server, int, Any]]] = {}
        self.coordinator: Coordinator | None = None
        self.requests: dict[int, tuple[Server, int]] = {}
        self.known = Lives(self.heard.get)
        self.joining: set[int] = set()

    # --- other servers

    def call(self, to: Server, what: Any, then: Callable[[Any], None]) -> None:
        was_heard_of = self.known.verdict(to) is not Verdict.UNHEARD

        def answered(answer: Any) -> None:
            if answer is not None:
                then(answer)
                return
            fate = self.known.failed(to, (to, what, then), was_heard_of)
            if fate is Fate.AGAIN:
                self.call(to, what, then)
            elif fate is Fate.GIVEN_UP:
                then(None)
            else:
                self.trust(to)

        super().call(to, what, answered)

    def trust(self, life: Server) -> None:
        if self.known.trust(life):
            self.game.later(self, lambda: self.doubt(life))

    def doubt(self, life: Server) -> None:
        """News of who lives comes within that time."""
        if not self.known.doubt(life):
            return
        if life in self.game.living and life not in self.game.islands:
            self.game.later(self, lambda: self.doubt(life))
        else:
            self.lost(life)

    def believes_in(self, life: Server) -> bool:
        self.trust(life)
        return self.known.verdict(life) is not Verdict.OVER

    # --- views

    def see(self, view: View) -> None:
        if self.view is not None and view.number <= self.view.number:
            self.maybe_coordinate()
            return
        self.view = view
        self.term = max(self.term, view.term)
        mine = {s.number: s for s in view.shards if self.life in s.chain}
        for number in [n for n in self.replicas if n not in mine]:
            if any(s.number == number for s in view.shards) and number in self.joining:
                continue
            self.carry_out(number, self.replicas[number].deposed())
            del self.replicas[number], self.states[number]
        for number, shard in mine.items():
            if number not in self.replicas:
                self.make(number)
            self.carry_out(number, self.replicas[number].rechained(shard))
            for sender, call, what in self.early.pop(number, []):
                self.receive(number, sender, call, what)
        coordinator = self.coordinator
        if (
            coordinator is not None
            and view.coordinator != self.life
            and view.term > coordinator.view.term
        ):
            self.coordinator = None
        for number in list(self.states):
            self.resend_exports(number)
            self.carry_out(number, self.replicas[number].inform_again())
        self.maybe_coordinate()

    def make(self, number: int, position: int = 0, version: int = -1) -> Replica:
        replica = Replica(self.life, number, self.game.plan.consistency, position, version)
        self.replicas[number] = replica
        self.states[number] = State(number)
        return replica

    def maybe_coordinate(self) -> None:
        view = self.view
        if view is None or self.coordinator is not None or view.broken:
            return
        living = self.living(view)
        starts = view.coordinator == self.life
        if starts or views.is_next_coordinator(view, self.life, living):
            trainers = [
                t.number
                for t in view.trainers
                if self.believes_in(Server(t.client.name, t.client.incarnation))
            ]
            self.coordinator = Coordinator(self.life, view, living, trainers)
            self.coordinate(self.coordinator.start())

    def living(self, view: View) -> set[Server]:
        known = {each for shard in view.shards for each in shard.chain} | set(view.servers)
        known |= {Server(name, latest.incarnation) for name, latest in self.heard.items()}
        return {s for s in known if s.name.startswith("ps") and self.believes_in(s)}

    # --- coordinating

    def coordinate(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Store):
                self.game.store_later(self, effect)
            elif isinstance(effect, Tell):
                assert self.coordinator is not None
                self.call(
                    effect.to,
                    (
                        "order",
                        self.coordinator.view,
                        self.coordinator.view.term,
                        effect.shard,
                        effect.order,
                    ),
                    lambda answer, ask=effect.ask: self.order_answered(ask, answer),
                )
            elif isinstance(effect, Publish):
                self.game.publish(self, effect.view)
            elif isinstance(effect, Reply | Fail):
                to, number = self.requests.pop(effect.request)
                self.game.send(self.life, to, ("answer", number, effect))
            elif isinstance(effect, Conclude):
                self.game.conclude(effect)
                self.game.later(self, lambda ask=effect.ask: self.order_answered(ask, True))
            elif isinstance(effect, Alarm):
                self.game.alarm(self)
            elif isinstance(effect, Resign):
                self.coordinator = None
                self.game.later(self, lambda: self.see(self.game.view))

    def order_answered(self, ask: int, answer: Any) -> None:
        if answer is None or isinstance(answer, NotHead):
            return  # it will be told to another, or this coordinator is out of date
        if self.coordinator is not None:
            self.coordinate(self.coordinator.answered(ask, None if answer == "none" else answer))

    def lost(self, life: Server) -> None:
        for to, _, then in self.known.lost(life):
            del to
            then(None)
        for number, replica in list(self.replicas.items()):
            self.carry_out(number, replica.heir_lost(life))
        if self.view is not None and self.view.coordinator == life:
            self.game.spread(self, self.view)
        if self.coordinator is not None:
            self.coordinate(self.coordinator.server_lost(life))
        if self.coordinator is not None:
            self.coordinate(self.coordinator.worker_lost(life.name, life.incarnation))
        self.maybe_coordinate()

    def came(self, life: Server) -> None:
        news = self.known.came(life)
        for former in news.over:
            self.lost(former)
        for call in news.again:
            self.call(*call)
        if self.coordinator is not None and life.name.startswith("ps"):
            self.coordinate(self.coordinator.server_came(life))

    # --- serving

    def handle(self, sender: Server, number: int, what: Any) -> None:
        kind = what[0]
        call = (sender, number)
        self.game.kinds_seen[kind] += 1
        if kind == "order":
            self.take_order(call, *what[1:])
        elif kind == "request":
            self.take_request(call, what[1])
        elif kind == "view":
            self.see(what[1])
            self.reply(call, True)
        elif kind == "record":
            self.take_record(sender, call, what)
        elif kind == "install":
            self.install(call, *what[1:])
        else:
            self.take_work(call, what)

    def take_work(self, call: Any, what: Any) -> None:
        kind, shard = what[0], what[1]
        replica = self.replicas.get(shard)
        if replica is None:
            self.reply(call, NotHead())
        elif kind == "push":
            self.carry_out(shard, replica.pushed(what[2], call))
        elif kind == "pull":
            self.carry_out(shard, replica.pulled(replace(what[2], ask=(call, what[2].ask))))
        elif kind == "import":
            self.carry_out(shard, replica.imported(what[2], call))
        elif kind == "ready":
            self.carry_out(shard, replica.told(what[2], call))

    def take_order(self, call: Any, view: View, term: int, shard: int, order: Any) -> None:
        self.see(view)
        if term < self.term:
            self.reply(call, NotHead())
            return
        self.term = term
        replica = self.replicas.get(shard)
        if replica is None:
            self.reply(call, NotHead())
        elif isinstance(order, orders.Write):
            frozen = self.states[shard].frozen.pop(order.change, None)
            self.reply(call, "none" if frozen is None else (shard, frozen))
        else:
            self.carry_out(shard, replica.ordered(order, call))

    def take_request(self, call: Any, what: Any) -> None:
        if self.coordinator is None:
            self.reply(call, Fail(0, ""))
            return
        self.game.numbers += 1
        self.requests[self.game.numbers] = call
        self.coordinate(self.coordinator.asked(self.game.numbers, what))

    def take_record(self, sender: Server, call: Any, what: Any) -> None:
        shard = what[1]
        if shard in self.replicas:
            self.receive(shard, sender, call, what)
        else:
            self.early.setdefault(shard, []).append((sender, call, what))

    def receive(self, shard: int, sender: Server, call: Any, what: Any) -> None:
        _, _, version, position, record = what
        self.carry_out(shard, self.replicas[shard].received(version, position, record, call))

    def install(
        self, call: Any, shard: int, position: int, version: int, dumped: Any, state: State
    ) -> None:
        if shard in self.replicas and self.replicas[shard].version >= version:
            self.reply(call, "none")  # somebody who was replaced
            return
        replica = self.make(shard, position, version)
        replica.load(dumped)
        self.joining.add(shard)
        self.states[shard] = State(
            shard, state.slots, dict(state.rows), {}, {k: dict(v) for k, v in state.exports.items()}
        )
        for sender, early, what in self.early.pop(shard, []):
            self.receive(shard, sender, early, what)
        self.reply(call, True)

    def reply(self, call: Any, answer: Any) -> None:
        to, number = call
        self.game.send(self.life, to, ("answer", number, answer))

    def carry_out(self, shard: int, effects: list[Any]) -> None:
        for effect in effects:
            replica = self.replicas.get(shard)
            if isinstance(effect, Run):
                self.run(shard, effect.what)
            elif isinstance(effect, Read):
                self.read(shard, effect.pull)
            elif isinstance(effect, Respond):
                call = effect.call
                if isinstance(effect.answer, Refusal) or isinstance(call[0], tuple):
                    call = call[0]
                answer = "none" if effect.answer in (None, False) else effect.answer
                if isinstance(answer, Taken):
                    answer = (answer, replica.safe_count(answer.trainer) if replica else 0)
                self.reply(call, answer)
            elif isinstance(effect, Forward):
                self.forward(shard, effect)
            elif isinstance(effect, StartCopy):
                self.copy(shard, effect)
            elif isinstance(effect, Inform):
                self.inform(shard, effect)

    def inform(self, shard: int, effect: Inform) -> None:
        def done(answer: Any) -> None:
            if (answer is None or isinstance(answer, NotHead)) and (
                self.life not in self.game.islands
            ):
                self.game.later(self, lambda: self.inform_again(shard))

        assert self.view is not None
        for other in effect.ready.others:
            found = self.view.shard(other)
            if found is not None and found.chain:
                self.call(found.head, ("ready", other, Heard(shard, effect.ready)), done)

    def inform_again(self, shard: int) -> None:
        if shard in self.replicas:
            self.carry_out(shard, self.replicas[shard].inform_again())

    def forward(self, shard: int, effect: Forward) -> None:
        def acked(answer: Any) -> None:
            if isinstance(answer, Safe) and shard in self.replicas:
                replica = self.replicas[shard]
                self.carry_out(shard, replica.acknowledged(effect.to, answer.position))

        what = ("record", shard, effect.version, effect.position, effect.record)
        self.call(effect.to, what, acked)

    def copy(self, shard: int, effect: StartCopy) -> None:
        def installed(answer: Any) -> None:
            if shard in self.replicas:
                replica = self.replicas[shard]
                follow = replica.copied if answer is True else replica.heir_lost
                self.carry_out(shard, follow(effect.heir))

        state = self.states[shard]
        copied = State(shard, state.slots, dict(state.rows), {}, dict(state.exports))
        what = ("install", shard, effect.position, effect.version, dict(effect.clock), copied)
        self.call(effect.heir, what, installed)

    # --- the state

    def run(self, shard: int, what: Any) -> None:
        state = self.states[shard]
        if isinstance(what, Apply):
            step = tuple((push.trainer, push.number) for push in what.pushes)
            for push in what.pushes:
                if sorted(push.load) != state.owned():
                    raise Broken(f"{push} was split by another map than {state.owned()}")
            for each in state.owned():
                state.rows[each] = (*state.rows.get(each, ()), step)
        elif isinstance(what, orders.Prime):
            state.slots = what.slots
            state.rows = {}
            if what.folder and not what.awaited:
                whole = self.game.folders[what.folder]
                state.rows = {each: whole[each] for each in state.owned() if each in whole}
        elif isinstance(what, Reached):
            self.pass_cut(state, what.cut)
        elif isinstance(what, Import):
            for each, history in what.load.items():
                state.rows[each] = history
        elif isinstance(what, Exported):
            state.exports.pop((what.target, what.epoch), None)

    def pass_cut(self, state: State, cut: Cut) -> None:
        if isinstance(cut.action, orders.Freeze):
            state.frozen[cut.change] = dict(state.rows)
        if isinstance(cut.action, orders.Move):
            state.slots = cut.action.slots
            assert cut.epoch is not None
            for target in cut.awaited:
                if target != state.number:
                    load = {
                        each: state.rows.pop(each)
                        for each in list(state.rows)
                        if cut.action.slots[each] == target
                    }
                    state.exports[target, cut.epoch] = load
            self.resend_exports(state.number)

    def resend_exports(self, shard: int) -> None:
        replica = self.replicas.get(shard)
        if replica is None or not replica.is_head or self.view is None:
            return
        for (target, epoch), load in list(self.states[shard].exports.items()):
            found = self.view.shard(target)
            if found is None or not found.chain:
                continue

            def done(answer: Any, target: int = target, epoch: int = epoch) -> None:
                if shard not in self.replicas:
                    return
                if self.life in self.game.islands:
                    return
                if answer is None or isinstance(answer, NotHead):
                    self.game.later(self, lambda: self.resend_exports(shard))
                else:
                    self.carry_out(shard, self.replicas[shard].exported(target, epoch))

            self.call(found.head, ("import", target, Import(shard, epoch, load)), done)

    def read(self, shard: int, pull: Pull) -> None:
        call, trainer = pull.ask
        state, replica = self.states[shard], self.replicas[shard]
        rows = {each: state.rows.get(each, ()) for each in state.owned()}
        self.reply(call, ("rows", rows, replica.safe_count(trainer), replica.clock.low))


class TrainerProcess(Process):
    def __init__(self, game: Game, name: str, incarnation: int, steps: int) -> None:
        super().__init__(game, name, incarnation)
        self.view: View | None = None
        self.client = Client(name, incarnation)
        self.number = -1
        self.next = 0
        self.start = 0
        self.left = steps
        self.kept = Unacknowledged()
        self.phase = "join"
        self.waiting: set[int] = set()
        self.generation = 0
        self.rows: dict[int, History] = {}
        self.wanted: tuple[int, int] | None = None
        self.refreshing = False
        self.sent: set[int] = set()
        self.rollbacks = 0

    def begin(self) -> None:
        self.refresh()

    def lost(self, life: Server) -> None:
        if self.view is not None and self.view.coordinator == life:
            self.game.spread(self, self.game.view)
        self.refresh()

    # --- the view

    def refresh(self) -> None:
        """Looks into the store, soon."""
        if not self.refreshing:
            self.refreshing = True
            self.game.later(self, self.look)

    def look(self) -> None:
        self.refreshing = False
        self.see(self.game.view)

    def see(self, view: View) -> None:
        if self.view is not None and view.number <= self.view.number:
            if self.phase != "done":
                self.act()
            return
        old, self.view = self.view, view
        if view.broken:
            self.phase = "done"
            self.game.broken = True
            return
        if self.number >= 0 and view.generation > self.generation:
            self.roll_back(view)
            return
        self.generation = view.generation
        numbers = {s.number for s in view.shards}
        if self.number >= 0:
            self.kept.only(numbers)
        for shard in view.shards:
            before = old.shard(shard.number) if old else None
            if before is not None and before.chain[:1] != shard.chain[:1]:
                self.send_again(shard.number)
        self.act()

    def roll_back(self, view: View) -> None:
        self.generation = view.generation
        self.kept.clear()
        self.rollbacks += 1
        snapshot = view.snapshot
        assert snapshot is not None
        if view.trainer(self.client) is None:
            self.phase = "done"  # it had finished
            return
        known = [snapshot.counts[t.number] for t in view.trainers if t.number in snapshot.counts]
        start = min(known, default=snapshot.time)
        self.next = snapshot.counts.get(self.number, start)
        self.left = self.game.plan.steps
        self.phase = "work"
        self.wanted = None
        self.waiting = set()
        self.pull()

    # --- what it does

    def act(self) -> None:
        """Whatever was not answered is tried again by somebody who waits."""
        if self.phase == "join":
            self.ask_coordinator(orders.Join(self.client), self.joined)
        elif self.phase == "leave":
            leave = orders.Leave(self.number, self.generation, self.start, self.next - 1)
            self.ask_coordinator(leave, self.gone)
        elif self.phase in ("work", "finish"):
            if self.wanted is not None and self.view is not None:
                if self.wanted[1] != self.view.epoch:
                    self.pull()
                for shard in list(self.waiting):
                    self.pull_from(shard)
            for shard in self.view.shards if self.view else ():
                self.send_again(shard.number)

    def ask_coordinator(self, what: Any, then: Callable[[Any], None]) -> None:
        assert self.view is not None

        def answered(answer: Any) -> None:
            if isinstance(answer, Reply):
                then(answer.result)
            else:
                self.game.spread(self, self.game.view)
                self.refresh()

        self.call(self.view.coordinator, ("request", what), answered)

    def joined(self, number: Any) -> None:
        if self.phase != "join":
            return
        if number < 0:
            raise Broken("joined without a number")
        self.number = number
        self.phase = "start"
        self.ask_count()

    def ask_count(self) -> None:
        """Where does it begin? Any shard can tell."""
        start = self.game.start_of(self)
        if start is None:
            self.look()
            if self.phase == "start":
                self.game.later(self, self.ask_count)
            return
        self.next = self.start = start
        self.phase = "work"
        self.generation = self.game.view.generation
        self.see(self.game.view)
        self.pull()

    def pull(self) -> None:
        assert self.view is not None
        self.rows = {}
        self.waiting = set(self.view.active)
        self.wanted = (self.next, self.view.epoch)
        for shard in list(self.waiting):
            self.pull_from(shard)

    def pull_from(self, shard: int) -> None:
        assert self.view is not None
        found = self.view.shard(shard)
        if found is None or not found.chain:
            self.refresh()
            return
        pull = Pull(self.next, self.view.epoch, self.number)
        wanted, epoch = self.wanted, self.view.epoch

        def answered(answer: Any) -> None:
            if self.wanted != wanted or shard not in self.waiting or self.phase != "work":
                return
            if isinstance(answer, tuple) and answer[0] == "rows":
                if self.view is not None and epoch == self.view.epoch:
                    self.kept.safe(shard, answer[2])
                    self.take_rows(shard, answer[1], answer[3])
            elif answer is Refusal.MOVED:
                self.game.later(self, self.pull_anew)
            else:
                self.refresh()

        self.call(found.head, ("pull", shard, pull), answered)

    def pull_anew(self) -> None:
        """The map is another: everything is asked again."""
        if self.phase == "work" and self.waiting:
            self.refresh()
            self.pull()

    def take_rows(self, shard: int, rows: dict[int, History], low: int | None) -> None:
        self.rows |= rows
        self.waiting.discard(shard)
        self.game.check_pull(self, rows, low)
        if not self.waiting:
            if sorted(self.rows) != sorted(IDS):
                raise Broken(f"{self.name} pulled {sorted(self.rows)}")
            self.wanted = None
            self.step()

    def step(self) -> None:
        last = self.left == 0
        kind = PushKind.FINISH if last else PushKind.UPDATE
        if kind is PushKind.UPDATE and self.game.random.random() < 0.1:
            kind = PushKind.SKIP
        self.push(self.next, kind)
        self.next += 1
        if last:
            self.phase = "finish"
        else:
            self.left -= 1
            self.pull()

    def push(self, number: int, kind: PushKind) -> None:
        assert self.view is not None
        view = self.view
        parts = {
            shard: {each: number for each in IDS if view.slots[each] == shard}
            for shard in view.active
        }
        self.kept.add(number, view.epoch, kind, parts)
        if kind is PushKind.UPDATE:
            self.sent.add(number)
        self.game.note_sent(self, number, kind)
        for shard, part in parts.items():
            self.send(shard, number, view.epoch, kind, part)

    def send(self, shard: int, number: int, epoch: int, kind: PushKind, part: Any) -> None:
        assert self.view is not None
        found = self.view.shard(shard)
        if found is None or not found.chain:
            self.refresh()
            return

        def answered(answer: Any) -> None:
            self.push_answered(shard, number, epoch, answer)

        push = Push(self.number, number, epoch, kind, part)
        self.call(found.head, ("push", shard, push), answered)

    def send_again(self, shard: int) -> None:
        for number, epoch, part in self.kept.again(shard):
            kind = self.game.kinds[self.number, number]
            self.send(shard, number, epoch, kind, part)

    def push_answered(self, shard: int, number: int, epoch: int, answer: Any) -> None:
        generation = self.generation
        if isinstance(answer, Refused) and answer.reason is Refusal.MOVED:
            self.game.later(self, lambda: self.split_again(number, epoch, generation))
        elif isinstance(answer, tuple) or self.is_gone(answer):
            safe = answer[1] if isinstance(answer, tuple) else 0
            self.kept.safe(shard, max(safe, number + 1))
            if self.phase == "finish" and not len(self.kept):
                self.phase = "leave"
                self.act()
        else:
            self.refresh()

    def is_gone(self, answer: Any) -> bool:
        """True if a shard has forgotten this trainer, as it took all, the last push included."""
        known = self.view is not None and self.view.trainer(self.client)
        return self.phase == "finish" and bool(known) and isinstance(answer, Refused)

    def split_again(self, number: int, epoch: int, generation: int) -> None:
        self.look()
        if generation != self.generation or self.phase == "done":
            return
        assert self.view is not None
        if self.view.epoch <= epoch:
            self.game.later(self, lambda: self.split_again(number, epoch, generation))
            return
        kind = self.kept.refused(number, epoch)
        if kind is not None:
            self.push(number, kind)

    def gone(self, _: Any) -> None:
        if self.phase == "leave":
            self.phase = "done"
            self.game.finished.add(self.number)


class Game:
    """One cluster from its start until all trainers are done."""

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        self.random = random.Random(seed ^ 0x5EED)
        self.plan = plan or draw_plan(seed)
        self.numbers = 0
        self.network: list[tuple[Server, Server, Any]] = []
        self.tasks: list[tuple[Server, Callable[[], None]]] = []
        self.living: dict[Server, Process] = {}
        self.dead: set[Server] = set()
        self.islands: set[Server] = set()
        self.lives: Counter[str] = Counter()
        self.folders: dict[str, dict[int, History]] = {}
        self.kinds: dict[tuple[int, int], PushKind] = {}
        self.names: dict[int, str] = {}
        self.finished: set[int] = set()
        self.kinds_seen: Counter[str] = Counter()
        self.lost_trainers: set[Server] = set()
        self.ever_lost = False
        self.broken = False
        self.rolled = False
        self.budget = Counter(
            kill=self.plan.kills, trainer=self.plan.trainer_kills,
            snapshot=self.plan.snapshots, resize=self.plan.resizes,
        )  # fmt: skip
        names = [f"ps{k}" for k in range(self.plan.servers)]
        self.spare = [f"ps{self.plan.servers + k}" for k in range(self.plan.spare)]
        for name in [*names, *self.spare]:
            if self.plan.newcomers and self.random.random() < 0.5:
                self.dead.add(Server(name, 0))
                self.lives[name] += 1
            self.start_server(name)
        servers = [self.server(name).life for name in names]
        settings = settings_of(self.plan.consistency, names, self.plan.trainers)
        self.view = views.first(servers, self.plan.backups, settings)
        self.admin = Admin(self, "admin", 0)
        self.living[self.admin.life] = self.admin
        self.publish(self.server(names[0]), self.view)
        for k in range(self.plan.trainers):
            self.start_trainer(f"trainer{k}")
        self.meet()

    def meet(self) -> None:
        """All know each other, but for some who came back just now."""
        for process in self.living.values():
            for life in self.living:
                former = Latest(0, self.random.random() < 0.5)
                if life.incarnation and life != process.life and self.random.random() < 0.6:
                    if self.random.random() < 0.7:
                        process.heard[life.name] = former
                    self.later(process, lambda p=process, new=life: p.hear_came(new))
                else:
                    process.heard[life.name] = Latest(life.incarnation, True)

    def server(self, name: str) -> ServerProcess:
        life = Server(name, self.lives[name] - 1)
        process = self.living[life]
        assert isinstance(process, ServerProcess)
        return process

    def start_server(self, name: str) -> ServerProcess:
        process = ServerProcess(self, name, self.lives[name])
        self.lives[name] += 1
        self.arrive(process)
        return process

    def arrive(self, process: Process) -> None:
        """It looks who is there; the others hear of it some time."""
        for life in self.living:
            process.heard[life.name] = Latest(life.incarnation, True)
        process.heard[process.name] = Latest(process.life.incarnation, True)
        for other in self.living.values():
            self.later(other, lambda o=other: o.hear_came(process.life))
        self.living[process.life] = process

    def start_trainer(self, name: str) -> None:
        process = TrainerProcess(self, name, self.lives[name], self.plan.steps)
        self.lives[name] += 1
        self.arrive(process)
        self.later(process, process.begin)

    @property
    def trainers(self) -> list[TrainerProcess]:
        return [p for p in self.living.values() if isinstance(p, TrainerProcess)]

    @property
    def servers(self) -> list[ServerProcess]:
        return [p for p in self.living.values() if isinstance(p, ServerProcess)]

    # --- network

    def cut_off(self, one: Server, other: Server) -> bool:
        return (one in self.islands) != (other in self.islands)

    def send(self, source: Server, to: Server, what: Any) -> None:
        if to in self.living and not self.cut_off(source, to):
            self.network.append((source, to, what))
            may_be_repeated = what[0] == "call" and what[2][0] != "install"
            if self.plan.duplicates and may_be_repeated and self.random.random() < 0.05:
                self.network.append((source, to, what))

    def later(self, process: Process, task: Callable[[], None]) -> None:
        self.tasks.append((process.life, task))

    def publish(self, source: Process, view: View) -> None:
        for process in list(self.living.values()):
            if process is source:
                self.later(process, lambda p=process: p.see(view))
            elif isinstance(process, ServerProcess | TrainerProcess):
                self.send(source.life, process.life, ("tell", view))

    def spread(self, source: Process, view: View) -> None:
        """Tells all servers of the view when no coordinator is found, lest none knows it."""
        for server in view.servers:
            self.send(source.life, server, ("tell", view))

    def store_later(self, process: ServerProcess, effect: Store) -> None:
        coordinator = process.coordinator
        assert coordinator is not None

        def put() -> None:
            accepted = self.view == effect.expected
            if accepted:
                self.check_view(effect.view)
                self.view = effect.view
            view = self.view

            def stored() -> None:
                if process.coordinator is coordinator:
                    process.coordinate(coordinator.stored(view, accepted))
                process.see(view)

            self.later(process, stored)

        self.later(process, put)

    def alarm(self, process: ServerProcess) -> None:
        def ring() -> None:
            if any(name not in {p.name for p in self.servers} for name in ("ps0",)) and (
                self.random.random() < 0.8
            ):
                self.later(process, ring)
                return
            if process.coordinator is not None:
                process.coordinate(process.coordinator.rang())

        self.later(process, ring)

    # --- what goes wrong

    def kill(self, process: Process) -> None:
        del self.living[process.life]
        self.dead.add(process.life)
        self.ever_lost = True
        if isinstance(process, TrainerProcess):
            self.lost_trainers.add(process.life)
        self.network = [m for m in self.network if m[1] != process.life]
        self.tasks = [t for t in self.tasks if t[0] != process.life]
        for other in list(self.living.values()):
            self.tasks.append((other.life, lambda o=other: self.tell_lost(o, process.life)))

    def tell_lost(self, hearer: Process, life: Server) -> None:
        self.network = [m for m in self.network if not (m[0] == life and m[1] == hearer.life)]
        hearer.hear_lost(life)

    def isolate(self, process: ServerProcess) -> None:
        """It lives, but everybody takes it for lost; it still reaches the store."""
        self.islands.add(process.life)
        self.dead.add(process.life)
        self.ever_lost = True
        self.network = [m for m in self.network if not self.cut_off(m[0], m[1])]
        for other in list(self.living.values()):
            if other is not process:
                self.tasks.append((other.life, lambda o=other: self.tell_lost(o, process.life)))

    def restart(self, name: str) -> None:
        process = self.start_server(name)
        self.later(process, lambda: process.see(self.view))
        self.admin.arrive(process.life)

    def mishap(self) -> None:
        r = self.random
        healthy = [p for p in self.servers if p.life not in self.islands]
        kind = r.choice(["kill", "kill", "trainer", "snapshot", "resize", "restart"])
        if kind == "kill" and self.budget["kill"] and len(healthy) > 0:
            self.budget["kill"] -= 1
            victim = r.choice(healthy)
            if self.plan.zombies and r.random() < 0.5 and len(healthy) > 1:
                self.isolate(victim)
            else:
                self.kill(victim)
        elif kind == "trainer" and self.budget["trainer"] and len(self.trainers) > 0:
            self.budget["trainer"] -= 1
            victim = r.choice(self.trainers)
            self.kill(victim)
            if r.random() < 0.7 or victim.number < 0:
                self.start_trainer(victim.name)
        elif kind == "snapshot" and self.budget["snapshot"]:
            self.take_snapshot()
        elif kind == "resize" and self.budget["resize"]:
            self.budget["resize"] -= 1
            count = r.randint(1, len(healthy)) if healthy else 0
            if count:
                self.admin.resize([p.life for p in r.sample(healthy, count)])
                if self.plan.snapshot_follows and self.budget["snapshot"]:
                    self.take_snapshot()
        elif kind == "restart":
            self.restart_one()

    def take_snapshot(self) -> None:
        self.budget["snapshot"] -= 1
        self.admin.snapshot(f"folder{self.budget['snapshot']}")

    def restart_one(self) -> None:
        gone = [
            name for name in self.lives
            if name.startswith("ps")
            and Server(name, self.lives[name] - 1) in self.dead
        ]  # fmt: skip
        if gone:
            self.restart(self.random.choice(gone))

    # --- rules

    def check_view(self, view: View) -> None:
        if view.number != self.view.number + 1:
            raise Broken(f"view {self.view.number} is followed by {view.number}")
        if view.generation != self.view.generation:
            self.rolled = True
            assert view.snapshot is not None
            for life, process in self.living.items():
                if isinstance(process, TrainerProcess) and process.number >= 0:
                    del life

    def note_sent(self, trainer: TrainerProcess, number: int, kind: PushKind) -> None:
        self.kinds[trainer.number, number] = kind
        self.names[trainer.number] = trainer.name

    def start_of(self, trainer: TrainerProcess) -> int | None:
        for process in self.servers:
            if process.life in self.islands:
                continue
            for shard, replica in process.replicas.items():
                counts = replica.clock.status().counts
                if replica.is_head and trainer.number in counts and shard in self.view.active:
                    return counts[trainer.number]
        return None

    def check_pull(
        self, trainer: TrainerProcess, rows: dict[int, History], low: int | None
    ) -> None:
        staleness = staleness_of(self.plan.consistency)
        if staleness >= 0 and low is not None and low < trainer.next - staleness:
            raise Broken(f"pull {trainer.next} of {trainer.name} was answered at {low}")
        if isinstance(self.plan.consistency, BSP) and not self.rolled:
            own = [n for n in range(trainer.start, trainer.next)
                   if self.kinds[trainer.number, n] is PushKind.UPDATE]  # fmt: skip
            for each, history in rows.items():
                seen = [n for step in history for who, n in step if who == trainer.number]
                if seen != own:
                    raise Broken(f"{trainer.name} pulled {each} with {seen}, not {own}")

    def conclude(self, effect: Conclude) -> None:
        """Every snapshot is exact: of each trainer what the cut says, on every shard."""
        whole: dict[int, History] = {}
        for _, rows in effect.parts:
            if set(rows) & set(whole):
                raise Broken("two shards wrote the same row")
            whole |= rows
        self.check_exact(whole, effect.snapshot)
        self.folders[effect.snapshot.folder] = whole

    def check_exact(self, whole: dict[int, History], snapshot: Snapshot) -> None:
        lost = {self.number_of(life) for life in self.lost_trainers}
        if isinstance(self.plan.consistency, BSP):
            self.check_whole(whole)
        for each in IDS:
            seen = Counter(pair for step in whole.get(each, ()) for pair in step)
            if any(count > 1 for count in seen.values()):
                raise Broken(f"id {each} got a push twice: {seen}")
            for trainer, count in snapshot.counts.items():
                if trainer in lost:
                    continue
                numbers = sorted(n for who, n in seen if who == trainer)
                sent = [n for (who, n), kind in self.kinds.items()
                        if who == trainer and kind is PushKind.UPDATE and n < count]  # fmt: skip
                if numbers != sorted(sent) and not self.rolled:
                    raise Broken(f"snapshot: id {each} has {numbers} of {trainer}, not {sent}")

    def number_of(self, life: Server) -> int:
        trainer = self.view.trainer(Client(life.name, life.incarnation))
        known = [n for n, name in self.names.items() if name == life.name]
        return trainer.number if trainer else (min(known) if known else -1)

    def check_end(self) -> None:
        if self.view.broken:
            plan = self.plan
            kills, resizes = (getattr(plan, f"{k}s") - self.budget[k] for k in ("kill", "resize"))
            may_lose = kills > min(plan.backups, plan.servers - 1) or resizes
            if self.view.snapshot is not None or not may_lose:
                raise Broken(f"the cluster gave up: {self.view.broken}")
            return
        rows: dict[int, History] = {}
        for shard in self.view.shards:
            process = self.living[shard.head]
            assert isinstance(process, ServerProcess)
            state = process.states[shard.number]
            for each in state.owned():
                if each in rows:
                    raise Broken(f"id {each} is kept twice")
                rows[each] = state.rows.get(each, ())
        if sorted(rows) != sorted(IDS):
            raise Broken(f"kept are {sorted(rows)}")
        self.check_once(rows)
        self.check_backups()

    def check_once(self, rows: dict[int, History]) -> None:
        for each, history in rows.items():
            seen = Counter(pair for step in history for pair in step)
            if any(count > 1 for count in seen.values()):
                raise Broken(f"id {each} got a push twice: {seen}")
            for trainer in self.trainers:
                sent = {n for (who, n), kind in self.kinds.items()
                        if who == trainer.number and kind is PushKind.UPDATE}  # fmt: skip
                numbers = {n for who, n in seen if who == trainer.number}
                if numbers != sent and not self.rolled:
                    raise Broken(f"id {each} has {numbers} of {trainer.name}, not {sent}")
        if isinstance(self.plan.consistency, BSP):
            self.check_whole(rows)

    def check_whole(self, rows: dict[int, History]) -> None:
        """Every step is on all shards or on none, whoever died."""
        first = rows.get(IDS[0], ())
        for each in IDS:
            if rows.get(each, ()) != first:
                raise Broken(f"ids {IDS[0]} and {each} went different ways")

    def check_backups(self) -> None:
        """Once all is quiet, every server of a chain has the same state."""
        for shard in self.view.shards:
            states = [self.living[life] for life in shard.chain if life in self.living]
            kept = [p.states[shard.number].rows for p in states if isinstance(p, ServerProcess)]
            if any(each != kept[0] for each in kept):
                raise Broken(f"the chain of shard {shard.number} differs")

    # --- playing

    def over(self) -> bool:
        return all(t.phase == "done" for t in self.trainers)

    def play(self) -> int:
        """Plays to the end; returns how many events there were."""
        r = self.random
        for turn in range(_PATIENCE):
            if self.over():
                self.drain()
                self.check_end()
                return turn
            if r.random() < 0.02:
                self.mishap()
            choices = len(self.network) + len(self.tasks)
            if choices == 0:
                self.idle()
                continue
            self.one(r.randrange(choices))
        raise Broken(f"stuck: {self.plan}; {self.describe()}")

    def drain(self) -> None:
        """Plays on until nothing is under way and the view names only the living."""
        for _ in range(_PATIENCE):
            choices = len(self.network) + len(self.tasks)
            if choices:
                self.one(self.random.randrange(choices))
            elif self.view.broken or self.is_whole():
                return
            else:
                self.idle()

    def is_whole(self) -> bool:
        heads = [shard.head for shard in self.view.shards if shard.chain]
        healthy = {life for life in self.living if life not in self.islands}
        return len(heads) == len(self.view.shards) and healthy.issuperset(heads)

    def one(self, choice: int) -> None:
        if choice < len(self.tasks):
            life, task = self.tasks.pop(choice)
            if life in self.living:
                task()
            return
        source, to, what = self.network.pop(choice - len(self.tasks))
        process = self.living.get(to)
        if what[0] == "lost":
            caller = self.living.get(to)
            if caller is not None:
                caller.answered(what[1], None)
            return
        if process is None:
            return
        is_rows = what[0] == "call" and what[2][0] == "import"
        if self.plan.slow_rows and is_rows and self.random.random() < 0.9:
            self.network.append((source, to, what))
            return
        if what[0] == "call":
            process.handle(source, what[1], what[2])
        elif what[0] == "answer":
            process.answered(what[1], what[2])
        else:
            process.see(what[1])

    def idle(self) -> None:
        """Nothing is under way: somebody looks again, as after a time, or a server comes back."""
        if not self.servers or any(
            not shard.chain or shard.head in self.dead for shard in self.view.shards
        ):
            self.restart_one()
        for trainer in self.trainers:
            if trainer.phase != "done":
                self.later(trainer, trainer.look)
        for server in self.servers:
            self.later(server, lambda s=server: s.see(self.view))
            self.later(server, server.maybe_coordinate)
        self.idles = getattr(self, "idles", 0) + 1
        if self.idles > 200:
            raise Broken(f"stuck: {self.plan}; {self.describe()}")

    def describe(self) -> str:
        lines = [str(replace(self.view, slots=()))]
        for p in self.servers:
            for n, replica in p.replicas.items():
                lines.append(
                    f"{p.life} shard {n} head={replica.is_head} primed={replica.is_primed} "
                    f"{replica.clock.dump()} {vars(replica)}"
                )
            if p.coordinator:
                lines.append(f"{p.life} coordinates {vars(p.coordinator)}")
        for t in self.trainers:
            lines.append(
                f"{t.life} {t.number} {t.phase} next={t.next} waiting={t.waiting} "
                f"kept={vars(t.kept)} view={t.view.number if t.view else None}"
            )
        return "\n".join(lines)


class Admin(Process):
    """Asks for snapshots and resizes, and tells the coordinator of servers that came."""

    def lost(self, life: Server) -> None:
        pass

    def see(self, view: View) -> None:
        pass

    def ask(self, what: Any, again: bool) -> None:
        def answered(answer: Any) -> None:
            if again and not isinstance(answer, Reply):
                self.game.later(self, lambda: self.ask(what, again))

        self.call(self.game.view.coordinator, ("request", what), answered)

    def snapshot(self, folder: str) -> None:
        self.ask(orders.TakeSnapshot(folder, folder), again=False)

    def resize(self, servers: list[Server]) -> None:
        self.ask(orders.Resize(tuple(servers)), again=False)

    def arrive(self, server: Server) -> None:
        if server in self.game.living and not self.game.over() and not self.game.view.broken:

            def answered(answer: Any) -> None:
                if not isinstance(answer, Reply):
                    self.game.later(self, lambda: self.arrive(server))

            what = ("request", orders.Arrive(server))
            self.call(self.game.view.coordinator, what, answered)


def check_game(seed: int) -> int:
    """Plays the game of a seed; raises if a rule is broken."""
    try:
        return Game(seed).play()
    except Exception as error:
        raise Broken(f"seed {seed}: {type(error).__name__}: {error}") from error
