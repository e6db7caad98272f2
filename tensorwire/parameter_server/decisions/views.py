"""A cluster's layout: shards, their chains of servers, the map from slots to shards, the trainers.

A view is one value in the group's store, replaced by compare-and-set only, with a number that
grows. It says what shall be; the coordinator (``coordination``) makes the shards follow. The
views that follow on another are made in ``view_changes``.

A chain is the servers that keep one shard: the first is its head, which decides, the others
are backups. The view names *lives* of servers: after a restart a server has another.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tensorwire.parameter_server.decisions.samples import Account
from tensorwire.parameter_server.opaque import Json

KEPT: Final = "kept:"
"""Begins the text of what a restored snapshot has, and nobody has declared yet."""


@dataclass(frozen=True, slots=True, order=True)
class Server:
    """One life of a server process.

    Args:
        name: the worker's.
        incarnation: which life of that name.
    """

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}/{self.incarnation}"

    def is_of(self, role: str) -> bool:
        """True of a worker of that role of a job, as ``ps:3`` is of ``ps``."""
        name, _, number = self.name.rpartition(":")
        return name == role and number.isdecimal()

    def number_in_role(self) -> int:
        """Its number, if it is a worker of some role."""
        return int(self.name.rpartition(":")[2])


@dataclass(frozen=True, slots=True, order=True)
class Client:
    """Somebody who pushes, from when it joins until it has finished.

    Args:
        name: the worker's.
        incarnation: which life of that name.
        session: how often this life has joined before.
    """

    name: str
    incarnation: int
    session: int = 0


@dataclass(frozen=True, slots=True)
class Trainer:
    """A client that has joined.

    Args:
        number: in the cluster; never given twice.
        client: who it is.
    """

    number: int
    client: Client


@dataclass(frozen=True, slots=True)
class Left:
    """A trainer that has finished or was lost since the last snapshot.

    Args:
        number: the trainer's.
        name: the worker's.
        begin: number of its first push; None if it was lost and did not say.
        end: number behind its last push that counts.
    """

    number: int
    name: str
    begin: int | None
    end: int

    def encode(self) -> list[object]:
        """Encodes it as a value of JSON."""
        return [self.number, self.name, self.begin, self.end]

    def undone_by(self, snapshot: Snapshot) -> int:
        """The number of its pushes that are not in a snapshot."""
        first = snapshot.time if self.begin is None else self.begin
        return max(0, self.end - snapshot.counts.get(self.number, first))


@dataclass(frozen=True, slots=True)
class Shard:
    """One share of the state.

    Args:
        number: never given twice.
        chain: the servers that keep it, the head first.
        version: number of the view in which the chain became what it is.
    """

    number: int
    chain: tuple[Server, ...]
    version: int = 0

    @property
    def head(self) -> Server:
        """The server that decides."""
        return self.chain[0]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The place of a snapshot, and its point in everybody's pushes.

    Args:
        folder: where its files are.
        counts: by trainer, how many of its pushes are in it.
        time: pushes of the fastest trainer.
        accounts: of samples, by the name of the sampler.
    """

    folder: str
    counts: Mapping[int, int]
    time: int
    accounts: Mapping[str, Account] = field(default_factory=dict)

    def encode(self) -> list[object]:
        """Encodes it as a value of JSON."""
        accounts = {name: each.encode() for name, each in self.accounts.items()}
        return [self.folder, sorted(self.counts.items()), self.time, accounts]

    @classmethod
    def decode(cls, value: list[Json]) -> Snapshot:
        """The inverse of :meth:`encode`."""
        folder, counts, time, accounts = value
        decoded = {name: Account.decode(each) for name, each in accounts.items()}
        return cls(folder, dict(counts), time, decoded)


@dataclass(frozen=True, slots=True)
class Older:
    """A snapshot that is not the last.

    Args:
        snapshot: the snapshot.
        left: trainers that left after it, and of which the next one has everything.
    """

    snapshot: Snapshot
    left: tuple[Left, ...] = ()


