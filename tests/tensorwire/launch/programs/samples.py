"""A server or a trainer that counts how often each sample was trained, while machines die.

    samples.py FOLDER bsp|async

A trainer writes after each step how far it is to ``FOLDER/NAME.progress``, and at the end how often
each sample was trained to ``FOLDER/NAME.counts``. Nobody trains before there are two servers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import rpc
from tensorwire import parameter_server as ps

CONSISTENCIES = {"bsp": ps.BSP(ps.Reduce.SUM), "async": ps.Async()}
SAMPLES, EPOCHS = 600, 2


def main() -> None:
    rpc.init_rpc(rpc_backend_options=rpc.TensorWireRpcBackendOptions(liveness_timeout=8))
    if os.environ["ROLE_NAME"] == "ps":
        ps.serve()
    else:
        train(Path(sys.argv[1]), os.environ["RPC_WORKER_NAME"], sys.argv[2])


def train(folder: Path, me: str, consistency: str) -> None:
    cluster = ps.connect("ps", consistency=CONSISTENCIES[consistency], backups=1, grow=True)
    table = cluster.table("counts", 1, ps.SGD(lr=1.0))
    data = cluster.samples(SAMPLES, batch_size=3, shuffle=True, seed=5, epochs=EPOCHS)
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=data)
    while not data.progress.trained and len(cluster.stats()["servers"]) < 2:
        time.sleep(0.05)
    for (ids,) in data.track(loader):
        table.push(ids, -torch.ones(len(ids), 1))
        progress = {"pid": os.getpid(), "steps": cluster.step}
        progress |= {"incarnation": rpc.extend.life_of(me).incarnation}
        write(folder / f"{me}.progress", progress)
        time.sleep(0.02)
    write(folder / f"{me}.counts", table.pull(torch.arange(SAMPLES)).flatten().tolist())
    cluster.finish()
    rpc.shutdown()


def write(path: Path, what: object) -> None:
    """Writes a file that others read meanwhile."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(what))
    draft.rename(path)


if __name__ == "__main__":
    main()
