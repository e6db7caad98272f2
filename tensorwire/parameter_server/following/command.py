"""The command line: prints and checks a chain of versions, and makes a snapshot of one."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tensorwire.checkpoint import Chain, CheckpointError, Draft, PartWriter, Version
from tensorwire.parameter_server.decisions.slots import SLOTS
from tensorwire.parameter_server.errors import SnapshotError
from tensorwire.parameter_server.snapshots.contents import FORMAT, Restored, part_name
from tensorwire.parameter_server.snapshots.published import Replayed, content_of
from tensorwire.parameter_server.snapshots.saved import SavedDense, SavedTable

_PROGRAM: Final = "python -m tensorwire.parameter_server.follow"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns the process's exit status: 0 if all is well, else 1."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Prints which versions of a model a folder has, and what they are.",
    )
    parser.add_argument("folder", type=Path, help="in which versions are published")
    parser.add_argument(
        "--check", action="store_true", help="read every version, and compare all bytes"
    )
    parser.add_argument(
        "--compact", type=Path, metavar="PATH", help="write a snapshot of the newest version"
    )
    options = parser.parse_args(arguments)
    try:
        chain = Chain.open(options.folder)
        is_well = _print(chain, options.check)
        if options.compact is not None:
            compact(chain, options.compact)
            print(f"{options.compact}: a snapshot of the newest version")
    except (CheckpointError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0 if is_well else 1


def _print(chain: Chain, check: bool) -> bool:
    """Prints a line for each version; False if something is wrong with one, or lacks."""
    errors: dict[int, Exception] = dict(chain.errors())
    for version in chain.versions():
        try:
            if check:
                version.verify()
                content_of(version.folder, version.about).verify()
        except CheckpointError as error:
            errors[version.number] = error
        print(_line(version))
    for number, fault in sorted(errors.items()):
        print(f"version {number}: {type(fault).__name__}: {fault}", file=sys.stderr)
    if not chain.versions():
        print(f"{chain.folder} has no version")
    way = chain.route()
    if way:
        print(f"to read version {way[-1].number}: {', '.join(str(each.number) for each in way)}")
    return not errors


def _line(version: Version) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(version.time))
    rows = ""
    if "parameter_server" in version.about:
        content = content_of(version.folder, version.about)
        tables = [n for n, each in content.described.items() if isinstance(each, SavedTable)]
        rows = "".join(f", {name}: {content.count(name)} rows" for name in sorted(tables))
    return (
        f"version {version.number}: {version.kind.value}, step {version.step}, {when} UTC, "
        f"{version.bytes} bytes{rows}"
    )


def compact(chain: Chain, path: Path) -> None:
    """Writes a snapshot of the newest version of a chain, as one shard.

    Args:
        chain: of a cluster's versions.
        path: of the snapshot; nothing may be there.

    Raises:
        CheckpointError: the chain has no version, or is damaged.
        FileExistsError: something is at ``path``.
    """
    way = chain.route()
    if not way:
        raise SnapshotError(f"{chain.folder} has no version")
    for version in way:
        version.verify()
    restored = Replayed([content_of(each.folder, each.about) for each in way])
    draft = Draft.create(path)
    try:
        with PartWriter(draft.folder, part_name(0)) as part:
            part.finish(_written(part, restored))
        counts = [list(each) for each in sorted(restored.counts.items())]
        about = {"parameter_server": FORMAT, "counts": counts, "time": restored.time}
        draft.commit([part_name(0)], about)
    except BaseException:
        draft.discard()
        raise


def _written(part: PartWriter, restored: Restored) -> dict[str, object]:
    """Writes all tables and dense parameters; returns what describes them."""
    tables: dict[str, object] = {}
    dense: dict[str, object] = {}
    for name, saved in restored.described.items():
        if isinstance(saved, SavedTable):
            tables[name] = _table(part, restored, name, saved)
        else:
            dense[name] = _dense(part, restored, name, saved)
    return {"shard": 0, "slots": [[0, SLOTS]], "tables": tables, "dense": dense}


def _table(part: PartWriter, restored: Restored, name: str, saved: SavedTable) -> dict[str, object]:
    count = 0
    for _, columns in restored.pieces(name):
        if len(columns["ids"]):
            for column, values in columns.items():
                part.add(f"table/{name}/{count}/{column}", values)
            count += 1
    waiting = list(restored.candidates(name))
    if waiting:
        candidates = torch.from_numpy(np.concatenate(waiting, axis=1))
        part.add(f"table/{name}/candidates", candidates)
    steps = max(each.tables[name].steps for each in restored.shards if name in each.tables)
    return {"about": saved.encode(), "pieces": count, "steps": steps}


def _dense(part: PartWriter, restored: Restored, name: str, saved: SavedDense) -> dict[str, object]:
    places = range(len(saved.pieces))
    plain: dict[str, dict[str, object]] = {}
    for place, piece in restored.dense_data(name, set(places)).items():
        part.add(f"dense/{name}/{place}/value", piece.value)
        for key, value in piece.state.items():
            if isinstance(value, Tensor):
                part.add(f"dense/{name}/{place}/state/{key}", value)
            else:
                plain.setdefault(str(place), {})[key] = value
    parts = [each.dense[name] for each in restored.shards if name in each.dense]
    return {
        "about": saved.encode(),
        "pieces": list(places),
        "plain": plain,
        "steps": max(each.steps for each in parts),
        "loaded": any(each.is_loaded for each in parts),
    }
