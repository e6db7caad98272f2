"""Checkpoints go to torch's format and come from it, without ever running what a pickle says."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

from remote_module import RemoteModule
from rpc.testing import as_worker, local_group
from tensorwire import checkpoint
from tensorwire.checkpoint import UnsafeCheckpointError
from tensorwire.checkpoint.dcp import export_dcp, import_dcp


@pytest.fixture
def module() -> Iterator[RemoteModule]:
    with local_group("here", "there") as agents, as_worker(agents[0]):
        yield RemoteModule("there", nn.Linear, (3, 2))


def test_a_checkpoint_goes_to_torchs_format_and_back(tmp_path: Path, module: RemoteModule) -> None:
    checkpoint.save(tmp_path / "ours", {"model": module, "epoch": 3, "mean": torch.ones(2)})
    export_dcp(tmp_path / "ours", tmp_path / "theirs")
    found = {"model.weight": torch.zeros(2, 3), "state.mean": torch.zeros(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.load(found, checkpoint_id=tmp_path / "theirs", no_dist=True)
    state = module.state_dict()
    assert torch.equal(found["model.weight"], state["weight"])
    assert torch.equal(found["state.mean"], torch.ones(2))

    import_dcp(tmp_path / "theirs", tmp_path / "back")
    other = RemoteModule("there", nn.Linear, (3, 2))
    checkpoint.load(tmp_path / "back", {"model": other})
    assert all(torch.equal(other.state_dict()[name], state[name]) for name in state)


class _Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('code was run')",))


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(_Runs()))
    with pytest.raises(UnsafeCheckpointError, match=r"the metadata names builtins\.exec"):
        import_dcp(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
