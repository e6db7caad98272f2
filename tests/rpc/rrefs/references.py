"""Values, and functions that workers call, in tests of references."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch

import rpc
from rpc.agent import Agent
from rpc.rrefs.rref import RRef
from tests import waiting

SECONDS = 10.0


eventually = partial(waiting.eventually, meanwhile=gc.collect)


def owned(agent: Agent) -> int:
    return agent.references.counts().num_owner_rrefs


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    @rpc.functions.async_execution
    def add_later(self, to: str, amount: int) -> torch.futures.Future[int]:
        return rpc.rpc_async(to, int, (amount,)).then(lambda f: self.add(f.wait()))

    def fail(self) -> None:
        raise KeyError("nope")


def identity(value: Any) -> Any:
    return value


kept_references: dict[str, RRef[Any]] = {}


def keep(key: str, rref: RRef[Any]) -> None:
    kept_references[key] = rref


def kept(key: str) -> RRef[Any]:
    return kept_references[key]


def make_here(value: Any) -> RRef[Any]:
    return RRef(value)


def read(rref: RRef[Any]) -> Any:
    return rref.to_here()
