"""The rules for which ids get a row, and when a row must go: in pushes and steps, not seconds."""

from __future__ import annotations

from dataclasses import dataclass

from tensorwire.parameter_server.declarations.arguments import whole


@dataclass(frozen=True)
class MinCount:
    """Gives an id a row with its ``pushes``-th push; until then its gradients are dropped.

    Args:
        pushes: that name the id, of all trainers together.
    """

    pushes: int

    def __post_init__(self) -> None:
        whole("MinCount", "pushes", self.pushes)


@dataclass(frozen=True)
class UnusedFor:
    """Evicts a row that no push has named for ``steps`` steps of the fastest trainer.

    It reads as it began from then on. Pulls do not count.

    Args:
        steps: how long a row stays.
    """

    steps: int

    def __post_init__(self) -> None:
        whole("UnusedFor", "steps", self.steps)
