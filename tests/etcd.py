"""A real etcd cluster of three members on this machine, of which some are killed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.free_ports import free_port
from tests.waiting import until

ETCD = shutil.which("etcd")
SECONDS = 60.0


class EtcdCluster:
    """Three members, each in a process of its own.

    Args:
        folder: for their data.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = [(free_port(), free_port()) for _ in range(3)]
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def endpoint(self) -> str:
        return ",".join(f"127.0.0.1:{client}" for client, _ in self._ports)

    def start(self) -> None:
        peers = ",".join(f"m{n}=http://127.0.0.1:{peer}" for n, (_, peer) in enumerate(self._ports))
        for number, (client, peer) in enumerate(self._ports):
            here = f"http://127.0.0.1:{client}"
            command = [
                str(ETCD), "--name", f"m{number}", "--data-dir", str(self._folder / f"m{number}"),
                "--listen-client-urls", here, "--advertise-client-urls", here,
                "--listen-peer-urls", f"http://127.0.0.1:{peer}",
                "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
                "--initial-cluster", peers, "--heartbeat-interval", "300",
                "--election-timeout", "3000", "--unsafe-no-fsync",
            ]  # fmt: skip
            log = (self._folder / f"m{number}.log").open("wb")
            with log:
                self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        for client, _ in self._ports:
            until(lambda client=client: self._is_healthy(client), SECONDS, 0.1)

    @staticmethod
    def _is_healthy(port: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                return b"true" in answer.read()
        except OSError:
            return False

    def kill(self, number: int) -> None:
        """Kills one member."""
        self._processes[number].send_signal(signal.SIGKILL)
        self._processes[number].wait(SECONDS)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(SECONDS)


@contextlib.contextmanager
def etcd_cluster(folder: Path) -> Iterator[EtcdCluster]:
    made = EtcdCluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.close()
