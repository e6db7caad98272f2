"""The program of a server that rpcrun starts."""

from __future__ import annotations

import gc

import pytest

import rpc
from tensorwire.parameter_server import __main__ as program


def test_a_server_that_has_served_ends_without_collecting_all_that_was_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(program, "load_kernels", lambda: done.append("kernels"))
    monkeypatch.setattr(rpc, "init_rpc", lambda: done.append("join"))
    monkeypatch.setattr(program, "serve", lambda: done.append("serve"))
    kept = [[number] for number in range(1000)]
    frozen = gc.get_freeze_count()
    program.main()
    assert done == ["kernels", "join", "serve"]
    assert gc.get_freeze_count() >= frozen + len(kept)
