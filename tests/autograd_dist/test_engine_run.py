"""Code knows for which run it executes, and its slot keeps no more and no less than it says."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import pytest
import torch
from torch.autograd import Variable

from autograd_dist.engine_run import BEACON, current_run, innermost_run, running
from autograd_dist.graph import edge_of
from autograd_dist.recv_node import Origin

TIMES = 1000


class Run:
    def received_gradients(self, origin: Origin, gradients: Sequence[torch.Tensor | None]) -> None:
        """Never called here."""


def test_runs_nest() -> None:
    outer, inner = Run(), Run()
    with running(outer):
        with running(inner):
            assert current_run() is inner
        assert current_run() is outer
    assert current_run() is None


def test_a_run_is_over_after_an_error() -> None:
    with pytest.raises(ValueError, match="no"), running(Run()):
        raise ValueError("no")
    assert current_run() is None


def test_other_threads_are_not_part_of_it() -> None:
    seen: list[object] = []
    with running(Run()):
        thread = threading.Thread(target=lambda: seen.append(current_run()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize("outer", [None, Run()])
def test_a_run_is_referred_to_as_often_as_before(outer: Run | None) -> None:
    run = Run()
    uses = sys.getrefcount(run), sys.getrefcount(outer)
    for _ in range(TIMES):
        if outer is None:
            with running(run):
                assert current_run() is run
        else:
            with running(outer), running(run):
                assert current_run() is run
    assert sys.getrefcount(run) == uses[0]
    assert abs(sys.getrefcount(outer) - uses[1]) < TIMES / 10  # others use None, too


@pytest.mark.parametrize("is_leaf", [False, True])
def test_a_run_that_begins_at_the_beacon_is_told_from_runs_inside_it_by_all_that_it_executes(
    is_leaf: bool,
) -> None:
    leaf = torch.ones(2, requires_grad=True)
    loss = leaf * 2
    root = leaf if is_leaf else loss
    run, runs = Run(), list[object]()
    beacon, gradient = BEACON

    def look(_: torch.Tensor) -> None:
        assert current_run() is run
        runs.append(innermost_run())
        if len(runs) == 1:
            torch.autograd.grad(loss, leaf, torch.ones(2), retain_graph=True)
            runs.append(innermost_run())

    root.register_hook(look)  # type: ignore[no-untyped-call]
    with running(run):
        Variable._execution_engine.run_backward(
            (beacon, edge_of(root)),
            (gradient, torch.ones(2)),
            False,
            False,
            (edge_of(leaf), beacon),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    assert runs == [run, None, run]
    assert innermost_run() is None
