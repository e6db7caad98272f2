"""The plan of a job: who its agents are, which seats there are, and what is done with each.

A *seat* is a worker's name and id, such as ``trainer:3``. One agent holds it and runs its
worker; when that agent dies, another may take the seat over. Each start of a seat's worker
is a *life* of it.

All agents share one plan. It lies in the store of the rendezvous as JSON, and only whole
plans take each other's place (``plan_store.py``). ``seats.py`` decides what happens to it.

No plan says what a worker runs: that each agent knows from its own command line. A plan holds
digests of it, so that agents which were told differently refuse to work together.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from tensorwire.launch.roles import Restart, Role, Share


class Order(enum.Enum):
    """The orders to the holder of a seat."""

    RUN = "run"
    """Run the life that the plan says; start it if it does not run yet."""
    STOP = "stop"
    """End the life that runs, and say so."""
    WAIT = "wait"
    """Run nothing; the next life begins when the role's others are ready, too."""
    NOTHING = "nothing"
    """Do nothing: the worker is done, or nobody holds the seat."""


class Phase(enum.Enum):
    """The phases that a job goes through."""

    GATHERING = "gathering"
    """There are fewer agents than it takes to begin."""
    RUNNING = "running"
    ENDING = "ending"
    """The work is done; services are told to end."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """True if nothing runs any more, or should."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)


@dataclass(frozen=True, slots=True)
class Restarts:
    """Failures so far of what starts again as one: a worker, a role or the job.

    Args:
        spent: how many.
        in_a_row: how many of the latest came soon after a start.
    """

    spent: int = 0
    in_a_row: int = 0

    def after(self, soon: bool) -> Restarts:
        """Counts one failure more."""
        return Restarts(self.spent + 1, self.in_a_row + 1 if soon else 1)

    def pause(self) -> float:
        """Seconds to wait before the next start: 0, then 1, 2, 4, ... in a crash loop."""
        return 0.0 if self.in_a_row < 2 else min(2.0 ** (self.in_a_row - 2), _LONGEST_PAUSE)


_LONGEST_PAUSE = 60.0


@dataclass(frozen=True, slots=True)
class Node:
    """One agent.

    Args:
        id: unique among all that ever take part.
        number: counts those that ever came.
        host: for people.
        offers: how many workers of which role it has room for, by role.
        spare: room for workers of an agent that died, of any role that this one knows.
        place: its group rank: the lowest number that no other agent had as it joined.
        hosts: it hosts the store, so the job ends with it.
        is_late: it joined a job that had begun without it.
        failures: how often what may start again, by name, failed while it was held here.
    """

    id: str
    number: int
    host: str
    offers: tuple[tuple[str, int], ...]
    spare: int = 0
    place: int = 0
    hosts: bool = False
    is_late: bool = False
    failures: tuple[tuple[str, int], ...] = ()

    def offered(self, role: str) -> int:
        """The number of workers of a role that it has room for."""
        return dict(self.offers).get(role, 0)

    def failed(self, what: str) -> int:
        """The failures of a worker, a role or the job here."""
        return dict(self.failures).get(what, 0)

    def with_failure(self, what: str) -> Node:
        """The agent after one failure more."""
        counts = dict(self.failures) | {what: self.failed(what) + 1}
        return replace(self, failures=tuple(counts.items()))


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker, whichever process it is just now.

    Args:
        role: its role.
        number: its number in the role.
        id: its id in the group.
        holder: the node that runs it; empty if none does.
        life: the latest start, from 1; 0 before the first.
        order: what the holder has to do.
        pause: seconds to wait before that life begins.
        done: its worker has ended well.
        restarts: failures of this worker.
        needs_room: no spare seat takes it over: with it an agent was taken out of the job.
    """

    role: str
    number: int
    id: int
    holder: str = ""
    life: int = 0
    order: Order = Order.NOTHING
    pause: float = 0.0
    done: bool = False
    restarts: Restarts = Restarts()
    needs_room: bool = False

    @property
    def name(self) -> str:
        """The name of its worker."""
        return f"{self.role}:{self.number}"


@dataclass(frozen=True, slots=True)
class RoleState:
    """A role, and what is known of it as a whole.

    Args:
        role: as described, without what its workers run.
        runs: digest of that.
        attempt: how often it was formed.
        gathers: all of it is to stop, and then begin again.
        members: numbers of the seats of the latest attempt.
        meeting: ``host:port`` of that attempt's own store, where it has one.
        restarts: failures, if it starts again as a whole.
    """

    role: Role
    runs: str = ""
    attempt: int = 0
    gathers: bool = False
    members: tuple[int, ...] = ()
    meeting: str = ""
    restarts: Restarts = Restarts()


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a job failed.

    Args:
        who: the worker that failed first, or empty.
        id: its id.
        host: where it ran.
        process: its process id.
        exit_code: of the process, negative for a signal.
        life: which start of it.
        said: the traceback or message that it left, or why else the job failed.
    """

    who: str
    said: str
    id: int = -1
    host: str = ""
    process: int = 0
    exit_code: int = 0
    life: int = 0


