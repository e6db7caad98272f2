"""A worker without torch, which starts at once: says who it is, and does what it is told.

    light.py FOLDER [WORKER=ACTION ...]

It adds a line with its environment to ``FOLDER/journal``, and at its end writes the time to
``FOLDER/NAME#LIFE.ended``. ``WORKER`` is a name, with ``#2`` for
its second life only, or a role; the actions:

    wait     until there is a file ``FOLDER/end``, as all do that are told nothing
    done     end well, at once
    go       end well, as soon as there is a file ``FOLDER/go``
    fail     end with exit code 3
    raise    end with an exception
    torn     be killed while the error file is written
    vanish   end with exit code 0, and nothing that Python does at an end
    deaf     wait, and ignore SIGTERM and SIGUSR1
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    folder, told = Path(sys.argv[1]), dict(each.split("=") for each in sys.argv[2:])
    role, life = os.environ["ROLE_NAME"], int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    name = os.environ.get("RPC_WORKER_NAME", f"{role}:{os.environ['ROLE_RANK']}")
    action = told.get(f"{name}#{life}") or told.get(name) or told.get(role, "wait")
    if action == "deaf":
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    print(f"{name} speaks, life {life}", flush=True)
    print(f"{name} complains", file=sys.stderr, flush=True)
    note(folder, name, life)
    if action == "fail":
        sys.exit(3)
    if action == "torn":
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text('{"message": ')
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "vanish":
        os._exit(0)
    if action == "raise":
        raise ArithmeticError(f"{name} cannot count")
    awaited = folder / ("go" if action == "go" else "end")
    while action != "done" and not awaited.exists():
        time.sleep(0.02)
    (folder / f"{name}#{life}.ended").write_text(str(time.time()))


def note(folder: Path, name: str, life: int) -> None:
    line = {"name": name, "life": life, "pid": os.getpid(), "at": time.time()}
    began = {"environment": dict(os.environ), "is_warm": "torch._dynamo" in sys.modules}
    text = json.dumps(line | began) + "\n"
    journal = os.open(folder / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(journal, text.encode())  # at once, as this process may be killed at any time


if __name__ == "__main__":
    main()
