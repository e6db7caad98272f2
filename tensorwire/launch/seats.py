"""Decides what becomes of a job when something happens to it: an event in, the next plan out.

No I/O and no clock. Agents read the plan, apply the events that they saw, and try to put the
result in the plan's place; if another was faster, they apply the same events to its plan. So
every event says which life of which seat, or which node, it is about, and one that is out of
date changes nothing.

After each event the plan is *settled*: seats that nobody holds go to agents that have room,
roles whose workers all stopped begin again, and a job whose work is done ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from tensorwire.launch.plan import (
    Dismissal,
    Failure,
    Node,
    Order,
    Phase,
    Plan,
    Restarts,
    RoleState,
    Seat,
)
from tensorwire.launch.roles import Restart, Role, RoleError, Share

_DISMISSALS_KEPT = 64


@dataclass(frozen=True, slots=True)
class Joined:
    """An agent takes part from now on.

    Args:
        node: the agent.
        roles: those that it knows of.
        program: digest of the job's program and its arguments, as the agent was told them.
    """

    node: Node
    roles: tuple[Role, ...]
    program: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """An agent is gone, because it left or gave no sign of life for too long."""

    node: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process of a seat's worker ended.

    Args:
        node: whose it was.
        seat: which.
        life: which start of it.
        exit_code: 0 if it ended well.
        soon: it did not run for long.
        failure: what the report says if this ends the job.
        hopeless: another start would come to the same.
    """

    node: str
    seat: int
    life: int
    exit_code: int
    soon: bool
    failure: Failure
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class Met:
    """An attempt of a role has a store of its own now, at ``host:port``."""

    role: str
    attempt: int
    meeting: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """An agent cannot go on, or sees that the job cannot."""

    failure: Failure


Event = Joined | Left | Exited | Met | GaveUp


def apply(plan: Plan, events: Iterable[Event]) -> Plan:
    """The plan after some events.

    Raises:
        RoleError: an agent that joins was told another program than those that are there, or
            describes a role otherwise.
    """
    for event in events:
        plan = settle(_HANDLERS[type(event)](plan, event))
    return plan


def settle(plan: Plan) -> Plan:
    """The plan in which nothing is left to decide until the next event."""
    while True:
        settled = plan
        for step in _STEPS:
            settled = step(settled)
        if settled == plan:
            return plan
        plan = settled


# --- Events


def _joined(plan: Plan, event: Joined) -> Plan:
    if plan.phase not in (Phase.GATHERING, Phase.RUNNING) or plan.node(event.node.id):
        return plan
    if plan.program not in ("", event.program):
        raise RoleError(
            "the agents disagree about the job's program or its arguments: the command line on "
            f"{event.node.host} names others than the first agent's; start all alike, or this as "
            "a job of its own, with another --rdzv-id"
        )
    states = plan.roles
    for role in event.roles:
        known = next((state for state in states if state.role.name == role.name), None)
        if known is None:
            states = (*states, RoleState(role.policy, role.runs))
        else:
            _check_alike(known, role, event.node.host)
    taken = {node.place for node in plan.nodes}
    place = next(place for place in range(len(taken) + 1) if place not in taken)
    is_late = plan.phase is Phase.RUNNING
    node = replace(event.node, place=place, is_late=is_late, failures=())
    nodes = (*plan.nodes, node)
    return replace(plan, roles=states, nodes=nodes, program=event.program)


def _check_alike(known: RoleState, role: Role, host: str) -> None:
    if _policy(known.role) != _policy(role.policy):
        raise RoleError(
            f"role {role.name!r}: the agents disagree about it; one was told {known.role}, and "
            f"that on {host} {role.policy}"
        )
    if known.runs != role.runs:
        raise RoleError(
            f"role {role.name!r}: the agents disagree about its module or its arguments: the "
            f"command line on {host} names others than the first agent's"
        )


def _policy(role: Role) -> Role:
    """The role as agents must agree on it: not how many of the workers each of them has."""
    return role if role.share is Share.JOB else replace(role, count=1)


