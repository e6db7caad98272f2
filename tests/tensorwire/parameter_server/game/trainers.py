"""A trainer in a game: joins, pulls and pushes its steps, finishes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.consistency import BSP
from tensorwire.parameter_server.decisions.pushes import Push, PushKind, Refusal, Refused
from tensorwire.parameter_server.decisions.reads import Pull
from tensorwire.parameter_server.decisions.records import Counted
from tensorwire.parameter_server.decisions.samples import Account, size
from tensorwire.parameter_server.decisions.tasks import (
    Reply,
)
from tensorwire.parameter_server.decisions.unacknowledged import Unacknowledged
from tensorwire.parameter_server.decisions.views import Client, Server, Snapshot, View
from tests.tensorwire.parameter_server.game.leasing import Leasing
from tests.tensorwire.parameter_server.game.loads import declared
from tests.tensorwire.parameter_server.game.plans import IDS, Broken, History
from tests.tensorwire.parameter_server.game.processes import Process
from tests.tensorwire.parameter_server.game.reading import (
    SAMPLER,
    Work,
    has,
    parts_of_files,
    whole_batches,
)

if TYPE_CHECKING:
    from tests.tensorwire.parameter_server.game.cluster import Game


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
        self.phase = "declare"
        self.undeclared = list(declared().items())
        self.waiting: set[int] = set()
        self.generation = 0
        self.rows: dict[int, History] = {}
        self.wanted: tuple[int, int] | None = None
        self.refreshing = False
        self.sent: set[int] = set()
        self.rollbacks = 0
        self.account = Account()
        self.deals_known = -1
        self.deals_heard = 0
        self.is_late = False
        """It goes by an account that lacks pushes of its own, and may push the same once more."""
        self.leasing = Leasing(self)
        self.is_leaving = False
        """It finishes with its next push, whatever is left."""

    def handle(self, sender: Server, number: int, what: Any) -> None:
        """It is asked if some are lost to it, too: it says so as soon as they are."""
        if all(self.takes_for_lost(each) for each in what[2]):
            self.game.send(self.life, sender, ("answer", number, True))
        elif sender in self.game.living:
            self.game.later(self, lambda: self.handle(sender, number, what))

    def begin(self) -> None:
        if self.game.plan.stranger:
            self.confirm(self.see)
        else:
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
            for number in self.kept.stranded(numbers):
                self.push(number, self.kept.whole(number))
        for shard in view.shards:
            before = old.shard(shard.number) if old else None
            if before is not None and before.chain[:1] != shard.chain[:1]:
                self.send_again(shard.number)
        self.act()

    def roll_back(self, view: View) -> None:
        self.generation = view.generation
        self.kept.clear()
        self.rollbacks += 1
        snapshot = view.snapshot or Snapshot("", {}, 0)
        if view.trainer(self.client) is None:
            self.phase = "done"  # it had finished
            return
        known = [snapshot.counts[t.number] for t in view.trainers if t.number in snapshot.counts]
        start = min(known, default=snapshot.time)
        self.next = snapshot.counts.get(self.number, start)
        self.left = self.game.plan.steps
        has_counted = not self.game.plan.batches or self.phase not in ("start", "count")
        self.phase = "work" if has_counted else "count"
        self.wanted = None
        self.waiting = set()
        self.deals_known, self.deals_heard = -1, 0
        self.leasing.forget()
        if has_counted:
            self.pull()
        else:
            self.act()

    # --- what it does

    def act(self) -> None:
        """Tries again what was not answered, as somebody who waits does."""
        if self.phase == "declare":
            self.ask_coordinator(orders.Announce(*self.undeclared[0]), self.is_declared)
        elif self.phase == "join":
            self.ask_coordinator(orders.Join(self.client), partial(self.joined, self.client))
        elif self.phase == "count":
            self.ask_coordinator(orders.CountSamples(SAMPLER, SAMPLER), self.is_counted)
        elif self.phase == "leave":
            leave = orders.Leave(self.number, self.generation, self.start, self.next - 1)
            self.ask_coordinator(leave, partial(self.gone, self.number))
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

    def is_declared(self, text: Any) -> None:
        if self.phase == "declare" and text == self.undeclared[0][1]:
            del self.undeclared[0]
            if not self.undeclared:
                self.phase = "join"
            self.act()

    def joined(self, client: Client, number: Any) -> None:
        if self.phase != "join" or client != self.client:
            return
        if number < 0:
            raise Broken("joined without a number")
        self.number = number
        self.phase = "start"
        self.ask_count()

    def ask_count(self) -> None:
        """Asks where it begins, which any shard can tell."""
        if self.phase != "start":
            return  # the cluster went back to where it begins
        start = self.game.rules.start_of(self)
        if start is None:
            self.look()
            self.game.later(self, self.ask_count)
            return
        self.next = self.start = start
        self.generation = self.game.view.generation
        self.phase = "count" if self.game.plan.batches else "work"
        self.see(self.game.view)
        if self.phase == "count":
            self.act()
        else:
            self.pull()

    def is_counted(self, text: Any) -> None:
        if self.phase == "count" and text == SAMPLER:
            self.phase = "work"
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
                if self.is_old(shard, answer[4]):
                    self.refresh()
                elif self.view is not None and epoch == self.view.epoch:
                    self.kept.safe(shard, answer[2])
                    self.deals_heard = max(self.deals_heard, answer[5])
                    self.take_rows(shard, answer[1], answer[3])
            elif answer is Refusal.MOVED:
                self.game.later(self, self.pull_anew)
            else:
                self.refresh()

        self.call(found.head, ("pull", shard, pull), answered)

    def is_old(self, shard: int, version: int) -> bool:
        """True if it knows a later chain of a shard than the server that answers."""
        found = self.view.shard(shard) if self.view else None
        return found is not None and found.version > version

    def pull_anew(self) -> None:
        """The map is another: everything is asked again."""
        if self.phase == "work" and self.waiting:
            self.refresh()
            self.pull()

    def take_rows(self, shard: int, rows: dict[int, History], low: int | None) -> None:
        self.rows |= rows
        self.waiting.discard(shard)
        self.game.rules.check_pull(self, rows, low)
        if not self.waiting:
            if sorted(self.rows) != sorted(IDS):
                raise Broken(f"{self.name} pulled {sorted(self.rows)}")
            self.wanted = None
            self.step()

    def step(self) -> None:
        if self.is_leaving:
            self.leave_early()
            return
        if self.game.plan.batches:
            self.train()
            return
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

    def leave_early(self) -> None:
        """Finishes, with batches of its own that it has not trained."""
        self.game.works[self.number, self.next] = None
        self.push(self.next, PushKind.FINISH)
        self.next += 1
        self.phase = "finish"

    # --- samples

    def train(self) -> None:
        """Pushes the next batches that are this trainer's, once it knows which these are."""
        if not isinstance(self.game.plan.consistency, BSP):
            self.leasing.train()
            return
        assert self.view is not None
        if self.game.plan.looks and self.game.random.random() < 0.3:
            self.deals_known = -1  # it has left its loop, and begins again
            self.game.lose_head(self.view.active[0])
        knows = self.deals_heard == self.deals_known
        if not knows and self.deals_known >= 0 and self.game.random.random() < 0.2:
            self.game.late.add((self.number, self.next))  # it has not looked at what it heard
            knows = True
        if knows and self.given():
            self.train_batches()
            return
        shard = self.view.shard(self.view.active[0])
        step = self.generation, self.next

        def answered(answer: Any) -> None:
            if step != (self.generation, self.next) or self.phase != "work":
                return
            if isinstance(answer, Counted) and shard in self.game.view.shards:
                behind = answer.deals < self.deals_heard  # by a head that has just taken over
                self.is_late = behind or self.lacks_own_push(answer.account)
                self.account = answer.account
                self.deals_known = self.deals_heard = answer.deals
                self.train_batches()
            else:
                self.game.later(self, again)

        def again() -> None:
            self.look()
            if step == (self.generation, self.next) and self.phase == "work":
                self.train()

        if shard is None or not shard.chain:
            self.game.later(self, again)
        else:
            self.call(shard.head, ("account", shard.number, SAMPLER), answered)

    def train_batches(self) -> None:
        """Pushes what is next; an empty push while others have something left."""
        mine, dice = self.given(), self.game.random
        done = size(self.account.done) == self.game.plan.batches
        is_skipped = bool(mine) and dice.random() < 0.1  # as GradScaler does
        few = mine[: dice.choice([1, 1, 1, 2])]
        work = self.work_on(few, self.account) if few else None
        has_gradients = work is not None and work.units and not is_skipped
        kind = PushKind.UPDATE if has_gradients else PushKind.SKIP
        if work is not None:
            self.account = self.account.trained(self.number, work.batches)
        self.game.works[self.number, self.next] = work
        if self.is_late or self.had_a_late_push():
            self.game.late.add((self.number, self.next))
        self.push(self.next, PushKind.FINISH if done else kind)
        self.next += 1
        if done:
            self.phase = "finish"
        elif self.game.plan.looks and dice.random() < 0.2:
            self.deals_known = -1
            self.train()  # without a wait, as after Cluster.exchange: it is told of an older state
        else:
            self.pull()

    def work_on(self, numbers: list[int], account: Account) -> Work:
        """A push of some batches, or of parts of files."""
        plan, deal = self.game.plan, account.deal.number
        if not plan.files:
            return whole_batches(deal, numbers)
        return parts_of_files(deal, numbers, account.begun, plan.batches, self.game.random)

    def lacks_own_push(self, account: Account) -> bool:
        """True if an account is older than this trainer's pushes of its deal, or goes without."""
        own = self.works_of(account.deal.number)
        return not all(has(account, work.batches) for work in own.values())

    def had_a_late_push(self) -> bool:
        """True if an earlier push of the same deal may be refused, and a new deal begin."""
        own = self.works_of(self.account.deal.number)
        return any((self.number, n) in self.game.late for n in own)

    def works_of(self, deal: int) -> dict[int, Work]:
        """This trainer's pushes of a deal that have samples, by number."""
        works = {n: self.game.works.get((self.number, n)) for n in range(self.start, self.next)}
        return {n: work for n, work in works.items() if work and work.batches.deal == deal}

    def given(self) -> list[int]:
        """The batches that are this trainer's, as far as it knows."""
        return list(self.account.remaining(self.number, 0, self.game.plan.batches))

    # --- pushing

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
        self.game.rules.note_sent(self, number, kind)
        for shard, part in parts.items():
            self.send(shard, number, view.epoch, kind, part)

    def send(self, shard: int, number: int, epoch: int, kind: PushKind, part: Any) -> None:
        assert self.view is not None
        found = self.view.shard(shard)
        if found is None or not found.chain:
            self.refresh()
            return

        trainer = self.number

        def answered(answer: Any) -> None:
            if trainer == self.number:
                self.push_answered(shard, number, epoch, answer)

        work = self.game.works.get((self.number, number))
        batches = None if work is None else work.batches
        push = Push(self.number, number, epoch, kind, part, batches)
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
        """Splits by a later map what was refused; of copies that are refused one counts."""
        if self.kept.refused(number, epoch) is None:
            return
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

    def gone(self, trainer: int, _: Any) -> None:
        if self.phase != "leave" or trainer != self.number:
            return
        if not self.is_leaving:
            self.phase = "done"
            self.game.finished_in = self.generation
        elif self.game.comings.comes_back(self):
            self.join_again()
        else:
            self.phase = "done"

    def join_again(self) -> None:
        """Is a trainer of its own from here on, who has nothing yet."""
        self.client = replace(self.client, session=self.client.session + 1)
        self.number, self.is_leaving, self.is_late = -1, False, False
        self.account, self.deals_known = Account(), -1
        self.leasing.forget()
        self.phase = "join"
        self.act()
