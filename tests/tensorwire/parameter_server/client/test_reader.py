"""Readers get rows of all servers that are of one step, while trainers push."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from rpc.testing import local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.client.exchange import Exchanging
from tensorwire.parameter_server.errors import ParameterServerError, UnreachableError
from tests.tensorwire.parameter_server.clusters import run, train

_IDS = torch.arange(24)
_PULLS = 25


def _tables(cluster: ps.Cluster) -> list[ps.Table]:
    """Two tables whose rows are the number of the step: each moves by one."""
    return [cluster.table(name, 2, ps.SGD(lr=1.0)) for name in ("items", "users")]


def test_a_reader_never_sees_two_steps_and_is_told_which_it_sees() -> None:
    over = threading.Event()

    def trainer() -> int:
        cluster = ps.connect(["ps0", "ps1", "ps2"], trainers=2)
        tables = _tables(cluster)
        while not over.is_set():
            cluster.push({table: (_IDS, torch.full((24, 2), -1.0)) for table in tables})
        cluster.finish()
        return cluster.step

    def read() -> list[ps.WholeStep]:
        try:
            cluster = ps.connect(["ps0", "ps1", "ps2"], trainers=2)
            _tables(cluster)
            reader = cluster.reader(timeout=60)
            wanted = {"items": _IDS.view(4, 6), "users": _IDS[3:9]}
            seen = [reader.pull(wanted)]
            while len(seen) < _PULLS or seen[-1].step == seen[0].step:
                seen.append(reader.pull(wanted))
            return seen
        finally:
            over.set()

    names = ["ps0", "ps1", "ps2", "a", "b", "evaluator"]
    with local_group(*names) as agents:
        found = run(agents[3:], [trainer, trainer, read])[2]
    assert isinstance(found, list)
    for whole in found:
        assert whole.tables["items"].shape == (4, 6, 2)
        assert whole.tables["users"].shape == (6, 2)
        values = {float(each) for rows in whole.tables.values() for each in rows.flatten()}
        assert values == {float(whole.step)}
    steps = [each.step for each in found]
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]


def test_servers_that_never_agree_end_a_pull_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def go() -> None:
        cluster = ps.connect(["ps0", "ps1"])
        (items, _) = _tables(cluster)
        cluster.push({items: (_IDS, torch.ones(24, 2))})
        send = cluster.stepper.send

        def apart(*args: Any) -> Any:
            answer = send(*args).wait()
            return Exchanging(lambda _: replace(answer, times=(1, 2)))

        monkeypatch.setattr(cluster.stepper, "send", apart)
        with pytest.raises(UnreachableError, match="from steps 1 to 2"):
            cluster.reader(timeout=0.01).pull({"items": _IDS})
        monkeypatch.undo()
        assert cluster.reader().pull({"items": _IDS}).step == 1
        cluster.finish()

    train([go], servers=2)


def test_mistakes_are_told() -> None:
    def go() -> None:
        cluster = ps.connect(["ps0"], consistency=ps.Async())
        with pytest.raises(ValueError, match=r"reader: the cluster has Async\(\), under which"):
            cluster.reader()

    def bsp() -> None:
        cluster = ps.connect(["ps0"])
        _tables(cluster)
        with pytest.raises(ValueError, match="timeout=-1"):
            cluster.reader(timeout=-1)
        with pytest.raises(ParameterServerError, match="'other'"):
            cluster.reader().pull({"other": _IDS})
        with pytest.raises(TypeError, match=r"ids are torch\.int32"):
            cluster.reader().pull({"items": _IDS.int()})
        assert cluster.reader().pull({}).tables == {}

    for each in (go, bsp):
        train([each])