@dataclass(frozen=True, slots=True)
class Publisher:
    """Somebody who publishes versions, for whom shards note what changes.

    Args:
        client: who it is.
        folder: of the chain of versions.
        chain: names the chain; whoever begins to publish gives it another name.
    """

    client: Client
    folder: str
    chain: str

    def encode(self) -> list[object]:
        """Encodes it as a value of JSON."""
        who = self.client
        return [who.name, who.incarnation, who.session, self.folder, self.chain]

    @classmethod
    def decode(cls, value: list[Json]) -> Publisher:
        """The inverse of :meth:`encode`."""
        *client, folder, chain = value
        return cls(Client(*client), folder, chain)


@dataclass(frozen=True, slots=True)
class View:
    """The layout of a cluster.

    Args:
        number: grows with every change.
        generation: how often the cluster went back to a snapshot.
        coordinator: the server that changes the view.
        term: number of the view in which it began to; orders of earlier terms are refused.
        servers: those that may keep shards, in the order in which they coordinate.
        backups: servers that each chain shall have beside its head.
        shards: the shards.
        epoch: numbers the maps.
        slots: by slot, its shard, in this epoch.
        trainers: the trainers.
        joined: trainers there ever were.
        made: shards there ever were.
        declared: by name of a table or dense group, what it is, as text.
        snapshot: the last whole snapshot, to which the cluster can go back.
        older: snapshots before it, the latest first, to go back to if it is damaged.
        settings: what everybody who connects must agree about.
        broken: the reason for which the cluster cannot go on; empty if it can.
        left: trainers that have left since the last snapshot.
        undone: by name of trainers that had left, pushes that the last roll-back undid.
        samplers: by name of a sampler whose samples are counted, what it is, as text.
        publisher: who publishes versions; None if nobody does.
    """

    number: int
    generation: int
    coordinator: Server
    term: int
    servers: tuple[Server, ...]
    backups: int
    shards: tuple[Shard, ...]
    epoch: int
    slots: tuple[int, ...]
    trainers: tuple[Trainer, ...] = ()
    joined: int = 0
    made: int = 0
    declared: Mapping[str, str] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    settings: Mapping[str, Json] = field(default_factory=dict)
    broken: str = ""
    left: tuple[Left, ...] = ()
    undone: Mapping[str, int] = field(default_factory=dict)
    older: tuple[Older, ...] = ()
    samplers: Mapping[str, str] = field(default_factory=dict)
    publisher: Publisher | None = None

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """All snapshots to which the cluster may go back, the latest first."""
        latest = () if self.snapshot is None else (self.snapshot,)
        return (*latest, *(each.snapshot for each in self.older))

    def shard(self, number: int) -> Shard | None:
        """The shard of that number, if there still is one."""
        return next((each for each in self.shards if each.number == number), None)

    @property
    def active(self) -> tuple[int, ...]:
        """The shards that keep anything in this epoch; pushes go to each of them."""
        return tuple(sorted(set(self.slots)))

    @property
    def is_together(self) -> bool:
        """True under BSP: the pushes of one step of all trainers are one update."""
        kind, *_ = self.settings.get("consistency", ("BSP",))
        return bool(kind == "BSP")

    def trainer(self, client: Client) -> Trainer | None:
        """The trainer that this client is; None if it has not joined, or no longer."""
        return next((each for each in self.trainers if each.client == client), None)

    # --- as text

    def encode(self) -> str:
        """Encodes it as JSON."""
        runs = runs_of(self.slots)
        return json.dumps(
            {
                "number": self.number,
                "generation": self.generation,
                "coordinator": _pair(self.coordinator),
                "term": self.term,
                "servers": [_pair(each) for each in self.servers],
                "backups": self.backups,
                "shards": [
                    [s.number, [_pair(each) for each in s.chain], s.version] for s in self.shards
                ],
                "epoch": self.epoch,
                "slots": runs,
                "trainers": [
                    [t.number, t.client.name, t.client.incarnation, t.client.session]
                    for t in self.trainers
                ],
                "joined": self.joined,
                "made": self.made,
                "declared": dict(self.declared),
                "snapshot": self.snapshot.encode() if self.snapshot else None,
                "settings": dict(self.settings),
                "broken": self.broken,
                "left": [each.encode() for each in self.left],
                "undone": dict(self.undone),
                "older": [
                    [each.snapshot.encode(), [left.encode() for left in each.left]]
                    for each in self.older
                ],
                "samplers": dict(self.samplers),
                "publisher": self.publisher.encode() if self.publisher else None,
            }
        )

    @classmethod
    def decode(cls, text: str) -> View:
        """The inverse of :meth:`encode`."""
        fields = json.loads(text)
        fields["coordinator"] = Server(*fields["coordinator"])
        fields["servers"] = tuple(Server(*each) for each in fields["servers"])
        fields["shards"] = tuple(
            Shard(number, tuple(Server(*each) for each in chain), version)
            for number, chain, version in fields["shards"]
        )
        fields["slots"] = tuple(shard for shard, count in fields["slots"] for _ in range(count))
        if fields["snapshot"] is not None:
            fields["snapshot"] = Snapshot.decode(fields["snapshot"])
        fields["trainers"] = tuple(
            Trainer(number, Client(*client)) for number, *client in fields["trainers"]
        )
        fields["left"] = tuple(Left(*each) for each in fields["left"])
        if fields["publisher"] is not None:
            fields["publisher"] = Publisher.decode(fields["publisher"])
        fields["older"] = tuple(
            Older(Snapshot.decode(snapshot), tuple(Left(*each) for each in left))
            for snapshot, left in fields["older"]
        )
        return cls(**fields)


