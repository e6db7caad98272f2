"""Reads a live cluster in whole steps: rows of all shards that are of one step, and of which."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch import Tensor

from tensorwire.parameter_server.client.distinct import distinct
from tensorwire.parameter_server.errors import ParameterServerError, UnreachableError

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster

_PAUSE: Final = 0.001
"""Seconds before shards that were at different steps are asked again; doubled each time."""
_LONGEST_PAUSE: Final = 0.05


@dataclass(frozen=True, slots=True)
class WholeStep:
    """The state of a cluster at one step.

    Args:
        step: pushes of each trainer that are in it; of one that came later, as if it had always
            been there.
        tables: by name, a row for each id that was asked for, ``(*ids.shape, dim)``, float32.
        dense: by name, the values of each parameter; None if nobody has set them yet.
    """

    step: int
    tables: Mapping[str, Tensor]
    dense: Mapping[str, list[Tensor] | None]


class Reader:
    """Reads whole steps of a cluster that trains under BSP. Made by ``Cluster.reader``.

    A pull is answered by each shard as soon as it comes, and shards may be one step apart. So each
    says of which step its rows are, and all are asked again until they agree. Trainers wait for
    none of it.
    """

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        self._cluster = cluster
        self._timeout = timeout

    def pull(self, tables: Mapping[str, Tensor], dense: Sequence[str] = ()) -> WholeStep:
        """The rows of ids, and dense parameters, all of one step.

        Args:
            tables: by name, int64 ids of any shape, on the CPU.
            dense: names of dense parameters.

        Raises:
            ParameterServerError: a table or dense group was not declared here.
            RolledBack: see there.
            TypeError: ids are not int64.
            UnreachableError: shards did not agree on a step in the time that ``reader`` was given.
        """
        known = {each.name: each for each in self._cluster.tables}
        for name, ids in tables.items():
            if name not in known:
                raise ParameterServerError(f"reader: table {name!r} was not declared here")
            known[name].check_ids(ids)
        different = {name: distinct(ids) for name, ids in tables.items()}
        wanted = self._cluster.rows.grouped({name: ids for name, (ids, _) in different.items()})
        deadline, pause = time.monotonic() + self._timeout, _PAUSE
        while True:
            left = max(0.0, deadline - time.monotonic())
            answer = self._cluster.stepper.send(None, wanted, tuple(dense)).wait(left)
            if answer is None:
                return WholeStep(0, {}, {})
            first, last = answer.times
            if first == last:
                break
            if time.monotonic() >= deadline:
                raise UnreachableError(
                    f"after {self._timeout:g} s shards still answered from steps {first} to "
                    f"{last}: they train faster than they can be read"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        rows = {
            name: own[different[name][1]]
            for ids, pulled in zip(wanted, answer.rows, strict=True)
            for name, own in zip(ids.tables, pulled.split_with_sizes(ids.sizes), strict=True)
        }
        return WholeStep(first, {name: rows[name] for name in tables}, answer.dense)
