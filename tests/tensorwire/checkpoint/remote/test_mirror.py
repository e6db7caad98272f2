"""All that is fetched is checked before it is applied; damage is not fetched all the time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tensorwire import checkpoint
from tensorwire.checkpoint import ChainCopier, DamagedCheckpointError
from tensorwire.checkpoint.remote import mirror
from tests import waiting

fsspec = pytest.importorskip("fsspec")


def test_damage_in_a_store_is_refused_and_not_fetched_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, url = torch.ones(3), "memory://damage"
    publishing = checkpoint.publish({"x": values}, tmp_path)
    copier = ChainCopier(tmp_path, url)
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
        waiting.until(lambda: isinstance(weights.error, DamagedCheckpointError), 90)
        monkeypatch.setattr(mirror.Mirror, "_fetch", _noted(mirror.Mirror._fetch, looks))
        waiting.until(lambda: len(looks) > 3, 90)
        assert fetched == ["0000000001.delta"]
        assert torch.equal(weights.value("x"), torch.ones(3))
    publishing.close()
    files.rm(url, recursive=True)


def _noted(call: object, calls: list[object]) -> object:
    def wrapped(*arguments: object) -> object:
        calls.append(arguments)
        return call(*arguments)  # type: ignore[operator]

    return wrapped
