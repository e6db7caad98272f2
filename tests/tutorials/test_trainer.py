"""The fine-tuning that a Trainer does beside servers, in one process."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

pytest.importorskip("transformers")

from tests.tensorwire.integrations.tiny import SERVERS, beside_servers, losses
from tutorials.trainer import fine_tune


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_fine_tuning_goes_on_from_its_checkpoint_with_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread that outlives the bar
    options = argparse.Namespace(steps=5, seed=0, output=tmp_path, kill=False)

    def go() -> Any:
        torch.manual_seed(0)
        return fine_tune.fine_tune(options, SERVERS)

    whole = beside_servers(go)
    assert losses(whole)[-1] < losses(whole)[0]
    shutil.rmtree(tmp_path / "tuned" / "checkpoint-5")  # as if it had been killed after step 4
    resumed = beside_servers(go)
    assert losses(resumed) == losses(whole)
    assert "training resumes from" in capsys.readouterr().out
