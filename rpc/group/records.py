"""The record that a worker leaves when it joins, and what all of them must agree about.

Records are JSON, never pickled. Static and dynamic groups keep them in different places of
the group's store: see ``rendezvous`` and ``member_list``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rpc.errors import BringUpError
from rpc.group.signed_store import SignedStore
from rpc.transports.base import Peer
from rpc.wire.messages import PROTOCOL_VERSION
from rpc.worker_info import WorkerInfo

PREFIX: Final = "tensorwire"
"""Begins the names of all keys of groups in a store, beside which others may use it."""
STATIC, DYNAMIC = b"static", b"dynamic"
LIVENESS = "liveness"
"""The name in a record's extras of the way to watch the worker's process."""
NONCE = "nonce"
"""The name in a record's extras of a random value, which no earlier record has."""

_MUST_AGREE = ("world_size", "backend", "protocol")
_TYPES = {"name": str, "rank": int, "incarnation": int, "extras": dict, "host": str, "pid": int}


@dataclass(frozen=True, slots=True)
class Record:
    """The facts that a worker tells the others when it joins.

    Args:
        name: the worker's.
        rank: its id.
        world_size: how many workers it expects; None in a dynamic group.
        incarnation: which life of that name this is; see :func:`next_incarnation`.
        backend: the backend it uses.
        address: where its transport can be reached; the transport's own format.
        protocol: the version of the messages it speaks.
        host: the name of the host that it runs on, for people.
        pid: its process id there.
        extras: anything else that JSON can hold.
    """

    name: str
    rank: int
    world_size: int | None
    incarnation: int
    backend: str
    address: bytes
    protocol: int = PROTOCOL_VERSION
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    extras: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Encodes it for the store."""
        fields = asdict(self)
        fields["address"] = base64.b64encode(self.address).decode()
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """The inverse of :meth:`encode`.

        Raises:
            BringUpError: this is no record of this version.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            fields["address"] = base64.b64decode(fields["address"])
            record = cls(**fields)
            record._check_types()
            return record
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise BringUpError(
                f"the store holds something else than a record of this version: {error}"
            ) from error

    def digest(self) -> str:
        """Names this very record: that of another life, or of another group, has another."""
        return hashlib.sha256(self.encode()).hexdigest()[:32]

    def peer(self) -> Peer:
        """The facts that the others need to know of the worker that left this record."""
        info = WorkerInfo(self.name, self.rank)
        return Peer(info, self.incarnation, self.address, str(self.extras.get(LIVENESS, "")))

    def _check_types(self) -> None:
        for what, kind in _TYPES.items():
            value = getattr(self, what)
            if not isinstance(value, kind):
                raise TypeError(f"{what}={value!r} is a {type(value).__name__}")

    def __str__(self) -> str:
        return f"{self.name!r} (rank {self.rank}, process {self.pid} on {self.host})"


def disagreements(me: Record, first: Record) -> list[str]:
    """Lists, in words, where ``me`` contradicts the group's first member."""
    return [
        f"the workers disagree about {what}: "
        f"{first.name} says {getattr(first, what)}, {me.name} says {getattr(me, what)}"
        for what in _MUST_AGREE
        if getattr(me, what) != getattr(first, what)
    ]


def set_mode(store: SignedStore, mode: bytes) -> None:
    """Says what kind of group meets at a store: ``STATIC`` or ``DYNAMIC``.

    Raises:
        BringUpError: the other kind does.
    """
    if store.compare_and_set("mode", None, mode) != mode:
        raise BringUpError(
            "RPC group mixes statically and dynamically initialized members which is not "
            "supported. Give every worker a world_size, or none."
        )


def next_incarnation(store: SignedStore, name: str, rank: int) -> int:
    """The number of the life that ``name`` begins now: higher than any of this name or rank.

    Raises:
        BringUpError: the store was lost.
    """
    of_name, of_rank = f"incarnation/{name}", f"incarnation-of-rank/{rank}"
    life = store.add(of_name)
    count = store.add(of_rank)
    while life < count:  # to a number that no other life of the name was given
        life = store.add(of_name, count - life)
    if count < life:
        store.add(of_rank, life - count)
    return life
