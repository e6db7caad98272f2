"""Records of workers, and stores at which they meet in this process."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from rpc.group.records import PREFIX, Record, next_incarnation
from rpc.group.signed_store import SignedStore

SOON = 5.0
"""A deadline that only a failing test reaches."""
SECONDS = timedelta(seconds=SOON)


def record(rank: int, world_size: int | None = 2, **fields: Any) -> Record:
    values = {
        "name": f"worker{rank}",
        "incarnation": 1,
        "backend": "TENSORPIPE",
        "address": b"\x00\xff:%d" % rank,
    }
    return Record(rank=rank, world_size=world_size, **(values | fields))


def signed(store: Store, key: bytes = b"") -> SignedStore:
    """The part of a store that is for groups, as workers with a key see it."""
    return SignedStore(store, key, PREFIX)


def begun(store: Store, rank: int, world_size: int | None = 2, **fields: Any) -> Record:
    """The record of a worker that begins its next life now."""
    name = fields.get("name", f"worker{rank}")
    incarnation = next_incarnation(signed(store), name, rank)
    return record(rank, world_size, **fields, incarnation=incarnation)


class CountingStore(Store):
    """Counts the requests that one worker makes, of the kinds it needs."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.requests = 0
        self._store = store

    def _counted(self, name: str, *arguments: Any) -> Any:
        self.requests += 1
        return getattr(self._store, name)(*arguments)

    def set(self, *arguments: Any) -> Any:
        return self._counted("set", *arguments)

    def wait(self, *arguments: Any) -> Any:
        return self._counted("wait", *arguments)

    def compare_set(self, *arguments: Any) -> Any:
        return self._counted("compare_set", *arguments)

    def delete_key(self, *arguments: Any) -> Any:
        return self._counted("delete_key", *arguments)


class TurnsStore(CountingStore):
    """Makes a request when it is its turn."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.turn = threading.Semaphore(0)
        self.made = threading.Semaphore(0)
        self.ended = False

    def _counted(self, name: str, *arguments: Any) -> Any:
        self.turn.acquire()
        try:
            return super()._counted(name, *arguments)
        finally:
            self.made.release()

    def wait(self, *arguments: Any) -> Any:
        self._needs_no_more_turns()
        return self._store.wait(*arguments)

    def take_turns(self, task: Callable[[SignedStore], Any]) -> Any:
        """Does a task in turns; returns its outcome."""
        try:
            return outcome(lambda: task(signed(self)))
        finally:
            self._needs_no_more_turns()

    def _needs_no_more_turns(self) -> None:
        self.ended = True
        self.turn.release(1000)
        self.made.release()


def in_turns(store: Store, tasks: list[Callable[[SignedStore], Any]], seed: int) -> list[Any]:
    """The outcome of each, where their requests come in an order drawn from a seed."""
    draw = random.Random(seed)
    stores = [TurnsStore(store) for _ in tasks]
    with ThreadPoolExecutor(len(tasks)) as pool:
        calls = [
            pool.submit(each.take_turns, task) for each, task in zip(stores, tasks, strict=True)
        ]
        while active := [each for each in stores if not each.ended]:
            chosen = draw.choice(active)
            chosen.turn.release()
            assert chosen.made.acquire(timeout=SOON)
        return [call.result() for call in calls]


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error
