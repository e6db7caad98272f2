"""A worker of a process group: averages gradients with the others until ``FOLDER/end`` is there.

ddp.py FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    is_over = torch.zeros(1)
    while not is_over:
        model(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
        weight = model.module.weight
        assert weight.grad is not None
        (folder / f"ddp:{dist.get_rank()}.{life}").write_text(
            f"{os.getpid()} {dist.get_world_size()} {weight.grad.item()}"
        )
        weight.grad = None
        is_over[0] = float((folder / "end").exists())
        dist.all_reduce(is_over)
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
