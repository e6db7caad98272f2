"""The facts about a worker's stages that whoever watches its job sees, and whom it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tensorwire.pipeline.letters import STEP, Address, Content
from tensorwire.pipeline.placement import owner_of
from tensorwire.pipeline.plan import Plan, Span

_NANOSECONDS: Final = 1e9


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of one worker's part of a step, in nanoseconds of its monotonic clock.

    Args:
        before: end of the step before; of the first step, its own beginning.
        began: of this step.
        ended: likewise.
        spans: of its actions.
    """

    before: int
    began: int
    ended: int
    spans: Sequence[Span]

    @property
    def busy(self) -> float:
        """Seconds in which it worked on actions."""
        return sum(span.ended - span.began for span in self.spans) / _NANOSECONDS

    @property
    def seconds(self) -> float:
        """Seconds from beginning to end."""
        return (self.ended - self.began) / _NANOSECONDS

    def facts(self) -> dict[str, object]:
        """Returns them as plain data: the share of all time, and the bubble within the step."""
        all_seconds = (self.ended - self.before) / _NANOSECONDS
        return {
            "step seconds": round(self.seconds, 4),
            "busy": round(self.busy / all_seconds, 3) if all_seconds else 0.0,
            "bubble": round(1.0 - self.busy / self.seconds, 3) if self.seconds else 0.0,
        }


def sender_of(plan: Plan, address: Address) -> str:
    """The worker that sends a letter; empty for the driver, whose letters come as steps begin."""
    if address.content is Content.SHARED:
        return plan.shared[address.target].members[address.source].worker
    if address.source == STEP:
        return ""
    return owner_of(plan.owners, address.source, address.microbatch)
