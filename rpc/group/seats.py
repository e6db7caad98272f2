"""Keeps a worker of rpcrun out of its group once its seat was given to another process.

An agent that was taken for dead may have just started a worker, which comes late: by then
another agent runs a later life of the same seat. The late one must not take its place, so
agents note in the group's store which life of a seat they start, and ``init_rpc`` looks.
"""

from __future__ import annotations

from torch._C._distributed_c10d import Store

from rpc.errors import BringUpError
from rpc.group.key_values import KeyValueStore
from rpc.group.records import PREFIX
from rpc.group.signed_store import SignedStore

_NAMESPACE = "rpcrun"
"""The prefix under which ``tensorwire.launch`` notes it, as ``life/NAME``."""


def refuse_former_life(store: Store, group_key: bytes, name: str, life: int) -> None:
    """Raises if a later life of this worker's seat was begun; else does nothing.

    Args:
        store: where the group meets.
        group_key: the group's key, as the launcher gave it.
        name: of the worker.
        life: which start of it this process is.

    Raises:
        BringUpError: a later life of the seat was begun.
    """
    lives = KeyValueStore(SignedStore(store, group_key, PREFIX), _NAMESPACE)
    latest = int(lives.get(f"life/{name}") or b"0")
    if latest > life:
        raise BringUpError(
            f"the seat {name!r} was given to another process, its start number {latest}; this is "
            f"number {life}, whose agent was taken for dead"
        )
