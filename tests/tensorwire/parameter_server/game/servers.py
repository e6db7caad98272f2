"""A server in a game: real decisions; a list of pushes for each id instead of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorwire.parameter_server.decisions import orders, shares, views
from tensorwire.parameter_server.decisions.coordination import Coordinator
from tensorwire.parameter_server.decisions.lives import Fate, Lives, Verdict
from tensorwire.parameter_server.decisions.pushes import Apply, Reached, Refusal, Taken
from tensorwire.parameter_server.decisions.reads import Pull
from tensorwire.parameter_server.decisions.records import (
    Counted,
    Exported,
    Heard,
    Import,
    Inform,
    NotHead,
    Read,
    Respond,
    Run,
    Safe,
    StartCopy,
)
from tensorwire.parameter_server.decisions.replica import Replica
from tensorwire.parameter_server.decisions.replication import Forward
from tensorwire.parameter_server.decisions.tasks import (
    Alarm,
    Ask,
    Conclude,
    Examine,
    Examined,
    Fail,
    Publish,
    Reply,
    Resign,
    Store,
    Tell,
)
from tensorwire.parameter_server.decisions.views import Server, View
from tests.tensorwire.parameter_server.game.loads import Copy, RealState
from tests.tensorwire.parameter_server.game.plans import IDS, Broken, History
from tests.tensorwire.parameter_server.game.processes import Process

if TYPE_CHECKING:
    from tests.tensorwire.parameter_server.game.cluster import Game


@dataclass
class State:
    """The state that storage holds of one shard."""

    number: int
    real: RealState
    slots: tuple[int, ...] = ()
    rows: dict[int, History] = field(default_factory=dict)
    frozen: dict[int, dict[int, History]] = field(default_factory=dict)
    exports: dict[tuple[int, int], tuple[dict[int, History], Any, Any]] = field(
        default_factory=dict
    )

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
        self.known = Lives(self.latest)
        self.joining: set[int] = set()
        self.was_named = False
        self.is_over = False
        self.polls: list[tuple[Any, View, frozenset[Server]]] = []
        self.exporting: set[tuple[int, int, int]] = set()

    # --- other servers

    def call(self, to: Server, what: Any, then: Callable[[Any], None]) -> None:
        was_heard_of = self.known.verdict(to) is not Verdict.UNHEARD

        def answered(answer: Any) -> None:
            if isinstance(answer, View) and what[0] != "poll":
                self.see(answer)
                then(NotHead())
                return
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
        self.game.rules.note_seen(self, view)
        self.was_named |= views.names(view, self.life)
        self.term = max(self.term, view.term)
        kept = {number: replica.version for number, replica in self.replicas.items()}
        for number in shares.given_up(view, self.life, kept, self.joining):
            self.carry_out(number, self.replicas[number].deposed())
            del self.replicas[number], self.states[number]
        mine = shares.of(view, self.life)
        self.joining -= mine.keys()
        for number, shard in mine.items():
            if number not in self.replicas:
                self.make(number)
            self.carry_out(number, self.replicas[number].rechained(shard))
            for sender, call, what in self.early.pop(number, []):
                self.receive(number, sender, call, what)
        coordinator = self.coordinator
        if coordinator is not None and (
            self.has_ended
            or (view.coordinator != self.life and view.number > coordinator.view.number)
        ):
            self.stop_coordinating()
        self.vote()
        for number in list(self.states):
            self.resend_exports(number)
            self.carry_out(number, self.replicas[number].inform_again())
        self.maybe_coordinate()

    @property
    def has_ended(self) -> bool:
        """A view that named it does so no longer, or it knows that it was taken for lost."""
        forgotten = self.was_named and not (self.view and views.names(self.view, self.life))
        if self.is_over or self.view is None:
            return self.is_over
        others = [*self.view.servers, *(each.client for each in self.view.trainers)]
        return forgotten or self.known.is_cut_off(others)

    def stop_coordinating(self) -> None:
        self.coordinator = None
        for to, number in self.requests.values():
            self.game.send(self.life, to, ("answer", number, Fail(0, "")))
        self.requests.clear()

    def vote(self) -> None:
        waiting, self.polls = self.polls, []
        for call, view, suspects in waiting:
            if self.view is not None and self.view.number > view.number:
                self.reply(call, self.view)
            elif all(self.known.verdict(each) is Verdict.OVER for each in suspects):
                self.reply(call, True)
            else:
                self.polls.append((call, view, suspects))

    def make(self, number: int, position: int = 0, version: int = -1) -> Replica:
        replica = Replica(self.life, number, self.game.plan.consistency, position, version)
        self.replicas[number] = replica
        self.states[number] = State(number, RealState(number, self.game.plan.consistency))
        return replica

    def maybe_coordinate(self) -> None:
        view = self.view
        if view is None or self.coordinator is not None or view.broken or self.has_ended:
            return
        living = self.living(view)
        starts = view.coordinator == self.life
        if starts or views.is_next_coordinator(view, self.life, living):
            trainers = [
                t.number
                for t in view.trainers
                if self.believes_in(Server(t.client.name, t.client.incarnation))
            ]
            named = views.servers_of(view)
            over = [each for each in named if self.known.is_proven_over(each)]
            self.coordinator = Coordinator(self.life, view, living, over, trainers)
            self.coordinate(self.coordinator.start())

    def living(self, view: View) -> set[Server]:
        known = {each for shard in view.shards for each in shard.chain} | set(view.servers)
        known |= {Server(name, latest.incarnation) for name, latest in self.heard.items()}
        return {s for s in known if s.name.startswith("ps") and self.believes_in(s)}

    # --- coordinating

    def coordinate(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                self.ask(effect)
            elif isinstance(effect, Store):
                self.game.store_later(self, effect)
            elif isinstance(effect, Tell):
                assert self.coordinator is not None
                view = self.coordinator.view
                order = ("order", view, view.term, effect.shard, effect.order)
                answered = partial(self.order_answered, self.coordinator, effect.ask, by=effect.to)
                self.call(effect.to, order, answered)
            elif isinstance(effect, Publish):
                self.game.publish(self, effect.view)
            elif isinstance(effect, Reply | Fail):
                to, number = self.requests.pop(effect.request)
                self.game.send(self.life, to, ("answer", number, effect))
            elif isinstance(effect, Conclude):
                self.game.rules.conclude(effect)
                coordinator, ask = self.coordinator, effect.ask
                self.game.later(self, partial(self.order_answered, coordinator, ask, True))
            elif isinstance(effect, Examine):
                self.examine(effect)
            elif isinstance(effect, Alarm):
                self.game.alarm(self)
            elif isinstance(effect, Resign):
                self.coordinator = None
                self.game.later(self, lambda: self.see(self.game.view))

    def ask(self, effect: Ask) -> None:
        coordinator = self.coordinator

        def answered(answer: Any) -> None:
            if self.coordinator is coordinator and coordinator is not None:
                vote = answer if answer in (None, True) else False
                self.coordinate(coordinator.answered(effect.ask, vote))
            if isinstance(answer, View):
                self.see(answer)

        self.call(effect.to, ("poll", effect.view, effect.suspects), answered)

    def examine(self, effect: Examine) -> None:
        """Some snapshots are damaged, of which the cluster hears when it would go back to them."""
        damaged = self.game.damaged.intersection(each.folder for each in effect.snapshots)
        whole = [each for each in effect.snapshots if each.folder not in damaged]
        found = Examined(whole[0] if whole else None, f"{sorted(damaged)} are damaged")
        coordinator = self.coordinator
        self.game.later(self, lambda: self.order_answered(coordinator, effect.ask, found))

    def order_answered(
        self, coordinator: Coordinator | None, ask: int, answer: Any, by: Server | None = None
    ) -> None:
        if answer is None or isinstance(answer, NotHead):
            return  # it will be told to another, or this coordinator is out of date
        if self.coordinator is coordinator and self.coordinator is not None:
            said = None if answer == "none" else answer
            self.coordinate(self.coordinator.answered(ask, said, by))

    def lost(self, life: Server) -> None:
        if life == self.life:
            self.end()
            return
        for _, _, then in self.known.lost(life):
            then(None)
        self.vote()
        for number, replica in list(self.replicas.items()):
            self.carry_out(number, replica.heir_lost(life))
        if self.view is not None and self.view.coordinator == life:
            self.game.spread(self, self.view)
        if self.coordinator is not None:
            is_proven = self.known.is_proven_over(life)
            self.coordinate(self.coordinator.server_lost(life, is_proven))
        if self.coordinator is not None:
            self.coordinate(self.coordinator.worker_lost(life.name, life.incarnation))
        self.maybe_coordinate()

    def end(self) -> None:
        """It was taken for lost: turns everybody away."""
        self.is_over = True
        self.stop_coordinating()
        for number, replica in self.replicas.items():
            self.carry_out(number, replica.deposed())

    def came(self, life: Server) -> None:
        news = self.known.came(life)
        for former in news.over:
            self.lost(former)
        for call in news.again:
            self.call(*call)
        self.vote()
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
        elif kind == "latest":
            self.reply(call, self.view or "none")
        elif kind == "poll":
            self.see(what[1])
            self.polls.append((call, *what[1:]))
            for suspect in what[2]:
                self.believes_in(suspect)
            self.vote()
        elif kind == "record":
            self.take_record(sender, call, what)
        elif kind == "install":
            if self.may_copy(sender, what[1], what[3]):
                self.install(call, *what[1:])
            else:
                self.reply(call, "none")
        else:
            self.take_work(call, what)

    def take_work(self, call: Any, what: Any) -> None:
        kind, shard = what[0], what[1]
        replica = self.replicas.get(shard)
        if kind in ("import", "ready") and self.is_outdated(call, what[2].source, what[3]):
            return
        if replica is None:
            self.reply(call, NotHead())
        elif kind == "push":
            self.carry_out(shard, replica.pushed(what[2], call))
        elif kind == "pull":
            now = self.game.time_of(self)
            pull = replace(what[2], ask=(call, what[2].ask, now))
            self.carry_out(shard, replica.pulled(pull, now))
        elif kind == "account":
            self.carry_out(shard, replica.counted(what[2], call))
        elif kind == "lease":
            self.carry_out(shard, replica.leased(what[2], call))
        elif kind == "import":
            self.carry_out(shard, replica.imported(what[2], call))
        elif kind == "ready":
            self.carry_out(shard, replica.told(what[2], call))

    def is_outdated(self, call: Any, shard: int, version: int) -> bool:
        """Turns a server away that acts for a chain which was replaced, and tells it so."""
        if self.view is None or not views.is_outdated(self.view, shard, version):
            return False
        self.reply(call, self.view)
        return True

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
            self.reply(call, self.written(shard, order.change))
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
        if self.is_outdated(call, shard, what[2]):
            return
        if shard in self.replicas:
            self.receive(shard, sender, call, what)
        else:
            self.early.setdefault(shard, []).append((sender, call, what))

    def receive(self, shard: int, sender: Server, call: Any, what: Any) -> None:
        _, _, version, position, record = what
        self.carry_out(shard, self.replicas[shard].received(version, position, record, call))

    def may_copy(self, sender: Server, shard: int, version: int) -> bool:
        """False if a later chain of a shard does without the server that makes a copy of it."""
        if self.view is None or not views.is_outdated(self.view, shard, version):
            return True
        found = self.view.shard(shard)
        return found is not None and sender in found.chain

    def install(
        self,
        call: Any,
        shard: int,
        position: int,
        version: int,
        dumped: Any,
        state: State,
        copy: Copy,
    ) -> None:
        if shard in self.replicas and self.replicas[shard].version >= version:
            self.reply(call, "none")  # somebody who was replaced
            return
        replica = self.make(shard, position, version)
        replica.load(dumped)
        self.joining.add(shard)
        mine = self.states[shard]
        mine.slots, mine.rows, mine.exports = state.slots, dict(state.rows), dict(state.exports)
        mine.real.become(copy)
        mine.real.check(mine.rows)
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
                elif isinstance(answer, Counted):
                    self.game.rules.check_told(self, shard, answer.account)
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
        heard, version = Heard(shard, effect.ready), self.replicas[shard].version
        for other in effect.ready.others:
            found = self.view.shard(other)
            if found is not None and found.chain:
                self.call(found.head, ("ready", other, heard, version), done)

    def inform_again(self, shard: int) -> None:
        if shard in self.replicas:
            self.carry_out(shard, self.replicas[shard].inform_again())

    def forward(self, shard: int, effect: Forward) -> None:
        def acked(answer: Any) -> None:
            if isinstance(answer, Safe) and shard in self.replicas:
                replica = self.replicas[shard]
                acked = replica.acknowledged(effect.to, answer.position, effect.version)
                self.carry_out(shard, acked)

        what = ("record", shard, effect.version, effect.position, effect.record)
        self.call(effect.to, what, acked)

    def copy(self, shard: int, effect: StartCopy) -> None:
        def installed(answer: Any) -> None:
            if shard in self.replicas:
                replica = self.replicas[shard]
                follow = replica.copied if answer is True else replica.heir_lost
                self.carry_out(shard, follow(effect.heir))

        state = self.states[shard]
        copied = replace(state, rows=dict(state.rows), frozen={}, exports=dict(state.exports))
        copy, kept = state.real.copy(), effect.state
        what = ("install", shard, effect.position, effect.version, kept, copied, copy)
        self.call(effect.heir, what, installed)

    # --- the state

    def written(self, shard: int, change: int) -> Any:
        """The answer of who writes a shard as it was at a cut."""
        state = self.states[shard]
        frozen = state.frozen.pop(change, None)
        if frozen is None:
            return "none"
        if change in state.real.versions:
            part: Any = state.real.version_part(change)
            is_known = not isinstance(part, orders.Unmarked)
            return orders.Written(shard, {"part": part}) if is_known else part
        state.real.check_frozen(change, frozen)
        return shard, frozen

    def run(self, shard: int, what: Any) -> None:
        state = self.states[shard]
        whole = None
        if isinstance(what, orders.Prime) and what.folder and not what.awaited:
            whole = self.game.folders[what.folder]
        state.real.run(what, whole)
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
            if whole is not None:
                state.rows = {each: whole[each] for each in state.owned() if each in whole}
        elif isinstance(what, Reached):
            self.pass_cut(state, what)
        elif isinstance(what, Import):
            for each, history in what.load[0].items():
                state.rows[each] = history
        elif isinstance(what, Exported):
            state.exports.pop((what.target, what.epoch), None)

    def pass_cut(self, state: State, reached: Reached) -> None:
        cut = reached.cut
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
                    moved = state.real.moved(target, cut.epoch)
                    state.exports[target, cut.epoch] = load, moved, reached.accounts
            self.resend_exports(state.number)

    def resend_exports(self, shard: int) -> None:
        replica = self.replicas.get(shard)
        if replica is None or not replica.is_head or self.view is None:
            return
        for (target, epoch), load in list(self.states[shard].exports.items()):
            found = self.view.shard(target)
            key = (shard, target, epoch)
            if found is None or not found.chain or key in self.exporting:
                continue
            self.exporting.add(key)

            def done(answer: Any, target: int = target, epoch: int = epoch) -> None:
                self.exporting.discard((shard, target, epoch))
                if shard not in self.replicas:
                    return
                if self.life in self.game.islands:
                    return
                if answer is None or isinstance(answer, NotHead):
                    self.game.later(self, lambda: self.resend_exports(shard))
                else:
                    self.carry_out(shard, self.replicas[shard].exported(target, epoch))

            rows = Import(shard, epoch, load[:2], load[2])
            self.call(found.head, ("import", target, rows, replica.version), done)

    def read(self, shard: int, pull: Pull) -> None:
        call, trainer, came = pull.ask
        state, replica = self.states[shard], self.replicas[shard]
        self.game.rules.check_read(self, shard, came)
        rows = {each: state.rows.get(each, ()) for each in state.owned()}
        safe, clock = replica.safe_count(trainer), replica.clock
        self.reply(call, ("rows", rows, safe, clock.low, replica.version, clock.deals))
