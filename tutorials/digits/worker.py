"""One process of the job: joins the group, does its part, leaves."""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
from job import SERVER, Settings, serve_and_drive, trainer_name, wait_until_over

import rpc


def run_rank(options: argparse.Namespace, rank: int, world_size: int) -> int:
    """Be the server (rank 0) or a trainer, and return the exit status."""
    torch.set_num_threads(1)  # several processes share this machine's cores
    name = SERVER if rank == 0 else trainer_name(rank)
    try:
        _join(options, name, rank, world_size)
        if rank == 0:
            _drive(options, trainers=world_size - 1)
        else:
            # Meanwhile this process serves calls, the one to `train` among them.
            rpc.rpc_sync(SERVER, wait_until_over, timeout=0)
        rpc.shutdown()
    except RuntimeError as error:
        return _give_up(name, error)
    return 0


def _join(options: argparse.Namespace, name: str, rank: int, world_size: int) -> None:
    backend = rpc.BackendType.__members__[options.backend]
    meeting = f"tcp://{options.master_addr}:{options.master_port}"
    rpc_options = rpc.backend_registry.construct_rpc_backend_options(
        backend, init_method=options.init_method or meeting
    )
    rpc.init_rpc(name, backend, rank, world_size, rpc_options)


def _drive(options: argparse.Namespace, trainers: int) -> None:
    settings = Settings(
        trainers, options.epochs, options.batch_size, options.learning_rate, options.seed
    )
    print(f"1 server, {trainers} trainers, backend {options.backend}", flush=True)
    started = time.monotonic()
    history, accuracy = serve_and_drive(settings)
    elapsed = time.monotonic() - started
    steps = sum(len(losses) for losses in history.losses.values())
    print(f"{steps} steps in {elapsed:.1f} s, {steps / elapsed:.0f} steps per second")
    print(f"final test accuracy: {accuracy:.1%}")
    from picture import draw  # only the server loads the plotting library

    draw(history, options.output)
    print(f"curves: {options.output}", flush=True)


def _give_up(name: str, error: RuntimeError) -> int:
    """Say why, and leave without waiting for anybody."""
    print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    # The group is broken: do not wait for it, and do not let a stuck thread hold us.
    os._exit(1)
