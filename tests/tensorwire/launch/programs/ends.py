"""A worker that serves, or that fails and takes its time to end.

ends.py FOLDER
"""

import os
import sys
import time
from pathlib import Path

import rpc


class Slow:
    """Is freed last of all, as much that was imported is, when the group misses this worker."""

    def __del__(self) -> None:
        time.sleep(7)


def note() -> None:
    Path(sys.argv[1], os.environ["RPC_WORKER_NAME"] + ".pid").write_text(str(os.getpid()))


if __name__ == "__main__":
    rpc.init_rpc()
    if os.environ["ROLE_NAME"] == "ps":
        note()
        rpc.serve()
    elif os.environ["ROLE_RANK"] == "1":
        rpc.rpc_sync("trainer:0", abs, (-1,))
        slow = Slow()
        raise ArithmeticError("trainer:1 cannot count")
    else:
        note()
        while not Path(sys.argv[1], "end").exists():
            time.sleep(0.02)
        rpc.shutdown()
