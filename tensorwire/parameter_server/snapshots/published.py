"""The content of published versions: bases, which have all rows, and deltas, which have changes.

A version's folder has a part of each shard, written and read as a snapshot's (``contents``), and
beside each its description. Of a delta, ids of rows that were evicted come first
(:meth:`Restored.gone`), then rows that have changed; dense parameters are there whole. A version
that is no restore point has rows without their state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from tensorwire.checkpoint import Checkpoint
from tensorwire.checkpoint.chain import ABOUT, Chain, Version, read_version, version_folders
from tensorwire.parameter_server.declarations.spec import Precision
from tensorwire.parameter_server.errors import SnapshotError
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.rows.index import Index
from tensorwire.parameter_server.snapshots.contents import (
    FORMAT,
    Restored,
    TablePart,
    columns_of,
    part_name,
)
from tensorwire.parameter_server.snapshots.quantised import SCALE, widened
from tensorwire.parameter_server.snapshots.saved import Saved, SavedTable, require, typed


def about_version(
    shards: Sequence[int],
    counts: Mapping[int, int],
    time: int,
    extra: object,
    samples: Mapping[str, object],
) -> dict[str, object]:
    """The plain data that is kept with a version.

    Args:
        shards: that wrote it.
        counts: by trainer, how many of its pushes are in it.
        time: pushes of the fastest trainer.
        extra: the user's own.
        samples: see ``contents.about_samples``.
    """
    return {
        "parameter_server": FORMAT,
        "shards": list(shards),
        "counts": [list(each) for each in sorted(counts.items())],
        "time": time,
        "extra": extra,
        **samples,
    }


def saved_at(folder: str | os.PathLike[str]) -> Restored:
    """A snapshot, a version, or the last version of a chain, whichever is in a folder.

    Args:
        folder: of a snapshot, of one version, or of a chain.

    Raises:
        CheckpointError: nothing is there, it is damaged, or of something else.
    """
    path = Path(folder).absolute()
    way = _way(path)
    if not way:
        return Restored.open(path)
    return Replayed([content_of(each.folder, each.about) for each in way])


def _way(path: Path) -> tuple[Version, ...]:
    """The versions that lead to one, or to the last of a chain; none if neither is there."""
    try:
        is_version, is_folder = (path / ABOUT).exists(), path.is_dir()
    except (OSError, ValueError):  # no name of a file can be like that
        return ()
    if is_version:
        return Chain.open(path.parent).route(to=read_version(path))
    return Chain.open(path).route() if is_folder and version_folders(path) else ()


def content_of(folder: Path, about: Mapping[str, object]) -> Restored:
    """The contents of one version, apart from those before it.

    Args:
        folder: of the version.
        about: what :func:`about_version` made.

    Raises:
        CheckpointError: it is damaged, or of something else.
    """
    if "parameter_server" not in about:
        raise SnapshotError(f"{str(folder)!r} is no version of a parameter server's state")
    shards = typed(about.get("shards"), list, "shards")
    require(bool(shards), "some shard has written it")
    names = [part_name(typed(each, int, "a shard")) for each in shards]
    return Restored(Checkpoint.of_parts(folder, names, about))


class Replayed(Restored):
    """A base with the deltas after it: as a snapshot of the last one's cut.

    Rows of ``Precision.INT8`` are float32 here.

    Args:
        versions: the contents of the base and of all deltas up to the last one, in order.

    Raises:
        CheckpointError: a delta has a table that is kept otherwise than in the versions before.
    """

    def __init__(self, versions: Sequence[Restored]) -> None:
        super().__init__(versions[-1].saved)
        self._versions = versions
        for version in versions[:-1]:
            for name, saved in version.described.items():
                self._require_alike(name, saved, version.folder)
        as_kept, self.described = self.described, {n: _wide(s) for n, s in self.described.items()}
        self.coarse = tuple(n for n, saved in as_kept.items() if saved is not self.described[n])

    def _require_alike(self, name: str, saved: object, folder: str) -> None:
        mine = self.described.get(name)
        if isinstance(mine, SavedTable) and isinstance(saved, SavedTable):
            same = columns_of(mine) == columns_of(saved)
            require(same, f"rows of {name!r} have the same columns in {folder} as in later ones")

    def verify(self) -> None:
        """Reads everything, and checks it; see :meth:`Restored.verify`."""
        for version in self._versions:
            version.verify()

    def pieces(self, name: str) -> Iterator[tuple[TablePart, dict[str, Tensor]]]:
        """The rows of a table, each from the last version that has it, unless it went later."""
        seen = Index(kernels())
        for version in reversed(self._versions):
            ids = []
            for about, columns in version.pieces(name):
                own = columns["ids"].numpy()
                ids.append(own)
                fresh = seen.find(own) < 0
                latest = {column: values[fresh] for column, values in columns.items()}
                if SCALE in latest:
                    latest["weight"] = widened(latest["weight"], latest.pop(SCALE))
                yield about, latest
            for each in (*ids, *version.gone(name)) if version is not self._versions[0] else ():
                seen.upsert(each)


def _wide(saved: Saved) -> Saved:
    if isinstance(saved, SavedTable) and saved.precision is Precision.INT8:
        return replace(saved, precision=Precision.FLOAT32)
    return saved
