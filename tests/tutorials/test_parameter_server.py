"""The main job as a person runs it, in real processes under rpcrun; word vectors in this one."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from tensorwire import parameter_server as ps
from tests.tensorwire.parameter_server.clusters import server_names
from tests.tensorwire.parameter_server.clusters import train as train_here
from tests.tutorials.jobs import assert_pictures, number_after, run_tutorial
from tutorials.parameter_server import words
from tutorials.parameter_server.clicks import World, area_under_curve
from tutorials.parameter_server.train import parser, train

_SMALL = ("--steps", "20", "--batch-size", "256", "--test-size", "2000")


def test_the_area_under_the_curve_counts_pairs_in_order() -> None:
    score, clicked = torch.tensor([0.1, 0.4, 0.3, 0.9]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert area_under_curve(score, clicked) == 3 / 4


def test_a_batch_depends_on_its_number_only() -> None:
    one, other = (World(seed=3).batch(number, 50) for number in (7, 7))
    assert torch.equal(one.clicked, other.clicked)
    assert torch.equal(one.ids["user"], other.ids["user"])
    assert not torch.equal(one.numbers, World(seed=3).batch(8, 50).numbers)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("process_server")
@pytest.mark.xdist_group("main_job")
@pytest.mark.skipif(sys.platform != "linux", reason="a server is killed by its process id")
def test_the_main_job_in_files_ends_with_the_bits_of_a_quiet_run_although_a_server_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread that outlives the bar

    def quiet() -> float:
        history = train(parser().parse_args(_SMALL), ps.connect(server_names(1)), 0, 1)
        return history.areas[20]

    (wanted,) = train_here([quiet], servers=1)
    monkeypatch.setenv("RPC_BACKEND", "TENSORWIRE")
    servers = "ps:2,service=tensorwire.parameter_server,max_restarts=2"
    how = (*_SMALL, "--files", "7", "--kill")
    output = run_tutorial(tmp_path, "parameter_server.train", f"{servers} trainer:1", *how)
    assert "killing ps:1" in output
    assert "each of the 20 pages was trained exactly once" in output
    assert number_after("final AUC:", output) == pytest.approx(wanted, abs=1e-6)
    assert wanted > 0.55
    assert_pictures(tmp_path, "clicks.png")


@pytest.mark.slow
def test_word_vectors_are_trained_by_trainers_that_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    options = argparse.Namespace(steps=60, batch_size=2048, seed=0)

    def trainer(number: int) -> dict[int, float]:
        cluster = ps.connect(server_names(2), consistency=ps.Async(), trainers=2)
        model = words.Vectors(cluster, options.seed)
        areas = words.train(options, model, ps.Optimizer(cluster, model), number, 2)
        cluster.finish()
        return areas

    first, second = train_here([partial(trainer, 0), partial(trainer, 1)], servers=2)
    assert first[60] > 0.52
    assert not second  # only the first one measures
