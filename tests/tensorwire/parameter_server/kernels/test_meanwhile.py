"""torch's kernels work until numba's are compiled, and then numba's, with the same bits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tensorwire.parameter_server import SGD, Adam, Uniform
from tensorwire.parameter_server import kernels as package
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.kernels import meanwhile
from tensorwire.parameter_server.kernels.meanwhile import Meanwhile
from tensorwire.parameter_server.storage.table import Part, TableShard
from tests.waiting import until

pytest.importorskip("numba")

LATER = "tensorwire.parameter_server.kernels.numba_kernels"


@pytest.fixture(autouse=True)
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which this machine says what was compiled; nothing was."""
    path = tmp_path / "kernels-x.compiled"
    monkeypatch.setattr(meanwhile, "_note", lambda: path)
    monkeypatch.setattr(meanwhile, "_folder", lambda: tmp_path)
    return path


def compiling(
    monkeypatch: pytest.MonkeyPatch, compile_: Callable[[], bool]
) -> tuple[list[Meanwhile], list[int]]:
    """Two processes' kernels, one of which has them compiled so; and who was asked."""
    asked: list[int] = []

    def do(self: Meanwhile) -> bool:
        asked.append(id(self))
        return compile_()

    monkeypatch.setattr(Meanwhile, "_compile", do)
    return [Meanwhile(package.torch_only(), LATER) for _ in range(2)], asked


def test_one_of_all_has_them_compiled_and_all_change(
    note: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def compile_() -> bool:
        may_end.wait()
        meanwhile.note_compiled()
        return True

    both, asked = compiling(monkeypatch, compile_)
    until(lambda: len(asked) == 1)
    assert [each.NAME for each in both] == ["torch", "torch"]
    may_end.set()
    until(lambda: all(each.has_changed for each in both))
    assert [each.NAME for each in both] == ["numba", "numba"]
    assert len(asked) == 1
    for each in both:
        each.close()


def test_where_they_cannot_be_compiled_the_slower_ones_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bool:
        raise OSError("no room")

    with caplog.at_level(logging.ERROR, "tensorwire"):
        both, asked = compiling(monkeypatch, fail)
        until(lambda: len(asked) == 2)
        for each in both:
            each.close()
    assert [each.NAME for each in both] == ["torch", "torch"]
    assert "the slower kernels go on" in caplog.text


@pytest.mark.parametrize("rule", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.1)])
def test_tables_go_on_with_the_same_bits_when_kernels_change(
    rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meanwhile, "_run", lambda self: None)
    changing = Meanwhile(package.torch_only(), LATER)
    numba = package.kernels()
    spec = TableSpec("items", 8, rule, Uniform(0.1, seed=3))
    tables = [TableShard(spec, cast(Any, changing)), TableShard(spec, numba)]
    generator = np.random.default_rng(1)
    for time in range(6):
        ids = generator.choice(5000, 700, replace=False)
        grads = generator.standard_normal((700, 8), np.float32)
        found = []
        for table in tables:
            rows = np.empty((700, 8), np.float32)
            places = table.pull(ids, rows, time)
            table.apply([Part(ids, grads.copy(), places)], time)
            found.append(rows)
        assert found[0].tobytes() == found[1].tobytes()
        if time == 2:
            changing._now = numba
    assert changing.has_changed
    changing.close()


def test_workers_of_rpcrun_alone_do_not_wait_for_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Meanwhile, "_run", lambda self: None)
    assert package.kernels.__wrapped__().NAME == "numba"
    monkeypatch.setenv(meanwhile.WORKER, "ps:0")
    found = package.kernels.__wrapped__()
    assert found.NAME == "torch"
    cast(Meanwhile, found).close()
    meanwhile.note_compiled()
    assert package.kernels.__wrapped__().NAME == "numba"