def _left(plan: Plan, event: Left) -> Plan:
    if plan.node(event.node) is None:
        return plan
    lost = [seat for seat in plan.held_by(event.node) if not seat.done]
    nodes = tuple(node for node in plan.nodes if node.id != event.node)
    plan = replace(plan, nodes=nodes)
    for seat in plan.held_by(event.node):
        plan = plan.with_seat(replace(seat, holder="", order=Order.NOTHING))
    if plan.phase is not Phase.RUNNING:
        return plan
    for name in dict.fromkeys(seat.role for seat in lost):
        plan = _gather_uncounted(plan, plan.role(name))
    return plan


def _gather_uncounted(plan: Plan, state: RoleState) -> Plan:
    """Begins again what a role's members have in common, without a failure of theirs."""
    calm = replace(state.restarts, in_a_row=0)
    if state.role.restart is Restart.JOB:
        return _gather_job(replace(plan, restarts=replace(plan.restarts, in_a_row=0)))
    if state.role.restart is Restart.ROLE:
        return _gather_role(plan.with_role(replace(state, restarts=calm)), state.role.name)
    return plan


def _exited(plan: Plan, event: Exited) -> Plan:
    seat = plan.seat(event.seat) if event.seat < len(plan.seats) else None
    is_news = (
        seat is not None
        and (seat.holder, seat.life) == (event.node, event.life)
        and seat.order in (Order.RUN, Order.STOP)
    )
    if seat is None or not is_news or plan.phase.is_over:
        return plan
    if plan.phase is Phase.ENDING:
        return plan.with_seat(replace(seat, order=Order.NOTHING, done=True))
    if seat.order is Order.STOP:
        return plan.with_seat(replace(seat, order=Order.WAIT))
    if event.exit_code == 0:
        return plan.with_seat(replace(seat, order=Order.NOTHING, done=True))
    return _failed(plan, seat, event)


def _failed(plan: Plan, seat: Seat, event: Exited) -> Plan:
    """Begins the worker, its role or the job again, or fails the job, as a worker ended badly."""
    state = plan.role(seat.role)
    scope: Seat | RoleState | Plan = seat
    if state.role.restart is not Restart.WORKER:
        scope = state if state.role.restart is Restart.ROLE else plan
    restarts = scope.restarts.after(event.soon)
    most = 0 if event.hopeless else state.role.max_restarts or 0
    holder = plan.node(seat.holder)
    if holder is not None and _can_do_without(plan, holder):
        what = {Restart.WORKER: seat.name, Restart.ROLE: seat.role}.get(state.role.restart, "")
        holder = holder.with_failure(what)
        if holder.failed(what) > most:
            return _dismissed(plan, holder, seat, event.failure)
        plan = plan.with_node(holder)
        restarts = replace(restarts, spent=scope.restarts.spent)
    if restarts.spent > most:
        return replace(plan, phase=Phase.FAILED, failure=event.failure)
    waiting = replace(seat, order=Order.WAIT)
    if state.role.restart is Restart.WORKER:
        return plan.with_seat(replace(waiting, restarts=restarts, pause=restarts.pause()))
    plan = plan.with_seat(waiting)
    if state.role.restart is Restart.ROLE:
        return _gather_role(plan.with_role(replace(state, restarts=restarts)), seat.role)
    return _gather_job(replace(plan, restarts=restarts))


def _can_do_without(plan: Plan, node: Node) -> bool:
    """True if an agent's failures are its own affair: the job had begun, and goes on, without."""
    return node.is_late and not node.hosts and len(plan.nodes) > plan.min_nodes


def _dismissed(plan: Plan, node: Node, seat: Seat, failure: Failure) -> Plan:
    """Takes an agent out of the job whose workers failed too often, as if it had left.

    The seat begins afresh with an agent that has room of its own: none that works gives it a
    spare seat, lest it be the next to go.
    """
    plan = _left(plan, Left(node.id))
    own = plan.role(seat.role).role.share is Share.AGENT
    plan = plan.with_seat(replace(plan.seat(seat.id), restarts=Restarts(), needs_room=own))
    dismissals = (*plan.dismissals, Dismissal(node.id, failure))[-_DISMISSALS_KEPT:]
    return replace(plan, dismissals=dismissals)


