"""Where workers meet: a c10d ``Store``, found by a URL, and the records they leave there.

Decides whether the workers that came form a group, and says what is wrong if
they do not. Records are JSON, never pickled. After a group has met, the store
is not needed any more, except by workers that join a dynamic group later.

Keys, under ``tensorwire/``: ``incarnation/NAME`` counts a name's lives;
``round/RANK`` counts how often a rank has met others on this store, so that
init, shutdown, init works; ``ROUND/RANK`` is a rank's record.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed
from torch._C._distributed_c10d import Store

from rpc.errors import BringUpError, RpcError
from rpc.messages import PROTOCOL_VERSION

_PREFIX = "tensorwire"
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Record:
    """What a worker tells the others when it meets them.

    Args:
        name: the worker's.
        rank: its id.
        world_size: how many workers it expects.
        incarnation: which life of that name this is.
        backend: the backend it uses.
        address: where its transport can be reached; the transport's own format.
        protocol: the version of the messages it speaks.
    """

    name: str
    rank: int
    world_size: int
    incarnation: int
    backend: str
    address: bytes
    protocol: int = PROTOCOL_VERSION

    def encode(self) -> bytes:
        """As bytes for the store."""
        fields = asdict(self)
        fields["address"] = base64.b64encode(self.address).decode()
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """The inverse of :meth:`encode`.

        Raises:
            BringUpError: something else wrote to the store under our keys.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            fields["address"] = base64.b64decode(fields["address"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise BringUpError(f"the store holds something else than a record: {error}") from None

    def __str__(self) -> str:
        return f"{self.name!r} (rank {self.rank})"


def open_store(
    init_method: str, rank: int, world_size: int | None, timeout: float
) -> tuple[Store, int, int]:
    """Connects to the store that ``init_method`` names.

    Args:
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``.
        rank: this worker's, or -1 to take it from the URL or, with ``env://``, from ``RANK``.
        world_size: likewise; None to take it from the URL or ``WORLD_SIZE``.
        timeout: seconds to wait for the store's host.

    Returns:
        The store, the rank and the world size.

    Raises:
        ValueError: something that is needed is given nowhere.
        BringUpError: the store's host does not answer.
    """
    if world_size is None and init_method.startswith("env://"):
        size = os.environ.get("WORLD_SIZE")
        world_size = int(size) if size else None
    given = -1 if world_size is None else world_size
    try:
        meeting = torch.distributed.rendezvous(
            init_method, rank, given, timeout=timedelta(seconds=timeout)
        )
        store, found_rank, found_size = next(meeting)
    except (torch.distributed.DistNetworkError, torch.distributed.DistStoreError) as error:
        raise BringUpError(
            f"the store at init_method={init_method!r} did not answer in {timeout:g} s: {error}"
        ) from error
    return store, found_rank, found_size


def next_incarnation(store: Store, name: str) -> int:
    """The number of the life that ``name`` begins now, from 1."""
    life: int = store.add(f"{_PREFIX}/incarnation/{name}", 1)
    return life


def meet(store: Store, me: Record, timeout: float) -> list[Record]:
    """Publishes ``me`` and waits for the records of all other ranks of a static group.

    Args:
        store: where the workers meet.
        me: this worker; its ``world_size`` says how many records there will be.
        timeout: seconds.

    Returns:
        The records of all ranks, in the order of their ranks.

    Raises:
        BringUpError: ranks are missing at the deadline, or workers disagree about
            the world size, the backend or the protocol; names them.
        RuntimeError: two workers have the same name, or the same rank.
    """
    deadline = time.monotonic() + timeout
    try:
        meeting = store.add(f"{_PREFIX}/round/{me.rank}", 1)
        keys = [f"{_PREFIX}/{meeting}/{rank}" for rank in range(me.world_size)]
        _publish(store, keys[me.rank], me)
        _wait_for_all(store, me, keys, deadline, timeout)
        records = [Record.decode(data) for data in store.multi_get(keys)]
    except torch.distributed.DistError as error:
        raise BringUpError(f"the store was lost while workers were meeting: {error}") from error
    _check_agreement(records)
    return records


def _publish(store: Store, key: str, me: Record) -> None:
    """Writes this worker's record; fails if another process claims the same rank."""
    mine = me.encode()
    found: bytes = store.compare_set(key, "", mine.decode())
    if found != mine:
        other = Record.decode(found)
        raise RpcError(f"rank {me.rank} is not unique: {other} came first, then {me.name!r}")


def _wait_for_all(
    store: Store, me: Record, keys: list[str], deadline: float, timeout: float
) -> None:
    """Waits for the records, looking every second whether those that came agree."""
    while True:
        left = deadline - time.monotonic()
        try:
            store.wait(keys, timedelta(seconds=max(0.001, min(_LOOK_SECONDS, left))))
            return
        except torch.distributed.DistStoreError:
            came = [rank for rank, key in enumerate(keys) if store.check([key])]
        records = [Record.decode(store.get(keys[rank])) for rank in came]
        _check_agreement(records)
        if left <= 0:
            missing = sorted(set(range(me.world_size)) - set(came))
            raise BringUpError(
                f"{len(missing)} of {me.world_size} workers did not come within {timeout:g} s: "
                f"missing ranks {missing}; there are {', '.join(map(str, records))}"
            )


def _check_agreement(records: Iterable[Record]) -> None:
    """Raises if the workers that came cannot form a group."""
    by_name: dict[str, Record] = {}
    for record in records:
        other = by_name.setdefault(record.name, record)
        if other is not record:
            raise RpcError(
                f"RPC worker name {record.name} is not unique: "
                f"ranks {other.rank} and {record.rank} both have it"
            )
    for what in ("world_size", "backend", "protocol"):
        said = {getattr(record, what) for record in by_name.values()}
        if len(said) > 1:
            each = ", ".join(f"{r.name} says {getattr(r, what)}" for r in by_name.values())
            raise BringUpError(f"the workers disagree about {what}: {each}")
