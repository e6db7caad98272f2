"""The share of a trainer that always has the same batches: which one of how many."""

from __future__ import annotations

import os
from typing import NamedTuple

from tensorwire.parameter_server.declarations.arguments import instance, whole


class Share(NamedTuple):
    """One of equal shares of all batches.

    Args:
        rank: which one, from 0.
        num_replicas: how many there are; 0 if batches go to those who are there.
    """

    rank: int = 0
    num_replicas: int = 0


def share_of(assignment: str, rank: int | None, num_replicas: int | None) -> Share:
    """The share that ``Cluster.samples`` was told; see there.

    Raises:
        TypeError: an argument is of a wrong kind.
        ValueError: one is out of range, missing, or of no use.
    """
    instance("samples", "assignment", assignment, str, "a text")
    if assignment not in ("dynamic", "static"):
        raise ValueError(f"samples: assignment={assignment!r} must be 'dynamic' or 'static'")
    if assignment == "dynamic":
        for name, value in {"rank": rank, "num_replicas": num_replicas}.items():
            if value is not None:
                raise ValueError(f"samples: {name}={value!r} needs assignment='static'")
        return Share()
    replicas = _given("num_replicas", num_replicas, "ROLE_WORLD_SIZE")
    whole("samples", "num_replicas", replicas)
    mine = _given("rank", rank, "ROLE_RANK")
    whole("samples", "rank", mine, least=0, below=replicas)
    return Share(mine, replicas)


def _given(name: str, value: int | None, variable: str) -> int:
    """The number that the program gives, or else the launcher."""
    if value is not None:
        return value
    said = os.environ.get(variable, "")
    if not said.isdecimal():
        raise ValueError(
            f"samples: assignment='static' needs {name}=, as the environment variable {variable} "
            f"is {said!r} and no whole number"
        )
    return int(said)