def _met(plan: Plan, event: Met) -> Plan:
    state = plan.role(event.role)
    if plan.phase is not Phase.RUNNING or state.attempt != event.attempt or state.meeting:
        return plan
    plan = plan.with_role(replace(state, meeting=event.meeting))
    for seat in plan.seats_of(event.role):
        if seat.order is Order.WAIT and seat.number in state.members:
            plan = _begin_life(plan, seat, _pause(plan, state))
    return plan


def _gave_up(plan: Plan, event: GaveUp) -> Plan:
    if plan.phase.is_over:
        return plan
    return replace(plan, phase=Phase.FAILED, failure=event.failure)


_HANDLERS: dict[type, Callable[[Plan, object], Plan]] = {
    Joined: _joined,  # type: ignore[dict-item]
    Left: _left,  # type: ignore[dict-item]
    Exited: _exited,  # type: ignore[dict-item]
    Met: _met,  # type: ignore[dict-item]
    GaveUp: _gave_up,  # type: ignore[dict-item]
}


# --- Beginning again


def _gather_job(plan: Plan) -> Plan:
    plan = replace(plan, gathers=True)
    for state in plan.roles:
        plan = _gather_role(plan, state.role.name)
    return plan


def _gather_role(plan: Plan, name: str) -> Plan:
    """Stops all workers of a role, and has those that were done begin again, too."""
    plan = plan.with_role(replace(plan.role(name), gathers=True))
    for seat in plan.seats_of(name):
        if seat.order is Order.RUN:
            plan = plan.with_seat(replace(seat, order=Order.STOP))
        elif seat.done:
            order = Order.WAIT if seat.holder else Order.NOTHING
            plan = plan.with_seat(replace(seat, done=False, order=order))
    return plan


def _pause(plan: Plan, state: RoleState) -> float:
    """Seconds before a role's workers begin again together."""
    restarts = plan.restarts if state.role.restart is Restart.JOB else state.restarts
    return restarts.pause()


def _begin_life(plan: Plan, seat: Seat, pause: float) -> Plan:
    return plan.with_seat(replace(seat, order=Order.RUN, life=seat.life + 1, pause=pause))


# --- Settling


def _begin(plan: Plan) -> Plan:
    if plan.phase is Phase.GATHERING and len(plan.nodes) >= plan.min_nodes:
        return replace(plan, phase=Phase.RUNNING)
    return plan


def _fill(plan: Plan) -> Plan:
    """Gives seats that nobody holds to agents with room, then makes those that lack."""
    if plan.phase is not Phase.RUNNING:
        return plan
    for state in plan.roles:
        plan = _make_shared_seats(plan, state.role)
    for seat in plan.seats:
        if not seat.holder and not seat.done and not _is_finishing(plan, seat.role):
            plan = _hand_over(plan, seat)
    for state in plan.roles:
        if not _is_finishing(plan, state.role.name):
            plan = _make_own_seats(plan, state.role)
    return plan


def _is_finishing(plan: Plan, role: str) -> bool:
    """True if some of those that end together have ended: nobody joins them any more."""
    return plan.role(role).role.is_tied and any(seat.done for seat in plan.seats_of(role))


def _make_shared_seats(plan: Plan, role: Role) -> Plan:
    if role.share is Share.JOB:
        for number in range(len(list(plan.seats_of(role.name))), role.count):
            seat = Seat(role.name, number, len(plan.seats))
            plan = replace(plan, seats=(*plan.seats, seat))
    return plan


def _make_own_seats(plan: Plan, role: Role) -> Plan:
    if role.share is Share.JOB:
        return plan
    for node in plan.nodes:
        for _ in range(node.offered(role.name) - _held(plan, node, role.name)):
            number = len(list(plan.seats_of(role.name)))
            seat = Seat(role.name, number, len(plan.seats), node.id, order=Order.WAIT)
            plan = replace(plan, seats=(*plan.seats, seat))
    return plan


def _hand_over(plan: Plan, seat: Seat) -> Plan:
    """Gives a seat to the agent with room for its role that has the fewest of it, or to a spare.

    An agent that was not told of the role does not know what its workers run.
    """
    role = plan.role(seat.role).role
    with_room = [
        node for node in plan.nodes if _held(plan, node, role.name) < _room(plan, node, role)
    ]
    with_spare = [
        node for node in plan.nodes if node.offered(role.name) and _spare_left(plan, node) > 0
    ]
    candidates = with_room or ([] if seat.needs_room else with_spare)
    if not candidates:
        return plan
    holder = min(candidates, key=lambda node: (_held(plan, node, role.name), node.number))
    return plan.with_seat(replace(seat, holder=holder.id, order=Order.WAIT))


