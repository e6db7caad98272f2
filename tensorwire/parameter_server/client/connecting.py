"""``connect``: meets the others who use a cluster, or is the first."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from rpc import extend
from tensorwire.parameter_server import errors
from tensorwire.parameter_server.client.cache import Cache
from tensorwire.parameter_server.client.cluster import Cluster
from tensorwire.parameter_server.client.finding import lives_to_come, most_servers, role_or_names
from tensorwire.parameter_server.client.membership import Membership
from tensorwire.parameter_server.client.session import Session
from tensorwire.parameter_server.client.stepper import NanPolicy
from tensorwire.parameter_server.client.table import Table
from tensorwire.parameter_server.decisions import view_changes, views
from tensorwire.parameter_server.decisions.consistency import BSP, SSP, Async, Consistency
from tensorwire.parameter_server.decisions.views import Snapshot, View
from tensorwire.parameter_server.declarations.arguments import instance, number, text, whole
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.messaging.confirming import confirmed, known_view
from tensorwire.parameter_server.messaging.settings import Meeting, settings_of
from tensorwire.parameter_server.opaque import Json
from tensorwire.parameter_server.snapshots.contents import Restored
from tensorwire.parameter_server.snapshots.kept import Keeping
from tensorwire.parameter_server.snapshots.published import saved_at

_NAME: Final = "default"


class _Connected:
    """The clusters that one worker is connected to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clusters: dict[str, Cluster] = {}
        self.sessions: dict[str, int] = {}

    def next_session(self, name: str) -> int:
        """Counts how often the worker has become a client of a cluster; how often before."""
        before = self.sessions.get(name, 0)
        self.sessions[name] = before + 1
        return before

    def close(self) -> None:
        for cluster in self.clusters.values():
            cluster.session.close()
            if cluster.publishing is not None:
                cluster.publishing.stop()


def connect(
    servers: Sequence[str] | str,
    *,
    backups: int = 0,
    consistency: Consistency | None = None,
    trainers: int | None = None,
    name: str = _NAME,
    nans: NanPolicy = NanPolicy.RAISE,
    restore: str | os.PathLike[str] | None = None,
    strict: bool = True,
    grow: bool = False,
    timeout: float = 60.0,
) -> Cluster:
    """Connects to the servers, which need nothing but to be in the group; the first one who
    does says what the cluster is.

    Args:
        servers: names of the workers that keep the state, each its share; or their role under
            rpcrun, such as ``"ps"``: then those that had been started by the time of this worker.
        backups: servers that have a copy of each share, and take over when its own is lost; with
            a role, as soon as there are so many.
        consistency: ``ps.BSP()``, which is the default, ``ps.SSP(steps)`` or ``ps.Async()``.
        trainers: how many wait for each other to begin. Default: all of this worker's role that
            rpcrun had started by the time that it started the last of those who wait; without
            rpcrun 1. Others may join later.
        name: of the cluster, if there are several in the group.
        nans: what happens to gradients that are no numbers.
        restore: folder of a snapshot to begin with, all of which is checked first; or of versions
            that were published, to begin with the last one, or with one of them. Its tables and
            dense parameters belong to the cluster from the start, declared or not. Of a cluster
            that exists, the snapshot with which it began or one that it has written since.
        strict: whether what is declared must be as it was saved. Otherwise other precisions,
            rules, optimizers and dtypes are converted, which is said in the log. Default True.
        grow: servers of the role that come later get their share at once. Default no, until
            :meth:`Cluster.resize` says so.
        timeout: seconds that servers have to come into the group, and for which they may be out
            of reach later, as while they start again, before calls fail with ``UnreachableError``.

    Raises:
        CheckpointError: the snapshot is damaged, or none of a parameter server.
        DeclarationError: there is such a cluster, and it is another, or began otherwise.
        TypeError: an argument is of a wrong kind.
        ValueError: an argument is out of range.
        TimeoutError: a server did not come, or no server has confirmed what the store says.
    """
    consistency = BSP() if consistency is None else consistency
    instance("connect", "consistency", consistency, (BSP, SSP, Async), "ps.BSP(), ps.SSP(n) or "
             "ps.Async()")  # fmt: skip
    text("connect", "name", name)
    instance("connect", "restore", restore, (str, os.PathLike, type(None)), "a folder or None")
    number("connect", "timeout", timeout)
    instance("connect", "nans", nans, NanPolicy, "a ps.NanPolicy")
    whole("connect", "backups", backups, least=0)
    instance("connect", "grow", grow, bool, "True or False")
    role, names = role_or_names("connect", servers)
    if grow and not role:
        raise ValueError(f"connect: grow=True needs a role for servers, not {names!r}")
    most = most_servers(role, names)
    if backups >= most:
        raise ValueError(f"connect: backups={backups} needs more than {most} servers")
    if trainers is not None:
        whole("connect", "trainers", trainers)
    instance("connect", "strict", strict, bool, "True or False")
    folder = "" if restore is None else str(Path(restore).absolute())
    settings = settings_of(consistency, names, trainers or 0, role, grow)
    settings["restore"] = [folder, strict]
    started = int(os.environ.get("ROLE_WORLD_SIZE", "1"))
    worker = extend.worker()
    connected = extend.worker_state(_Connected, _Connected, _Connected.close)
    with connected.lock:
        known = connected.clusters.get(name)
        if known is not None and not known.session.is_closed:
            _require_same(known.session.view, settings, backups)
            return known
        view = _meet(worker, name, settings, backups, timeout)
        next_session = partial(connected.next_session, name)
        session = Session(worker, name, view, next_session(), timeout)
        membership = Membership(session, trainers or started, next_session)
        cluster = connected.clusters[name] = Cluster(session, membership, nans)
    session.servers.spread()
    return cluster


