"""Compares two ways that were measured in turn, round by round, in words and in a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from tutorials import pictures


def show_ratio(rates: Mapping[str, Sequence[float]], unit: str, path: Path) -> None:
    """Print how many times as fast the second way is, and draw both.

    Args:
        rates: of two ways, by name: what was measured in each round.
        unit: of the rates.
        path: of the picture to write.
    """
    single, batched = rates.values()
    ratios = [many / one for one, many in zip(single, batched, strict=True)]
    print(f"batching makes it {statistics.median(ratios):.2f} times as fast", flush=True)
    drawn = pictures.figure(6, 3.5)
    axes = drawn.subplots()
    for way, values in rates.items():
        axes.plot(range(1, len(values) + 1), values, "o-", label=way)
    axes.set(xlabel="round", ylabel=unit, ylim=(0, None))
    axes.legend()
    pictures.save(drawn, path)
