"""One game: the network, the store, what goes wrong, and whose turn it is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tensorwire.parameter_server.decisions import view_changes
from tensorwire.parameter_server.decisions.leases import LEASE
from tensorwire.parameter_server.decisions.lives import Latest
from tensorwire.parameter_server.decisions.pushes import PushKind
from tensorwire.parameter_server.decisions.tasks import (
    Store,
)
from tensorwire.parameter_server.decisions.views import Client, Server, View
from tensorwire.parameter_server.messaging.settings import settings_of
from tests.tensorwire.parameter_server.game.admin import Admin
from tests.tensorwire.parameter_server.game.comings import Comings
from tests.tensorwire.parameter_server.game.plans import Broken, History, Plan
from tests.tensorwire.parameter_server.game.processes import Process
from tests.tensorwire.parameter_server.game.publisher import Publisher
from tests.tensorwire.parameter_server.game.reading import Work
from tests.tensorwire.parameter_server.game.rules import Rules
from tests.tensorwire.parameter_server.game.servers import ServerProcess
from tests.tensorwire.parameter_server.game.trainers import TrainerProcess

PATIENCE = 60_000
SECONDS_PER_TURN = 0.01
_LONGEST_SLEEP = 20.0
"""Seconds after which sleepers wake of whom the others cannot agree that they are lost."""


class Game:
    """One cluster from its start until all trainers are done."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.random = random.Random(seed ^ 0x5EED)
        self.plan = plan
        self.rules = Rules(self)
        slow = {"import": self.plan.slow_rows, "push": self.plan.slow_pushes}
        slow |= {"record": self.plan.slow_records, "ready": self.plan.slow_words}
        self.slow = {kind for kind, is_slow in slow.items() if is_slow}
        self.numbers = 0
        self.now = 0.0
        self.network: list[tuple[Server, Server, Any]] = []
        self.tasks: list[tuple[Server, Callable[[], None]]] = []
        self.living: dict[Server, Process] = {}
        self.dead: set[Server] = set()
        self.islands: set[Server] = set()
        self.lives: Counter[str] = Counter()
        self.folders: dict[str, dict[int, History]] = {}
        self.damaged: set[str] = set()
        self.kinds: dict[tuple[int, int], PushKind] = {}
        self.works: dict[tuple[int, int], Work | None] = {}
        self.late: set[tuple[int, int]] = set()
        """Pushes of trainers that have not looked yet which batches are theirs by now."""
        self.lives_of: dict[int, Server] = {}
        """By number of a trainer, its life."""
        self.finished_in = -1
        self.kinds_seen: Counter[str] = Counter()
        self.lost_trainers: set[Server] = set()
        self.left: set[Client] = set()
        self.ever_lost = False
        self.broken = False
        self.rolled = False
        self.budget = Counter(
            kill=self.plan.kills, trainer=self.plan.trainer_kills,
            snapshot=self.plan.snapshots, resize=self.plan.resizes, nap=self.plan.naps,
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
        self.view = self.first_view = view_changes.first(servers, self.plan.backups, settings)
        self.rules.note_chains(self.view)
        self.stranger = random.Random(f"stranger {seed}")
        self.written = [self.view]
        """All views that were ever in the store."""
        self.admin = Admin(self, "admin", 0)
        self.comings = Comings(self, seed)
        self.publisher = Publisher(self)
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
        for life, other in sorted(self.living.items()):
            process.heard[life.name] = Latest(life.incarnation, self.is_healthy(other))
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
        """Sends now, or a little later: the sender may stop in between."""
        process = self.living.get(source)
        if process is None or process.knows or process.takes_for_lost(to):
            return
        if self.plan.naps and self.random.random() < 0.25:
            self.later(process, lambda: self.transmit(source, to, what))
        else:
            self.transmit(source, to, what)

    def transmit(self, source: Server, to: Server, what: Any) -> None:
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
                self.rules.check_view(effect.view)
                self.rules.note_chains(effect.view)
                self.view = effect.view
                self.written.append(self.view)
                for reader in self.servers if self.plan.reads_store else ():
                    self.later(reader, partial(reader.see, effect.view))
            view = self.view

            def stored() -> None:
                if self.plan.reads_store and self.stranger.random() < 0.8:
                    self.later(process, stored)
                    return
                if process.coordinator is coordinator:
                    process.coordinate(coordinator.stored(view, accepted))
                process.see(view)

            self.later(process, stored)

        self.later(process, put)

    def shown_to_newcomer(self) -> View | None:
        """The view, one that somebody put back, or none; members do not believe the latter two."""
        shown = [self.view, None, self.stranger.choice(self.written)]
        return self.stranger.choice(shown)

    def time_of(self, process: Process) -> float:
        """The time by its own clock."""
        return self.now - process.behind

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
        self.remove(process)
        self.ever_lost = True
        if isinstance(process, TrainerProcess):
            self.lost_trainers.add(process.life)
        is_proven = self.random.random() < 0.8
        for other in list(self.living.values()):
            self.tasks.append(
                (other.life, lambda o=other: self.tell_lost(o, process.life, is_proven))
            )

    def remove(self, process: Process) -> None:
        del self.living[process.life]
        self.dead.add(process.life)
        self.network = [m for m in self.network if m[1] != process.life]
        self.tasks = [t for t in self.tasks if t[0] != process.life]

    def stop(self, process: Process) -> None:
        """It stops for a while: the others do not notice, or take it for lost."""
        process.asleep, process.fell_asleep = True, self.now
        kind = "trainer" if isinstance(process, TrainerProcess) else "kill"
        if not self.budget[kind] or (self.random.random() < 0.3 and not self.plan.sleepers):
            return
        self.budget[kind] -= 1
        process.expelled = True
        self.dead.add(process.life)
        self.ever_lost = True
        if isinstance(process, TrainerProcess):
            self.lost_trainers.add(process.life)
        for other in list(self.living.values()):
            if other is not process:
                self.tell_lost_soon(other, process.life)
        if isinstance(process, TrainerProcess) and (
            process.number < 0 or self.random.random() < 0.7
        ):
            self.start_trainer(process.name)

    def wake(self, process: Process) -> None:
        """It goes on where it stopped; some time later it hears what became of it, and leaves."""
        process.asleep = False
        if self.plan.clocks_stand:
            process.behind += self.now - process.fell_asleep

        def leave() -> None:
            if self.random.random() < 0.05:
                self.remove(process)
            else:
                self.later(process, leave)

        def learn() -> None:
            if self.random.random() < 0.1:
                process.learn()
                self.later(process, leave)
            else:
                self.later(process, learn)

        def is_refused(other: Process) -> None:
            """Has a process that took it for lost refuse it, so that it takes that one for lost."""
            if other.takes_for_lost(process.life):
                process.hear_lost(other.life)
            elif not process.knows:
                self.later(process, lambda: is_refused(other))

        if process.expelled:
            if self.plan.sleepers:
                self.read(process)
            self.later(process, learn)
            for other in self.living.values():
                if other is not process and self.random.random() < 0.5:
                    self.later(process, lambda o=other: is_refused(o))

    def read(self, process: Process) -> None:
        """A sleeper reads what was sent to it, answers first, before it hears what became of it."""
        unread = [each for each in self.network if each[1] == process.life]
        self.network = [each for each in self.network if each[1] != process.life]
        for each in sorted(unread, key=lambda each: each[2][0] != "answer"):
            self.deliver(*each)

    def tell_lost(self, hearer: Process, life: Server, is_proven: bool = False) -> None:
        self.network = [m for m in self.network if not (m[0] == life and m[1] == hearer.life)]
        hearer.hear_lost(life, is_proven)

    def tell_lost_soon(self, hearer: Process, life: Server) -> None:
        """Tells of a loss: of a sleeper's after a while; with late news, some much later."""

        def tell() -> None:
            if self.plan.sleepers and self.random.random() < patience:
                self.later(hearer, tell)
            else:
                self.tell_lost(hearer, life)

        is_late = self.plan.late_news and self.random.random() < 0.4
        patience = 0.98 if is_late else 0.9
        self.later(hearer, tell)

    def isolate(self, process: ServerProcess) -> None:
        """It lives, but everybody takes it for lost; it still reaches the store."""
        self.islands.add(process.life)
        self.dead.add(process.life)
        self.ever_lost = True
        self.network = [m for m in self.network if not self.cut_off(m[0], m[1])]
        for other in list(self.living.values()):
            if other is not process:
                self.tasks.append((other.life, lambda o=other: self.tell_lost(o, process.life)))

    def announce(self, process: ServerProcess) -> None:
        """A server that came looks for the view, and tells the coordinator that it is there."""

        def confirmed(view: View) -> None:
            process.see(view)
            self.admin.arrive(process)

        if self.plan.stranger:
            self.later(process, lambda: process.confirm(confirmed))
        else:
            self.later(process, lambda: confirmed(self.view))

    def mishap(self) -> None:
        r = self.random
        healthy = [p for p in self.servers if self.is_healthy(p)]
        kinds = ["kill", "kill", "trainer", "snapshot", "resize", "restart", "stop"]
        kind = r.choice([*kinds, "stop", "stop", "stop"] if self.plan.sleepers else kinds)
        if self.plan.publishes:
            self.publisher.take()
        if kind == "kill" and self.budget["kill"] and len(healthy) > 0:
            self.budget["kill"] -= 1
            victim = r.choice(healthy)
            if self.plan.zombies and r.random() < 0.5 and len(healthy) > 1:
                self.isolate(victim)
            else:
                self.kill(victim)
            if self.plan.hosts:
                self.kill_trainer()
        elif kind == "trainer":
            self.kill_trainer()
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
        elif kind == "stop" and self.budget["nap"]:
            awake = [p for p in (*healthy, *self.trainers) if not p.asleep and not p.expelled]
            if self.plan.sleepers:
                awake = [p for p in awake if self.has_backup(p)]
            if awake:
                self.budget["nap"] -= 1
                self.stop(r.choice(awake))

    def lose_head(self, number: int) -> None:
        """Kills, now and then, the head of a shard that has a backup, just before it is asked."""
        shard = self.view.shard(number)
        head = self.living.get(shard.head) if shard is not None and shard.chain[1:] else None
        if self.budget["kill"] and head is not None and self.random.random() < 0.1:
            self.budget["kill"] -= 1
            self.kill(head)

    def kill_trainer(self) -> None:
        """Kills a trainer, if the plan has one left to be killed; most of them come back."""
        if not self.budget["trainer"] or not self.trainers:
            return
        self.budget["trainer"] -= 1
        victim = self.random.choice(self.trainers)
        if victim.expelled:
            return
        self.kill(victim)
        if self.random.random() < 0.7 or victim.number < 0:
            self.start_trainer(victim.name)

    def may_stop(self) -> bool:
        """True while there is training, and nobody sleeps."""
        sleeps = any(each.asleep for each in self.living.values())
        return not sleeps and any(each.phase == "work" for each in self.trainers)

    def has_backup(self, process: Process) -> bool:
        """True of the head of a shard that has backups."""
        return any(s.chain[:1] == (process.life,) and s.chain[1:] for s in self.view.shards)

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
            self.announce(self.start_server(self.random.choice(gone)))

    def is_healthy(self, process: Process) -> bool:
        """False if the others take it for lost."""
        return process.life not in self.islands and not process.expelled

    # --- playing

    def over(self) -> bool:
        return all(t.phase == "done" or t.expelled for t in self.trainers)

    def play(self) -> int:
        """Plays to the end; returns how many events there were."""
        r = self.random
        for turn in range(PATIENCE):
            self.now += SECONDS_PER_TURN
            if self.over():
                self.drain()
                self.renew_leases()
                self.drain()
                self.rules.check_end()
                return turn
            if r.random() < 0.02:
                if not self.plan.sleepers or self.may_stop():
                    self.mishap()
                else:
                    self.restart_one()
            self.comings.next()
            if self.plan.looks and r.random() < 0.1:
                self.admin.look()
            for process in [p for p in self.living.values() if p.asleep]:
                if r.random() < 0.005 and self.may_wake(process):
                    self.wake(process)
            choices = len(self.network) + len(self.tasks)
            if choices == 0:
                self.idle()
                continue
            self.one(r.randrange(choices))
        raise Broken(f"stuck: {self.plan}; {self.describe()}")

    def drain(self) -> None:
        """Plays on until nothing is under way and the view names only the living.

        A server that was taken for lost has found that out by now, and has left. Servers come
        back meanwhile: one that came alone may ask others, of whose end it never hears.
        """
        for process in [*self.servers, *self.trainers]:
            if process.asleep:
                self.wake(process)
            if process.life in self.islands:
                self.kill(process)
        for _ in range(PATIENCE):
            self.now += SECONDS_PER_TURN
            choices = len(self.network) + len(self.tasks)
            if self.random.random() < 0.01:
                self.restart_one()
            if self.view.broken:
                return  # those who still ask the dead are answered by nobody
            if choices:
                self.one(self.random.randrange(choices))
            elif self.is_whole():
                return
            else:
                self.idle()
        raise Broken(f"it is never quiet: {self.plan}; {self.describe()}")

    def renew_leases(self) -> None:
        """Somebody looks at each shard: what its head has heard goes with the next record."""
        self.now += 2 * LEASE
        for process in self.servers:
            for number, replica in list(process.replicas.items()):
                process.carry_out(number, replica.looked_at(self.time_of(process))[1])

    def is_whole(self) -> bool:
        heads = [shard.head for shard in self.view.shards if shard.chain]
        healthy = {life for life, process in self.living.items() if self.is_healthy(process)}
        return len(heads) == len(self.view.shards) and healthy.issuperset(heads)

    def one(self, choice: int) -> None:
        if choice < len(self.tasks):
            life, task = self.tasks[choice]
            if self.is_asleep(life):
                return
            del self.tasks[choice]
            if life in self.living:
                task()
            return
        source, to, what = self.network[choice - len(self.tasks)]
        if self.is_asleep(to):
            return
        del self.network[choice - len(self.tasks)]
        self.deliver(source, to, what)

    def deliver(self, source: Server, to: Server, what: Any) -> None:
        process = self.living.get(to)
        if process is not None and what[0] != "lost" and process.takes_for_lost(source):
            return
        if what[0] == "lost":
            caller = self.living.get(to)
            if caller is not None:
                caller.answered(what[1], None)
            return
        if process is None:
            return
        if what[0] == "call" and what[2][0] in self.slow and self.random.random() < 0.9:
            self.network.append((source, to, what))
            return
        if what[0] == "call":
            process.handle(source, what[1], what[2])
        elif what[0] == "answer":
            process.answered(what[1], what[2])
        else:
            process.see(what[1])

    def may_wake(self, process: Process) -> bool:
        """False of a sleeper until its leases are over; if nobody takes its place, for a while."""
        awaits = self.plan.sleepers and process.expelled and isinstance(process, ServerProcess)
        latest = process.fell_asleep + _LONGEST_SLEEP
        return not awaits or self.now > min(latest, self.rules.leases_end(process))

    def is_asleep(self, life: Server) -> bool:
        process = self.living.get(life)
        return process is not None and process.asleep

    def idle(self) -> None:
        """Nothing is under way: somebody looks again, as after a time, or a server comes back."""
        self.rules.check_votes()
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
