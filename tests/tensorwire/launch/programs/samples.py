"""A server or a trainer that counts how often each sample was trained, while machines die.

    samples.py FOLDER bsp|async batches|files [SERVERS save|restore]

Each worker writes its process to ``FOLDER/NAME.progress``, and a trainer after each step how far it
is. At the end it writes how often each sample was trained to ``FOLDER/NAME.counts``. Nobody trains
before there are two servers, or so many. With ``save`` a trainer takes a snapshot at its 8th step,
``FOLDER/saved``, from which another job goes on with ``restore``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

import rpc
from tensorwire import parameter_server as ps
from tests.tensorwire.parameter_server.samples import counted

Kind = Callable[[ps.Cluster], Iterable[Tensor]]
KINDS: dict[str, Kind] = {"batches": counted.batches, "files": counted.records}
CONSISTENCIES = {"bsp": ps.BSP(ps.Reduce.SUM), "async": ps.Async()}


def main() -> None:
    rpc.init_rpc(rpc_backend_options=rpc.TensorWireRpcBackendOptions(liveness_timeout=8))
    folder, me = Path(sys.argv[1]), os.environ["RPC_WORKER_NAME"]
    note(folder, me, 0)
    if os.environ["ROLE_NAME"] == "ps":
        ps.serve()
    else:
        servers, what = (int(sys.argv[4]), sys.argv[5]) if len(sys.argv) > 4 else (2, "")
        train(folder, me, CONSISTENCIES[sys.argv[2]], KINDS[sys.argv[3]], servers, what)


def train(
    folder: Path, me: str, consistency: ps.BSP | ps.Async, kind: Kind, servers: int, what: str
) -> None:
    saved = folder / "saved"
    restore = saved if what == "restore" else None
    backups = min(1, servers - 1)
    cluster = ps.connect("ps", consistency=consistency, backups=backups, grow=True, restore=restore)
    table = cluster.table("counts", 1, ps.SGD(lr=1.0))
    batches, begun = kind(cluster), folder / "begun"
    while not begun.exists() and len(cluster.stats()["servers"]) < servers:
        time.sleep(0.05)
    begun.touch()
    for ids in batches:
        table.push(ids, -torch.ones(len(ids), 1))
        note(folder, me, cluster.step)
        if what == "save" and me == "trainer:0" and cluster.step == 8:
            cluster.snapshot(saved)
        time.sleep(0.02)
    counts = table.pull(torch.arange(counted.SAMPLES))
    write(folder / f"{me}.counts", counts.flatten().tolist())
    cluster.finish()
    rpc.shutdown()


def note(folder: Path, me: str, steps: int) -> None:
    """Writes down how far this worker is."""
    incarnation = rpc.extend.life_of(me).incarnation
    told = {"pid": os.getpid(), "steps": steps, "incarnation": incarnation}
    write(folder / f"{me}.progress", told)


def write(path: Path, what: object) -> None:
    """Writes a file that others read meanwhile."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(what))
    draft.rename(path)


if __name__ == "__main__":
    main()
