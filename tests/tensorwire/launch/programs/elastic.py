"""A server or a trainer of a parameter server that grows with its job.

    elastic.py FOLDER bsp|async [BACKUPS]

Each step adds 1 to every row. A trainer trains until there is a file ``FOLDER/end``, and writes
after each step how far it is to ``FOLDER/NAME.progress``. The first one takes snapshots all the
time; the names of those that were written are in ``FOLDER/saved``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch

import rpc
from tensorwire import parameter_server as ps

CONSISTENCIES = {"bsp": ps.BSP(), "async": ps.Async()}


def main() -> None:
    folder, me = Path(sys.argv[1]), os.environ["RPC_WORKER_NAME"]
    backups = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    rpc.init_rpc(rpc_backend_options=rpc.TensorWireRpcBackendOptions(liveness_timeout=8))
    if os.environ["ROLE_NAME"] == "ps":
        ps.serve()
    else:
        train(folder, me, sys.argv[2], backups)


def train(folder: Path, me: str, consistency: str, backups: int) -> None:
    cluster = ps.connect("ps", consistency=CONSISTENCIES[consistency], backups=backups, grow=True)
    table = cluster.table("counts", 2, ps.SGD(lr=1.0))
    ids, down = torch.arange(100), -torch.ones(100, 2)
    cluster.join()
    saving: ps.Saving | None = None
    while not (folder / "end").exists():
        table.push(ids, down)
        if me == "trainer:0":
            saving = saved(folder, cluster, saving)
        progress = {"pid": os.getpid(), "steps": cluster.step, "at": time.time()}
        progress |= {"rows": table.pull(ids).unique().tolist()}
        progress |= {"incarnation": rpc.extend.life_of(me).incarnation}
        draft = folder / f"{me}.draft"
        draft.write_text(json.dumps(progress))
        draft.rename(folder / f"{me}.progress")
        time.sleep(0.02)
    cluster.finish()
    rpc.shutdown()


def saved(folder: Path, cluster: ps.Cluster, saving: ps.Saving | None) -> ps.Saving:
    """Notes a snapshot that is written, and begins the next; some fail, as servers die."""
    if saving is not None and not saving.done():
        return saving
    if saving is not None:
        with contextlib.suppress(ps.SnapshotError), (folder / "saved").open("a") as file:
            file.write(f"{saving.wait().folder}\n")
    return cluster.snapshot(folder / f"snapshot{cluster.step}")


if __name__ == "__main__":
    main()