@dataclass(frozen=True, slots=True)
class Dismissal:
    """The reason why an agent was taken out of the job, which goes on without it.

    Args:
        node: its id.
        failure: why.
    """

    node: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the agents of a job agree on.

    Args:
        min_nodes: agents that it takes to begin.
        phase: how far the job is.
        nodes: its agents, by number.
        roles: its roles.
        seats: its seats, by id.
        gathers: everything is to stop, and then begin again.
        restarts: failures that started the whole job again.
        failure: why it failed, if it did.
        dismissals: the latest agents that were taken out of the job.
        program: digest of the job's program and its arguments; empty before the first agent.
    """

    min_nodes: int
    phase: Phase = Phase.GATHERING
    nodes: tuple[Node, ...] = ()
    roles: tuple[RoleState, ...] = ()
    seats: tuple[Seat, ...] = ()
    gathers: bool = False
    restarts: Restarts = Restarts()
    failure: Failure | None = None
    dismissals: tuple[Dismissal, ...] = ()
    program: str = ""

    def node(self, node_id: str) -> Node | None:
        """An agent that takes part; None if it does not."""
        return next((node for node in self.nodes if node.id == node_id), None)

    def dismissal(self, node_id: str) -> Dismissal | None:
        """Says why an agent was taken out of the job; None if it was not."""
        return next((each for each in self.dismissals if each.node == node_id), None)

    def with_node(self, changed: Node) -> Plan:
        """The plan with one agent changed."""
        nodes = tuple(changed if node.id == changed.id else node for node in self.nodes)
        return replace(self, nodes=nodes)

    def role(self, name: str) -> RoleState:
        """A role by its name."""
        return next(state for state in self.roles if state.role.name == name)

    def seats_of(self, role: str) -> Iterator[Seat]:
        """The seats of a role, by number."""
        return (seat for seat in self.seats if seat.role == role)

    def held_by(self, node_id: str) -> Iterator[Seat]:
        """The seats that an agent holds."""
        return (seat for seat in self.seats if seat.holder == node_id)

    def seat(self, seat_id: int) -> Seat:
        """A seat by its id."""
        return self.seats[seat_id]

    def with_seat(self, changed: Seat) -> Plan:
        """The plan with one seat changed."""
        seats = (*self.seats[: changed.id], changed, *self.seats[changed.id + 1 :])
        return replace(self, seats=seats)

    def with_role(self, changed: RoleState) -> Plan:
        """The plan with one role's state changed."""
        name = changed.role.name
        roles = tuple(changed if state.role.name == name else state for state in self.roles)
        return replace(self, roles=roles)

    def encode(self) -> str:
        """Encodes it as text for the store."""
        return json.dumps(asdict(self), default=_value_of, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str | bytes) -> Plan:
        """The inverse of :meth:`encode`.

        Raises:
            ValueError: the text is no plan of this version.
        """
        try:
            return _plan(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"the store holds something else than a plan of this version: {error!r}"
            ) from error


def _value_of(member: object) -> str:
    assert isinstance(member, enum.Enum)
    value: str = member.value
    return value


def _plan(fields: dict[str, Any]) -> Plan:
    return Plan(
        **{
            **fields,
            "phase": Phase(fields["phase"]),
            "nodes": tuple(map(_node, fields["nodes"])),
            "roles": tuple(map(_role_state, fields["roles"])),
            "seats": tuple(map(_seat, fields["seats"])),
            "restarts": Restarts(**fields["restarts"]),
            "failure": None if fields["failure"] is None else Failure(**fields["failure"]),
            "dismissals": tuple(
                Dismissal(each["node"], Failure(**each["failure"])) for each in fields["dismissals"]
            ),
        }
    )


def _node(fields: dict[str, Any]) -> Node:
    offers = tuple((role, count) for role, count in fields["offers"])
    failures = tuple((what, count) for what, count in fields["failures"])
    return Node(**{**fields, "offers": offers, "failures": failures})


def _role_state(fields: dict[str, Any]) -> RoleState:
    says = fields["role"]
    role = Role(
        **{
            **says,
            "share": Share(says["share"]),
            "restart": Restart(says["restart"]),
            "arguments": tuple(says["arguments"]),
        }
    )
    if role != role.policy:
        raise ValueError("a plan says what a role runs, which is not for it to say")
    members, restarts = tuple(fields["members"]), Restarts(**fields["restarts"])
    return RoleState(**{**fields, "role": role, "members": members, "restarts": restarts})


def _seat(fields: dict[str, Any]) -> Seat:
    order, restarts = Order(fields["order"]), Restarts(**fields["restarts"])
    return Seat(**{**fields, "order": order, "restarts": restarts})