def unpickled(cluster: str, spec: TableSpec, cache: Cache | None) -> Table:
    """The table that a pickle names, at the cluster of that name that this worker is connected to.

    Raises:
        ParameterServerError: this worker is not connected to it.
    """
    connected = extend.worker_state(_Connected, _Connected, _Connected.close)
    with connected.lock:
        client = connected.clusters.get(cluster)
    if client is None or client.session.is_closed:
        raise errors.ParameterServerError(
            f"table {spec.name!r} of cluster {cluster!r} was pickled, which keeps no rows; call "
            f"ps.connect(..., name={cluster!r}) before you load it"
        )
    return client.declared(spec, cache)


def _meet(
    worker: extend.Worker,
    name: str,
    settings: Mapping[str, Json],
    backups: int,
    timeout: float,
) -> View:
    """The view of the cluster; makes the first one if there is none."""
    view = Meeting(worker).view(name)
    if view is None:
        folder, _ = settings["restore"]
        restored = _checked(folder) if folder else None
        lives = lives_to_come("connect", worker, settings["servers"], timeout)
        view = known_view(worker, name, lives, timeout)  # somebody may have deleted it
        view = view or _begun(worker, name, view_changes.first(lives, backups, settings), restored)
    view = confirmed(worker, name, view, timeout)
    _require_same(view, settings, backups)
    return view


def _begun(worker: extend.Worker, name: str, first: View, restored: Restored | None) -> View:
    """A new cluster with this first view, unless somebody else has made one meanwhile."""
    if restored is not None:
        _, strict = first.settings["restore"]
        first = _beginning_with(first, restored, strict)
    meeting = Meeting(worker)
    meeting.enter(name)
    return meeting.replace(name, None, first)


def _checked(folder: str) -> Restored:
    """A snapshot that is whole."""
    restored = saved_at(folder)
    if restored.coarse:
        raise errors.SnapshotError(
            f"connect: restore={folder!r} was published with precision=INT8, for readers: rows of "
            f"{', '.join(restored.coarse)} are too coarse to train on. Restore from a snapshot, or "
            "from versions with state=True"
        )
    restored.verify()
    return restored


def _beginning_with(view: View, restored: Restored, strict: bool) -> View:
    """A cluster that has all that is in a snapshot, though nobody has declared it yet."""
    declared = {
        name: Keeping(saved, restored.folder, strict).encode()
        for name, saved in restored.described.items()
    }
    snapshot = Snapshot(restored.folder, {}, restored.time, restored.accounts)
    return views.beginning_with(view, snapshot, declared, restored.samplers)


def _other_beginning(view: View, settings: Mapping[str, Json]) -> list[str]:
    """Lists settings of a restore that the cluster did not begin with; its own snapshots count."""
    folder, strict = settings["restore"]
    began, was_strict = view.settings.get("restore", ["", True])
    if not folder or folder in (each.folder for each in view.snapshots if each.folder != began):
        return []
    if folder != began:
        return [f"restore={began or None!r}, not {folder!r}; all who connect say the same"]
    return [] if strict == was_strict else [f"strict={was_strict}, not {strict}"]


def _require_same(view: View, settings: Mapping[str, Json], backups: int) -> None:
    before = view.settings
    different = [
        f"{key}={before[key]!r}, not {settings[key]!r}"
        for key in ("consistency", "grows")
        if list_of(before.get(key)) != list_of(settings[key])
    ]
    if settings["trainers"] and before["trainers"] not in (0, settings["trainers"]):
        different.append(f"trainers={before['trainers']}, not {settings['trainers']}")
    if view.backups != backups:
        different.append(f"backups={view.backups}, not {backups}")
    different += _other_beginning(view, settings)
    if not _are_same_servers(view, settings):
        current = [server.name for server in view.servers]
        different.append(f"servers={current}, not {settings['role'] or settings['servers']!r}")
    if different:
        raise errors.DeclarationError(
            f"the cluster was set up otherwise before: {'; '.join(different)}"
        )


def _are_same_servers(view: View, settings: Mapping[str, Json]) -> bool:
    if settings["role"]:  # whose workers may be others by now
        return all(server.is_of(settings["role"]) for server in view.servers)
    names = [list(view.settings["servers"]), [server.name for server in view.servers]]
    return settings["servers"] in names


def list_of(value: Json) -> Json:
    """A tuple as the list that it becomes in JSON."""
    return list(value) if isinstance(value, tuple) else value
