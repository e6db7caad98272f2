"""A loop over a loader knows its place, saves it in checkpoints, and goes on from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rpc.testing import MemoryHub
from tensorwire import checkpoint
from tensorwire.pipeline import Batch, GradScaler, Pipeline
from tests.tensorwire.pipeline.reference import group, place


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(40, 3, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


class _Stateful:
    """A loader that knows where it is, as torchdata's does, and counts what it has read."""

    def __init__(self) -> None:
        self.at = self.read = 0

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        data = _data()
        while self.at < len(data):
            rows = slice(self.at, self.at + 8)
            self.at += 8
            self.read += 1
            yield list(data[rows])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _loader() -> DataLoader[Any]:
    return DataLoader(_data(), batch_size=8, shuffle=True)


def _pipeline(**options: Any) -> Pipeline:
    torch.manual_seed(1)
    modules = [nn.Linear(3, 4), nn.Linear(4, 1)]
    return Pipeline(place(modules, "ab"), "1f1b", 2, nn.MSELoss(), **options)


def _train(pipe: Pipeline, loader: Any, stop: int = 99, **options: Any) -> list[float]:
    """Two loops over a loader, or as many steps as are said."""
    optimizer = pipe.optimizer(torch.optim.Adam, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = GradScaler(pipe, 3.0, 1.5, growth_interval=2)  # which rounds, so its state shows
    losses = []
    for _ in range(2):
        for batch in pipe.batches(loader, state={"scheduler": scheduler}, **options):
            scale = scaler.get_scale()
            losses.append(pipe.train_step(batch.x, target=batch.y, scale=scale).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            if len(losses) == stop:
                return losses
    return losses


@pytest.mark.parametrize("make", [_loader, _Stateful])
def test_training_goes_on_from_the_latest_checkpoint_at_its_batch(
    make: Any, tmp_path: Path
) -> None:
    with group("a", "b"):
        wanted = _train(_pipeline(), make())
        assert len(wanted) == 10
        options = {"folder": tmp_path, "every": 2, "keep": 2}
        for stop in (5, 8):  # in the first loop's last batch, and in the second loop
            torch.manual_seed(1)
            folder = tmp_path / str(stop)
            assert _train(_pipeline(), make(), stop, **{**options, "folder": folder})
            saved = checkpoint.latest(folder)
            assert saved is not None
            after = {5: 4, 8: 7}[stop]
            assert saved.path.name == str(after)
            loader = make()
            torch.manual_seed(99)  # the order of the data comes from the checkpoint
            modules = place([nn.Linear(3, 4), nn.Linear(4, 1)], "ab")
            pipe = Pipeline(modules, "1f1b", 2, nn.MSELoss())
            assert _train(pipe, loader, **{**options, "folder": folder}) == wanted[after:]
            if isinstance(loader, _Stateful):
                assert loader.read == 10 - after  # nothing is read and passed over


def test_a_worker_lost_while_a_checkpoint_is_written_is_no_end(tmp_path: Path) -> None:
    hub = MemoryHub()
    with group("a", "b", "c", hub=hub):
        pipe = _pipeline(backups=1, spares=["c"])
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        for batch in pipe.batches(_loader(), folder=tmp_path, every=5):
            pipe.train_step(batch.x, target=batch.y)
            optimizer.step()
            optimizer.zero_grad()
            if pipe.steps == 5:
                hub.cut(1)
        assert pipe.workers == ["c", "b"]
        saved = checkpoint.latest(tmp_path)
        assert saved is not None
        assert saved.path.name == "5"


@pytest.mark.usefixtures("no_monitor")
def test_batches_have_names_where_they_are_pairs_and_a_bar_if_wanted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with group("a", "b"):
        pipe = _pipeline()
        whole = {"x": torch.rand(4, 3)}
        pair, other = pipe.batches([(1, 2), whole], bar=True)
        assert isinstance(pair, Batch)
        assert (pair.x, pair.y) == (1, 2)
        assert other is whole
        assert "2/2" in capsys.readouterr().err


def test_arguments_of_a_loop_that_cannot_be_right_are_named() -> None:
    with group("a", "b"):
        pipe = _pipeline()
        for arguments, error, message in [
            ({"state": {"lr": 3}}, TypeError, "'lr'.*int, which has no state_dict"),
            ({"state": {"pipeline": nn.ReLU()}}, ValueError, "uses this name"),
            ({"every": 2}, ValueError, "folder=None and every=2"),
            ({"every": 0, "folder": "x"}, ValueError, "every=0 must be a positive integer"),
            ({"keep": 2}, ValueError, "keep=2 needs folder="),
        ]:  # fmt: skip
            with pytest.raises(error, match=message):
                pipe.batches([], **arguments)  # type: ignore[arg-type]


def test_a_scheduler_that_would_be_forgotten_is_missed(tmp_path: Path) -> None:
    with group("a", "b"):
        pipe = _pipeline()
        scheduler = torch.optim.lr_scheduler.StepLR(pipe.optimizer(torch.optim.SGD, lr=0.1), 2)
        assert next(pipe.batches([1])) == 1  # no place is kept
        with pytest.raises(ValueError, match=r"no scheduler.*of optimizer '0'"):
            next(pipe.batches([1], folder=tmp_path, every=1))
        state = {"scheduler": scheduler}
        assert next(pipe.batches([1], state=state, folder=tmp_path, every=1)) == 1
