"""A worker that makes some steps and then stands still, in the way that its role says.

stalls.py FOLDER
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch

import rpc

lock = threading.Lock()


def step() -> None:
    """Counts at the worker that serves it."""
    rpc.progress()


def sleep_in_a_handler(folder: str) -> None:
    """Rests until the job's end is there."""
    while not (Path(folder) / "end").exists():
        time.sleep(0.2)


def take_the_lock(folder: str) -> None:
    """Waits for a lock that another thread keeps."""
    while not lock.acquire(timeout=0.2):
        if (Path(folder) / "end").exists():
            return
    lock.release()


def pass_on(around: list[str], folder: str) -> None:
    """Calls the next worker of a ring, which does the same."""
    if (Path(folder) / "end").exists():
        return
    rpc.rpc_sync(around[0], sleep_in_a_handler, args=(folder,), timeout=0)


class Fifo(torch.utils.data.Dataset[int]):
    """Reads from a FIFO that nobody writes, until the job's end."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        sleep_in_a_handler(self.folder)
        return index


def main(folder: str) -> None:
    rpc.init_rpc()
    name, role = rpc.get_worker_info().name, os.environ["ROLE_NAME"]
    ended = Path(folder) / "end"
    for _ in range(5):
        rpc.progress()
        time.sleep(0.5)
    if role == "sleeps":
        rpc.rpc_sync("serves:0", step)
        rpc.rpc_sync("serves:0", sleep_in_a_handler, args=(folder,), timeout=0)
    elif role == "locks":
        with lock:
            rpc.rpc_sync(name, take_the_lock, args=(folder,), timeout=0)
    elif role == "ring":
        number = int(os.environ["ROLE_RANK"])
        rpc.rpc_sync(f"ring:{(number + 1) % 3}", sleep_in_a_handler, args=(folder,), timeout=0)
    elif role == "loads":
        next(iter(torch.utils.data.DataLoader(Fifo(folder))))
    elif role == "evaluates":
        with rpc.slow_phase("evaluation"):
            sleep_in_a_handler(folder)
    elif role == "moves":
        while not ended.exists():
            rpc.progress()
            time.sleep(0.1)
    sleep_in_a_handler(folder)
    rpc.shutdown(graceful=False)


if __name__ == "__main__":
    main(sys.argv[1])
