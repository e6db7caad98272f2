"""A host is known by what two processes must share, not by its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rpc.transports.host import identity
from rpc.transports.host.identity import host_identity, usable_cores


@pytest.mark.parametrize("namespace", ["net", "pid"])
def test_two_processes_of_a_host_agree(namespace: str) -> None:
    module = identity.__file__  # by its file, as the packages around it import torch
    program = f"import runpy; print(runpy.run_path({module!r})['host_identity']({namespace!r}))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert other.stdout.strip() == host_identity(namespace) != ""


def test_what_cannot_be_told_is_nobodys_host(tmp_path: Path) -> None:
    assert host_identity("pid", tmp_path) == ""


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("6400000 100000", 8), ("", 8)],
)
def test_a_process_may_use_what_its_affinity_and_its_quota_allow(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    file = tmp_path / "cpu.max"
    assert usable_cores(file) == 8
    file.write_text(f"{quota}\n")
    assert usable_cores(file) == cores
