"""The fine-tuning that a Trainer does beside servers, in one process."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

pytest.importorskip("transformers")

from tests.tensorwire.integrations.tiny import SERVERS, beside_servers, losses
from tests.tutorials.jobs import PNG_SIGNATURE
from tutorials.trainer import fine_tune


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_fine_tuning_goes_on_from_its_checkpoint_and_draws_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread that outlives the bar
    options = argparse.Namespace(steps=20, seed=0, output=tmp_path, kill=False)

    def go() -> Any:
        torch.manual_seed(0)
        return fine_tune.fine_tune(options, SERVERS)

    whole = beside_servers(go)
    assert losses(whole)[-1] < losses(whole)[0]
    shutil.rmtree(tmp_path / "tuned" / "checkpoint-20")  # as if it had been killed after step 18
    resumed = beside_servers(go)
    assert losses(resumed) == losses(whole)
    assert "training resumes from" in capsys.readouterr().out
    assert fine_tune.write(resumed.model, "The ").startswith("The ")
    fine_tune.draw(resumed.state.log_history, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG_SIGNATURE)
