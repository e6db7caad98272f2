"""Tests and measures device tensors on one card, and writes one report: ``make gpu``.

Needs torch with CUDA and pytest, and installs nothing. Without a GPU it says so and ends well.
The measurements start two processes that share the card, ours beside torch's RPC.
"""

from __future__ import annotations

import argparse
import importlib
import json
import operator
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).parents[1]
_SECONDS_FOR_TESTS = 240
_SECONDS_FOR_ONE = 70
_KILOBYTE, _MEGABYTE, _GIGABYTE = 1 << 10, 1 << 20, 1 << 30
_COLUMNS = (("torch", "TENSORPIPE"), ("ours", "TENSORPIPE"), ("ours", "TENSORWIRE"))
_SECONDS_PER_ROW = 1.0


def main() -> int:
    """Tests, measures, writes the report; returns the exit status."""
    options = _parse()
    if options.member is not None:
        _member(options)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        return _finish(options.output, ["Skipped: torch sees no GPU."], 0)
    lines, status = [f"{_machine(options.device)}", ""], 0
    if not options.no_tests:
        status, told = _run_tests()
        lines += ["## Tests marked `cuda`", "", *told, ""]
    measured = [_measure(column, options) for column in _COLUMNS]
    return _finish(options.output, [*lines, *_table(measured)], status or _status_of(measured))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=_ROOT / "runs" / "gpu.md")
    parser.add_argument("--device", default="cuda", help="where tensors are (%(default)s)")
    parser.add_argument("--largest", type=int, default=_GIGABYTE, help="bytes (%(default)s)")
    parser.add_argument("--no-tests", action="store_true", help="only measure")
    parser.add_argument("--member", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--column", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _machine(device: str) -> str:
    card = torch.cuda.get_device_name(0) if device == "cuda" else "no GPU"
    return f"{card}, torch {torch.__version__}, Python {platform.python_version()}"


def _finish(output: Path, lines: list[str], status: int) -> int:
    text = "\n".join(["# Device tensors", "", *lines, ""])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
    print(text)
    return status


def _run_tests() -> tuple[int, list[str]]:
    files = sorted(
        str(path.relative_to(_ROOT))
        for path in (_ROOT / "tests").rglob("test_*.py")
        if "mark.cuda" in path.read_text()
    )
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", *files]
    try:
        done = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=_SECONDS_FOR_TESTS
        )
    except subprocess.TimeoutExpired:
        return 1, [f"The tests did not end within {_SECONDS_FOR_TESTS} s."]
    last = done.stdout.strip().splitlines()[-25:] + done.stderr.strip().splitlines()[-5:]
    return done.returncode, ["```", *last, "```"]


# --- Measuring


