"""A real etcd cluster of three members, on this machine or another of the test's, some killed."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.free_ports import free_port
from tests.machines import Machine
from tests.waiting import until

ETCD = shutil.which("etcd")
SECONDS = 60.0
_REQUEST = """
import sys, urllib.request
body = sys.argv[2].encode() or None
print(urllib.request.urlopen(sys.argv[1], body, 5).read().decode())
"""


class EtcdCluster:
    """Three members, each in a process of its own.

    Args:
        folder: for their data.
        machine: where they run. Default in the test's own network.
    """

    def __init__(self, folder: Path, machine: Machine | None = None) -> None:
        self._folder = folder
        self._host = "127.0.0.1" if machine is None else machine.address
        self._there = [] if machine is None else ["nsenter", f"--net=/proc/{machine.holder}/ns/net"]
        self._ports = [(free_port(), free_port()) for _ in range(3)]
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def endpoint(self) -> str:
        return ",".join(f"{self._host}:{client}" for client, _ in self._ports)

    def start(self) -> None:
        host = f"http://{self._host}"
        peers = ",".join(f"m{n}={host}:{peer}" for n, (_, peer) in enumerate(self._ports))
        for number, (client, peer) in enumerate(self._ports):
            command = [
                *self._there, str(ETCD), "--name", f"m{number}",
                "--data-dir", str(self._folder / f"m{number}"),
                "--listen-client-urls", f"{host}:{client}",
                "--advertise-client-urls", f"{host}:{client}",
                "--listen-peer-urls", f"{host}:{peer}",
                "--initial-advertise-peer-urls", f"{host}:{peer}",
                "--initial-cluster", peers, "--heartbeat-interval", "300",
                "--election-timeout", "3000", "--unsafe-no-fsync",
            ]  # fmt: skip
            log = (self._folder / f"m{number}.log").open("wb")
            with log:
                self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        for number in range(3):
            until(lambda number=number: "true" in self._ask(number, "health"), SECONDS, 0.1)

    def keys(self) -> int:
        """The number of keys of all jobs; -1 if no member answers."""
        question = json.dumps({"key": "Lw==", "range_end": "MA==", "count_only": True})
        for number in range(3):
            if answer := self._ask(number, "v3/kv/range", question):
                return int(json.loads(answer).get("count", 0))
        return -1

    def _ask(self, number: int, what: str, body: str = "") -> str:
        """The answer of a member; empty if there is none."""
        url = f"http://{self._host}:{self._ports[number][0]}/{what}"
        command = [*self._there, sys.executable, "-S", "-c", _REQUEST, url, body]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def kill(self, number: int) -> None:
        """Kills one member."""
        self._processes[number].send_signal(signal.SIGKILL)
        self._processes[number].wait(SECONDS)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(SECONDS)


@contextlib.contextmanager
def etcd_cluster(folder: Path, machine: Machine | None = None) -> Iterator[EtcdCluster]:
    made = EtcdCluster(folder, machine)
    try:
        made.start()
        yield made
    finally:
        made.close()
