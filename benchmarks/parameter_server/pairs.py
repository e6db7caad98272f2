"""One big table in this checkout and in an earlier one, in turn."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.parameter_server.ours import AHEAD

_HERE = Path(__file__).parents[2]
_MEDIAN = re.compile(r"(\d+\.\d) \(")


def compare(before: str, arguments: Sequence[str], pairs: int) -> str:
    """The time of a step in each checkout, and their ratio, which is above 1 if it is faster now.

    Args:
        before: folder of the earlier checkout; compared with itself if empty.
        arguments: of the benchmark, such as ``["--quick"]``.
        pairs: how often each is measured.
    """
    found = [
        (_milliseconds(Path(before or _HERE), arguments), _milliseconds(_HERE, arguments))
        for _ in range(pairs)
    ]
    ratio = statistics.median(old / new for old, new in found)
    lines = [f"before {old:.1f} ms, now {new:.1f} ms" for old, new in found]
    return "\n".join(["one big table, ours, ahead", *lines, f"before / now {ratio:.2f}"])


def _milliseconds(checkout: Path, arguments: Sequence[str]) -> float:
    """Of a step, in the better setting of threads."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.parameter_server", "tables", "--only", AHEAD,
         *arguments],
        cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)}, stdout=subprocess.PIPE,
        text=True, check=True,
    )  # fmt: skip
    return min(medians(done.stdout))


def medians(told: str) -> list[float]:
    """The medians that the benchmark has told of the program."""
    line = next(line for line in told.splitlines() if line.startswith(AHEAD))
    return [float(each) for each in _MEDIAN.findall(line)]
