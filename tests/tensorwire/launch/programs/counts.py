"""A trainer of parameter servers, one of which is killed twice: with a backup, and without.

    counts.py FOLDER

Each step adds 1 to every row, so the rows at the end say how often each step counted. What a
trainer saw, it writes to ``FOLDER/NAME.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import rpc
from tensorwire import parameter_server as ps

SERVERS = ["ps:0", "ps:1"]
VICTIM = SERVERS[1]
STEPS, SAVED, KILLED = 12, 4, 8


def train(name: str, backups: int, folder: Path) -> dict[str, Any]:
    """Trains until a server has been killed and is back; says what was seen."""
    cluster = ps.connect(SERVERS, backups=backups, name=name)
    table = cluster.table("counts", 2, ps.SGD(lr=1.0))
    ids, down = torch.arange(100), -torch.ones(100, 2)
    process, life = rpc.rpc_sync(VICTIM, os.getpid), rpc.extend.life_of(VICTIM).incarnation
    rolled_back, done = list[int](), set[int]()
    cluster.join()
    while cluster.step < STEPS:
        try:
            table.push(ids, down)
            if rpc.get_worker_info().name == "trainer:0" and cluster.step not in done:
                done.add(cluster.step)
                if cluster.step == SAVED:
                    cluster.snapshot(folder / name).wait()
                if cluster.step == KILLED:
                    os.kill(process, signal.SIGKILL)
        except ps.RolledBack as error:
            rolled_back.append(error.step)
    cluster.finish()
    while cluster.stats()["trainers"]:
        time.sleep(0.02)
    rows = table.pull(ids).unique().tolist()
    while not all(_knows_a_later_life(server, life) for server in SERVERS):
        time.sleep(0.05)
    lives = [rpc.extend.life_of(server).incarnation for server in SERVERS]
    return {"rows": rows, "rolled_back": rolled_back, "lives": lives}


def _knows_a_later_life(server: str, life: int) -> bool:
    """True if that server does not take the former life of the victim for its present one."""
    try:
        return rpc.rpc_sync(server, rpc.extend.life_of, args=(VICTIM,)).incarnation > life
    except rpc.RpcError:
        return False


def main() -> None:
    rpc.init_rpc(backend=rpc.BackendType.TENSORWIRE)
    folder, me = Path(sys.argv[1]), rpc.get_worker_info().name
    seen = {name: train(name, backups, folder) for name, backups in [("kept", 1), ("alone", 0)]}
    (folder / f"{me}.json").write_text(json.dumps(seen))
    rpc.shutdown()


if __name__ == "__main__":
    main()
