"""The shared part of the tutorials' pictures. Draws into files and needs no screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(width: float, height: float) -> Figure:
    """Return an empty figure of that many inches."""
    from matplotlib.figure import Figure  # only the worker that draws loads it

    return Figure(figsize=(width, height), layout="constrained")


def save(drawn: Figure, path: Path) -> None:
    """Write the figure as a PNG picture and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=110)
    print(f"picture: {path}", flush=True)
