"""Calls of every kind that a trainer makes to everybody beside training, whoever comes and goes.

They may fail, with errors of ours. They may not hang, run twice, answer with something
else than was sent, or leave anything behind.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch

import rpc
from rpc.errors import NotInitializedError, RpcError

_SLACK_SECONDS = 10.0
_CALL_SECONDS = 8.0
_REMEMBERED = 5_000
_LARGE = 65_536  # elements; goes through shared memory where there is some


class Odd(Exception):
    """Something that must not happen."""


class Tally:
    """The last calls that ran in this life of the worker, to see that none ran twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, None] = {}
        self._twice = 0

    def note(self, key: str) -> None:
        """One runs."""
        with self._lock:
            self._twice += key in self._seen
            self._seen[key] = None
            if len(self._seen) > _REMEMBERED:
                del self._seen[next(iter(self._seen))]

    def begin(self) -> None:
        """Another life begins: a call that is tried again may come to it, too."""
        with self._lock:
            self._seen.clear()

    def twice(self) -> int:
        """Returns how many calls ran more than once."""
        with self._lock:
            return self._twice


tally = Tally()


class Account:
    """An object that others hold."""

    def __init__(self) -> None:
        self.balance = 0

    def add(self, amount: int) -> int:
        self.balance += amount
        return self.balance


def note(key: str) -> str:
    """Runs at most once for each key."""
    tally.note(key)
    return key


@rpc.functions.idempotent
def note_once(key: str) -> str:
    """Is sent again when its connection is lost, and still runs at most once in one worker."""
    tally.note(key)
    return key


def add_through(account: rpc.RRef[Account], amount: int) -> int:
    """At a third worker."""
    return int(account.rpc_sync(timeout=_CALL_SECONDS).add(amount))


def dawdle(seconds: float) -> bool:
    """Works until it is over or nobody wants it any more."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not rpc.cancelled():
        torch.ones(100).sum()
    return rpc.cancelled()


async def dawdle_elsewhere(seconds: float, name: str) -> bool:
    """At a third worker."""
    await asyncio.sleep(seconds)
    return bool(await rpc.rpc_async(name, dawdle, (seconds,), timeout=_CALL_SECONDS))


class Errands:
    """Does them one after the other until told to stop.

    Args:
        name: this worker.
        report: is told what must not have happened.
        failed: is told of each that failed, as may happen.
        seed: of the choice among them.
    """

    def __init__(
        self,
        name: str,
        report: Callable[[str], None],
        failed: Callable[[RpcError], None],
        seed: int,
    ) -> None:
        self._name = name
        self._report = report
        self._failed = failed
        self._draw = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="errands", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Waits for the one that is being done."""
        self._stop.set()
        self._thread.join(_CALL_SECONDS + _SLACK_SECONDS)
        if self._thread.is_alive():
            self._report("an errand did not end")

    def _run(self) -> None:
        deeds = (self._call, self._share, self._echo, self._give_up, self._insist, self._fan_out)
        while not self._stop.is_set():
            deed = self._draw.choice(deeds)
            start = time.monotonic()
            try:
                deed()
            except NotInitializedError:
                return
            except RpcError as error:
                self._failed(error)
                self._stop.wait(0.02)
            except Exception as error:
                self._report(f"{deed.__name__}: {type(error).__name__}: {error}")
            took = time.monotonic() - start
            if took > _CALL_SECONDS + _SLACK_SECONDS:
                self._report(f"{deed.__name__} took {took:.1f} s")
            self._stop.wait(0.005)

    def _anybody(self) -> str:
        names = [worker.name for worker in rpc.workers() if worker.name != self._name]
        return self._draw.choice(names or [self._name])

    def _call(self) -> None:
        key = uuid.uuid4().hex
        if rpc.rpc_sync(self._anybody(), note, (key,), timeout=_CALL_SECONDS) != key:
            raise Odd("the answer is another call's")

    def _insist(self) -> None:
        key = uuid.uuid4().hex
        again = rpc.Retry(3, backoff=0.01)
        rpc.rpc_sync(self._anybody(), note_once, (key,), timeout=_CALL_SECONDS, retry=again)

    def _share(self) -> None:
        account = rpc.remote(self._anybody(), Account, timeout=_CALL_SECONDS)
        there = rpc.rpc_sync(self._anybody(), add_through, (account, 3), timeout=_CALL_SECONDS)
        if there != 3 or account.to_here(timeout=_CALL_SECONDS).balance != 3:
            raise Odd("an object lost what was done to it")

    def _echo(self) -> None:
        sent = torch.randint(0, 1 << 30, (_LARGE,))
        found = rpc.rpc_sync(self._anybody(), torch.neg, (sent,), timeout=_CALL_SECONDS)
        if not torch.equal(found, -sent):
            raise Odd("a tensor arrived as another")

    def _give_up(self) -> None:
        waiting = rpc.rpc_async(self._anybody(), dawdle, (0.5,), timeout=0.01)
        future = rpc.rpc_async(
            self._anybody(), dawdle_elsewhere, (0.02, self._anybody()), timeout=_CALL_SECONDS
        )
        future.cancel()
        for unwanted in (future, waiting):
            try:
                unwanted.wait()
            except RpcError:
                continue

    def _fan_out(self) -> None:
        keys = [uuid.uuid4().hex for _ in range(20)]
        futures = [
            rpc.rpc_async(self._anybody(), note, (key,), timeout=_CALL_SECONDS) for key in keys
        ]
        errors: list[RpcError] = []
        for key, future in zip(keys, futures, strict=True):
            try:
                if future.wait() != key:
                    raise Odd("the answer is another call's")
            except RpcError as error:
                errors.append(error)
        if errors:
            raise errors[0]


def held(info: Mapping[str, Any]) -> dict[str, object]:
    """Returns what a worker holds for calls, references or contexts, by its ``debug_info``."""
    counts = {name: value for name, value in info.items() if name.startswith("num_")}
    counts |= {name: info[name] for name in ("calls", "retrying", "serving")}
    return {name: value for name, value in counts.items() if value}
