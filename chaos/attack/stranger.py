"""The attacker's process: another user, if root starts it, who does all means at once until killed.

It reads lines of JSON that say where the job is, and writes lines that say how often it has done
what.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable

from chaos.attack.means import MEANS, Scene
from chaos.attack.surroundings import Doors

_NOBODY = 65534
_PAUSE = 0.01
"""Seconds between two attempts by one means: the job is to go on, on a machine of few cores."""


def told(scene: Scene, line: str) -> None:
    """Takes a line that says where the job is."""
    says = json.loads(line)
    doors = says["doors"]
    scene.doors = Doors(tuple(doors["tcp"]), tuple(doors["udp"]), tuple(doors["unix"]))
    scene.stores, scene.run_id = tuple(says["stores"]), says["run_id"]
    if "conversations" in says:
        scene.conversations = {
            int(port): [[base64.b64decode(piece) for piece in pieces] for pieces in heard]
            for port, heard in says["conversations"].items()
        }
        scene.datagrams = [base64.b64decode(each) for each in says["datagrams"]]


def again_and_again(scene: Scene, do: Callable[[Scene], None]) -> None:
    """Does one thing until the process ends."""
    while True:
        with contextlib.suppress(OSError):
            do(scene)
        time.sleep(_PAUSE)


def main() -> None:
    """Attacks."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    "localhost".encode("idna")  # loads what another user may not be able to read
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    seed = int(sys.argv[1])
    scene = Scene(random.Random(seed))
    told(scene, sys.stdin.readline())
    for make in MEANS.values():
        threading.Thread(target=again_and_again, args=(scene, make()), daemon=True).start()
    for line in sys.stdin:
        told(scene, line)
        with scene.lock:
            counts = json.dumps(scene.counts)
        sys.stdout.write(counts + "\n")
        sys.stdout.flush()
    os._exit(0)  # its threads may wait for ever


if __name__ == "__main__":
    main()
