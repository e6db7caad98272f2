"""Decides what one agent does, given the plan and what its processes do. No I/O, no clock.

A round of an agent has two halves. :meth:`Supervisor.report` turns what was seen into events for
the plan. When these are in the plan, :meth:`Supervisor.act` compares it with what runs here and
returns what to do: start, stop, kill, strike off.

An agent that others took for dead finds itself missing in the plan. Its seats may be others'
by then, so it first kills whatever it runs, and only then joins again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tensorwire.launch.exits import ExitRules
from tensorwire.launch.plan import Failure, Node, Order, Phase, Plan, Seat
from tensorwire.launch.roles import Role
from tensorwire.launch.seats import Event, Exited, GaveUp, Joined, Left

_HOPELESS = (
    "It failed twice in the same way, both times soon after its start and before it joined the "
    "group, so it is not tried again; --exit-codes can say that it is."
)

LOST_SECONDS = 5.0
"""Seconds for which a worker that its group declared lost may go on ending by itself."""

REPEAT_SECONDS = 2.0
"""Seconds before a process is killed that did not end, at which it is asked once more."""

SOON = 10.0
"""Seconds within which a worker that fails counts as one that fails again and again."""


_ANOTHERS = "this agent does not hold its seat any more"


@dataclass(frozen=True, slots=True)
class Ended:
    """A process of this agent ended.

    Args:
        seat: whose worker it was.
        exit_code: negative for a signal.
        process: its id.
        said: the traceback or message that it left.
        stopped: the agent had asked it to end, and it ended by that signal.
        joined: it was seen as a member of its group.
    """

    seat: int
    exit_code: int
    process: int = 0
    said: str = ""
    stopped: bool = False
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Start a life of a seat. Whatever its group still lists under its name is dead."""

    seat: Seat


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask the process of a seat to end.

    Args:
        seat: which.
        again: seconds for which it has not ended although it was asked to; 0 the first time.
    """

    seat: int
    again: float = 0.0


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process of a seat at once, and all that it started."""

    seat: int
    why: str


@dataclass(frozen=True, slots=True)
class HostStore:
    """Make a store for an attempt of a role, and say where it is."""

    role: str
    attempt: int


Effect = Start | Stop | Kill | HostStore


def before_the_kill(grace: float) -> float:
    """The seconds before a kill at which a process is asked once more to end."""
    return min(REPEAT_SECONDS, grace / 2)


@dataclass(slots=True)
class _Running:
    """A process of this agent, as far as it matters here."""

    name: str
    life: int
    since: float
    lost_since: float | None = None
    kill_at: float | None = None
    repeat_at: float = 0.0
    is_repeated: bool = False
    killed: bool = False
    why: str = ""