def _pair(server: Server) -> list[object]:
    return [server.name, server.incarnation]


def runs_of(slots: Sequence[int]) -> list[list[int]]:
    """Shards with how many slots in a row each has, as values of JSON."""
    runs: list[list[int]] = []
    for shard in slots:
        if runs and runs[-1][0] == shard:
            runs[-1][1] += 1
        else:
            runs.append([shard, 1])
    return runs


# --- how views follow each other


def beginning_with(
    view: View, snapshot: Snapshot, declared: Mapping[str, str], samplers: Mapping[str, str]
) -> View:
    """A new cluster that begins as a snapshot of another one is, with trainers of its own.

    Args:
        view: the new cluster.
        snapshot: where it begins.
        declared: what is in the snapshot, by name.
        samplers: whose samples it counts, by name.
    """
    accounts = {name: each.unassigned() for name, each in snapshot.accounts.items()}
    begins = replace(snapshot, counts={}, accounts=accounts)
    return replace(view, snapshot=begins, declared=declared, samplers=samplers)


def wanting(view: View, living: Collection[Server]) -> tuple[int, Server] | None:
    """A shard that has too few backups, and the server that should be one."""
    load = Counter(server for shard in view.shards for server in shard.chain)
    for shard in view.shards:
        if not shard.chain or len(shard.chain) > view.backups:
            continue
        free = [each for each in view.servers if each in living and each not in shard.chain]
        if free:
            return shard.number, min(free, key=lambda each: (load[each], view.servers.index(each)))
    return None


def keepers_of(shards: Iterable[Shard]) -> set[Server]:
    """The servers that keep some of these shards."""
    return {each for shard in shards for each in shard.chain}


def keepers(view: View) -> set[Server]:
    """The servers that keep a share of the state."""
    return keepers_of(view.shards)


def servers_of(view: View) -> set[Server]:
    """Everybody whom a view names as a server."""
    return {*view.servers, *keepers(view)}


def names(view: View, server: Server) -> bool:
    """True if a server has any part in a view."""
    return server in {*servers_of(view), view.coordinator}


def is_outdated(view: View | None, shard: int, version: int) -> bool:
    """True if a view knows a later chain of a shard than that version, or that it is no more."""
    if view is None:
        return False
    latest = view.shard(shard)
    return latest.version > version if latest is not None else shard < view.made


def is_next_coordinator(view: View, me: Server, living: Collection[Server]) -> bool:
    """True if this server must take over, as the coordinator and all before it are gone."""
    if view.coordinator in living:
        return False
    candidates = [each for each in view.servers if each in living]
    return candidates[0] == me if candidates else True
