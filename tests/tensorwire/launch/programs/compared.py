"""Writes what a worker begins with to ``FOLDER/NAME.json``, to be compared with another's.

compared.py FOLDER
"""

import gc
import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch

import rpc

_ROOT = str(Path(rpc.__file__).parents[1])
"""On the path of whoever is forked off a process of the tests."""


def _bits() -> str:
    """Of a sum whose order depends on the number of threads."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1_000_003, generator=generator).sum().numpy().tobytes().hex()


if __name__ == "__main__":
    found = {
        "arguments": sys.argv,
        "path": [sys.path[0], *sorted(set(sys.path[1:]) - {_ROOT})],
        "file": __file__,
        "is_main": sys.modules["__main__"].__dict__ is globals(),
        "threads": torch.get_num_threads(),
        "bits": _bits(),
        "environment": dict(os.environ),
        "signals_of_main": str(signal.getsignal(signal.SIGINT)),
        "is_unbuffered": sys.stdout.write_through,  # type: ignore[union-attr]
        "leads_its_group": os.getpgid(0) == os.getpid(),
        "has_cuda": torch.cuda.is_initialized(),
        "random": [torch.initial_seed(), float(np.random.rand()), random.random()],
        "rpc": rpc.__file__,
        "collects_garbage": (gc.isenabled(), gc.get_threshold()),
    }
    name = os.environ["RPC_WORKER_NAME"]
    Path(sys.argv[1], f"{name}.json").write_text(json.dumps(found))
