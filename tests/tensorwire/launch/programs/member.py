"""A worker of a group: a server that counts, or a trainer that has all servers count.

    member.py FOLDER [SERVER ...]

A trainer works until there is a file ``FOLDER/end``, and writes after each step how far it is to
``FOLDER/NAME.progress``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import rpc

SERVERS = sys.argv[2:] or ["ps:0", "ps:1"]


def process() -> int:
    return os.getpid()


def train(folder: Path) -> None:
    me, number = rpc.get_worker_info().name, rpc.get_worker_info().id
    incarnation = rpc.extend.life_of(me).incarnation
    steps, seen = 0, dict.fromkeys(SERVERS, 0)
    while not (folder / "end").exists():
        for server in SERVERS:
            try:
                seen[server] = rpc.rpc_sync(server, process, timeout=20)
            except rpc.RpcError as error:
                print(f"{me}: {error}", flush=True)
        steps += 1
        progress = {"pid": os.getpid(), "id": number, "incarnation": incarnation}
        progress |= {"steps": steps, "seen": seen}
        draft = folder / f"{me}.draft"
        draft.write_text(json.dumps(progress))
        draft.rename(folder / f"{me}.progress")
        time.sleep(0.05)
    rpc.shutdown()


def main() -> None:
    options = rpc.TensorWireRpcBackendOptions(liveness_timeout=8)
    rpc.init_rpc(rpc_backend_options=options)
    folder = Path(sys.argv[1])
    if os.environ["ROLE_NAME"] == "ps":
        rpc.serve()
    else:
        train(folder)


if __name__ == "__main__":
    main()
