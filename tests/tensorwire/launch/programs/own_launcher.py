"""A launcher of one's own, as torch's customization page has it, with our classes.

own_launcher.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic import metrics
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.events import Event
from torch.distributed.elastic.metrics import MetricData, MetricHandler
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from tensorwire.launch import EventHandler, RoleAgent, events


class OwnRendezvous(RendezvousHandler):
    """One node, and a store that only agents use."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))

    def get_backend(self) -> str:
        return "own"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        store: Store = PrefixStore("own", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "own job"

    def shutdown(self) -> bool:
        return True


class OwnMetrics(MetricHandler):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def emit(self, metric_data: MetricData) -> None:
        self.seen.append(metric_data.name)


class OwnEvents(EventHandler):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def record(self, event: Event) -> None:
        self.seen.append([event.source.value, event.metadata["state"]])


def square(path: str) -> int:
    """Fails the first time, and returns the square of its number the second time."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        raise ValueError("at first")
    return int(os.environ["RANK"]) ** 2 + len(path) * 0


def main(folder: str) -> None:
    own_metrics, own_events = OwnMetrics(), OwnEvents()
    metrics.configure(own_metrics)
    events.configure(own_events)
    spec = WorkerSpec(
        role="trainer",
        local_world_size=3,
        fn=square,
        args=(folder,),
        rdzv_handler=OwnRendezvous(),
        max_restarts=1,
        monitor_interval=0.02,
    )
    result = RoleAgent(spec, start_method="fork").run()
    seen = {
        "failed": result.is_failed(),
        "values": result.return_values,
        "metrics": own_metrics.seen,
        "events": own_events.seen,
    }
    Path(folder, "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
