"""The output of ``--dry-run``: the workers that this agent would start, if it were the first."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

from tensorwire.launch.flags import Command
from tensorwire.launch.plan import Node, Plan, Seat
from tensorwire.launch.roles import Role
from tensorwire.launch.seats import Joined, apply

_NODE = "0"


def describe_start(command: Command) -> str:
    """The workers and what each would run, a line for each, below the rendezvous."""
    said = command.arguments
    lines = [
        f"rendezvous: {said.rdzv_backend} at {said.rdzv_endpoint or 'this machine'}, "
        f"job {said.rdzv_id!r}, {said.nnodes} nodes"
    ]
    lines += _roles(command) if command.roles else [_everyone(command)]
    return "\n".join(lines)


def _everyone(command: Command) -> str:
    said = command.arguments
    return f"{said.nproc_per_node} workers of role {said.role!r}: {_program(command)}"


def _roles(command: Command) -> Iterator[str]:
    roles = command.roles
    node = Node(_NODE, 0, "", tuple((role.name, role.count) for role in roles))
    plan = apply(Plan(1), [Joined(node, roles)])
    by_name = {role.name: role for role in roles}
    for seat in plan.seats:
        yield _seat(command, seat, by_name[seat.role])
    if command.arguments.spare:
        yield f"room for {command.arguments.spare} workers of an agent that dies"


def _seat(command: Command, seat: Seat, role: Role) -> str:
    restarts = command.arguments.max_restarts if role.max_restarts is None else role.max_restarts
    says = [f"restart={role.restart.value}", f"max_restarts={restarts}"]
    says += ["service"] * role.service + ["pg"] * role.process_group
    return f"{seat.name} (id {seat.id}; {', '.join(says)}): {_program(command, role)}"


def _program(command: Command, role: Role | None = None) -> str:
    if role is not None and role.module is not None:
        return shlex.join([sys.executable, "-u", "-m", role.module, *role.arguments])
    said = command.arguments
    words = [] if said.no_python or said.run_path else [sys.executable, "-u"]
    words += ["-m"] * said.module
    return shlex.join([*words, said.training_script, *said.training_script_args])
