"""Plans for tests, and what happens to them, in few words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tensorwire.launch.plan import Failure, Node, Order, Plan
from tensorwire.launch.roles import Role, parse_role
from tensorwire.launch.seats import Event, Exited, Joined, Left, Met, apply

SIGKILL = -9


def roles(*texts: str) -> tuple[Role, ...]:
    parsed = map(parse_role, texts)
    return tuple(replace(role, max_restarts=role.max_restarts or 0) for role in parsed)


def node(number: int, of: Iterable[Role], spare: int = 0) -> Node:
    offers = tuple((role.name, role.count) for role in of)
    return Node(f"node{number}", number, f"host{number}", offers, spare)


class Job:
    """A job's plan, to which things happen."""

    def __init__(self, *texts: str, nodes: int = 1, at_least: int = 1, spare: int = 0) -> None:
        self.roles = roles(*texts)
        self.plan = Plan(at_least)
        for number in range(nodes):
            self.join(number, spare)

    def happens(self, event: Event) -> None:
        self.plan = Plan.decode(apply(self.plan, [event]).encode())

    def join(self, number: int, spare: int = 0, of: tuple[Role, ...] | None = None) -> None:
        known = self.roles if of is None else of
        self.happens(Joined(node(number, known, spare), known))

    def leave(self, number: int) -> None:
        self.happens(Left(f"node{number}"))

    def ends(self, name: str, code: int = 0, soon: bool = False, life: int | None = None) -> None:
        """The process of a worker's present life, or of an earlier one, ends."""
        seat = self.seat(name)
        which = seat.life if life is None else life
        failure = Failure(name, "because", seat.id, exit_code=code, life=which)
        self.happens(Exited(seat.holder, seat.id, which, code, soon, failure))

    def all_end(self, role: str) -> None:
        """Stops all of a role that has to stop."""
        for seat in list(self.plan.seats_of(role)):
            if seat.order is Order.STOP:
                self.ends(seat.name, -15)

    def meets(self, role: str, port: int) -> None:
        self.happens(Met(role, self.plan.role(role).attempt, f"host:{port}"))

    def seat(self, name: str):  # type: ignore[no-untyped-def]
        return next(seat for seat in self.plan.seats if seat.name == name)

    def says(self, role: str) -> str:
        """The seats of a role in short: who holds it, what it does, and in which life."""
        return " ".join(
            f"{seat.holder[4:] or '-'}:{'done' if seat.done else seat.order.value}{seat.life}"
            for seat in self.plan.seats_of(role)
        )
