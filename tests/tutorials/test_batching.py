"""Batched and single answers agree, and the comparisons run to their end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.tutorials.jobs import assert_pictures, number_after, run_tutorial
from tutorials.batching.inference import Agent
from tutorials.batching.updates import ParameterServer


def test_a_batch_is_answered_when_every_game_has_asked_and_as_each_alone() -> None:
    torch.manual_seed(0)
    agent = Agent(width=16, games=3)
    states = [torch.randn(4) for _ in range(3)]
    answers = [agent.choose_in_batch(state) for state in states[:2]]
    assert not any(answer.done() for answer in answers)
    answers.append(agent.choose_in_batch(states[2]))
    assert [answer.wait() for answer in answers] == [agent.choose(state) for state in states]


def test_a_batched_update_is_one_step_with_the_mean_gradient() -> None:
    batching, alone = (ParameterServer(trainers=2, width=8, seed=0) for _ in range(2))
    gradients = [torch.randn_like(batching.weights()) for _ in range(2)]
    first = batching.update_in_batch(gradients[0])
    assert not first.done()
    second = batching.update_in_batch(gradients[1])
    expected = alone.update((gradients[0] + gradients[1]) / 2)
    torch.testing.assert_close(first.wait(), expected)
    torch.testing.assert_close(second.wait(), expected)
    assert batching.steps == 1


@pytest.mark.slow
@pytest.mark.xdist_group("batching")
@pytest.mark.usefixtures("process_server")
def test_both_parameter_servers_learn_to_read_digits(tmp_path: Path) -> None:
    arguments = ["server:1 trainer:2,service", "--width", "64", "--steps", "60", "--rounds", "2"]
    output = run_tutorial(tmp_path, "batching.updates", *arguments, "--batch-size", "32")
    accuracies = re.findall(r"(\d+) steps, final test accuracy ([\d.]+)%", output)
    assert [int(steps) for steps, _ in accuracies] == [240, 120]
    assert all(float(accuracy) > 60.0 for _, accuracy in accuracies)
    assert_pictures(tmp_path, "updates.png")


@pytest.mark.slow
@pytest.mark.xdist_group("batching")
@pytest.mark.usefixtures("process_server")
def test_both_ways_of_asking_balance_the_pole(tmp_path: Path) -> None:
    arguments = ["agent:1 observer:2,service", "--width", "64", "--games", "4", "--steps", "250"]
    output = run_tutorial(tmp_path, "batching.inference", *arguments, "--rounds", "1")
    ways = re.findall(r"(choose\w*): \d+ decisions a second", output)
    assert ways == ["choose", "choose_in_batch"]
    assert ", 0 games" not in output
    assert number_after("batching makes it", output) > 0
    assert_pictures(tmp_path, "inference.png")
