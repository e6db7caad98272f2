"""The pipeline learns what the whole model would, and goes on from a checkpoint."""

from __future__ import annotations

import argparse
import copy
import math
import shutil
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from rpc.testing import as_worker, local_group
from tests.tutorials.jobs import assert_pictures, number_after, run_tutorial
from tutorials.getting_started.language_model import Corpus
from tutorials.pipeline import train
from tutorials.pipeline.model import loss, transformer
from tutorials.pipeline.train import make_pipeline


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_two_workers_learn_what_the_whole_model_would(schedule: str) -> None:
    model = transformer(characters=11, length=6, width=8, blocks=4)
    text = torch.randint(0, 11, (4, 7))
    with local_group("main", "stage1", "stage2") as agents, as_worker(agents[0]):
        pipe = make_pipeline(model, ["stage1", "stage2"], schedule, 4, 6)
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        whole = copy.deepcopy(model)
        found = pipe.train_step(text[:, :-1], target=text[:, 1:])
        expected = loss(whole(text[:, :-1]), text[:, 1:])
        torch.testing.assert_close(found, expected)
        expected.backward()
        torch.optim.SGD(whole.parameters(), lr=0.1).step()
        optimizer.step()
        state = pipe.state_dict()
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(state[name], value)


def test_training_that_was_cut_short_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "SAVED_EVERY", 3)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # else it starts a thread that stays
    text = torch.randint(0, 11, (200,))
    corpus = Corpus(text, text)
    options = argparse.Namespace(
        steps=6, batch_size=4, length=6, seed=0, resume=False, kill=False, output=tmp_path
    )
    model = transformer(characters=11, length=6, width=8, blocks=2)
    with local_group("main", "stage1", "stage2") as agents, as_worker(agents[0]):
        whole, again = (make_pipeline(model, ["stage1", "stage2"], "1f1b", 2, 6) for _ in range(2))
        bits = train.train(whole, corpus, options)
        shutil.rmtree(tmp_path / "checkpoints" / "6")
        options.resume = True
        assert train.train(again, corpus, options) == bits
        assert len(bits) == 6


@pytest.mark.slow
@pytest.mark.xdist_group("pipeline")
@pytest.mark.usefixtures("process_server")
def test_it_learns_writes_and_draws_every_schedule_though_a_stage_is_killed(
    tmp_path: Path,
) -> None:
    small = ["--width", "16", "--batch-size", "8", "--micro-batches", "4", "--rounds", "1"]
    small += ["--steps", "40", "--written", "5", "--kill"]
    roles = "main:1 stage:2,service,max_restarts=1"
    output = run_tutorial(tmp_path, "pipeline.train", roles, *small)
    assert "stage:1 is killed" in output
    assert number_after("step 40:", output) < math.log2(97)
    assert number_after("zb-h1, 4 micro-batches:", output) > 0
    assert "ERROR" not in output
    assert_pictures(tmp_path, "loss.png", "schedules.png")


@pytest.mark.slow
@pytest.mark.xdist_group("pipeline")
@pytest.mark.usefixtures("process_server")
def test_a_hugging_face_model_in_three_stages_learns_though_one_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    small = ["--steps", "12", "--width", "32", "--batch-size", "8", "--length", "16"]
    roles = "main:1 stage:3,service,max_restarts=1"
    output = run_tutorial(tmp_path, "pipeline.hugging_face", roles, *small)
    assert "stage:1 is killed" in output
    assert number_after("step 12:", output) < number_after("step 1:", output)
    assert_pictures(tmp_path, "hugging_face.png")
