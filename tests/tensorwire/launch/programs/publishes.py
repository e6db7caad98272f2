"""A trainer of parameter servers that publishes a version after each step.

    publishes.py FOLDER

Each step adds 1 to every row. The versions are in ``FOLDER/chain``, the process id of the trainer's
present life in ``FOLDER/trainer``. It ends once there is a file ``FOLDER/end``.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch

import rpc
from tensorwire import parameter_server as ps


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    folder = Path(sys.argv[1])
    rpc.init_rpc(backend=rpc.BackendType.TENSORWIRE)
    cluster = ps.connect(["ps:0", "ps:1"])
    table = cluster.table("counts", 2, ps.SGD(lr=1.0))
    ids, down = torch.arange(100), -torch.ones(100, 2)
    cluster.join()
    publishing = cluster.publish(folder / "chain", ps.Steps(1))
    draft = folder / "trainer.new"
    draft.write_text(str(os.getpid()))
    draft.rename(folder / "trainer")
    while not (folder / "end").exists():
        table.push(ids, down)
        publishing.wait()
    cluster.finish()
    rpc.shutdown()


if __name__ == "__main__":
    main()
