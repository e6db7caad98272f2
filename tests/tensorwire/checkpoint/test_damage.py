"""Damaged checkpoints are refused with one error, in bounded time and memory."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorwire import checkpoint
from tensorwire.checkpoint import Checkpoint, CheckpointError, DamagedCheckpointError, checksums
from tensorwire.checkpoint.__main__ import main
from tensorwire.checkpoint.bounded import depth, parse
from tensorwire.checkpoint.manifest import sealed
from tests.tensorwire.checkpoint.folders import flip, rewrite


def _save(path: Path) -> Path:
    checkpoint.save(path, {"model": nn.Linear(8, 8), "step": 3, "rest": torch.arange(9)})
    return path


def _shard(folder: Path) -> Path:
    return max(folder.glob("*.safetensors"), key=lambda each: each.stat().st_size)


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    saved = _save(tmp_path / "1")
    for path in [*saved.glob("*.safetensors"), saved / "manifest.json"]:
        size = path.stat().st_size
        for at in {*range(400), *range(0, size, 997), *range(size - 300, size)}:
            if at < size:
                flip(path, at)
                with pytest.raises(CheckpointError):
                    Checkpoint.open(saved).verify()
                flip(path, at)
    Checkpoint.open(saved).verify()


def test_a_tensor_is_checked_when_it_is_read(tmp_path: Path) -> None:
    saved = _save(tmp_path / "1")
    flip(_shard(saved), -1)
    opened = Checkpoint.open(saved)
    names = [name for name, each in opened.parts["common"].tensors.items() if each.dtype == "F32"]
    with pytest.raises(DamagedCheckpointError, match=r"is damaged: its checksum is .*, not "):
        opened.rows("common", names[-1], 0, 1)
    with pytest.raises(DamagedCheckpointError):
        checkpoint.load(saved, {"model": nn.Linear(8, 8)})


def test_the_latest_is_the_last_whole_one_and_the_log_says_what_was_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("1", "2", "3"):
        _save(tmp_path / name)
    flip(_shard(tmp_path / "3"), -1)
    with caplog.at_level(logging.WARNING, "tensorwire"):
        found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.path.name == "2"
    assert [each.getMessage().split(":")[0] for each in caplog.records] == [
        f"the checkpoint {tmp_path / '3'} is passed over"
    ]
    assert [each.path.name for each in checkpoint.complete(tmp_path)] == ["1", "2"]


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    os.truncate(path, 20 << 30)


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _socket(path: Path) -> None:
    path.unlink()
    os.mknod(path, 0o600 | stat.S_IFSOCK)  # bind takes no path of over 107 bytes


@pytest.mark.parametrize("replace", [_pipe, _folder, _device, _sparse, _loop, _socket])
@pytest.mark.parametrize("victim", ["manifest.json", "*.safetensors"])
def test_what_is_no_regular_file_of_its_size_stops_nobody(
    tmp_path: Path, replace: Callable[[Path], None], victim: str
) -> None:
    _save(tmp_path / "1")
    (path, *_) = sorted(_save(tmp_path / "2").glob(victim))
    replace(path)
    with pytest.raises(DamagedCheckpointError):
        Checkpoint.open(tmp_path / "2")
    with pytest.raises(DamagedCheckpointError):
        checkpoint.load(tmp_path / "2", {"model": nn.Linear(8, 8)})
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.path.name == "1"
    checkpoint.save(tmp_path / "3", {"step": 1}, keep=5)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * 300 + "]" * 300,
        '{"format": "tensorwire-checkpoint", "version": 2}',
        '{"format": "tensorwire-checkpoint", "version": NaN}',
        '{"format": "tensorwire-checkpoint", "version": ' + "9" * 10_000 + "}",
        '{"format": "tensorwire-checkpoint", "format": "tensorwire-checkpoint"}',
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        "",
        "null",
    ],
    ids=lambda text: text[:40],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    saved = _save(tmp_path / "1")
    for written in (text, sealed(text)):
        (saved / "manifest.json").write_text(written, encoding="latin-1")
        with pytest.raises(DamagedCheckpointError):
            Checkpoint.open(saved)


def _twice(document: Any) -> None:
    document["parts"]["again"] = document["parts"]["common"]


def _column(document: Any) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(document["parts"]["common"]["tensors"].values()))
    return found


@pytest.mark.parametrize(
    "change",
    [
        _twice,
        lambda d: d.update(sequence=True),
        lambda d: d.update(sequence=-1),
        lambda d: d.pop("parts"),
        lambda d: d["parts"].update(common=None),
        lambda d: d["parts"]["common"]["shards"].update({"../x.safetensors": 0}),
        lambda d: d["parts"]["common"]["shards"].update({"a\0.safetensors": 0}),
        lambda d: d["parts"]["common"]["shards"].update({"\ud800.safetensors": 0}),
        lambda d: d["parts"]["common"]["shards"].update({f"{'x' * 300}.safetensors": 0}),
        lambda d: _column(d).update(shape=[10**30]),
        lambda d: _column(d).update(shape=[1.5]),
        lambda d: _column(d).update(shape=[1] * 1000),
        lambda d: _column(d).update(dtype="F4"),
        lambda d: _column(d).update(checksum="md5:1"),
        lambda d: _column(d).update(checksum=""),
        lambda d: d["parts"]["common"]["tensors"].update(
            another=d["parts"]["common"]["tensors"].popitem()[1]
        ),
    ],
)
def test_a_manifest_that_says_what_is_not_so_is_refused(
    tmp_path: Path, change: Callable[[Any], object]
) -> None:
    saved = _save(tmp_path / "1")
    rewrite(saved, change)
    with pytest.raises(CheckpointError):
        Checkpoint.open(saved).verify()


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(210):
        deep = [deep]
    with pytest.raises(checkpoint.UnsavableValueError, match="levels in each other"):
        checkpoint.save(tmp_path / "1", {"deep": deep})
    assert list(tmp_path.iterdir()) == []


def test_the_depth_of_json_leaves_texts_out() -> None:
    assert depth(json.dumps([{"[[[": ["]]", '\\"[[{']}]).encode()) == 3
    assert depth(b"") == 0
    assert parse(b'{"a": [1]}', "it") == {"a": [1]}


def test_the_command_names_what_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("1", "2"):
        _save(tmp_path / name)
    assert main(["verify", str(tmp_path)]) == 0
    assert "1: whole, 3 tensors, " in capsys.readouterr().out
    flip(_shard(tmp_path / "2"), -1)
    assert main(["verify", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "1: whole" in shown.out
    assert "2: DamagedCheckpointError" in shown.err
    assert main(["verify", str(tmp_path / "none")]) == 1
    assert "there is no checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_is_a_module(tmp_path: Path) -> None:
    _save(tmp_path / "1")
    command = [sys.executable, "-m", "tensorwire.checkpoint", "verify", str(tmp_path / "1")]
    assert subprocess.run(command, timeout=100, stdout=subprocess.DEVNULL).returncode == 0


def test_either_checksum_is_read_and_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "xxhash", None)
        saved = _save(tmp_path / "blake")
        assert "blake2b:" in (saved / "manifest.json").read_text()
        Checkpoint.open(saved).verify()
    Checkpoint.open(saved).verify()
    pytest.importorskip("xxhash")
    saved = _save(tmp_path / "fast")
    assert "xxh3_128:" in (saved / "manifest.json").read_text()
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(CheckpointError, match=r"pip install 'tensorwire\[checkpoint\]'"):
        Checkpoint.open(saved)


def test_a_checksum_of_pieces_is_that_of_the_whole() -> None:
    for kind in ("blake2b", None):
        made = checksums.Checksum(kind)
        for piece in (b"one", b"", b"two"):
            made.update(memoryview(piece))
        assert made.text == checksums.checksum_of(memoryview(b"onetwo"), kind)


def test_a_checkpoint_shows_itself_in_one_line(tmp_path: Path) -> None:
    shown = repr(Checkpoint.open(_save(tmp_path / "1")))
    assert shown.startswith(f"Checkpoint('{tmp_path / '1'}', 3 tensors in 1 parts, ")
    assert len(shown) < 300
