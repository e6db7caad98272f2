"""The backend of a program that names none."""

from __future__ import annotations

from pathlib import Path

import pytest

import rpc
from rpc import builtin_backends


def test_a_program_that_chooses_nothing_gets_tensorwire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_backends, "_INFINIBAND", Path("/nothing/here"))
    assert builtin_backends.default_backend(None, None).name == "TENSORWIRE"
    assert builtin_backends.default_backend(None, "TENSORPIPE").name == "TENSORPIPE"
    options = rpc.TensorPipeRpcBackendOptions()
    assert builtin_backends.default_backend(options, None).name == "TENSORPIPE"


def test_a_host_with_infiniband_is_told_how_to_use_it_if_nothing_was_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(builtin_backends, "_INFINIBAND", tmp_path)
    monkeypatch.setattr(builtin_backends, "tensorpipe_available", lambda: True)
    with caplog.at_level("INFO", logger="rpc"):
        builtin_backends.default_backend(None, "TENSORPIPE")
        assert caplog.messages == []
        builtin_backends.default_backend(None, None)
    (line,) = caplog.messages
    assert "mlx5_0" in line
    assert "RPC_BACKEND=TENSORPIPE" in line
