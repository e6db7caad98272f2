"""The settings that all who connect to a cluster must agree about, and its view in the store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from rpc import extend
from tensorwire.parameter_server.decisions.consistency import (
    BSP,
    SSP,
    Async,
    Consistency,
    Reduce,
)
from tensorwire.parameter_server.decisions.views import View
from tensorwire.parameter_server.opaque import Json

_NAMESPACE: Final = "tensorwire.ps"
_CLUSTERS: Final = "clusters"


def settings_of(
    consistency: Consistency, servers: list[str], trainers: int, role: str = "", grows: bool = False
) -> dict[str, object]:
    """The settings of a cluster, as values of JSON.

    Args:
        consistency: between trainers.
        servers: names of those that it begins with.
        trainers: with how many it begins; 0 for as many as had been started by then.
        role: of the servers, if they were not given by name.
        grows: servers of that role that come later get a share.
    """
    kind: list[object] = [type(consistency).__name__]
    if isinstance(consistency, BSP):
        kind.append(consistency.reduce.value)
    elif isinstance(consistency, SSP):
        kind.append(consistency.staleness)
    told = {"consistency": kind, "servers": servers, "trainers": trainers}
    return {**told, "role": role, "grows": grows}


def consistency_of(settings: Mapping[str, Json]) -> Consistency:
    """The inverse of :func:`settings_of`, for the consistency."""
    kind, *rest = settings["consistency"]
    if kind == "BSP":
        return BSP(Reduce(rest[0]))
    return SSP(rest[0]) if kind == "SSP" else Async()


class Meeting:
    """The group's store, as far as it is about clusters.

    Args:
        worker: through whom it is asked.
    """

    def __init__(self, worker: extend.Worker) -> None:
        self._store = worker.store(_NAMESPACE)

    def clusters(self) -> list[str]:
        """The names of all clusters."""
        entry = self._store.get(_CLUSTERS)
        return [] if entry is None else [str(each) for each in json.loads(entry)]

    def enter(self, cluster: str) -> None:
        """Adds a name to them."""
        while True:
            entry = self._store.get(_CLUSTERS)
            names = [] if entry is None else json.loads(entry)
            if cluster in names:
                return
            wanted = json.dumps([*names, cluster]).encode()
            if self._store.compare_and_set(_CLUSTERS, entry, wanted) == wanted:
                return

    def view(self, cluster: str) -> View | None:
        """The view of a cluster."""
        entry = self._store.get(f"view/{cluster}")
        return None if entry is None else View.decode(entry.decode())

    def replace(self, cluster: str, expected: View | None, view: View) -> View:
        """Puts a view in the place of the expected one; returns which is there then."""
        before = None if expected is None else expected.encode().encode()
        stored = self._store.compare_and_set(f"view/{cluster}", before, view.encode().encode())
        assert stored is not None
        return View.decode(stored.decode())

    def claim(self, key: str, expected: str | None, value: str) -> str | None:
        """Compare-and-set of a text; returns what is there then."""
        before = None if expected is None else expected.encode()
        stored = self._store.compare_and_set(f"claim/{key}", before, value.encode())
        return None if stored is None else stored.decode()

    def undo(self, cluster: str, generation: int, trainer: int, pushes: int) -> None:
        """Notes how many pushes of a trainer the roll-back to that generation undid."""
        self.claim(f"undone/{cluster}/{generation}/{trainer}", None, str(pushes))

    def undone(self, cluster: str, generation: int, trainer: int) -> int | None:
        """The number that :meth:`undo` was told; None if it was not yet."""
        claim = self.claimed(f"undone/{cluster}/{generation}/{trainer}")
        return None if claim is None else int(claim)

    def claimed(self, key: str) -> str | None:
        """The holder of a claim."""
        entry = self._store.get(f"claim/{key}")
        return None if entry is None else entry.decode()
