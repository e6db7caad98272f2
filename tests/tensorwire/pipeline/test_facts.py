"""A watched worker tells how busy its stages are, how far they are and whom they wait for."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from rpc.extend import worker
from rpc.testing import as_worker
from tensorwire.pipeline import Action, Pipeline
from tensorwire.pipeline.facts import StepTimes
from tensorwire.pipeline.plan import Span
from tests.tensorwire.pipeline.reference import group, place
from tests.waiting import until

_gate = threading.Event()


class Gated(nn.Linear):
    """A layer that lets nothing through while the gate is closed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert _gate.wait(60)
        return super().forward(input)


def facts(agent: Any) -> dict[str, Any]:
    with as_worker(agent):
        return worker().progress.facts()["pipeline"]


def steps(agent: Any) -> int:
    with as_worker(agent):
        return worker().progress.report().steps


def test_the_busy_share_is_of_all_time_and_the_bubble_of_the_step() -> None:
    actions = [Action.parse("0F0"), Action.parse("0B0")]
    begun = (0, 4_000_000)
    spans = [Span(a, n, n + 1_000_000, n + 3_000_000) for a, n in zip(actions, begun, strict=True)]
    assert StepTimes(0, 0, 8_000_000, spans).facts() == {
        "step seconds": 0.008,
        "busy": 0.5,
        "bubble": 0.5,
    }
    assert StepTimes(0, 4_000_000, 9_000_000, spans).facts()["bubble"] == 0.2


def test_steps_count_and_a_stage_that_waits_says_for_whom() -> None:
    _gate.set()
    with group("a", "b") as (driver, first, second):
        stages = place([Gated(2, 2), nn.Linear(2, 1)], ["a", "b"])
        pipe = Pipeline(stages, "1f1b", microbatches=2, loss=nn.MSELoss())
        x, y = torch.ones(4, 2), torch.ones(4, 1)
        pipe.train_step(x, target=y)
        for agent, stage in ((first, 0), (second, 1)):
            told = facts(agent)
            assert (told["stages"], told["steps"], told["waits_for"]) == ([stage], 1, [])
            assert 0 < told["busy"] <= 1
            assert told["bubble"] < 1
        assert [steps(agent) for agent in (driver, first, second)] == [1, 1, 1]
        pipe.eval_step(x)
        assert steps(first) == 1

        _gate.clear()
        step = threading.Thread(target=lambda: _train(driver, pipe, x, y))
        step.start()
        try:
            until(lambda: facts(second)["waits_for"] == ["a"])
            assert facts(first)["waits_for"] == []
        finally:
            _gate.set()
            step.join()
        assert facts(second)["steps"] == 2
        pipe.close()


def _train(driver: Any, pipe: Pipeline, x: torch.Tensor, y: torch.Tensor) -> None:
    with as_worker(driver):
        pipe.train_step(x, target=y)
