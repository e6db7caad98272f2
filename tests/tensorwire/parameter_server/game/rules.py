"""The rules of a game: what must be so at each pull, at each cut, and at the end."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tensorwire.parameter_server.decisions import views
from tensorwire.parameter_server.decisions.confirmation import named_in
from tensorwire.parameter_server.decisions.consistency import (
    BSP,
    staleness_of,
)
from tensorwire.parameter_server.decisions.leases import LEASE
from tensorwire.parameter_server.decisions.pushes import PushKind
from tensorwire.parameter_server.decisions.samples import Account
from tensorwire.parameter_server.decisions.tasks import (
    Conclude,
)
from tensorwire.parameter_server.decisions.views import Server, Snapshot, View
from tests.tensorwire.parameter_server.game.plans import IDS, Broken, History
from tests.tensorwire.parameter_server.game.processes import Process
from tests.tensorwire.parameter_server.game.reading import SAMPLER, units_done
from tests.tensorwire.parameter_server.game.servers import ServerProcess
from tests.tensorwire.parameter_server.game.trainers import TrainerProcess

if TYPE_CHECKING:
    from tests.tensorwire.parameter_server.game.cluster import Game


class Rules:
    """Looks at one game, and raises ``Broken`` if a rule does not hold."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.chains: dict[tuple[int, int], tuple[Server, ...]] = {}
        """By shard and version, each chain that there ever was."""
        self.replaced_at: dict[tuple[int, int], float] = {}
        """Likewise, when a backup first knew that its head was replaced: it refuses that one."""
        self.told: dict[tuple[int, int], frozenset[object]] = {}
        """By generation and shard, the batches or records that somebody was told are trained."""

    def note_chains(self, view: View) -> None:
        """A view is in the store."""
        for shard in view.shards:
            self.chains[shard.number, shard.version] = shard.chain

    def note_seen(self, server: ServerProcess, view: View) -> None:
        """A server knows a view."""
        for (number, version), chain in self.chains.items():
            found = view.shard(number)
            is_replaced = number < view.made if found is None else found.chain[:1] != chain[:1]
            is_later = found is None or found.version > version
            if server.life in chain[1:] and is_replaced and is_later:
                self.replaced_at.setdefault((number, version), self.game.now)

    def leases_end(self, head: ServerProcess) -> float:
        """The time at which the last lease of a head is over; never, unless it was replaced."""
        known = [key for key in self.replaced_at if self.chains[key][:1] == (head.life,)]
        return max((self.replaced_at[key] + LEASE for key in known), default=math.inf)

    def check_view(self, view: View) -> None:
        if view.number != self.game.view.number + 1:
            raise Broken(f"view {self.game.view.number} is followed by {view.number}")
        if view.generation != self.game.view.generation:
            self.game.rolled = True
            if not view.snapshots and self.game.view.joined:
                raise Broken(f"view {view.number} begins anew, and what was trained is lost")
        elif view.epoch == self.game.view.epoch:
            self.check_removed(view)
        healthy = {p.life for p in self.game.servers if self.game.is_healthy(p)}
        if not healthy & views.servers_of(self.game.view):
            return  # the last server has nobody to ask: a coordinator that is none has no vote
        left = {each.number for each in view.left if each.begin is not None}
        self.game.left |= {t.client for t in self.game.view.trainers if t.number in left}
        for each in set(self.game.view.trainers) - set(view.trainers):
            life = Server(each.client.name, each.client.incarnation)
            had_left = each.client in self.game.left  # and joined by an echo of its request
            if life not in self.game.dead and each.number not in left and not had_left:
                raise Broken(f"view {view.number} dismisses {life}, who lives")

    def check_votes(self) -> None:
        """Nothing is under way: of those that a coordinator reaches, nobody's vote is lost."""
        for process in self.game.servers:
            coordinator = process.coordinator
            if coordinator is None or not self.game.is_healthy(process):
                continue
            voters = {p.life for p in self.game.servers if self.game.is_healthy(p) and not p.asleep}
            for poll in coordinator._polls:
                forgotten = poll.failed & voters & coordinator._living
                if forgotten:
                    raise Broken(f"{process.life} asks {forgotten} no more about {poll.suspects}")

    def check_removed(self, view: View) -> None:
        """Servers are taken out of a view only if they are lost, whoever thinks so."""
        removed = self.keepers(self.game.view) - self.keepers(view)
        healthy = removed - self.game.dead
        is_smaller = len(view.shards) != len(self.game.view.shards)
        if healthy and not is_smaller and not self.may_be_undecided(view):
            raise Broken(f"view {view.number} gives up {healthy}, who live")

    def may_be_undecided(self, view: View) -> bool:
        """Of two halves of the servers, either may stay before a first trainer has joined."""
        named = views.servers_of(self.game.view)
        living, staying = named & set(self.game.living), views.servers_of(view)
        is_half = len(living) <= 2 * len(staying) <= len(named)
        return is_half and not self.game.view.joined and all(s.chain for s in view.shards)

    def check_unconfirmed(self, newcomer: Process, view: View, new: set[Server]) -> None:
        """A newcomer acts on what it read only if no server that it can ask knows more.

        But for those that were new themselves when they were asked.
        """
        named = named_in(view, lambda name: self.game.lives[name] - 1)
        for each in self.game.servers:
            is_to_ask = each is not newcomer and each.life in named - new
            can_answer = self.game.is_healthy(each) and newcomer.knows_of(each.life)
            knows_more = each.view is not None and each.view.number > view.number
            if is_to_ask and can_answer and knows_more:
                who = f"{newcomer.life} believes in view {view.number}"
                raise Broken(f"{who}, and {each.life} knows a later one")

    @staticmethod
    def keepers(view: View) -> set[Server]:
        return {each for shard in view.shards for each in shard.chain}

    def note_sent(self, trainer: TrainerProcess, number: int, kind: PushKind) -> None:
        self.game.kinds[trainer.number, number] = kind
        self.game.lives_of[trainer.number] = trainer.life

    def start_of(self, trainer: TrainerProcess) -> int | None:
        for process in self.game.servers:
            if not self.game.is_healthy(process) or process.asleep:
                continue
            for shard, replica in process.replicas.items():
                counts = replica.clock.status().counts
                if replica.is_head and trainer.number in counts and shard in self.game.view.active:
                    return counts[trainer.number]
        return None

    def check_read(self, server: ServerProcess, shard: int, came: float) -> None:
        """A head that was replaced takes no pull once its lease is over, if its clock goes on."""
        version = server.replicas[shard].version
        replaced = self.replaced_at.get((shard, version))
        if replaced is not None and not server.behind and came > replaced + LEASE:
            raise Broken(f"{server.life} answers a pull for shard {shard}, whose head it was")

    def check_pull(
        self, trainer: TrainerProcess, rows: dict[int, History], low: int | None
    ) -> None:
        staleness = staleness_of(self.game.plan.consistency)
        if staleness >= 0 and low is not None and low < trainer.next - staleness:
            raise Broken(f"pull {trainer.next} of {trainer.name} was answered at {low}")
        if isinstance(self.game.plan.consistency, BSP) and not self.game.rolled:
            own = [n for n in range(trainer.start, trainer.next)
                   if self.game.kinds[trainer.number, n] is PushKind.UPDATE
                   and (trainer.number, n) not in self.game.late]  # fmt: skip
            for each, history in rows.items():
                seen = [n for step in history for who, n in step
                        if who == trainer.number and (who, n) not in self.game.late]  # fmt: skip
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
        if SAMPLER in effect.snapshot.accounts:
            self.check_samples(whole, effect.snapshot.accounts[SAMPLER])
        self.game.folders[effect.snapshot.folder] = whole
        if random.Random(f"{self.game.plan} {effect.snapshot}").random() < 0.3:
            self.game.damaged.add(effect.snapshot.folder)

    def check_exact(self, whole: dict[int, History], snapshot: Snapshot) -> None:
        lost = {n for n, life in self.game.lives_of.items() if life in self.game.lost_trainers}
        if isinstance(self.game.plan.consistency, BSP):
            self.check_whole(whole)
        for each in IDS:
            seen = Counter(pair for step in whole.get(each, ()) for pair in step)
            if any(count > 1 for count in seen.values()):
                raise Broken(f"id {each} got a push twice: {seen}")
            for trainer, count in snapshot.counts.items():
                if trainer in lost:
                    continue
                late = self.late(trainer, snapshot.accounts)
                numbers = sorted(n for who, n in seen if who == trainer and n not in late)
                sent = [n for (who, n), kind in self.game.kinds.items()
                        if who == trainer and kind is PushKind.UPDATE
                        and n < count and n not in late]  # fmt: skip
                if numbers != sorted(sent) and not self.game.rolled:
                    raise Broken(f"snapshot: id {each} has {numbers} of {trainer}, not {sent}")

    def late(self, trainer: int, accounts: Mapping[str, Account]) -> set[int]:
        """The pushes of a trainer that need not count.

        Under SSP and async those of leases that have ended are among them: their batches are given
        out again, and ``check_samples`` holds that each moved every row once.
        """
        late = {n for who, n in self.game.late if who == trainer}
        if SAMPLER in accounts and not isinstance(self.game.plan.consistency, BSP):
            deal = accounts[SAMPLER].deal.number
            works = {n: work for (who, n), work in self.game.works.items() if who == trainer}
            late |= {n for n, work in works.items() if work and work.batches.deal < deal}
        return late

    def accounts(self) -> Mapping[str, Account]:
        """The accounts of samples of a head."""
        shard = self.game.view.shards[0]
        process = self.game.living[shard.head]
        assert isinstance(process, ServerProcess)
        return process.replicas[shard.number].clock.accounts

    def check_end(self) -> None:
        if self.game.view.broken:
            plan = self.game.plan
            kills, resizes = (
                getattr(plan, f"{k}s") - self.game.budget[k] for k in ("kill", "resize")
            )
            may_lose = kills > min(plan.backups, plan.servers - 1) or resizes
            if not self.game.view.joined and not self.game.view.snapshots:
                raise Broken(f"an empty cluster gave up: {self.game.view.broken}")
            whole = [s for s in self.game.view.snapshots if s.folder not in self.game.damaged]
            if whole or not may_lose:
                raise Broken(f"the cluster gave up: {self.game.view.broken}")
            return
        rows: dict[int, History] = {}
        for shard in self.game.view.shards:
            process = self.game.living[shard.head]
            assert isinstance(process, ServerProcess)
            state = process.states[shard.number]
            for each in state.owned():
                if each in rows:
                    raise Broken(f"id {each} is kept twice")
                rows[each] = state.rows.get(each, ())
        if sorted(rows) != sorted(IDS):
            raise Broken(f"kept are {sorted(rows)}")
        self.check_once(rows)
        if self.game.plan.batches and self.game.finished_in == self.game.view.generation:
            self.check_all_trained(rows)
        self.check_backups()

    def check_once(self, rows: dict[int, History]) -> None:
        for each, history in rows.items():
            seen = Counter(pair for step in history for pair in step)
            if any(count > 1 for count in seen.values()):
                raise Broken(f"id {each} got a push twice: {seen}")
            for trainer in self.game.trainers:
                late = self.late(trainer.number, self.accounts())
                sent = {n for (who, n), kind in self.game.kinds.items()
                        if who == trainer.number and kind is PushKind.UPDATE} - late  # fmt: skip
                numbers = {n for who, n in seen if who == trainer.number} - late
                if numbers != sent and not self.game.rolled:
                    raise Broken(f"id {each} has {numbers} of {trainer.name}, not {sent}")
        if isinstance(self.game.plan.consistency, BSP):
            self.check_whole(rows)

    def check_whole(self, rows: dict[int, History]) -> None:
        """Every step is on all shards or on none, whoever died."""
        first = rows.get(IDS[0], ())
        for each in IDS:
            if rows.get(each, ()) != first:
                raise Broken(f"ids {IDS[0]} and {each} went different ways")

    def check_samples(self, rows: dict[int, History], account: Account) -> None:
        """The batches, or records, that moved each row are those of the account, each once.

        Those of pushes without gradients are in the account alone.
        """
        done = units_done(account, self.game.plan.files)
        for each in IDS:
            pairs = [pair for step in rows.get(each, ()) for pair in step]
            works = [self.game.works[pair] for pair in pairs]
            seen = Counter(unit for work in works if work is not None for unit in work.units)
            if any(count > 1 for count in seen.values()):
                raise Broken(f"id {each} was moved twice by a batch: {seen}")
            empty = self.trained_without_gradients()
            if not set(seen) <= done or not done - set(seen) <= empty:
                raise Broken(f"id {each} was moved by batches {set(seen)}, not {done}")

    def check_told(self, head: ServerProcess, shard: int, account: Account) -> None:
        """Samples that somebody was told are trained stay so, unless the cluster goes back.

        A head that has just taken over may lack news of other shards: it has the pushes by then.
        """
        assert head.view is not None
        life = head.view.generation, shard
        told = self.told.get(life, frozenset())
        done = frozenset(units_done(account, self.game.plan.files))
        works = map(self.game.works.get, head.replicas[shard].clock.dump()["_held"])
        here = done.union(*(work.units for work in works if work is not None))
        found = self.game.view.shard(shard)
        is_latest = found is not None and found.chain[:1] == (head.life,)
        if is_latest and head.view.generation == self.game.view.generation and not told <= here:
            raise Broken(f"{head.life} lacks {set(told - here)} that were told to be trained")
        self.told[life] = told | done

    def trained_without_gradients(self) -> set[object]:
        """The batches whose last push, of all deals that gave them out, had no gradients."""
        last: dict[object, int] = {}
        for work in filter(None, self.game.works.values()):
            for unit in work.units:
                last[unit] = max(work.batches.deal, last.get(unit, 0))
        return {unit for pair, each in self.game.works.items() if each is not None
                and self.game.kinds.get(pair) is PushKind.SKIP
                for unit in each.units
                if self.game.rolled or each.batches.deal == last[unit]}  # fmt: skip

    def check_all_trained(self, rows: dict[int, History]) -> None:
        """At the end every batch was trained."""
        for shard in self.game.view.shards:
            process = self.game.living[shard.head]
            assert isinstance(process, ServerProcess)
            account = process.replicas[shard.number].clock.accounts[SAMPLER]
            if account.done != ((0, self.game.plan.batches),) or account.begun:
                raise Broken(f"at the end, {account.done} of {self.game.plan.batches} are trained")
            self.check_samples(rows, account)

    def check_backups(self) -> None:
        """Once all is quiet, every server of a chain has the same state."""
        for shard in self.game.view.shards:
            states = [self.game.living[life] for life in shard.chain if life in self.game.living]
            for process in states:
                assert isinstance(process, ServerProcess)
                state = process.states[shard.number]
                state.real.check(state.rows)
            kept = [p.states[shard.number].rows for p in states if isinstance(p, ServerProcess)]
            if any(each != kept[0] for each in kept):
                raise Broken(f"the chain of shard {shard.number} differs")