def _held(plan: Plan, node: Node, role: str) -> int:
    return sum(seat.role == role for seat in plan.held_by(node.id))


def _room(plan: Plan, node: Node, role: Role) -> int:
    """The number of workers of a role that an agent has room for, apart from its spare seats."""
    offered = node.offered(role.name)
    if role.share is Share.AGENT or not offered:
        return offered
    sharers = sum(each.offered(role.name) > 0 for each in plan.nodes)
    return -(-role.count // sharers)


def _spare_left(plan: Plan, node: Node) -> int:
    held = ((_held(plan, node, state.role.name), state.role) for state in plan.roles)
    return node.spare - sum(max(0, count - _room(plan, node, role)) for count, role in held)


def _tie(plan: Plan) -> Plan:
    """Has those begin again who cannot take in a worker that comes while they run."""
    if plan.phase is not Phase.RUNNING:
        return plan
    for state in plan.roles:
        orders = {seat.order for seat in plan.seats_of(state.role.name)}
        comes = Order.WAIT in orders and Order.RUN in orders
        if state.role.is_tied and comes and not state.gathers:
            return _gather_uncounted(plan, state)
    return plan


def _form(plan: Plan) -> Plan:
    """Has those begin whom nothing keeps from it any more."""
    if plan.phase is not Phase.RUNNING:
        return plan
    if plan.gathers:
        if any(map(_runs, plan.seats)):
            return plan
        plan = replace(plan, gathers=False)
    for state in plan.roles:
        if state.role.process_group:
            plan = _form_process_group(plan, state)
        elif not (state.gathers and any(map(_runs, plan.seats_of(state.role.name)))):
            plan = _form_role(plan, state)
    return plan


def _runs(seat: Seat) -> bool:
    return seat.order in (Order.RUN, Order.STOP)


def _waiting(plan: Plan, role: str) -> Iterator[Seat]:
    return (seat for seat in plan.seats_of(role) if seat.order is Order.WAIT)


def _form_role(plan: Plan, state: RoleState) -> Plan:
    alone = state.role.restart is Restart.WORKER and not state.gathers
    for seat in _waiting(plan, state.role.name):
        plan = _begin_life(plan, seat, seat.pause if alone else _pause(plan, state))
    if not state.gathers:
        return plan
    return plan.with_role(replace(state, gathers=False, attempt=state.attempt + 1))


def _form_process_group(plan: Plan, state: RoleState) -> Plan:
    """Says who is in the next group; they begin once one of them has made a store for it."""
    seats = list(plan.seats_of(state.role.name))
    members = tuple(seat.number for seat in seats if seat.order is Order.WAIT)
    awaits_store = not state.gathers and not state.meeting and members == state.members
    if any(map(_runs, seats)) or not members or awaits_store:
        return plan
    attempt = state.attempt + 1
    formed = replace(state, gathers=False, attempt=attempt, members=members, meeting="")
    return plan.with_role(formed)


def _end(plan: Plan) -> Plan:
    if plan.phase is Phase.RUNNING and _work_is_done(plan):
        plan = replace(plan, phase=Phase.ENDING)
        for seat in plan.seats:
            order = Order.STOP if _runs(seat) else Order.NOTHING
            plan = plan.with_seat(replace(seat, order=order))
    if plan.phase is Phase.ENDING and not any(map(_runs, plan.seats)):
        plan = replace(plan, phase=Phase.SUCCEEDED)
    return plan


def _work_is_done(plan: Plan) -> bool:
    """Servers are not waited for, nor is a worker that nobody runs, if enough agents are there."""
    services = {state.role.name for state in plan.roles if state.role.service}
    work = [seat for seat in plan.seats if seat.role not in services] or list(plan.seats)
    missing = [seat for seat in work if not seat.done and not seat.holder]
    done = sum(seat.done for seat in work)
    return 0 < done == len(work) - len(missing) and (
        not missing or len(plan.nodes) >= plan.min_nodes
    )


_STEPS = (_begin, _fill, _tie, _form, _end)
