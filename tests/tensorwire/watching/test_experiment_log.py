"""A cluster's figures reach TensorBoard; Grafana asks for metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import rpc
from rpc.testing import as_worker, local_group
from tensorwire.parameter_server.metrics import text_of
from tensorwire.watching import ClusterLog

_SHARD = {
    "head": True,
    "updates": 5,
    "pulls": 4,
    "seconds": {"pushes": 0.5, "pulls": 0.25},
    "time": 5,
    "low": 3,
    "bytes": 100,
    "batches": {"samples": 3},
    "begun": {"samples": 1},
    "tables": {"words": {"rows": 7, "bytes": 80, "updates": 5, "not_admitted": 0, "evicted": 0}},
    "dense": {},
}


class Cluster:
    def stats(self) -> Mapping[str, Any]:
        servers = {
            "ps:0": {"shards": {0: _SHARD, 1: {**_SHARD, "head": False}}},
            "ps:1": {"shards": {1: {**_SHARD, "low": None}}},
        }
        return {"step": 9, "servers": servers, "bad_steps": 1, "rollbacks": 0,
                "seconds": {"waiting": 2.0}}  # fmt: skip


class Writer:
    def __init__(self) -> None:
        self.written: dict[str, tuple[float, int]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written[tag] = scalar_value, global_step


class Run:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, data: dict[str, float], step: int) -> None:
        self.logged.append((data, step))


def test_figures_are_written_when_the_block_ends_and_backups_are_not_counted() -> None:
    writer, run = Writer(), Run()
    with ClusterLog(Cluster(), writer, every=3600):
        pass
    assert writer.written["cluster/words/rows"] == (14.0, 9)
    assert writer.written["cluster/ps:0/updates"] == (5.0, 9)
    assert writer.written["cluster/slowest_trainer_behind"] == (2.0, 9)
    assert writer.written["cluster/this_trainer/seconds_waiting"] == (2.0, 9)
    with ClusterLog(Cluster(), run, every=3600, prefix="ps"):
        pass
    ((data, step),) = run.logged
    assert (data["ps/words/bytes"], step) == (160.0, 9)


def test_a_cluster_that_cannot_tell_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def stats(self) -> Mapping[str, Any]:
            raise RuntimeError("it is gone")

    with ClusterLog(Broken(), Writer(), every=3600):
        pass
    assert "figures of the cluster were not written: it is gone" in caplog.text


def test_what_cannot_be_written_to_is_refused() -> None:
    with pytest.raises(TypeError, match="neither add_scalar"):
        ClusterLog(Cluster(), object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every=0 must be seconds above 0"):
        ClusterLog(Cluster(), Writer(), every=0)


def test_grafana_asks_for_metrics_that_exist() -> None:
    with local_group("here", "there") as agents, as_worker(agents[0]):
        rpc.rpc_sync("there", abs, (-1,))
        text = rpc.metrics().to_prometheus()
    text += text_of({"c": {"server": "ps:0", "shards": {0: _SHARD}}})
    there = set(re.findall(r"^(tensorwire_\w+)\{", text, re.M))
    board = json.loads(Path("docs/_static/grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"tensorwire_\w+", target["expr"])
    }
    assert asked
    assert asked <= there


def test_the_guide_lists_the_panels_of_the_board() -> None:
    panels = json.loads(Path("docs/_static/grafana.json").read_text())["panels"]
    rows = [f"| {panel['title']} | `{panel['targets'][0]['expr']}` |" for panel in panels]
    table = Path("docs/guides/watching.md").read_text().partition("| panel |")[2]
    assert table.partition("\n\n")[0].splitlines()[2:] == rows
