"""A worker that makes steps and then stands still, in the way that its role says.

stalls.py FOLDER
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import rpc
from tensorwire import parameter_server as ps

FOLDER = Path(sys.argv[-1])
lock = threading.Lock()


def ended() -> bool:
    """True once the test is over."""
    return (FOLDER / "end").exists()


def wait_for(name: str) -> None:
    """Waits until the test has made a file."""
    while not (FOLDER / name).exists():
        time.sleep(0.1)


def rest() -> None:
    """Rests until the test is over."""
    wait_for("end")


def step() -> None:
    """Counts at the worker that serves it."""
    rpc.progress()


def sleep_in_a_handler() -> None:
    rest()


def take_the_lock() -> None:
    """Waits for a lock that another thread keeps."""
    while not lock.acquire(timeout=0.2):
        if ended():
            return
    lock.release()


class Fifo(torch.utils.data.Dataset[int]):
    """Reads from a FIFO that nobody writes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return len((FOLDER / "fifo").read_bytes())


class Slow:
    """Takes long to be collected."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        rest()


# --- the roles


def sleeps() -> None:
    rpc.rpc_sync("serves:0", step)
    rpc.rpc_sync("serves:0", sleep_in_a_handler, timeout=0)


def locks() -> None:
    with lock:
        rpc.rpc_sync(rpc.get_worker_info(), take_the_lock, timeout=0)


def ring() -> None:
    following = (int(os.environ["ROLE_RANK"]) + 1) % 3
    rpc.rpc_sync(f"ring:{following}", sleep_in_a_handler, timeout=0)


def loads() -> None:
    next(iter(torch.utils.data.DataLoader(Fifo())))


def collects() -> None:
    Slow()
    gc.collect()


def holds() -> None:
    """Is in C, and keeps the interpreter's lock, until a signal comes."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    ctypes.PyDLL(None).pause()


def hangs() -> None:
    """Waits in the kernel, in state D, as a parent does whose child has not executed anything."""
    number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    if ctypes.PyDLL(None).syscall(number, 0x4000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        rest()
        os._exit(0)


def stops() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGSTOP)


def ranks() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        rest()
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()


def servers() -> None:
    ps.serve()


def trainers() -> None:
    """Both push once, and one of them nothing after that, without a word."""
    cluster = ps.connect(["servers:0"], trainers=2)
    table = cluster.table("words", dim=2, optimizer=ps.SGD(lr=0.1))
    ids, gradient = torch.tensor([1]), torch.ones(1, 2)
    table.push(ids, gradient)
    if os.environ["ROLE_RANK"] == "1":
        rest()
    else:
        table.push(ids, gradient)
        table.pull(ids)
    cluster.finish()


def evaluates() -> None:
    with rpc.slow_phase("evaluation"):
        rest()


def moves() -> None:
    while not ended():
        rpc.progress()
        time.sleep(0.1)


ROLES: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        sleeps, locks, ring, loads, collects, holds, hangs, stops, ranks, servers, trainers,
        evaluates, moves,
    )
}  # fmt: skip
_COUNT_NOTHING = ("first", "servers")


def main() -> None:
    role = os.environ["ROLE_NAME"]
    rpc.init_rpc()
    if role not in _COUNT_NOTHING:
        rpc.progress()
    with rpc.slow_phase("start"):
        wait_for("go")
    ROLES.get(role, rest)()
    rest()
    rpc.shutdown(graceful=False)


if __name__ == "__main__":
    main()
