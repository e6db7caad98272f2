"""Decides what an agent says in its log of changes of the plan that it did not bring about. No I/O.

An agent that was struck out of the plan, as the others had no sign of life of it, says so once,
and once that it is back; what becomes of each of its workers meanwhile needs no line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensorwire.launch.plan import Plan, Seat
from tensorwire.launch.report import describe_exit


class Chronicle:
    """The lines of one agent.

    Args:
        node: its id.

    Attributes:
        is_returning: it was struck out, and is not back yet.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._is_in = False
        self._told: set[str] = set()
        self.is_returning = False

    def lines(self, plan: Plan, running: Sequence[str]) -> Iterator[str]:
        """The lines to say of a plan that was not said of earlier ones.

        Args:
            plan: as it is.
            running: names of the workers that run here.
        """
        for each in plan.dismissals:
            if each.node not in self._told and each.node != self._node:
                self._told.add(each.node)
                first = each.failure
                yield (
                    f"agent {each.node} on {first.host} is taken out of the job, which goes on: "
                    f"{first.who} failed with {describe_exit(first.exit_code)} and has no restarts "
                    "left there"
                )
        is_in = plan.node(self._node) is not None
        is_wanted = not plan.phase.is_over and plan.dismissal(self._node) is None
        if self._is_in and not is_in and is_wanted:
            self.is_returning = True
            workers = ", ".join(sorted(running)) or "no workers"
            yield (
                "no sign of life of this agent reached the others, who have struck it out: "
                f"{workers} end here, as their seats may be others' by now, and it joins again"
            )
        if is_in and self.is_returning:
            self.is_returning = False
            yield "this agent is back in the job"
        self._is_in = is_in


def describe_starts(seats: Sequence[Seat]) -> str:
    """Says which workers start again; empty if none does."""
    again = sorted((seat for seat in seats if seat.life > 1), key=lambda seat: seat.id)
    if not again:
        return ""
    names = ", ".join(seat.name for seat in again)
    if len(again) == 1:
        return f"{names} starts again, as life {again[0].life}"
    return f"{names} start again, as lives {', '.join(str(seat.life) for seat in again)}"