class Supervisor:
    """One agent's decisions.

    Args:
        node: this agent.
        roles: the roles that it knows of.
        grace: seconds from asking a process to end to killing it.
        patience: seconds for which the job may have fewer agents than it needs.
        program: digest of the job's program and its arguments.
        exits: which ends are worth a restart.
    """

    def __init__(
        self,
        node: Node,
        roles: tuple[Role, ...],
        grace: float,
        patience: float,
        program: str = "",
        exits: ExitRules | None = None,
    ) -> None:
        self._exits = exits or ExitRules()
        self.node, self._roles, self._program = node, roles, program
        self._grace, self._patience = grace, patience
        self._running: dict[int, _Running] = {}
        self._begun: dict[int, int] = {}
        """The latest life that was begun here, by seat."""
        self._due: dict[int, tuple[int, float]] = {}
        """The life to begin next, and when, by seat."""
        self._hosting: dict[str, int] = {}
        """The attempt whose store was last made here, by role."""
        self._scarce_since: float | None = None
        self._joined: set[int] = set()
        """The seats of which a life was seen as a member of the group."""
        self._early: dict[int, int] = {}
        """The exit code of each seat's last life if it failed early, else 0."""

    @property
    def running(self) -> Sequence[int]:
        """The seats whose processes run here."""
        return list(self._running)

    def is_finished(self, plan: Plan) -> bool:
        """True if the job, or this agent's part in it, is over and nothing runs here any more."""
        is_over = plan.phase.is_over or plan.dismissal(self.node.id) is not None
        return is_over and not self._running

    # --- What was seen

    def report(
        self, now: float, plan: Plan, ended: Iterable[Ended], silent: Iterable[str]
    ) -> list[Event]:
        """Returns the events to put into the plan.

        Args:
            now: the time.
            plan: as it was when this was seen.
            ended: processes that ended.
            silent: nodes that gave no sign of life for too long.
        """
        events: list[Event] = [self._exited(now, plan, each) for each in ended]
        me = self.node.id
        events += [Left(node) for node in silent if node != me and plan.node(node) is not None]
        events += [
            Exited(me, seat.id, seat.life, 0, False, Failure(seat.name, ""))
            for seat in plan.held_by(me)
            if seat.order is Order.STOP and seat.id not in self._running  # it never began
        ]
        events += self._scarcity(now, plan)
        is_over = plan.phase.is_over or plan.dismissal(me) is not None
        if plan.node(me) is None and not self._running and not is_over:
            events.append(Joined(self.node, self._roles, self._program))
        return events

    def _exited(self, now: float, plan: Plan, ended: Ended) -> Event:
        run = self._running.pop(ended.seat)
        said = f"{run.why}\n{ended.said}".strip() if run.why else ended.said
        node, code = self.node, ended.exit_code
        failure = Failure(run.name, said, ended.seat, node.host, ended.process, code, run.life)
        soon = now - run.since < SOON
        hopeless = self._exits.verdict(code) is False
        if self._fails_again(plan, ended, soon):
            hopeless, failure = True, replace(failure, said=f"{_HOPELESS}\n{said}".strip())
        return Exited(node.id, ended.seat, run.life, code, soon, failure, hopeless)

    def _fails_again(self, plan: Plan, ended: Ended, soon: bool) -> bool:
        """True at the second end in a row for which the program itself is to blame.

        That is an error with the same exit code as the last one, soon after the start, of a program
        that never joined the group, as mistakes in imports and arguments are. Members of a process
        group need not join.
        """
        seat, code = ended.seat, ended.exit_code
        if ended.joined:
            self._joined.add(seat)
        is_member = seat in self._joined or plan.role(plan.seat(seat).role).role.process_group
        early = code if soon and code > 0 and not is_member else 0
        former, self._early[seat] = self._early.get(seat, 0), early
        return early != 0 and early == former and self._exits.verdict(code) is None

    def _scarcity(self, now: float, plan: Plan) -> list[Event]:
        """Gives up if there are too few agents for too long."""
        if plan.phase is not Phase.RUNNING or len(plan.nodes) >= plan.min_nodes:
            self._scarce_since = None
            return []
        if self._scarce_since is None:
            self._scarce_since = now
        if now - self._scarce_since < self._patience:
            return []
        said = (
            f"there were {len(plan.nodes)} agents for {self._patience:g} s, but --nnodes asks for "
            f"{plan.min_nodes} at least, and no other joined"
        )
        return [GaveUp(Failure("", said))]

    # --- What to do

    def act(
        self, now: float, plan: Plan, lost: Iterable[str] = (), ending: Iterable[str] = ()
    ) -> list[Effect]:
        """Returns what to do.

        Args:
            now: the time.
            plan: as it is.
            lost: names of workers that their group declared lost.
            ending: names of those that are about to end by themselves, which is why they were.
        """
        effects: list[Effect] = []
        mine = {seat.id: seat for seat in plan.held_by(self.node.id)}
        is_in = plan.node(self.node.id) is not None or plan.phase.is_over
        declared, leaving = set(lost), set(ending)
        for seat_id, run in list(self._running.items()):
            seat = mine.get(seat_id)
            run.lost_since = (run.lost_since or now) if run.name in declared else None
            patience = max(LOST_SECONDS, self._grace) if run.name in leaving else LOST_SECONDS
            if run.lost_since is not None and now - run.lost_since >= patience:
                effects += self._kill(run, seat_id, "its group declared it lost")
            elif not is_in or seat is None or seat.life != run.life:
                is_out = plan.dismissal(self.node.id) is not None
                why = "this agent is out of the job" if is_out else _ANOTHERS
                effects += self._kill(run, seat_id, why)
            elif seat.order is not Order.RUN or plan.phase is Phase.FAILED:
                effects += self._stop(now, run, seat_id)
        if plan.phase is Phase.RUNNING and is_in:
            for seat in mine.values():
                effects += self._start(now, seat)
            effects += self._host(plan, mine.values())
        return effects

    def _kill(self, run: _Running, seat_id: int, why: str) -> list[Effect]:
        if run.killed:
            return []
        run.killed, run.why = True, run.why or why
        return [Kill(seat_id, why)]

    def _stop(self, now: float, run: _Running, seat_id: int) -> list[Effect]:
        if run.kill_at is None:
            run.kill_at = now + self._grace
            run.repeat_at = run.kill_at - before_the_kill(self._grace)
            return [Stop(seat_id)]
        if now < run.kill_at:
            return self._repeat(now, run, seat_id)
        return self._kill(run, seat_id, f"it did not end within {self._grace:g} s")

    def _repeat(self, now: float, run: _Running, seat_id: int) -> list[Effect]:
        if run.is_repeated or now < run.repeat_at:
            return []
        run.is_repeated = True
        return [Stop(seat_id, self._grace - before_the_kill(self._grace))]

    def _start(self, now: float, seat: Seat) -> list[Effect]:
        is_next = seat.order is Order.RUN and seat.life > self._begun.get(seat.id, 0)
        if not is_next or seat.id in self._running:
            return []
        life, due = self._due.get(seat.id, (0, 0.0))
        if life != seat.life:
            due = now + seat.pause
            self._due[seat.id] = (seat.life, due)
        if now < due:
            return []
        del self._due[seat.id]
        self._begun[seat.id] = seat.life
        self._running[seat.id] = _Running(seat.name, seat.life, now)
        return [Start(seat)]

    def _host(self, plan: Plan, mine: Iterable[Seat]) -> list[Effect]:
        """Makes the store of a process group, if this agent holds the first of its seats."""
        effects: list[Effect] = []
        held = {(seat.role, seat.number) for seat in mine}
        for state in plan.roles:
            name, attempt = state.role.name, state.attempt
            is_first = bool(state.members) and (name, state.members[0]) in held
            if not state.role.process_group or state.meeting or not is_first or state.gathers:
                continue
            if self._hosting.get(name) != attempt:
                self._hosting[name] = attempt
                effects.append(HostStore(name, attempt))
        return effects
