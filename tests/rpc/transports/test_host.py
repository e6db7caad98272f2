"""A host is known by what two processes must share, not by its name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rpc.transports import host
from rpc.transports.host import host_identity


@pytest.mark.parametrize("namespace", ["net", "pid"])
def test_two_processes_of_a_host_agree(namespace: str) -> None:
    program = f"from rpc.transports.host import host_identity; print(host_identity({namespace!r}))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert other.stdout.strip() == host_identity(namespace) != ""


def test_what_cannot_be_told_is_nobodys_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_NAMESPACES", host._NAMESPACES / "nowhere")
    assert host_identity("pid") == ""
