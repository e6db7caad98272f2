"""A worker of the job that is attacked: a parameter server, or a trainer under BSP.

    training.py FOLDER network|local

Each step's batch follows from the trainer and the step alone. Trainers go on until there is a file
``FOLDER/last``, with the number of the last step, and write their rows to ``FOLDER/NAME.rows``.
Everybody writes its process and addresses to ``FOLDER/NAME.life``, trainers their step to
``FOLDER/NAME.step``, and whom they heard to be lost to ``FOLDER/NAME.lost``. ``network`` has all
traffic go by TCP and UDP, ``local`` by Unix sockets and shared memory where it can.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import rpc
from tensorwire import parameter_server as ps

SERVERS = ["ps:0", "ps:1", "ps:2"]
TRAINERS = ["trainer:0", "trainer:1"]
_IDS, _BATCH, _WIDTH = 1000, 100, 8
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RPC_INIT_METHOD", "TORCHELASTIC_RUN_ID")


def note(path: Path, text: str) -> None:
    """Writes a file that others may be reading: they see all of the text or none."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    draft.rename(path)


def train(folder: Path, me: str, pause: float = 0.0) -> Tensor:
    """Trains until it is told the last step; returns all rows.

    Args:
        folder: where it is told, and says how far it is.
        me: this trainer.
        pause: seconds between two steps.
    """
    cluster = ps.connect(SERVERS, backups=1, consistency=ps.BSP(), trainers=len(TRAINERS))
    table = cluster.table("items", _WIDTH, ps.Adam(lr=0.01), init=ps.Uniform(0.1, seed=3))
    cluster.join()
    last = folder / "last"
    while not (last.exists() and cluster.step >= int(last.read_text())):
        ids, grad = _batch(TRAINERS.index(me), cluster.step)
        table.push(ids, grad + table.pull(ids))
        note(folder / f"{me}.step", str(cluster.step))
        time.sleep(pause)
    cluster.finish()
    while cluster.stats()["trainers"]:
        time.sleep(0.02)
    return table.pull(torch.arange(_IDS))


def _batch(trainer: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * len(TRAINERS) + trainer)
    ids = torch.randint(0, _IDS, (_BATCH,), generator=generator)
    return ids, torch.randn(_BATCH, _WIDTH, generator=generator)


def main() -> None:
    """The worker."""
    torch.set_num_threads(1)
    options = rpc.TensorWireRpcBackendOptions(local_paths=sys.argv[2] == "local")
    rpc.init_rpc(rpc_backend_options=options)
    folder, me = Path(sys.argv[1]), rpc.get_worker_info().name
    about: dict[str, object] = {name: os.environ.get(name, "") for name in _VARIABLES}
    note(folder / f"{me}.life", json.dumps(about | {"pid": os.getpid()}))
    if me in SERVERS:
        ps.serve()
        return
    lost = folder / f"{me}.lost"

    def hear(event: rpc.MembershipEvent) -> None:
        if event.change is rpc.MembershipChange.LOST:
            with lost.open("a") as file:
                file.write(f"{event.worker.name}: {event.reason}\n")

    rpc.on_membership(hear)
    torch.save(train(folder, me, pause=0.02), folder / f"{me}.rows")
    rpc.shutdown()


if __name__ == "__main__":
    main()
