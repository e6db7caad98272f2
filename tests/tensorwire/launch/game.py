"""Plays jobs: agents that are killed, frozen and joined by others, on a virtual clock.

The decisions are the agents' own (``seats``, ``supervisor``, ``silence``), and so is the list of
the group's members (``rpc.group.member_list``, ``rpc.group.seats``) on a store in memory. An
agent's round is cut into steps, between which anything may happen to anybody. Agents and workers
stop for any time, also between a look and what they do about it, and go on where they stopped; the
clock of an agent goes on meanwhile, or stands, as that of a machine that is paused.

The rules:

* No seat is held twice: when a process starts, no other of its seat lives, but for those of
  agents that are dead, frozen, or struck out.
* Once a successor has joined, nobody who looked at the list since calls a former life; and
  nobody who called a later life ever calls an earlier one.
* Processes of one process group are of one attempt, but for those of such agents: one that was
  struck out while it was frozen may still begin a worker of an attempt whose store is gone.
* An agent that slept strikes off no later life of a seat than it knows of.
* No worker starts again more often than it may.
* When nothing happens any more, the job ends, and nothing is left running.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch._C._distributed_c10d import HashStore

from rpc.errors import BringUpError, RpcError
from rpc.group import seats
from rpc.group.key_values import KeyValueStore
from rpc.group.member_list import MemberTable
from rpc.group.members import Group
from rpc.group.records import PREFIX, Record, next_incarnation
from rpc.group.signed_store import SignedStore
from rpc.ids import Life
from rpc.transports.base import Peer
from rpc.worker_info import WorkerInfo
from tensorwire.launch.group_members import FormerLifeError, life_noted, note_life
from tensorwire.launch.plan import Plan
from tensorwire.launch.roles import Role
from tensorwire.launch.seats import Left, Met, apply
from tensorwire.launch.silence import Silence
from tensorwire.launch.supervisor import Effect, Ended, HostStore, Kill, Start, Stop, Supervisor
from tests.seeded_games import breaks, simplest
from tests.tensorwire.launch.plans import node, roles

SILENCE = 5.0
GRACE = 3.0
STEPS = 900
"""Steps in which anything may happen to anybody."""
WORK = 25
"""Steps of work that a worker which is no server does."""


@dataclass(eq=False)
class Process:
    """One process of a worker."""

    seat: int
    name: str
    role: Role
    life: int
    attempt: int
    agent: GameAgent
    view: Group = field(default_factory=Group)
    record: Record | None = None
    code: int | None = None
    told: bool = False
    stopped: bool = False
    work: int = 0
    seen: dict[str, int] = field(default_factory=dict)

    @property
    def lives(self) -> bool:
        return self.code is None


@dataclass(eq=False)
class GameAgent:
    """One agent."""

    number: int
    supervisor: Supervisor
    silence: Silence
    processes: dict[int, Process] = field(default_factory=dict)
    not_started: list[Ended] = field(default_factory=list)
    round: Iterator[None] | None = None
    dead: bool = False
    frozen: bool = False
    clock_stands: bool = False
    behind: float = 0.0
    leaving: bool = False
    finished: bool = False
    beats: int = 0
    last_beat: float = 0.0
    died_at: float = 0.0

    @property
    def acts(self) -> bool:
        return not (self.dead or self.frozen or self.finished)


class Game:
    """One job, played from one seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.roles = roles(*self.draw.choice(_JOBS))
        self.at_least = self.draw.choice([1, 1, 2])
        self.plan = Plan(self.at_least)
        self.store = HashStore()
        self.signed = SignedStore(self.store, b"", PREFIX)
        self.members = MemberTable(self.signed)
        self.lives = KeyValueStore(self.signed, "rpcrun")
        self.agents: list[GameAgent] = []
        self.all: list[Process] = []
        self.starts: dict[str, int] = {}
        for _ in range(self.draw.randint(self.at_least, 3)):
            self.add_agent()

    # --- Playing

    def play(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.draw.choices(
                [self.let_agent, self.let_process, self.pass_time, self.mishap],
                [10, 8, 4, 0.8],
            )[0]()
        self.calm()
        for _ in range(40_000):
            if all(agent.dead or agent.finished for agent in self.agents):
                break
            self.draw.choices([self.let_agent, self.let_process, self.pass_time], [10, 10, 4])[0]()
        assert all(agent.dead or agent.finished for agent in self.agents), self.describe()
        self.end_orphans()  # of agents that died just before the end
        assert not any(process.lives for process in self.all), self.describe()
        acting = [agent for agent in self.agents if agent.finished]
        assert not acting or self.plan.phase.is_over, self.describe()

    def calm(self) -> None:
        """From now on nothing happens to anybody, and there are enough agents."""
        for agent in self.agents:
            agent.frozen = False
        for process in self.all:
            process.stopped = False
        while (
            sum(agent.acts for agent in self.agents) < self.at_least and not self.plan.phase.is_over
        ):
            self.add_agent()

    def pass_time(self) -> None:
        passed = self.draw.choice([0.05, 0.3, 1.0])
        self.now += passed
        for agent in self.agents:
            if agent.frozen and agent.clock_stands:
                agent.behind += passed
            if agent.acts and self.time_of(agent) - agent.last_beat >= 1.0:
                agent.beats, agent.last_beat = agent.beats + 1, self.time_of(agent)
        self.end_orphans(after=1.0)

    def end_orphans(self, after: float = 0.0) -> None:
        """The orphan watches of agents that died some time ago end their workers."""
        for agent in self.agents:
            if agent.dead and self.now - agent.died_at >= after:
                for process in agent.processes.values():
                    if process.lives and not process.stopped:
                        process.code = -15

    def time_of(self, agent: GameAgent) -> float:
        """The time by an agent's own clock."""
        return self.now - agent.behind

    def let_agent(self) -> None:
        acting = [agent for agent in self.agents if agent.acts]
        if not acting:
            return
        agent = self.draw.choice(acting)
        agent.round = agent.round or self.one_round(agent)
        try:
            next(agent.round)
        except StopIteration:
            agent.round = None

    def let_process(self) -> None:
        awake = [process for process in self.all if process.lives and not process.stopped]
        if awake:
            self.step(self.draw.choice(awake))

    # --- Mishaps

    def mishap(self) -> None:
        self.draw.choices(
            [
                self.kill_worker,
                self.cut_off_worker,
                self.stop_worker,
                self.wake_worker,
                self.kill_agent,
                self.freeze_agent,
                self.thaw_agent,
                self.add_agent,
                self.ask_agent_to_leave,
            ],
            [5, 2, 3, 3, 1, 4, 3, 1, 1],
        )[0]()

    def kill_worker(self) -> None:
        living = [process for process in self.all if process.lives]
        if living:
            self.draw.choice(living).code = self.draw.choice([-9, 1])

    def cut_off_worker(self) -> None:
        members = [p for p in self.all if p.lives and p.record is not None]
        if members:
            record = self.draw.choice(members).record
            assert record is not None
            self.members.strike_off(record, "its agent", "it ended")

    def stop_worker(self) -> None:
        awake = [process for process in self.all if process.lives and not process.stopped]
        if awake:
            self.draw.choice(awake).stopped = True

    def wake_worker(self) -> None:
        stopped = [process for process in self.all if process.stopped]
        if stopped:
            self.draw.choice(stopped).stopped = False

    def kill_agent(self) -> None:
        acting = [agent for agent in self.agents if not (agent.dead or agent.finished)]
        if len(acting) > 1:
            agent = self.draw.choice(acting)
            agent.dead, agent.died_at, agent.round = True, self.now, None

    def freeze_agent(self) -> None:
        acting = [agent for agent in self.agents if agent.acts]
        if len(acting) > 1:
            agent = self.draw.choice(acting)
            agent.frozen, agent.clock_stands = True, self.draw.random() < 0.5

    def thaw_agent(self) -> None:
        frozen = [agent for agent in self.agents if agent.frozen]
        if frozen:
            self.draw.choice(frozen).frozen = False

    def add_agent(self) -> None:
        if len(self.agents) >= 9:
            return
        number = len(self.agents)
        spare = self.draw.choice([0, 0, 1, 3])
        supervisor = Supervisor(node(number, self.roles, spare), self.roles, GRACE, 300.0)
        self.agents.append(GameAgent(number, supervisor, Silence(SILENCE)))

    def ask_agent_to_leave(self) -> None:
        acting = [agent for agent in self.agents if agent.acts]
        if len(acting) > 1:
            self.draw.choice(acting).leaving = True

    # --- Agents

    def one_round(self, agent: GameAgent) -> Iterator[None]:
        if agent.leaving:
            yield from self.leave(agent)
            return
        plan, now = self.plan, self.time_of(agent)
        yield
        ended = [self.end(agent, p) for p in list(agent.processes.values()) if not p.lives]
        ended += agent.not_started
        agent.not_started = []
        events = agent.supervisor.report(now, plan, ended, self.silent(agent, plan))
        orphans = []
        for seat in [s for e in events if isinstance(e, Left) for s in plan.held_by(e.node)]:
            record = self.members.lookup(seat.name)
            yield
            if record is not None and life_noted(self.lives, seat.name) <= seat.life:
                orphans.append((record, seat.life))
        yield
        yield from self.put(plan, events)
        for record, life in orphans:
            self.strike_off_up_to(record, life)
            yield
        plan = self.plan
        lost = [p.name for p in agent.processes.values() if p.lives and self.was_lost(p)]
        for effect in agent.supervisor.act(self.time_of(agent), plan, lost):
            yield
            if isinstance(effect, Start):
                yield from self.start(agent, effect, plan)
            else:
                self.perform(agent, effect)
        agent.finished = agent.supervisor.is_finished(plan)
        if agent.finished:
            yield from self.put(plan, [Left(str(agent.supervisor.node.id))])

    def put(self, seen: Plan, events: list) -> Iterator[None]:  # type: ignore[type-arg]
        """Compare-and-set, with others between reading and setting."""
        while events:
            after = apply(seen, events)
            if after == seen:
                return
            yield
            if self.plan == seen:
                self.plan = Plan.decode(after.encode())
                return
            seen = self.plan

    def leave(self, agent: GameAgent) -> Iterator[None]:
        for process in agent.processes.values():
            process.code = process.code if process.code is not None else -15
            self.strike_off(process)
            yield
        agent.processes.clear()
        yield from self.put(self.plan, [Left(agent.supervisor.node.id)])
        agent.dead, agent.died_at = True, self.now

    def end(self, agent: GameAgent, process: Process) -> Ended:
        del agent.processes[process.seat]
        self.strike_off(process)
        assert process.code is not None
        return Ended(process.seat, process.code)

    def strike_off(self, process: Process) -> None:
        if process.record is not None:
            self.members.strike_off(process.record, "its agent", "it ended")

    def was_lost(self, process: Process) -> bool:
        if process.record is None:
            return False
        found = self.members.lookup(process.name)
        return found is None or found.incarnation != process.record.incarnation

    def silent(self, agent: GameAgent, plan: Plan) -> list[str]:
        beats = {
            other.number: other.beats
            for other in self.agents
            if plan.node(other.supervisor.node.id) is not None and other is not agent
        }
        return [f"node{number}" for number in agent.silence.hear(self.time_of(agent), beats)]

    def perform(self, agent: GameAgent, effect: Effect) -> None:
        if isinstance(effect, Stop):
            if effect.seat in agent.processes:
                agent.processes[effect.seat].told = True
        elif isinstance(effect, Kill):
            process = agent.processes.get(effect.seat)
            if process is not None and process.lives:
                process.code = -9
        elif isinstance(effect, HostStore):
            self.plan = apply(self.plan, [Met(effect.role, effect.attempt, "host:1")])

    def start(self, agent: GameAgent, effect: Start, plan: Plan) -> Iterator[None]:
        seat, state = effect.seat, plan.role(effect.seat.role)
        listed = self.members.lookup(seat.name)
        yield
        try:
            note_life(self.lives, seat.name, seat.life)
        except FormerLifeError:
            agent.not_started.append(Ended(seat.id, 127))
            return
        yield
        if listed is not None:
            self.strike_off_up_to(listed, seat.life - 1)
        yield
        for other in self.all:
            if other.lives and not (self.is_fenced(other.agent) or self.is_fenced(agent)):
                assert other.seat != seat.id, f"{seat.name} is held twice: {self.describe()}"
                if state.role.process_group and other.role.name == seat.role:
                    assert other.attempt == state.attempt or self.is_fenced(agent), self.describe()
        process = Process(seat.id, seat.name, state.role, seat.life, state.attempt, agent)
        agent.processes[seat.id] = process
        self.all.append(process)
        assert seat.restarts.spent <= (state.role.max_restarts or 0)

    def strike_off_up_to(self, record: Record, life: int) -> None:
        """An agent, which may have slept since it looked, strikes off a former life of a seat."""
        later = [p for p in self.all if p.record == record and p.life > life]
        assert not later, f"a later life than {life} of {record.name} is struck off: {later}"
        self.members.strike_off(record, "its agent", "it ended")

    def is_fenced(self, agent: GameAgent) -> bool:
        return agent.dead or agent.frozen or self.plan.node(agent.supervisor.node.id) is None

    # --- Workers

    def step(self, process: Process) -> None:
        if process.told and self.draw.random() < 0.5:
            process.code = 0 if process.role.service else -15
        elif process.record is None:
            if self.draw.random() < 0.1:  # it takes a while to import what it needs
                self.join(process)
        else:
            self.look(process)
            self.call(process)
            process.work += 1
            if not process.role.service and process.work >= WORK:
                self.members.leave(process.record)
                process.code = 0

    def join(self, process: Process) -> None:
        try:
            seats.refuse_former_life(self.store, b"", process.name, process.life)
            incarnation = next_incarnation(self.signed, process.name, process.seat)
            record = Record(process.name, process.seat, None, incarnation, "TENSORWIRE", b"")
            self.members.join(record)
        except BringUpError:
            process.code = 1
            return
        process.record = record
        latest = max(p.life for p in self.all if p.seat == process.seat)
        assert process.life == latest, f"a former life joined: {self.describe()}"

    def look(self, process: Process) -> None:
        """Looks at the list as a worker's own watch does."""
        listed = {record.rank: record for record in self.members.members()}
        for info in process.view.living():
            if info.id not in listed:
                process.view.lose(process.view.life(info.id), "not listed")
        for rank, record in listed.items():
            known = process.view.latest(rank)
            if known is None or known.incarnation < record.incarnation:
                if known is not None:
                    process.view.lose(Life(rank, known.incarnation), "replaced")
                process.view.add(Peer(WorkerInfo(record.name, rank), record.incarnation, b""))

    def call(self, process: Process) -> None:
        name = self.draw.choice([p.name for p in self.all])
        try:
            info = process.view.find(name)
        except RpcError:
            return
        called = process.view.life(info.id).incarnation
        joined = [p.record.incarnation for p in self.all if p.name == name and p.record is not None]
        assert called == max(joined), f"a dead life of {name} is called: {self.describe()}"
        assert called >= process.seen.get(name, 0), self.describe()
        process.seen[name] = called

    def describe(self) -> str:
        running = [f"{p.name} life {p.life} on {p.agent.number}" for p in self.all if p.lives]
        agents = [
            (a.number, "dead" * a.dead + "frozen" * a.frozen + "finished" * a.finished)
            for a in self.agents
        ]
        return f"{self.plan}\nrunning: {running}\nagents: {agents}"


_JOBS = [
    ("ps:1,service,max_restarts=9", "trainer:2,max_restarts=9"),
    ("ps:2/job,service,max_restarts=9", "trainer:1,max_restarts=9"),
    ("ps:1/job,service,max_restarts=9", "ddp:2,pg,max_restarts=9"),
    ("ps:1,service,max_restarts=1", "trainer:2,restart=role,max_restarts=4"),
    ("ps:1/job,service,max_restarts=3", "trainer:1,restart=job,max_restarts=4"),
    ("trainer:3,max_restarts=2",),
]


def check_game(seed: int) -> None:
    """Plays the game of a seed.

    Raises:
        AssertionError: a rule was broken.
    """
    Game(seed).play()


def shorten_game(seed: int) -> str:
    """The fewest steps of the game of a seed, before nothing happens any more, that break it."""
    steps = simplest(
        STEPS, lambda n: (n // 2, n - n // 8 - 1), lambda n: breaks(Game(seed).play, n)
    )
    return f"so does Game({seed}).play(steps={steps})"
