"""A pipeline with backups goes on when workers are lost, bit for bit as an undisturbed one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rpc
from remote_module import RemoteModule
from rpc.testing import MemoryHub
from tensorwire import checkpoint
from tensorwire.pipeline import GradScaler, Pipeline, PipelineOptimizer, StageFailedError
from tensorwire.pipeline.backups.keeping import Keepers
from tests.tensorwire.pipeline.reference import group, place
from tests.waiting import eventually

_STEPS = 4


class _Stage(nn.Module):
    """A layer, with all that a copy must have; may call something in a forward pass."""

    def __init__(self, inputs: int, outputs: int, name: str) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)
        self.dropout, self.name = nn.Dropout(0.3), name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in _IN_FORWARD:
            each(self)
        output: torch.Tensor = self.dropout(torch.tanh(self.norm(self.linear(x))))
        return output


_IN_FORWARD: list[Callable[[_Stage], None]] = []


def _modules() -> list[nn.Module]:
    torch.manual_seed(3)
    return [_Stage(3, 6, "first"), _Stage(6, 6, "middle"), _Stage(6, 2, "last")]


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(4)
    return [(torch.rand(8, 3), torch.rand(8, 2)) for _ in range(_STEPS)]


def _loop(pipe: Pipeline, optimizer: PipelineOptimizer, hooks: dict[str, Any]) -> list[float]:
    """Trains with all that a loop's body may have."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    losses = []
    for step, (x, y) in enumerate(_batches()):
        for part in range(2):
            losses.append(pipe.train_step(x, target=y + part).item())
        losses.append(float(pipe.clip_grad_norm_(0.05)))
        if step in hooks:
            hooks[step]()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        x.zero_()  # what the loop does with its batch is its own business
    return losses


def _train(workers: str, hooks: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    pipe = Pipeline(place(_modules(), workers), "1f1b", 4, nn.MSELoss(), seed=5, **options)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    losses = _loop(pipe, optimizer, hooks)
    state = pipe.state_dict(), optimizer.state_dict()["state"]
    workers_then = pipe.workers
    pipe.close()
    return losses, *state, workers_then


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Any, ...]:
    """The losses, and what the stages and the optimizer have in the end."""
    with group("a", "b", "c"):
        return _train("abc", {})


