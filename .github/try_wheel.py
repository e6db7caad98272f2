"""Lets two workers of the installed wheel make calls and take a step of autograd.

Run outside the source folder, with ``compiled`` or ``pure``, which the wheel must be.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile

import torch

import autograd_dist
import rpc


def work(rank: int, meet: str) -> None:
    """Runs one of both workers, which meet at that address."""
    options = rpc.TensorWireRpcBackendOptions(init_method=meet, rpc_timeout=120)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        ask()
    rpc.shutdown()


def ask() -> None:
    """Makes the calls, and looks at what comes of them."""
    weights = torch.ones(3, requires_grad=True)
    assert rpc.rpc_sync("worker1", max, args=(2, 3)) == 3
    assert rpc.remote("worker1", torch.add, args=(weights, 1)).to_here().tolist() == [2, 2, 2]
    with autograd_dist.context() as context:
        loss = rpc.rpc_sync("worker1", torch.mul, args=(weights, 5)).sum()
        autograd_dist.backward(context, [loss])
        assert autograd_dist.get_gradients(context)[weights].tolist() == [5, 5, 5]


def main(wanted: str) -> None:
    """Starts the workers, and waits for them."""
    told = subprocess.run(
        [sys.executable, "-m", "tensorwire", "--json"], stdout=subprocess.PIPE, check=True
    )
    facts = json.loads(told.stdout)
    assert ("compiled" if facts["compiled"] else "pure") == wanted, facts
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        workers = [
            context.Process(target=work, args=(rank, f"file://{folder}/meet")) for rank in (0, 1)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    print(f"{wanted}: Python {facts['python']}, torch {facts['torch']} made its calls")


if __name__ == "__main__":
    main(sys.argv[1])
