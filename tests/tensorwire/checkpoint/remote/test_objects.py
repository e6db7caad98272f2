"""A chain is copied into an object store, and followed from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tensorwire import checkpoint
from tensorwire.checkpoint import ChainCopier, CheckpointError, DamagedCheckpointError, Publishing
from tensorwire.checkpoint.remote import mirror
from tests import waiting

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
    """As after a kill: what is missing is copied again."""
    _publish(tmp_path, torch.ones(3)).close()
    copier, files = ChainCopier(tmp_path, url), fsspec.filesystem("memory")
    copier.copy()
    files.rm_file(f"{url}/0000000000.base/version.json")
    with pytest.raises(TimeoutError, match=r"no version after 0\.0 seconds"):
        checkpoint.follow(url, timeout=0.0)
    assert copier.copy() == 1
    with checkpoint.follow(url) as weights:
        assert torch.equal(weights.value("x"), torch.ones(3))


def test_damage_in_a_store_is_refused_and_not_fetched_again_and_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.ones(3)
    publishing, copier = _publish(tmp_path, values), ChainCopier(tmp_path, url)
    copier.copy()
    files = fsspec.filesystem("memory")
    with checkpoint.follow(url, interval=0.01) as weights:
        fetched: list[str] = []
        whole = mirror.Mirror._fetch_files

        def fetch(self: mirror.Mirror, version: checkpoint.Version, text: bytes) -> None:
            fetched.append(version.folder.name)
            (name,) = (each for each in version.files if each.endswith(".safetensors"))
            path = f"{url}/{version.folder.name}/{name}"
            data = files.cat_file(path)
            files.pipe_file(path, data[:-1] + bytes([data[-1] ^ 1]))
            whole(self, version, text)

        monkeypatch.setattr(mirror.Mirror, "_fetch_files", fetch)
        values += 1
        publishing.update()
        copier.copy()
        looks: list[object] = []
        waiting.until(lambda: isinstance(weights.error, DamagedCheckpointError))
        monkeypatch.setattr(mirror.Mirror, "_fetch", _noted(mirror.Mirror._fetch, looks))
        waiting.until(lambda: len(looks) > 3)
        assert fetched == ["0000000001.delta"]
        assert torch.equal(weights.value("x"), torch.ones(3))
    publishing.close()


def _noted(call: object, calls: list[object]) -> object:
    def wrapped(*arguments: object) -> object:
        calls.append(arguments)
        return call(*arguments)  # type: ignore[operator]

    return wrapped


def test_what_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'nonsense://x' cannot be opened: Protocol not"):
        checkpoint.follow("nonsense://x")
    with pytest.raises(checkpoint.NoCheckpointError):
        ChainCopier(tmp_path / "none", "memory://none").copy()
