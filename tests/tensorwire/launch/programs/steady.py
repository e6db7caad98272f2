"""A trainer of three parameter servers, some of whose job is stopped or cut off for a while.

    steady.py FOLDER [SECONDS]

The steps and their gradients are the same in every run, so a run that was disturbed ends with the
rows of one that was not. It writes to ``FOLDER/NAME.here`` that it is in the group, how many steps
it has made to ``FOLDER/NAME.step``, and the processes of servers and trainers, and where the store
is, to ``FOLDER/pids.json``. It waits in the middle until there is a file ``FOLDER/go``, and writes
its rows to ``FOLDER/NAME.rows`` at the end. SECONDS are those for which servers may be out of
reach; if they are longer, it writes the error and when it came to ``FOLDER/NAME.error``, and ends
once the other trainer has seen one, too. A third trainer takes no part but waits as well.
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
TRAINERS = ["trainer:0", "trainer:1"]
IDS, STEPS, HALF = 200, 60, 40


def note(path: Path, text: str) -> None:
    """Writes so that readers see all of the text or none."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


def train(folder: Path, me: str, seconds: float = 60.0) -> torch.Tensor:
    """Makes all steps; returns the rows at the end."""
    cluster = ps.connect(
        SERVERS, backups=1, consistency=ps.BSP(), trainers=len(TRAINERS), timeout=seconds
    )
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
        found = {name: rpc.rpc_sync(name, os.getpid) for name in (*SERVERS, *TRAINERS)}
        found["store"] = os.environ.get("RPC_INIT_METHOD", "")
        note(folder / "pids.json", json.dumps(found))
    while cluster.step < STEPS:
        step = cluster.step
        ids, grad = batches[step]
        table.push(ids, grad + table.pull(ids))
        note(folder / f"{me}.step", str(step))
        if step == HALF:
            wait_for(folder / "go")
    cluster.finish()
    while cluster.stats()["trainers"]:
        time.sleep(0.02)
    return table.pull(torch.arange(IDS))


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def fail_together(folder: Path, me: str, seconds: float) -> None:
    """Trains; all note the error before the launcher ends them for the first one's."""
    try:
        train(folder, me, seconds)
    except ps.ParameterServerError as error:
        said = {"kind": type(error).__name__, "text": str(error), "at": time.time()}
        note(folder / f"{me}.error", json.dumps(said))
        for name in TRAINERS:
            wait_for(folder / f"{name}.error")
        raise


def main() -> None:
    rpc.init_rpc(backend=rpc.BackendType.TENSORWIRE)
    folder, me = Path(sys.argv[1]), rpc.get_worker_info().name
    torch.set_num_threads(1)
    note(folder / f"{me}.here", "")
    if me not in TRAINERS:
        wait_for(folder / "go")
    elif len(sys.argv) > 2:
        fail_together(folder, me, float(sys.argv[2]))
    else:
        torch.save(train(folder, me), folder / f"{me}.rows")
    rpc.shutdown()


if __name__ == "__main__":
    main()
