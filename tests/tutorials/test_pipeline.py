"""The pipeline computes what the network as a whole does, and learns, in any number of stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import rpc
from rpc.testing import as_worker, local_group
from tests.torch_features import needs_profiles_of_all_threads
from tests.tutorials.jobs import assert_pictures, number_after, run_tutorial
from tutorials.pipeline.train import Pipeline, Stage, layers


def _layers_of(stage: rpc.RRef[Stage]) -> nn.Module:
    return stage.local_value().layers


def test_three_stages_give_what_the_whole_network_gives_however_a_batch_is_cut() -> None:
    images = torch.rand(6, 1, 8, 8)
    with local_group("main", "stage1", "stage2", "stage3") as group, as_worker(group[0]):
        pipeline = Pipeline(["stage1", "stage2", "stage3"], width=8, seed=3)
        parts = [rpc.rpc_sync(each.owner(), _layers_of, (each,)) for each in pipeline.stages]
        whole = nn.Sequential(*parts)
        assert len([*whole.parameters()]) == len([*nn.Sequential(*layers(8)).parameters()])
        for micro_batches in (1, 2, 6):
            with torch.no_grad():
                found = pipeline.forward(images, micro_batches)
            torch.testing.assert_close(found, whole(images))


@pytest.mark.slow
@pytest.mark.xdist_group("pipeline")
@needs_profiles_of_all_threads
def test_two_stages_learn_and_are_less_idle_with_micro_batches(tmp_path: Path) -> None:
    arguments = ["--epochs", "2", "--width", "16", "--batch-size", "64", "--rounds", "2"]
    output = run_tutorial(tmp_path, "pipeline.train", *arguments)
    assert number_after("final test accuracy:", output) > 20.0
    assert number_after("16 micro-batches:", output) > 0
    assert number_after("8 micro-batches: stages idle", output) < 100.0
    assert "ERROR" not in output
    assert_pictures(tmp_path, "bubble.png")
