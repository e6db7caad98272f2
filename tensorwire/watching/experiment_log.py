"""Writes the figures of a parameter-server cluster to TensorBoard or Weights & Biases."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol, runtime_checkable

_logger: Final = logging.getLogger("tensorwire")


class Statistics(Protocol):
    """A cluster, as far as it is written about."""

    def stats(self) -> Mapping[str, Any]:
        """All that servers and this worker say of themselves."""


@runtime_checkable
class ScalarWriter(Protocol):
    """Writes one figure, as ``torch.utils.tensorboard.SummaryWriter`` does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Writes one figure."""


@runtime_checkable
class Run(Protocol):
    """Writes several figures at once, as a run of ``wandb`` does."""

    def log(self, data: dict[str, float], step: int) -> object:
        """Writes figures."""


class ClusterLog:
    """Writes a cluster's figures every few seconds, for the length of a ``with`` block.

    Rows and bytes of each table, updates and busy seconds of each server, how far the slowest
    trainer is behind, and where this trainer's own time goes. The last ones are written at the
    end of the block.

    Args:
        cluster: what ``ps.connect`` returned.
        to: a ``SummaryWriter`` of TensorBoard, or a run of Weights & Biases.
        every: seconds between two writings. Default 10.
        prefix: of each figure's name. Default ``"cluster"``.

    Raises:
        TypeError: ``to`` is neither.
        ValueError: ``every`` is not above 0.

    Example::

        with ClusterLog(cluster, SummaryWriter("runs/clicks")):
            train()
    """

    def __init__(
        self,
        cluster: Statistics,
        to: ScalarWriter | Run,
        *,
        every: float = 10.0,
        prefix: str = "cluster",
    ) -> None:
        if not isinstance(to, ScalarWriter | Run):
            raise TypeError(
                f"to={to!r} has neither add_scalar, as TensorBoard's SummaryWriter has, nor log, "
                "as a run of Weights & Biases has"
            )
        if not every > 0:
            raise ValueError(f"every={every!r} must be seconds above 0")
        self._cluster, self._to, self._every, self._prefix = cluster, to, every, prefix
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensorwire-log", daemon=True)

    def __enter__(self) -> ClusterLog:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()
        self.write()

    def write(self) -> None:
        """Writes the figures as they are now; a cluster that cannot tell them is logged."""
        try:
            stats = self._cluster.stats()
            step = int(stats["step"])
            values = {f"{self._prefix}/{name}": value for name, value in figures(stats)}
            if isinstance(self._to, ScalarWriter):
                for name, value in values.items():
                    self._to.add_scalar(name, value, step)
            else:
                self._to.log(values, step=step)
        except Exception as error:  # training goes on without its picture
            _logger.warning("figures of the cluster were not written: %s", error)

    def _run(self) -> None:
        while not self._over.wait(self._every):
            self.write()


def figures(stats: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values out of ``cluster.stats()``.

    Args:
        stats: what it returned.
    """
    yield "bad_steps", float(stats.get("bad_steps", 0))
    yield "rollbacks", float(stats.get("rollbacks", 0))
    rows: dict[str, list[float]] = {}
    behind = [0.0]
    for server, told in stats["servers"].items():
        heads = [shard for shard in told["shards"].values() if shard["head"]]
        yield f"{server}/updates", float(sum(shard["updates"] for shard in heads))
        for stage in ("pushes", "pulls"):
            yield f"{server}/seconds_{stage}", float(sum(s["seconds"][stage] for s in heads))
        for shard in heads:
            if shard["low"] is not None:
                behind.append(float(shard["time"] - shard["low"]))
            for name, table in shard["tables"].items():
                total = rows.setdefault(name, [0.0, 0.0])
                total[0] += table["rows"]
                total[1] += table["bytes"]
    yield "slowest_trainer_behind", max(behind)
    for name, (count, size) in rows.items():
        yield f"{name}/rows", count
        yield f"{name}/bytes", size
    for stage, seconds in stats.get("seconds", {}).items():
        yield f"this_trainer/seconds_{stage}", float(seconds)
