"""Whole clusters in one process: servers and trainers are workers, trainers have threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rpc.agent import Agent
from rpc.testing import as_worker, local_group

T = TypeVar("T")

_SECONDS = 100


def server_names(count: int) -> list[str]:
    return [f"ps{number}" for number in range(count)]


def run(agents: Sequence[Agent], functions: Sequence[Callable[..., T]], *args: Any) -> list[T]:
    """Runs a function as each of these workers, on threads, and returns what they returned."""
    results: list[Any] = [None] * len(functions)
    raised: list[BaseException] = []

    def do(place: int) -> None:
        try:
            with as_worker(agents[place]):
                results[place] = functions[place](*args)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=do, args=(place,)) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
    if raised:
        raise raised[0]
    assert not any(thread.is_alive() for thread in threads), "a trainer hangs"
    return results


def train(
    trainers: Sequence[Callable[..., T]], *args: Any, servers: int = 1, spare: int = 0
) -> list[T]:
    """Runs each function as a trainer of a group of its own, with so many servers."""
    names = server_names(servers + spare)
    with local_group(*names, *(f"trainer{n}" for n in range(len(trainers)))) as agents:
        return run(agents[len(names) :], trainers, *args)