def _require_equal(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    assert found[0] == wanted[0]
    for one, other in zip(found[1:3], wanted[1:3], strict=True):
        assert one.keys() == other.keys()
    for name, value in wanted[1].items():
        assert torch.equal(found[1][name], value), name
    for name, fields in wanted[2].items():
        for field, value in fields.items():
            assert torch.equal(found[2][name][field], value), (name, field)


def test_backups_change_nothing_while_nobody_is_lost(undisturbed: tuple[Any, ...]) -> None:
    with group("a", "b", "c"):
        _require_equal(_train("abc", {}, backups=1), undisturbed)


@pytest.mark.parametrize("lost", ["a", "b", "c"])
@pytest.mark.parametrize("call", [1, 6, 13, 20, 27])
def test_a_worker_cut_off_in_a_forward_pass_changes_nothing(
    lost: str, call: int, undisturbed: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, calls = MemoryHub(), [0]
    victim = {"a": "first", "b": "middle", "c": "last"}[lost]

    def cut(stage: _Stage) -> None:
        calls[0] += stage.name == victim
        if calls[0] == call:
            calls[0] += 1
            hub.cut("abc".index(lost) + 1)

    monkeypatch.setattr(f"{__name__}._IN_FORWARD", [cut])
    with group("a", "b", "c", hub=hub):
        found = _train("abc", {}, backups=1)
        _require_equal(found, undisturbed)
        assert lost not in found[3]


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_a_worker_lost_before_the_optimizer_steps_changes_nothing(
    lost: str, undisturbed: tuple[Any, ...]
) -> None:
    hub = MemoryHub()
    with group("a", "b", "c", hub=hub):
        hooks = {2: lambda: hub.cut("abc".index(lost) + 1)}
        _require_equal(_train("abc", hooks, backups=1), undisturbed)


@pytest.mark.parametrize("spares", [["d"], []])
def test_a_frozen_worker_is_replaced_and_what_it_does_later_changes_nothing(
    spares: list[str], undisturbed: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, calls = MemoryHub(), [0]

    def cut(stage: _Stage) -> None:
        calls[0] += 1
        if calls[0] == 50:
            hub.cut(2)

    monkeypatch.setattr(f"{__name__}._IN_FORWARD", [cut])
    with group("a", "b", "c", "d", hub=hub):
        found = _train("abc", {}, backups=1, spares=spares)
        _require_equal(found, undisturbed)
        assert found[3] == (["a", "d", "c"] if spares else ["a", "c"])


def test_losses_one_after_the_other_change_nothing(undisturbed: tuple[Any, ...]) -> None:
    hub = MemoryHub()
    with group("a", "b", "c", "d", hub=hub):
        hooks = {each: lambda each=each: hub.cut(each) for each in (1, 2, 3)}
        found = _train("abc", hooks, backups=1, spares=["d"])
        _require_equal(found, undisturbed)
        assert found[3] == ["d"]


def test_two_neighbours_lost_at_once_end_in_one_error_that_says_what_to_do() -> None:
    hub = MemoryHub()
    with group("a", "b", "c", hub=hub):
        pipe = Pipeline(place(_modules(), "abc"), "1f1b", 4, nn.MSELoss(), backups=1)
        ((x, y), *_) = _batches()
        pipe.train_step(x, target=y)
        hub.cut(2)
        hub.cut(3)
        with pytest.raises(StageFailedError, match=r"copy of stage 1.*recover\(\) and load"):
            pipe.train_step(x, target=y)


def test_an_error_of_a_stage_is_no_loss_and_leaves_everything_as_it_was(
    undisturbed: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0]

    def fail(stage: _Stage) -> None:
        calls[0] += 1
        if calls[0] == 5:
            raise ValueError("the user's own error")

    with group("a", "b", "c"):
        pipe = Pipeline(place(_modules(), "abc"), "1f1b", 4, nn.MSELoss(), seed=5, backups=1)
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05)
        monkeypatch.setattr(f"{__name__}._IN_FORWARD", [fail])
        before = pipe.state_dict()
        with pytest.raises(StageFailedError, match="the user's own error"):
            pipe.train_step(*_batches()[0][:1], target=_batches()[0][1])
        pipe.load_state_dict(before)  # BatchNorm counts batches, also of steps that fail
        assert _loop(pipe, optimizer, {}) == undisturbed[0]


def test_stages_move_and_come_back_without_a_bit_changing(undisturbed: tuple[Any, ...]) -> None:
    with group("a", "b", "c", "d"):
        for backups in (0, 1):
            pipe = Pipeline(
                place(_modules(), "abc"), "1f1b", 4, nn.MSELoss(), seed=5, backups=backups
            )
            optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05)

            def merge(pipe: Pipeline = pipe) -> None:
                assert pipe.rebalance(["c", "a"]) in (["c", "c", "a"], ["c", "a", "a"])

            hooks = {
                0: lambda pipe=pipe: pipe.move(1, "d"),
                1: merge,
                2: lambda pipe=pipe: pipe.rebalance(["a", "b", "c"]),
            }
            found = _loop(pipe, optimizer, hooks)
            state = pipe.state_dict(), optimizer.state_dict()["state"]
            _require_equal((found, *state), undisturbed)
            assert pipe.workers == ["a", "b", "c"]
            pipe.close()


def test_a_scaler_and_two_optimizers_go_on_as_well() -> None:
    found = []
    for lost in (None, 2):
        hub = MemoryHub()
        with group("a", "b", "c", hub=hub):
            pipe = Pipeline(place(_modules(), "abc"), "gpipe", 2, nn.MSELoss(), seed=1, backups=1)
            scaler = GradScaler(pipe, init_scale=2.0**10, growth_interval=2)
            one = pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
            two = pipe.optimizer(torch.optim.Adam, lr=0.01)
            losses = []
            for step, (x, y) in enumerate(_batches()):
                losses.append(pipe.train_step(x, target=y, scale=scaler.get_scale()).item())
                scaler.unscale_(one)
                if lost and step == 2:
                    hub.cut(lost)
                scaler.step(one)
                two.step()
                scaler.update()
                one.zero_grad()
            found.append((losses, {n: t.tolist() for n, t in pipe.state_dict().items()}))
    assert found[0] == found[1]


def test_replicas_and_tied_weights_go_on_as_well() -> None:
    found = []
    for lost in (None, 1, 2, 3):
        hub = MemoryHub()
        with group("a", "b", "c", "d", hub=hub):
            torch.manual_seed(0)
            modules = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
            modules[2].weight.data.copy_(modules[0].weight)
            first, middle, again, last = place([*modules[:2], modules[1], modules[2]], "abcd")
            pipe = Pipeline(
                [first, [middle, again], last], "1f1b", 4, nn.MSELoss(), backups=1,
                tied=[[(0, "weight"), (2, "weight")]],
            )  # fmt: skip
            optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
            losses = []
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                x, y = torch.rand(8, 4, generator=generator), torch.rand(8, 4, generator=generator)
                losses.append(pipe.train_step(x, target=y).item())
                if lost and step == 1:
                    hub.cut(lost)
                optimizer.step()
                optimizer.zero_grad()
            found.append((losses, {n: t.tolist() for n, t in pipe.state_dict().items()}))
    assert found[1:] == found[:1] * 3


def test_backups_that_cannot_be_are_refused() -> None:
    with group("a", "b"):
        both = place([nn.Linear(2, 2), nn.Linear(2, 2)], "ab")
        one = place([nn.Linear(2, 2)], "a")
        other = RemoteModule.init_from_module_rref("b", both[1].get_module_rref())
        for arguments, error, message in [
            ({"stages": one, "backups": 1}, ValueError, "needs a second worker, but all .* 'a'"),
            ({"stages": both, "backups": 2}, ValueError, "backups=2 must be 0 or 1"),
            ({"stages": both, "backups": True}, TypeError, "backups=True is a bool"),
            ({"stages": both, "spares": ["a"]}, ValueError, "needs backups=1"),
            ({"stages": both, "name": "run"}, ValueError, "name='run' needs backups=1"),
            ({"stages": both, "backups": 1, "spares": "ab"}, TypeError, "is one name"),
            ({"stages": both, "backups": 1, "spares": ["x"]}, ValueError, "no worker 'x'"),
            ({"stages": [both[0], other], "backups": 1}, ValueError, "make stage 1 anew"),
        ]:  # fmt: skip
            with pytest.raises(error, match=message):
                Pipeline(loss=nn.MSELoss(), **arguments)  # type: ignore[arg-type]
        pipe = Pipeline(both, loss=nn.MSELoss())
        for stage, worker, message in [(2, "a", "0 to 1"), (0, "x", "no such worker")]:
            with pytest.raises(ValueError, match=message):
                pipe.move(stage, worker)


def _with_the_driver(hub: MemoryHub, lost_at: int | None) -> tuple[list[float], list[str]]:
    """Trains stages that are on the driver, too, with dropout, no seed and data as it comes."""
    with group("b", "c", hub=hub):
        torch.manual_seed(0)
        first = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
        middle = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))
        stages = place([first, middle, nn.Linear(4, 4)], ["driver", "b", "driver"])
        pipe = Pipeline(stages, "1f1b", 2, nn.MSELoss(), backups=1)
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.1)
        losses = []
        for step in range(4):
            x, y = torch.randn(4, 4), torch.randn(4, 4)
            if step == lost_at:
                hub.cut(1)
            losses.append(pipe.train_step(x, target=y).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, pipe.workers


def test_the_driver_s_own_random_numbers_are_not_drawn_again() -> None:
    quiet, workers = _with_the_driver(MemoryHub(), None)
    assert workers == ["driver", "b"]
    assert _with_the_driver(MemoryHub(), 2) == (quiet, ["driver"])


def test_a_loss_right_after_a_checkpoint_was_loaded_says_to_load_it_again(tmp_path: Path) -> None:
    hub = MemoryHub()
    with group("a", "b", "c", "d", hub=hub):
        pipe = Pipeline(place(_modules(), "abc"), "1f1b", 4, nn.MSELoss(), backups=1, spares=["d"])
        ((x, y), *_) = _batches()
        saved = checkpoint.save(tmp_path / "0", {"model": pipe})
        checkpoint.load(saved, {"model": pipe})
        pipe.train_step(x, target=y)  # from here on the backups have what was loaded
        hub.cut(1)
        pipe.train_step(x, target=y)
        checkpoint.load(saved, {"model": pipe})
        hub.cut(2)
        with pytest.raises(StageFailedError, match="a checkpoint was loaded after the last backup"):
            pipe.train_step(x, target=y)


def test_nothing_is_kept_of_a_pipeline_that_was_closed() -> None:
    with group("a", "b"):
        pipe = Pipeline(place(_modules()[:2], "ab"), loss=nn.MSELoss(), backups=1)
        kept = [rpc.rpc_sync(name, _copies_here) for name in ("a", "b")]
        assert kept == [2, 2]  # its own stage, and the other's
        pipe.close()
        assert eventually(lambda: [rpc.rpc_sync(n, _copies_here) for n in ("a", "b")] == [0, 0])


def _copies_here() -> int:
    keepers = Keepers.here()
    return sum(len(keepers.of(name).found().copies) for name in keepers.names())
