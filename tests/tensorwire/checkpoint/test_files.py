"""A checkpoint on disk is there whole or not at all, and holds what was written, bit for bit."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.numpy
import safetensors.torch
import torch

from tensorwire.checkpoint import placing, shard_file
from tensorwire.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    UnsafeCheckpointError,
    UnsavableValueError,
)
from tensorwire.checkpoint.files import Checkpoint, Draft, PartWriter, complete, latest, retain
from tests.tensorwire.checkpoint.folders import rewrite

_TENSORS = {
    "weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "mask": torch.tensor([True, False, True]),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "step": torch.tensor(3.0, dtype=torch.float64),
    "none": torch.empty(0, 5),
    "ids": torch.arange(7),
    "view": torch.arange(12.0).reshape(3, 4).t()[1:],
}


def _save(path: Path, parts: dict[str, dict[str, torch.Tensor]], **meta: object) -> Checkpoint:
    draft = Draft.create(path)
    for name, tensors in parts.items():
        with PartWriter(draft.folder, name) as part:
            for each, tensor in tensors.items():
                part.add(each, tensor)
            part.finish({"owner": name})
    return draft.commit(list(parts), meta)


def test_tensors_of_several_parts_come_back_bit_for_bit(tmp_path: Path) -> None:
    _save(tmp_path / "one", {"a/b": _TENSORS, "..": {"weight": torch.ones(2)}}, step=7)

    saved = Checkpoint.open(tmp_path / "one")

    assert saved.meta == {"step": 7}
    assert set(saved.parts) == {"a/b", ".."}
    assert saved.parts["a/b"].meta == {"owner": "a/b"}
    read = dict(saved.tensors("a/b"))
    assert read.keys() == _TENSORS.keys()
    for name, tensor in _TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
        assert torch.equal(saved.tensor("a/b", name), tensor)
    assert torch.equal(saved.rows("a/b", "weight", 1, 3), _TENSORS["weight"][1:3])


def test_shards_can_be_read_by_safetensors_and_numpy(tmp_path: Path) -> None:
    _save(tmp_path / "one", {"a": {"x": _TENSORS["weight"], "y": _TENSORS["ids"]}})

    found = {}
    for shard in (tmp_path / "one").glob("*.safetensors"):
        found |= safetensors.numpy.load_file(shard)
        assert safetensors.torch.load_file(shard).keys() <= {"x", "y"}

    assert (found["x"] == _TENSORS["weight"].numpy()).all()
    assert (found["y"] == _TENSORS["ids"].numpy()).all()


def test_each_tensor_lies_at_a_multiple_of_its_item_size(tmp_path: Path) -> None:
    saved = _save(tmp_path / "one", {"a": _TENSORS})

    for name, tensor in saved.tensors("a"):
        assert tensor.data_ptr() % tensor.element_size() == 0, name


def test_a_part_goes_on_in_another_shard_when_one_is_full(tmp_path: Path) -> None:
    draft = Draft.create(tmp_path / "one")
    many = {f"{'long' * 20}{number}": torch.tensor([number]) for number in range(900)}
    with PartWriter(draft.folder, "by_size", shard_bytes=100) as part:
        for number in range(4):
            part.add(str(number), torch.full((10,), float(number)))
        part.finish()
    with PartWriter(draft.folder, "by_header") as part:
        for name, tensor in many.items():
            part.add(name, tensor)
        part.finish()
    saved = draft.commit(["by_size", "by_header"])

    assert len(saved.parts["by_size"].shards) == 2
    assert len(saved.parts["by_header"].shards) > 1
    assert all(torch.equal(tensor, many[name]) for name, tensor in saved.tensors("by_header"))


def test_a_draft_is_no_checkpoint_until_it_is_committed(tmp_path: Path) -> None:
    _save(tmp_path / "1", {"a": _TENSORS})
    draft = Draft.create(tmp_path / "2")
    with PartWriter(draft.folder, "a") as part:
        part.add("x", torch.ones(1))
        part.finish()

    found = latest(tmp_path)
    assert found is not None
    assert found.path.name == "1"
    draft.discard()
    assert [each.name for each in tmp_path.iterdir()] == ["1"]


def test_a_part_that_is_missing_or_unfinished_cannot_be_committed(tmp_path: Path) -> None:
    draft = Draft.create(tmp_path / "1")
    with PartWriter(draft.folder, "a") as part:
        part.add("x", torch.ones(1))
    with pytest.raises(DamagedCheckpointError, match=r"part 'a' .* is not finished"):
        draft.commit(["a"])
    draft.discard()
    with pytest.raises(FileNotFoundError, match="file system that all of its writers share"):
        PartWriter(draft.folder, "a")


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    _save(tmp_path / "1", {"a": {"x": torch.ones(1)}})
    with pytest.raises(FileExistsError, match="save under a new name"):
        Draft.create(tmp_path / "1")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_checkpoint_is_replaced_if_one_says_so_and_anything_else_never_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(placing, "exchange", lambda one, other: False)
    _save(tmp_path / "1", {"a": {"x": torch.ones(1)}})
    draft = Draft.create(tmp_path / "1", overwrite=True)
    with PartWriter(draft.folder, "a") as part:
        part.add("x", torch.zeros(1))
        part.finish()
    assert Checkpoint.open(tmp_path / "1").tensor("a", "x").item() == 1  # until it is whole
    draft.commit(["a"])
    assert Checkpoint.open(tmp_path / "1").tensor("a", "x").item() == 0
    assert [each.name for each in tmp_path.iterdir()] == ["1"]
    (tmp_path / "work").mkdir()
    with pytest.raises(FileExistsError, match="is no checkpoint, and is not overwritten"):
        Draft.create(tmp_path / "work", overwrite=True)


def test_the_latest_is_the_one_committed_last_whatever_its_name(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for name in ["9", "10", "2"]:
        _save(tmp_path / name, {"a": {"x": torch.ones(1)}})
    assert [each.path.name for each in complete(tmp_path)] == ["9", "10", "2"]


def test_a_damaged_checkpoint_is_refused_and_passed_over(tmp_path: Path) -> None:
    for name in ["1", "2", "3", "4"]:
        _save(tmp_path / name, {"a": {"x": torch.ones(100)}})
    (shard,) = (tmp_path / "2").glob("*.safetensors")
    os.truncate(shard, shard.stat().st_size - 1)
    (tmp_path / "3" / "manifest.json").write_text('{"format": ')
    rewrite(tmp_path / "4", lambda d: d["parts"]["a"]["tensors"]["x"].update(shard="../elsewhere"))

    for name, message in [("2", "bytes of"), ("3", "is not JSON"), ("4", "in no listed shard")]:
        with pytest.raises(DamagedCheckpointError, match=message):
            Checkpoint.open(tmp_path / name)
    assert [each.path.name for each in complete(tmp_path)] == ["1"]


def test_retention_keeps_the_last_and_the_drafts_that_are_in_use(tmp_path: Path) -> None:
    for name in ["1", "2", "3"]:
        _save(tmp_path / name, {"a": {"x": torch.ones(1)}})
    in_use = Draft.create(tmp_path / "4")
    abandoned = Draft.create(tmp_path / "5")
    os.close(abandoned.lock)  # as the end of its process would

    removed = retain(tmp_path, last=2)

    assert [path.name for path in removed] == ["1"]
    assert {path.name for path in tmp_path.iterdir()} == {"2", "3", in_use.folder.name}
    in_use.discard()
    with pytest.raises(ValueError, match="at least one"):
        retain(tmp_path, last=0)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: torch.save({"x": torch.ones(1)}, path),
        lambda path: path.write_bytes(pickle.dumps({"x": 1})),
        lambda path: (path.mkdir(), (path / ".metadata").write_bytes(pickle.dumps({}))),
    ],
    ids=["torch.save", "pickle", "torch.distributed.checkpoint"],
)
def test_a_pickle_is_refused(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path / "model")
    with pytest.raises(UnsafeCheckpointError, match="reading a pickle can run any code"):
        Checkpoint.open(tmp_path / "model")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(1, dtype=torch.complex128), "complex128, which safetensors cannot hold"),
        (torch.eye(2).to_sparse(), "to_dense"),
        (torch.ones(1, device="meta"), "only tensors with memory"),
    ],
)
def test_a_tensor_that_cannot_be_saved_is_named(
    tmp_path: Path, tensor: torch.Tensor, message: str
) -> None:
    draft = Draft.create(tmp_path / "1")
    with (
        PartWriter(draft.folder, "a") as part,
        pytest.raises(UnsavableValueError, match=f"tensor 'x' .*{message}"),
    ):
        part.add("x", tensor)
    draft.discard()


def test_meta_that_is_not_json_is_refused(tmp_path: Path) -> None:
    draft = Draft.create(tmp_path / "1")
    with (
        PartWriter(draft.folder, "a") as part,
        pytest.raises(UnsavableValueError, match="plain JSON data"),
    ):
        part.finish({"x": torch.ones(1)})
    draft.discard()


def test_without_safetensors_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match=r"pip install 'tensorwire\[checkpoint\]'"):
        Draft.create(tmp_path / "1")


def test_writing_holds_no_tensor(tmp_path: Path) -> None:
    file = shard_file.ShardFile(tmp_path / "x")
    tensor = torch.ones(3)
    file.append("x", tensor)
    tensor.zero_()
    file.finish()
    assert safetensors.torch.load_file(tmp_path / "x")["x"].tolist() == [1.0, 1.0, 1.0]


class _Crash(BaseException):
    """Stands for the end of the process."""


class _Crashing:
    """Lets a number of operations on the file system happen, and then no more."""

    def __init__(self, operations: int) -> None:
        self.left = operations

    def around(self, operation: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            if self.left == 0:
                raise _Crash
            self.left -= 1
            return operation(*args, **kwargs)

        return counted


def _close_locks(folder: Path) -> None:
    """Closes what the end of the process would close."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if target.startswith(str(folder)):
            os.close(int(descriptor))


