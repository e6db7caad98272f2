"""Others follow a program's weights: each version is whole, and only what changed is written."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from remote_module import RemoteModule
from rpc.testing import as_worker, local_group
from tensorwire import checkpoint
from tensorwire.checkpoint import (
    Chain,
    CheckpointError,
    DamagedCheckpointError,
    Following,
    MismatchError,
    NotSavedError,
    UnsavableValueError,
)
from tensorwire.pipeline import Pipeline
from tests import waiting
from tests.tensorwire.checkpoint.folders import flip


@contextmanager
def _followed(folder: Path, max_pinned: int = 2) -> Iterator[Following]:
    with checkpoint.follow(folder, interval=0.01, max_pinned=max_pinned) as weights:
        yield weights


def _fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(value)


def _assert_equal(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_a_follower_has_what_was_published_last(tmp_path: Path) -> None:
    learner, actor = nn.Linear(3, 2), nn.Linear(3, 2)
    with (
        checkpoint.publish({"policy": learner}, tmp_path, step=7) as publishing,
        _followed(tmp_path) as weights,
    ):
        weights.load_into(actor)
        _assert_equal(actor, learner)
        assert (weights.version, weights.step, weights.error) == (0, 7, None)
        for _ in range(3):
            with torch.no_grad():
                learner.bias += 1
            version = publishing.update()
            weights.wait_for(version.number, timeout=60)
            weights.load_into(actor, "policy")
            _assert_equal(actor, learner)
        publishing.update(step=20)
        weights.wait_for(step=20, timeout=60)
        assert weights.version == 4
        assert weights.age < 3600


def test_a_version_has_only_the_tensors_that_changed(tmp_path: Path) -> None:
    model = nn.Linear(1000, 1000)
    with checkpoint.publish({"model": model}, tmp_path, base_every=3, keep_bases=9) as publishing:
        for _ in range(3):
            with torch.no_grad():
                model.bias += 1
            publishing.update()
    sizes = [each.bytes for each in Chain.open(tmp_path).versions()]
    assert sizes[0] > 4_000_000
    assert sizes[1] < sizes[0] / 20
    assert sizes[2] < sizes[0] / 20
    assert sizes[3] == sizes[0]


def test_nested_state_and_plain_data_are_there_too(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "names": ("a", 3), "scale": torch.ones(2)}
    with checkpoint.publish(state, tmp_path), _followed(tmp_path) as weights:
        now = weights.now()
        assert now.names() == ["model", "names", "optimizer", "scale"]
        assert now.value("names") == ("a", 3)
        assert torch.equal(weights.value("scale"), torch.ones(2))
        other = torch.optim.Adam(nn.Linear(2, 2).parameters())
        other.load_state_dict(now.value("optimizer"))
        assert other.param_groups[0]["lr"] == 0.5
        with pytest.raises(NotSavedError, match="has nothing named 'other'"):
            now.value("other")
        with pytest.raises(ValueError, match="name one of"):
            now.load_into(model)


def test_owners_write_their_shares_and_a_follower_needs_no_group(tmp_path: Path) -> None:
    with local_group("driver", "a", "b") as agents, as_worker(agents[0]):
        remote = RemoteModule("a", nn.Linear, (3, 3))
        pipe = Pipeline([RemoteModule("a", nn.Linear, (2, 2)), RemoteModule("b", nn.ReLU)])
        local = nn.Linear(2, 2)
        state = {"remote": remote, "pipe": pipe, "local": local}
        with checkpoint.publish(state, tmp_path) as publishing:
            assert any("worker%20a" in name for name in publishing.update().files)
            new = {name: each + 1 for name, each in remote.state_dict().items()}
            remote.load_state_dict(new)
            last = publishing.update()
            assert last.bytes < Chain.open(tmp_path).versions()[0].bytes
        expected = remote.state_dict(), pipe.state_dict()
    with _followed(tmp_path) as weights:
        now = weights.now()
        torch.testing.assert_close(now.value("remote"), dict(expected[0]), rtol=0, atol=0)
        torch.testing.assert_close(now.value("pipe"), dict(expected[1]), rtol=0, atol=0)
        module = nn.Linear(3, 3)
        now.load_into(module, "remote")


def test_what_was_read_stays_as_it_was(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    _fill(model, 0)
    with (
        checkpoint.publish({"model": model}, tmp_path) as publishing,
        _followed(tmp_path) as weights,
        weights.pinned() as state,
    ):
        for value in (1, 2, 3):
            _fill(model, value)
            publishing.update()
        weights.wait_for(3, timeout=60)
        assert state.version == 0
        assert all(bool((each == 0).all()) for each in state.value("model").values())


def test_newer_versions_wait_while_as_many_are_pinned_as_may_be(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with (
        checkpoint.publish({"model": model}, tmp_path) as publishing,
        _followed(tmp_path, max_pinned=1) as weights,
    ):
        with weights.pinned():
            publishing.update()
            with pytest.raises(TimeoutError, match=r"has version 0 \(step 0\) after 0.2 seconds"):
                weights.wait_for(1, timeout=0.2)
        weights.wait_for(1, timeout=60)


def test_threads_never_see_tensors_of_two_versions(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    _fill(model, 0)
    torn: list[object] = []
    over = threading.Event()
    with (
        checkpoint.publish({"model": model}, tmp_path, base_every=5) as publishing,
        _followed(tmp_path) as weights,
    ):

        def read() -> None:
            while not over.is_set():
                now = weights.now()
                values = {float(each.max()) for each in now.value("model").values()}
                if values != {float(now.version)}:
                    torn.append((now.version, values))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for each in readers:
            each.start()
        for value in range(1, 9):
            _fill(model, value)
            publishing.update()
        weights.wait_for(8, timeout=60)
        over.set()
        for each in readers:
            each.join()
    assert not torn


def test_a_damaged_version_is_refused_and_the_one_before_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    with (
        caplog.at_level(logging.WARNING, "tensorwire"),
        checkpoint.publish({"model": model}, tmp_path / "chain", base_every=3) as publishing,
        _copied(tmp_path) as weights,
    ):
        old = {name: each.clone() for name, each in weights.value("model").items()}
        _fill(model, 1)
        version = publishing.update()
        (file,) = version.folder.glob("*.safetensors")
        flip(file, -1)
        _copy(version, tmp_path / "copy")
        waiting.until(lambda: weights.error is not None)
        assert isinstance(weights.error, DamagedCheckpointError)
        assert "is damaged: its checksum is" in str(weights.error)
        torch.testing.assert_close(weights.value("model"), old, rtol=0, atol=0)
        with pytest.raises(TimeoutError, match="its checksum is"):
            weights.wait_for(1, timeout=0.01)
        for number in (2, 3):
            version = publishing.update() if number < 3 else _base(publishing)
            _copy(version, tmp_path / "copy")
        weights.wait_for(3, timeout=60)
        assert weights.error is None
        _assert_equal_state(weights, model)
    said = [each.getMessage() for each in caplog.records if "served on" in each.getMessage()]
    assert 1 <= len(said) <= 2


def _copy(version: checkpoint.Version, folder: Path) -> None:
    """Puts a copy of a version into another folder, all at once."""
    shutil.copytree(version.folder, folder.parent / "one")
    (folder.parent / "one").rename(folder / version.folder.name)


@contextmanager
def _copied(folder: Path) -> Iterator[Following]:
    shutil.copytree(folder / "chain", folder / "copy")
    with _followed(folder / "copy") as weights:
        yield weights


def _base(publishing: checkpoint.Publishing) -> checkpoint.Version:
    version = publishing.update()
    assert version.kind is checkpoint.Kind.BASE
    return version


def _assert_equal_state(weights: Following, model: nn.Module) -> None:
    torch.testing.assert_close(weights.value("model"), dict(model.state_dict()), rtol=0, atol=0)


def test_a_follower_that_fell_behind_begins_with_the_next_base(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with (
        checkpoint.publish({"model": model}, tmp_path, base_every=2, keep_bases=1) as publishing,
        _followed(tmp_path, max_pinned=1) as weights,
    ):
        with weights.pinned():  # it cannot go on meanwhile
            for value in range(7):
                _fill(model, value)
                publishing.update()
        weights.wait_for(7, timeout=60)
        _assert_equal_state(weights, model)


def test_a_failed_update_is_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    with checkpoint.publish({"model": model}, tmp_path) as publishing:
        _fill(model, 5)

        def fail(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match="No space left"):
                publishing.update()
        publishing.update()
        with _followed(tmp_path) as weights:
            _assert_equal_state(weights, model)


def test_mistakes_are_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TimeoutError, match=r"has no version after 0.01 seconds"):
        checkpoint.follow(tmp_path / "nothing", timeout=0.01)
    with pytest.raises(ValueError, match="interval=0"):
        checkpoint.follow(tmp_path, interval=0)
    with pytest.raises(ValueError, match="max_pinned=0"):
        checkpoint.follow(tmp_path, max_pinned=0)
    with pytest.raises(ValueError, match="base_every=0"):
        checkpoint.publish({"model": model}, tmp_path, base_every=0)
    with pytest.raises(UnsavableValueError):
        checkpoint.publish({"model": object()}, tmp_path)
    with checkpoint.publish({"model": model}, tmp_path):
        with pytest.raises(BlockingIOError):
            checkpoint.publish({"model": model}, tmp_path)
        with _followed(tmp_path) as weights, pytest.raises(ValueError, match="give one of them"):
            weights.wait_for()
    with pytest.raises(RuntimeError, match="is not followed any more"):
        weights.wait_for(99)
    with checkpoint.ChainWriter(tmp_path / "other") as writer:
        number = writer.next_number()
        writer.folder_of(number)
        writer.commit(number, checkpoint.Kind.BASE, 0, {}, {})
    with pytest.raises(CheckpointError, match="was not made by"):
        checkpoint.follow(tmp_path / "other")


def test_another_chain_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.publish({"model": model}, tmp_path / "a").close()
    with checkpoint.publish({"model": model}, tmp_path / "b") as publishing:
        publishing.update()
    with _followed(tmp_path / "a") as weights:
        shutil.copytree(tmp_path / "b", tmp_path / "a", dirs_exist_ok=True)
        waiting.until(lambda: isinstance(weights.error, MismatchError))
        assert weights.version == 0
