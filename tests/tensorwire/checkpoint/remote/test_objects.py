"""A chain is copied into an object store, and followed from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tensorwire import checkpoint
from tensorwire.checkpoint import ChainCopier, CheckpointError, DamagedCheckpointError, Publishing
from tensorwire.checkpoint.remote.objects import StoredChain

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    path = f"/{request.node.name}"
    yield f"memory:/{path}"
    files = fsspec.filesystem("memory")
    if files.exists(path):
        files.rm(path, recursive=True)


def _publish(folder: Path, values: Tensor) -> Publishing:
    return checkpoint.publish({"x": values}, folder, base_every=2, keep_bases=1)


def test_a_follower_has_the_versions_that_are_copied(tmp_path: Path, url: str) -> None:
    values = torch.zeros(9)
    with _publish(tmp_path, values) as publishing:
        copier = ChainCopier(tmp_path, url)
        assert (copier.copy(), copier.copy()) == (1, 0)
        with checkpoint.follow(url, interval=0.01) as weights:
            for _ in range(4):
                values += 1
                publishing.update()
                assert copier.copy() == 1
                weights.wait_for(publishing.update().number - 1, timeout=60)
                assert copier.copy() == 1
            weights.wait_for(8, timeout=60)
            assert torch.equal(weights.value("x"), values)
    there = sorted(
        each.rsplit("/", 1)[1] for each in fsspec.filesystem("memory").ls(url, detail=False)
    )
    assert there == sorted(each.name for each in tmp_path.iterdir() if each.is_dir())


def test_a_version_that_is_copied_in_part_is_not_there(tmp_path: Path, url: str) -> None:
    """A kill leaves such a version; what is missing is copied again."""
    _publish(tmp_path, torch.ones(3)).close()
    copier, files = ChainCopier(tmp_path, url), fsspec.filesystem("memory")
    copier.copy()
    files.rm_file(f"{url}/0000000000.base/version.json")
    with pytest.raises(TimeoutError, match=r"no version after 0\.0 seconds"):
        checkpoint.follow(url, timeout=0.0)
    assert copier.copy() == 1
    with checkpoint.follow(url) as weights:
        assert torch.equal(weights.value("x"), torch.ones(3))


def test_a_version_whose_description_is_under_way_is_read_again(tmp_path: Path, url: str) -> None:
    """Some stores show a file before all of it is there."""
    _publish(tmp_path, torch.ones(3)).close()
    files, path = fsspec.filesystem("memory"), f"{url}/0000000000.base/version.json"
    ChainCopier(tmp_path, url).copy()
    text = files.cat_file(path)
    files.pipe_file(path, text[:50])
    stored = StoredChain(url)
    with pytest.raises(DamagedCheckpointError):
        stored.way(None)
    files.pipe_file(path, text)
    assert stored.way(None) == [text]


def test_what_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'nonsense://x' cannot be opened: Protocol not"):
        checkpoint.follow("nonsense://x")
    with pytest.raises(checkpoint.NoCheckpointError):
        ChainCopier(tmp_path / "none", "memory://none").copy()
