"""A step of a collection calls few Python functions for each table, at trainer and server."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import Tensor, nn

from rpc.testing import as_worker, local_group
from tensorwire import parameter_server as ps

STEPS, WARM, BATCH = 6, 6, 32
MOST_A_TABLE = 15


class Calls:
    """Counts the Python functions that this thread calls, and those that others call."""

    def __init__(self) -> None:
        self.here = self.elsewhere = 0
        self._counts = False
        self._me = threading.get_ident()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self._counts:
            if threading.get_ident() == self._me:
                self.here += 1
            else:
                self.elsewhere += 1

    @contextmanager
    def on_all_threads(self) -> Iterator[None]:
        before, others = sys.getprofile(), threading.getprofile()
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(others)

    def begin(self) -> None:
        self._counts = True

    def end(self) -> tuple[float, float]:
        """Calls a step, at the trainer and at the server."""
        self._counts = False
        return self.here / STEPS, self.elsewhere / STEPS


def calls_of(tables: int) -> tuple[float, float]:
    calls = Calls()
    names = [f"f{number}" for number in range(tables)]
    r = torch.Generator().manual_seed(1)
    kept: list[dict[str, Tensor]] = [
        {name: torch.randint(0, 50, (BATCH, 1), generator=r) for name in names} for _ in range(2)
    ]
    with calls.on_all_threads(), local_group("ps0", "trainer0") as agents, as_worker(agents[1]):
        cluster = ps.connect(["ps0"])
        rule, init = ps.RowwiseAdagrad(lr=0.1), ps.Uniform(0.1)
        bags = ps.EmbeddingBagCollection({n: cluster.table(n, 8, rule, init=init) for n in names})
        model = nn.ModuleList([bags, nn.Linear(8 * tables, 1)])
        optimizer = ps.Optimizer(cluster, model, dense=torch.optim.SGD, lr=0.1)
        given = [kept[step % 2] for step in range(WARM + STEPS + 3)]
        for step, batch in enumerate(ps.prefetch(given, model, ids=lambda batch: batch)):
            if step == WARM:
                calls.begin()
            elif step == WARM + STEPS:
                found = calls.end()
            optimizer.zero_grad()
            model[1](bags(batch).values()).square().mean().backward()
            optimizer.step()
        cluster.finish()
    return found


def test_python_calls_of_a_step_grow_little_with_the_number_of_tables() -> None:
    few, many = calls_of(4), calls_of(24)
    trainer, server = ((b - a) / 20 for a, b in zip(few, many, strict=True))
    assert 0 < trainer <= MOST_A_TABLE
    assert server <= MOST_A_TABLE
