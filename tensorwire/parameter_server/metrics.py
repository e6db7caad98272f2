"""Numbers of servers and clients for Prometheus, beside those of ``rpc.metrics()``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tensorwire.parameter_server.opaque import Json

_HELP: Final = {
    "rows": ("gauge", "rows of a table on a shard"),
    "bytes": ("gauge", "bytes of rows, state and index of a table on a shard"),
    "updates_total": ("counter", "updates of a shard"),
    "pulls_total": ("counter", "pulls that a shard has answered"),
    "step": ("gauge", "pushes of the fastest trainer"),
    "lag": ("gauge", "pushes by which the slowest trainer is behind the fastest"),
    "not_admitted_total": ("counter", "gradients dropped as their id was not admitted yet"),
    "evicted_total": ("counter", "rows evicted"),
    "batches_trained": (
        "gauge",
        "batches, or whole files, of a sampler that are part of the state",
    ),
    "files_begun": ("gauge", "files of a sampler of which a part is trained"),
    "busy_seconds_total": ("counter", "seconds that a shard has worked, by stage"),
    "head": ("gauge", "1 where a server is the head of a shard, 0 where it is a backup"),
}

Sample = tuple[str, dict[str, str], float]


def text_of(described: dict[str, dict[str, Json]]) -> str:
    """The text exposition format of what servers say of themselves.

    Args:
        described: by cluster, the answer to ``Describe``.
    """
    samples = [each for name, server in described.items() for each in _samples(name, server)]
    lines = []
    for name, (kind, told) in _HELP.items():
        lines_of_it = [(labels, value) for which, labels, value in samples if which == name]
        if lines_of_it:
            full = f"tensorwire_ps_{name}"
            lines += [f"# HELP {full} {told}", f"# TYPE {full} {kind}"]
            lines += [f"{full}{{{_labels(labels)}}} {value:g}" for labels, value in lines_of_it]
    return "\n".join([*lines, ""]) if lines else ""


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _samples(cluster: str, described: dict[str, Json]) -> Iterator[Sample]:
    for number, shard in described["shards"].items():
        labels = {"cluster": cluster, "server": described["server"], "shard": str(number)}
        yield "head", labels, float(shard["head"])
        yield "updates_total", labels, shard["updates"]
        yield "pulls_total", labels, shard["pulls"]
        yield "step", labels, shard["time"]
        if shard["low"] is not None:
            yield "lag", labels, shard["time"] - shard["low"]
        for stage, seconds in shard["seconds"].items():
            yield "busy_seconds_total", {**labels, "stage": stage}, seconds
        for name, batches in shard["batches"].items():
            yield "batches_trained", {**labels, "sampler": name}, batches
        for name, files in shard["begun"].items():
            yield "files_begun", {**labels, "sampler": name}, files
        for name, table in shard["tables"].items():
            of_table = {**labels, "table": name}
            yield "rows", of_table, table["rows"]
            yield "bytes", of_table, table["bytes"]
            yield "not_admitted_total", of_table, table["not_admitted"]
            yield "evicted_total", of_table, table["evicted"]
