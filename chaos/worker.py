"""One worker of the job: the server, which keeps the parameters, or a trainer.

Trains for as long as it is let; when somebody is lost it goes on as soon as it can, and
when the others declare it lost it joins them again. Tells what happens on its output,
and takes orders on its input: ``cut`` or ``end``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch

import autograd_dist
import optim_dist
import rpc
from chaos.certificates import with_tls
from chaos.errands import Errands, held, tally
from chaos.events import Event, Vitals, What

SERVER = "server"
_WIDTH = 64
_BATCH = 512  # enough for shared memory where there is some
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LEAVE_SECONDS = 20.0
_QUIET_SECONDS = 30.0


class Models:
    """The models that the server keeps, one for each trainer: they do not wait for each other."""

    _lock = threading.Lock()
    _modules: ClassVar[dict[str, torch.nn.Module]] = {}

    @classmethod
    def get(cls, trainer: str) -> torch.nn.Module:
        with cls._lock:
            if trainer not in cls._modules:
                torch.manual_seed(0)
                cls._modules[trainer] = torch.nn.Sequential(
                    torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, 1)
                )
            return cls._modules[trainer]


def forward(trainer: str, inputs: torch.Tensor) -> torch.Tensor:
    """On the server."""
    result: torch.Tensor = Models.get(trainer)(inputs)
    return result


def parameters(trainer: str) -> list[rpc.RRef[torch.nn.Parameter]]:
    """On the server."""
    return [rpc.RRef(parameter) for parameter in Models.get(trainer).parameters()]


class Worker:
    """Runs the job in this process."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._name: str = arguments.name
        self._end = threading.Event()
        self._failed = threading.Event()
        self._tell_lock = threading.Lock()

    def run(self) -> None:
        for target in (self._take_orders, self._tell_vitals):
            threading.Thread(target=target, daemon=True).start()
        while not self._end.is_set():
            try:
                self._join()
                self._work()
                self._look_for_remains()
            except RuntimeError as error:
                self._tell_error(error)
            with contextlib.suppress(RuntimeError):
                rpc.shutdown(timeout=_LEAVE_SECONDS)
            self._end.wait(0.2)
        self._tell(What.LEFT)

    def _join(self) -> None:
        kind = {
            "TENSORPIPE": rpc.TensorPipeRpcBackendOptions,
            "TENSORWIRE": rpc.TensorWireRpcBackendOptions,
        }[self._arguments.backend]
        certificates = self._arguments.certificates
        options = kind(
            init_method=self._arguments.store,
            liveness_timeout=self._arguments.bound,
            rpc_timeout=60.0,
            bring_up_timeout=30.0,
            **({} if certificates is None else with_tls(self._name, certificates)),
        )
        tally.begin()
        rpc.init_rpc(self._name, rank=self._arguments.rank, rpc_backend_options=options)
        self._failed.clear()
        rpc.on_membership(self._member)
        self._tell(What.JOINED)
        self._meet()

    def _member(self, event: rpc.MembershipEvent) -> None:
        if event.change is rpc.MembershipChange.LOST:
            self._tell(What.LOST, event.worker.name, event.reason)
            if event.worker.name == self._name:
                self._failed.set()

    def _meet(self) -> None:
        """Calls everybody, so that from now on every connection that there may be is there."""
        for worker in rpc.workers():
            try:
                rpc.rpc_sync(worker, os.getpid, timeout=5)
            except RuntimeError as error:
                self._tell_error(error)

    def _work(self) -> None:
        if self._name == SERVER:
            while not (self._end.is_set() or self._failed.is_set()):
                self._end.wait(0.1)
            return
        errands = Errands(self._name, self._tell_wrong, self._tell_failed, self._arguments.rank)
        try:
            while not (self._end.is_set() or self._failed.is_set()):
                try:
                    self._train()
                except (RuntimeError, ValueError) as error:
                    self._tell_error(error)
                    self._end.wait(0.1)
        finally:
            errands.stop()

    def _look_for_remains(self) -> None:
        """Before leaving: nothing of what was called, shared or trained may still be here."""
        deadline = time.monotonic() + _QUIET_SECONDS
        while not self._failed.is_set() and (remains := held(rpc.debug_info())):
            gc.collect()
            if time.monotonic() > deadline:
                self._tell_wrong(f"still holds {remains}")
                break
            threading.Event().wait(0.05)
        if twice := tally.twice():
            self._tell_wrong(f"{twice} calls ran twice")

    def _train(self) -> None:
        owned = rpc.rpc_sync(SERVER, parameters, (self._name,), timeout=5)
        optimizer = optim_dist.DistributedOptimizer(torch.optim.SGD, owned, lr=0.01)
        inputs = torch.randn(_BATCH, _WIDTH)
        targets = inputs.sum(1, keepdim=True)
        while not (self._end.is_set() or self._failed.is_set()):
            with autograd_dist.context() as context:
                outputs = rpc.rpc_sync(SERVER, forward, (self._name, inputs))
                loss = torch.nn.functional.mse_loss(outputs, targets)
                autograd_dist.backward(context, [loss])
                optimizer.step(context)
            self._tell(What.STEP)
            self._end.wait(self._arguments.pause)

    def _tell_failed(self, error: Exception) -> None:
        self._tell_error(error, What.FAILED)

    def _tell_error(self, error: Exception, what: What = What.ERROR) -> None:
        lost = getattr(error, "name", "") if isinstance(error, rpc.WorkerLostError) else ""
        self._tell(what, str(lost or ""), f"{type(error).__name__}: {error}"[:300])

    def _tell_wrong(self, text: str) -> None:
        self._tell(What.WRONG, text=text[:2000])

    def _tell(
        self, what: What, name: str = "", text: str = "", vitals: Vitals | None = None
    ) -> None:
        event = Event(time.monotonic(), self._name, what, name, text, vitals)
        with self._tell_lock:
            sys.stdout.write(event.encode() + "\n")
            sys.stdout.flush()

    def _tell_vitals(self) -> None:
        while not self._end.wait(0.5):
            self._tell(What.VITALS, vitals=vitals())

    def _take_orders(self) -> None:
        for line in sys.stdin:
            if line.strip() == "cut":
                cut_off()
            else:
                break
        self._end.set()


def vitals() -> Vitals:
    """Returns the resources that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads = len(os.listdir("/proc/self/task"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    segments = sum("/memfd:" in line or "/dev/shm/" in line for line in maps)
    return Vitals(pages * _PAGE, threads, len(os.listdir("/proc/self/fd")), segments)


def cut_off() -> None:
    """Breaks off every connection of this process."""
    for connection in _connections():
        with contextlib.suppress(OSError):
            connection.getpeername()  # not one that listens
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def _connections() -> Iterator[socket.socket]:
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                yield socket.socket(fileno=os.dup(int(number)))
        except OSError:
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store", required=True, help="where the workers meet, a URL")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--bound", type=float, required=True, help="the liveness timeout")
    parser.add_argument("--certificates", type=Path, help="folder with this worker's, for TLS")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two steps")
    torch.set_num_threads(1)
    Worker(parser.parse_args()).run()


if __name__ == "__main__":
    main()
