"""A trainer of three parameter servers, some process of whose job is stopped for a while.

    steady.py FOLDER

The steps and their gradients are the same in every run, so a run that was disturbed ends with the
rows of one that was not. It writes to ``FOLDER/NAME.step`` how many steps it has made, and to
``FOLDER/pids.json`` the processes of servers and trainers, and where the store is. It waits in the
middle until there is a file ``FOLDER/go``, and writes its rows to ``FOLDER/NAME.rows`` at the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import rpc
from tensorwire import parameter_server as ps

SERVERS = ["ps:0", "ps:1", "ps:2"]
IDS, STEPS, HALF = 200, 60, 40


def note(path: Path, text: str) -> None:
    """Whoever reads it sees all of the text or none."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


def train(folder: Path, me: str) -> torch.Tensor:
    """Makes all steps; returns the rows at the end."""
    cluster = ps.connect(SERVERS, backups=1, consistency=ps.BSP(), trainers=2)
    table = cluster.table("items", 8, ps.Adam(lr=0.05), init=ps.Uniform(0.1, seed=3))
    generator = torch.Generator().manual_seed(int(me.rpartition(":")[2]))
    batches = [
        (
            torch.randint(0, IDS, (50,), generator=generator),
            torch.randn(50, 8, generator=generator),
        )
        for _ in range(STEPS)
    ]
    cluster.join()
    if me == "trainer:0" and not (folder / "pids.json").exists():
        found = {each.name: rpc.rpc_sync(each.name, os.getpid) for each in rpc.workers()}
        found["store"] = os.environ.get("RPC_INIT_METHOD", "")
        note(folder / "pids.json", json.dumps(found))
    while cluster.step < STEPS:
        step = cluster.step
        ids, grad = batches[step]
        table.push(ids, grad + table.pull(ids))
        note(folder / f"{me}.step", str(step))
        while step == HALF and not (folder / "go").exists():
            time.sleep(0.02)
    cluster.finish()
    while cluster.stats()["trainers"]:
        time.sleep(0.02)
    return table.pull(torch.arange(IDS))


def main() -> None:
    rpc.init_rpc(backend=rpc.BackendType.TENSORWIRE)
    folder, me = Path(sys.argv[1]), rpc.get_worker_info().name
    torch.set_num_threads(1)
    rows = train(folder, me)
    torch.save(rows, folder / f"{me}.rows")
    rpc.shutdown()


if __name__ == "__main__":
    main()