def test_a_crash_between_any_two_operations_leaves_the_last_checkpoint_whole(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    for operations in range(200):
        shutil.rmtree(folder, ignore_errors=True)
        _save(folder / "1", {"a": {"x": torch.full((9,), 1.0)}}, step=1)
        crashing = _Crashing(operations)
        done = False
        with pytest.MonkeyPatch.context() as patch:
            for place, name in [
                (os, "write"), (os, "fsync"), (shutil, "rmtree"),
                (Path, "rename"), (Path, "mkdir"), (Path, "unlink"),
            ]:  # fmt: skip
                patch.setattr(place, name, crashing.around(getattr(place, name)))
            try:
                _save(folder / "2", {p: {"x": torch.full((9,), 2.0)} for p in "ab"}, step=2)
                retain(folder, last=1)
                done = True
            except _Crash:
                _close_locks(folder)
        for saved in complete(folder):
            step = saved.meta["step"]
            for part in saved.parts:
                assert saved.tensor(part, "x").eq(step).all()
        assert latest(folder) is not None, operations
        if done:
            assert operations > 20
            return
    pytest.fail("it never came to an end")


_WRITER = """
import sys, torch
from tensorwire.checkpoint.files import Draft, PartWriter
draft = Draft.create(sys.argv[1])
with PartWriter(draft.folder, "a") as part:
    part.add("x", torch.ones(1000))
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_draft_whose_process_was_killed_is_swept_away(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WRITER, str(tmp_path / "2")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        _save(tmp_path / "1", {"a": {"x": torch.ones(1)}})
        retain(tmp_path, last=1)
        assert len(list(tmp_path.iterdir())) == 2  # the draft is in use
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=30)
    retain(tmp_path, last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
