"""``python -m tensorwire.checkpoint verify FOLDER``: reads everything, and says what is damaged."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tensorwire.checkpoint.errors import CheckpointError
from tensorwire.checkpoint.files import MANIFEST, Checkpoint
from tensorwire.checkpoint.placing import DRAFT


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns the process's exit status: 0 if everything is whole, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tensorwire.checkpoint")
    commands = parser.add_subparsers(required=True)
    verify = commands.add_parser(
        "verify", help="read checkpoints or snapshots, and compare all bytes with their checksums"
    )
    verify.add_argument("folder", nargs="+", help="a checkpoint, or a folder of checkpoints")
    folders = parser.parse_args(arguments).folder
    paths = [path for folder in folders for path in _checkpoints(Path(folder))]
    damaged = [path for path in paths if not _verify(path)]
    return 1 if damaged else 0


def _checkpoints(folder: Path) -> list[Path]:
    """The folder itself if it is a checkpoint, or has none in it; else those in it."""
    if os.path.lexists(folder / MANIFEST) or not folder.is_dir():
        return [folder]
    inside = [each for each in sorted(folder.iterdir()) if os.path.lexists(each / MANIFEST)]
    return [each for each in inside if DRAFT not in each.name] or [folder]


def _verify(path: Path) -> bool:
    try:
        saved = Checkpoint.open(path)
        saved.verify()
    except CheckpointError as error:
        print(f"{path}: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    parts = saved.parts.values()
    size = sum(sum(each.shards.values()) for each in parts)
    print(f"{path}: whole, {sum(len(each.tensors) for each in parts)} tensors, {size} bytes")
    return True


if __name__ == "__main__":
    sys.exit(main())