def _measure(column: tuple[str, str], options: argparse.Namespace) -> dict[str, float] | str:
    """Seconds by row; or why there are none."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.gpu", "--column", str(_COLUMNS.index(column))]
    command += ["--port", str(port), "--device", options.device, "--largest", str(options.largest)]
    members = [
        subprocess.Popen(
            [*command, "--member", str(rank)],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    deadline = time.monotonic() + _SECONDS_FOR_ONE
    try:
        out, told = members[0].communicate(timeout=_SECONDS_FOR_ONE)
        members[1].communicate(timeout=max(1.0, deadline - time.monotonic()))
        found: dict[str, float] = json.loads(out.splitlines()[-1])
    except (subprocess.TimeoutExpired, json.JSONDecodeError, IndexError) as error:
        for member in members:
            member.kill()
            member.communicate()
        told = "" if isinstance(error, subprocess.TimeoutExpired) else told
        return f"{type(error).__name__} {' '.join(told.split())[-300:]}"
    return found


def _member(options: argparse.Namespace) -> None:
    library, backend = _COLUMNS[options.column]
    names = ("torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.optim")
    if library == "ours":
        names = ("rpc", "autograd_dist", "optim_dist")
    rpc, autograd, optim = map(importlib.import_module, names)
    kinds = {"TENSORPIPE": "TensorPipeRpcBackendOptions"}
    kind = getattr(rpc, kinds.get(backend, "TensorWireRpcBackendOptions"))
    maps = {f"worker{1 - options.member}": {0: 0}} if options.device == "cuda" else {}
    chosen = kind(init_method=f"tcp://127.0.0.1:{options.port}", device_maps=maps)
    rpc.init_rpc(
        f"worker{options.member}",
        backend=getattr(rpc.BackendType, backend),
        rank=options.member,
        world_size=2,
        rpc_backend_options=chosen,
    )
    if options.member == 0:
        print(json.dumps(_rows(rpc, autograd, optim, options)))
    rpc.shutdown()


def _linear(rpc: Any, device: str) -> list[Any]:
    """A module, and its parameters, for the caller to refer to."""
    module = torch.nn.Linear(1024, 1024, device=device)
    return [rpc.RRef(module), *map(rpc.RRef, module.parameters())]


def _linear_of_torch(device: str) -> list[Any]:
    """Runs at the other worker."""
    return _linear(importlib.import_module("torch.distributed.rpc"), device)


def _linear_of_ours(device: str) -> list[Any]:
    """Runs at the other worker."""
    return _linear(importlib.import_module("rpc"), device)


def _rows(rpc: Any, autograd: Any, optim: Any, options: argparse.Namespace) -> dict[str, float]:
    found = {}
    sizes = {"1 KB": _KILOBYTE, "1 MB": _MEGABYTE, "64 MB": 64 * _MEGABYTE, "1 GB": _GIGABYTE}
    for name, size in sizes.items():
        if size <= options.largest:
            tensor = torch.ones(size // 4, device=options.device)
            call = partial(rpc.rpc_sync, "worker1", operator.pos, (tensor,))
            found[f"echo of {name}"] = _median(call, options)
            del tensor, call
    x = torch.ones(1024, device=options.device)
    found["remote + to_here of 4 KB"] = _median(
        lambda: rpc.remote("worker1", operator.pos, (x,)).to_here(), options
    )
    weight = torch.ones(1024, device=options.device, requires_grad=True)

    def forward_and_backward() -> None:
        with autograd.context() as context:
            loss = rpc.rpc_sync("worker1", operator.mul, (weight, x)).sum()
            autograd.backward(context, [loss])

    found["autograd forward + backward"] = _median(forward_and_backward, options)
    make = _linear_of_torch if rpc.__name__.startswith("torch") else _linear_of_ours
    module, *weights = rpc.rpc_sync("worker1", make, (options.device,))
    optimizer, batch = optim.DistributedOptimizer(torch.optim.SGD, weights, lr=1e-6), x.view(1, -1)

    def step() -> None:
        with autograd.context() as context:
            autograd.backward(context, [module.rpc_sync().forward(batch).sum()])
            optimizer.step(context)

    found["step of a 1024 x 1024 module"] = _median(step, options)
    return found


def _median(operation: Callable[[], object], options: argparse.Namespace) -> float:
    """Seconds of one operation, whose work on the device is over."""
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < 5 or (time.perf_counter() - began < _SECONDS_PER_ROW and len(taken) < 500):
        start = time.perf_counter()
        operation()
        if options.device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def _status_of(measured: list[dict[str, float] | str]) -> int:
    return int(any(isinstance(each, str) for each in measured[1:]))


def _table(measured: list[dict[str, float] | str]) -> list[str]:
    heads = [f"{library} {backend}" for library, backend in _COLUMNS]
    lines = ["## Medians in microseconds", "", f"| | {' | '.join(heads)} |", "|---" * 4 + "|"]
    rows = next((each for each in measured if not isinstance(each, str)), {})
    for row in rows:
        cells = [
            f"{each[row] * 1e6:,.0f}" if not isinstance(each, str) and row in each else "-"
            for each in measured
        ]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    failed = zip(heads, measured, strict=True)
    return [*lines, "", *(f"{head} failed: {m}" for head, m in failed if isinstance(m, str))]


if __name__ == "__main__":
    os.chdir(_ROOT)
    sys.exit(main())
