"""Everything at once: workers that call, cancel, time out, train and leave. Nothing may stay.

The order of events is the threads' own, so a seed does not repeat a run; what it
draws is which calls are made. Errors must be ours, calls must end, and those who
stay must in the end hold nothing for calls, references or contexts.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch

import autograd_dist
import rpc
from chaos.errands import dawdle, held
from optim_dist import DistributedOptimizer
from rpc.agent import Agent, AgentOptions
from rpc.errors import RpcError
from rpc.testing import as_worker, local_group
from rpc.transports.base import Transport
from tests.waiting import eventually

NAMES = ("alice", "bob", "carol", "dave")
SECONDS = 30.0
DEADLINES = (rpc.constants.UNSET_RPC_TIMEOUT, 0.0005, 0.005, 1.0)

ran: Counter[object] = Counter()
ran_lock = threading.Lock()


@rpc.functions.idempotent
def once(key: object) -> None:
    with ran_lock:
        ran[key] += 1


async def spin_elsewhere(seconds: float, name: str) -> bool:
    await asyncio.sleep(seconds)
    return bool(await rpc.rpc_async(name, dawdle, (seconds,)))


@rpc.functions.async_execution
def pass_on(name: str, seconds: float) -> rpc.Future[bool]:
    return rpc.rpc_async(name, dawdle, (seconds,))


def nest(depth: int, seed: int) -> int:
    name = random.Random(seed).choice(NAMES)
    return int(rpc.rpc_sync(name, nest, (depth - 1, seed + 1))) if depth else seed


def grow(x: torch.Tensor, depth: int, seed: int) -> torch.Tensor:
    """A chain of calls that a backward pass has to find its way back through."""
    y = torch.tanh(x)
    if depth:
        name = random.Random(seed).choice(NAMES)
        y = y + rpc.rpc_sync(name, grow, (y * 1.5, depth - 1, seed + 1))
    return y


def grow_here(x: torch.Tensor, depth: int) -> torch.Tensor:
    y = torch.tanh(x)
    return y + grow_here(y * 1.5, depth - 1) if depth else y


def refuse() -> None:
    raise KeyError("not made")


class Model:
    def __init__(self) -> None:
        self.weight = torch.ones(3, requires_grad=True)

    def parameter(self) -> rpc.RRef[torch.Tensor]:
        return rpc.RRef(self.weight)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    async def scale_later(self, seconds: float) -> torch.Tensor:
        await asyncio.sleep(seconds)
        return self.weight.detach()


class Storm:
    """The work of one thread of a worker, and what it ran into.

    Args:
        agent: the worker.
        seed: of what it draws.
        work: how often it does something.
    """

    def __init__(self, agent: Agent, seed: int, work: int) -> None:
        self.agent = agent
        self.seed = seed
        self.draw = random.Random(seed)
        self.work = work
        self.wrong: list[BaseException] = []
        self.refused: Counter[str] = Counter()

    def run(self) -> None:
        deeds = (self.call, self.call, self.call, self.train, self.fail, self.retry)
        with as_worker(self.agent):
            for number in range(self.work):
                try:
                    self.draw.choice(deeds)(number)
                except RpcError as error:
                    self.refused[type(error).__name__] += 1
                except BaseException as error:
                    self.wrong.append(error)

    def call(self, number: int) -> None:
        draw, to, other = self.draw, self.draw.choice(NAMES), self.draw.choice(NAMES)
        timeout, seconds = draw.choice(DEADLINES), draw.random() * 0.005
        starts: tuple[Callable[[], rpc.Future[object]], ...] = (
            lambda: rpc.rpc_async(to, dawdle, (seconds,), timeout=timeout),
            lambda: rpc.rpc_async(to, spin_elsewhere, (seconds, other), timeout=timeout),
            lambda: rpc.rpc_async(to, pass_on, (other, seconds), timeout=timeout),
            lambda: rpc.rpc_async(to, nest, (draw.randrange(5), number), timeout=timeout),
            lambda: rpc.rpc_async(to, torch.neg, (torch.ones(20_000),), timeout=timeout),
            lambda: rpc.remote(to, Model, timeout=timeout).rpc_async().scale_later(seconds),
        )
        futures = [draw.choice(starts)() for _ in range(4)]
        for future in futures:
            if draw.random() < 0.2:
                future.cancel()
        for future in futures:
            future.wait()

    def train(self, number: int) -> None:
        model = rpc.remote(self.draw.choice(NAMES), Model)
        optimizer = DistributedOptimizer(torch.optim.SGD, [model.rpc_sync().parameter()], lr=0.1)
        x, depth = torch.rand(3, requires_grad=True), self.draw.randrange(4)
        with autograd_dist.context() as context_id:
            y = rpc.rpc_sync(self.draw.choice(NAMES), grow, (x, depth, number))
            autograd_dist.backward(context_id, [model.rpc_sync().scale(y).sum()])
            optimizer.step(context_id)
            found = autograd_dist.get_gradients(context_id)[x]
        here = x.detach().clone().requires_grad_()
        grow_here(here, depth).sum().backward()
        assert here.grad is not None
        torch.testing.assert_close(found, here.grad)
        expected = 1 - 0.1 * y.detach()
        torch.testing.assert_close(model.rpc_sync().scale(torch.ones(3)).detach(), expected)

    def fail(self, _: int) -> None:
        with pytest.raises(KeyError, match="not made"):
            rpc.remote(self.draw.choice(NAMES), refuse).to_here()

    def retry(self, number: int) -> None:
        key, again = (self.seed, number), rpc.Retry(3, backoff=0.001)
        rpc.rpc_sync(self.draw.choice(NAMES), once, (key,), timeout=0.2, retry=again)


def remains(agent: Agent) -> dict[str, object]:
    """All that a worker still holds."""
    gc.collect()
    return held(agent.debug_info())


@pytest.mark.slow
@pytest.mark.parametrize("leavers", [0, 1, 2])
def test_nothing_hangs_or_stays_behind(
    make_transport: Callable[[], Transport] | None, leavers: int
) -> None:
    ran.clear()
    options = AgentOptions(num_worker_threads=4, rpc_timeout=8.0)
    with local_group(*NAMES, options=options, transport=make_transport) as agents:
        storms = [Storm(agents[i // 2], 10 * leavers + i, work=40) for i in range(8)]
        threads = [threading.Thread(target=storm.run, daemon=True) for storm in storms]
        for thread in threads:
            thread.start()
        staying = agents[: len(agents) - leavers]
        for number, agent in enumerate(agents[len(staying) :], 1):
            assert eventually(
                lambda seen=agent, n=number: seen.callee.handled() > 40 * n,  # type: ignore[misc]
                SECONDS,
            )
            agent.shutdown(graceful=False)
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a call did not end"
        wrong = [error for storm in storms for error in storm.wrong]
        assert wrong == []
        assert set(ran.values()) <= {1}
        del storms, threads
        assert eventually(lambda: not any(map(remains, staying)), pause=0.05), list(
            map(remains, staying)
        )
