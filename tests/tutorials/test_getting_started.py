"""The first two tutorials learn something, run small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tutorials.jobs import assert_pictures, number_after, run_tutorial

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("getting_started"),
    pytest.mark.usefixtures("process_server"),
]

_MEAN_RETURN_OF_RANDOM_PLAY = 22.0


def test_the_agent_balances_the_pole_twice_as_long_as_by_chance(tmp_path: Path) -> None:
    output = run_tutorial(
        tmp_path,
        "getting_started.cartpole",
        "agent:1 observer:2,service",
        "--rounds",
        "12",
        "--steps",
        "256",
    )
    assert "1 agent, 2 observers" in output
    assert number_after("games:", output) > 2 * _MEAN_RETURN_OF_RANDOM_PLAY
    assert_pictures(tmp_path, "cartpole.png")


def test_the_language_model_predicts_better_than_frequencies_do(tmp_path: Path) -> None:
    arguments = ["trainer:1 server:2,service", "--steps", "60", "--width", "64"]
    output = run_tutorial(tmp_path, "getting_started.language_model", *arguments)
    assert "embedding on server:0, decoder on server:1" in output
    assert number_after("held-out text:", output) < number_after("per character;", output) - 0.3
    assert re.search(r"--- written by the model\n    def [^\0]{500,}\n---", output)
    assert_pictures(tmp_path, "language_model.png")
