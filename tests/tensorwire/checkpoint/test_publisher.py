"""The program that gives versions to readers, as a user or rpcrun starts it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensorwire import checkpoint
from tensorwire.checkpoint import publisher
from tests import waiting
from tests.free_ports import free_port

_GROUP_KEY = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "group.key"
    path.write_bytes(_GROUP_KEY)
    path.chmod(0o600)
    return path


def test_the_reader_key_is_written_for_its_owner_alone(tmp_path: Path, key_file: Path) -> None:
    target = tmp_path / "reader.key"
    target.write_text("an older one")
    assert publisher.main(["--group-key-file", str(key_file), "--write-key", str(target)]) == 0
    assert target.read_bytes().strip() == checkpoint.reader_key(_GROUP_KEY)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x"], "ValueError: there is no group key here: give --group-key-file or --key-file"),
        (["x", "--key-file", "none"], "ValueError: the key file 'none' cannot be read"),
        (["x", "--copy-to", "nonsense://x"], "CheckpointError: 'nonsense://x' cannot be opened"),
    ],
)
def test_a_wrong_start_is_one_line(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RPC_GROUP_KEY_FILE", "RPC_GROUP_KEY_FD"):
        monkeypatch.delenv(name, raising=False)
    assert publisher.main(arguments) == 1
    assert said in capsys.readouterr().err


def test_tls_needs_all_of_its_files(key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert publisher.main(["x", "--group-key-file", str(key_file), "--ca", "ca.pem"]) == 1
    assert "TLS needs all of --certificate, --private-key and --ca" in capsys.readouterr().err


@pytest.mark.slow
def test_a_publisher_of_rpcrun_serves_readers_until_the_job_is_done(
    tmp_path: Path, key_file: Path
) -> None:
    """Its arguments come from the environment, its key from the job's."""
    port = free_port()
    (tmp_path / "job.py").write_text(
        "import pathlib, time, torch\n"
        "from tensorwire import checkpoint\n"
        "with checkpoint.publish({'x': torch.ones(3)}, 'chain'):\n"
        "    while not pathlib.Path('done').exists():\n"
        "        time.sleep(0.05)\n"
    )
    arguments = f"chain --port {port} --write-key reader.key"
    role = "publisher:1,service=tensorwire.checkpoint.publisher"
    command = ["-m", "tensorwire.launch", "--standalone", "--group-key-file", str(key_file)]
    job = subprocess.Popen(
        [sys.executable, *command, "--role", role, "--role", "trainer:1", "job.py"],
        cwd=tmp_path,
        env=os.environ | {publisher.VARIABLE: arguments, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        key = tmp_path / "reader.key"
        waiting.until(lambda: key.exists() or job.poll() is not None, 90)
        with checkpoint.follow(f"tensorwire://localhost:{port}", key_file=key) as weights:
            assert torch.equal(weights.value("x"), torch.ones(3))
        (tmp_path / "done").touch()
        _, said = job.communicate(timeout=60)
        assert job.returncode == 0, said
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            job.communicate()
