"""Which run code executes for, and that its slot keeps no more and no less than it says."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import pytest
import torch

from autograd_dist.engine_run import current_run, running
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
