"""The command line says what a chain has, finds what is wrong, and makes a snapshot of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tensorwire import parameter_server as ps
from tensorwire.checkpoint import Checkpoint
from tensorwire.parameter_server.following.command import main
from tensorwire.parameter_server.reading import read_dense
from tensorwire.parameter_server.snapshots.contents import Restored
from tests.tensorwire.checkpoint.folders import flip
from tests.tensorwire.parameter_server.following.chains import Published, random_rows


def _fill(folder: Path) -> Published:
    with Published(folder) as published:
        published.base(0, {"items": random_rows(0, range(90))})
        published.weights = [each + 1 for each in published.weights]
        published.delta(7, {"items": random_rows(1, range(50, 95))}, range(10))
    return published


def test_versions_are_printed_with_the_way_to_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _fill(tmp_path)
    assert main([str(tmp_path), "--check"]) == 0
    base, delta, way = capsys.readouterr().out.splitlines()
    assert "version 0: base, step 0, " in base
    assert base.endswith("a/b c: 0 rows, items: 90 rows")
    assert "version 1: delta, step 7, " in delta
    assert delta.endswith("items: 45 rows")
    assert way == "to read version 1: 0, 1"


def test_what_is_wrong_is_said_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 0
    assert "has no version" in capsys.readouterr().out
    _fill(tmp_path)
    file, *_ = sorted(tmp_path.glob("*.delta/*.safetensors"))
    flip(file, -1)
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--check"]) == 1
    assert "version 1: DamagedCheckpointError: " in capsys.readouterr().err
    shutil.rmtree(tmp_path / "0000000000.base")
    assert main([str(tmp_path)]) == 1
    assert "does not have" in capsys.readouterr().err


def test_a_chain_becomes_a_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published = _fill(tmp_path / "chain")
    assert main([str(tmp_path / "chain"), "--compact", str(tmp_path / "snapshot")]) == 0
    assert capsys.readouterr().out.endswith("snapshot: a snapshot of the newest version\n")
    ids, rows = ps.read(tmp_path / "snapshot", "items")
    expected = published.rows["items"]
    assert ids.tolist() == sorted(expected)
    assert torch.equal(rows, torch.stack([expected[i] for i in sorted(expected)]))
    dense = read_dense(tmp_path / "snapshot", "model")
    assert dense is not None
    assert bool((dense == 1).all())
    Restored.open(tmp_path / "snapshot").verify()
    Checkpoint.open(tmp_path / "snapshot").verify()
    assert main([str(tmp_path / "chain"), "--compact", str(tmp_path / "snapshot")]) == 1
    assert "FileExistsError" in capsys.readouterr().err
