"""Functions that workers call in tests of agents."""

from __future__ import annotations

import asyncio
import threading

import rpc


def whoami() -> str:
    return rpc.get_worker_info().name


async def slow_square(x: int) -> int:
    await asyncio.sleep(0)
    return x * x


_kept: dict[int, threading.Event] = {}


def keep_event(event: threading.Event) -> threading.Event:
    _kept[id(event)] = event
    return event


def wait_for_event(key: int) -> bool:
    return _kept[key].wait(20)
