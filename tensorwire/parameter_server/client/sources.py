"""Sources of samples, such as paths of files: told from each other, and from other trainers'."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Final

_PROTOCOL: Final = 4


def pickles_of(sources: Iterable[object]) -> list[bytes]:
    """The pickles of sources.

    Equal texts, numbers, paths, and tuples and lists of them have equal pickles in each process.

    Raises:
        TypeError: a source cannot be pickled.
    """
    pickles = []
    for place, source in enumerate(sources):
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, _PROTOCOL)
        pickler.fast = True  # which objects in it are one object makes no difference
        try:
            pickler.dump(source)
        except Exception as error:
            raise TypeError(
                f"samples: files[{place}]={source!r} cannot be pickled, as every source must: "
                f"{error}"
            ) from error
        pickles.append(buffer.getvalue())
    return pickles


def digest_of(pickles: Iterable[bytes]) -> str:
    """32 hexadecimal digits that tell lists of sources from each other, by their pickles."""
    digest = hashlib.sha256()
    for data in pickles:
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


def require_distinct(sources: Sequence[object], pickles: Sequence[bytes]) -> None:
    """Refuses sources of which one is there twice, two spellings of one path among them.

    Args:
        sources: as the program gave them.
        pickles: theirs.

    Raises:
        ValueError: one is there twice.
    """
    places: dict[object, int] = {}
    folder_of = cache(os.path.realpath)
    for place, (source, data) in enumerate(zip(sources, pickles, strict=True)):
        path = _path(source)
        key = data if path is None else _resolved(path, folder_of)
        before = places.setdefault(key, place)
        if before != place:
            raise ValueError(
                f"samples: files[{place}]={source!r} is files[{before}]={sources[before]!r} once "
                "more; give each source once, and epochs=2 to train all of them twice"
            )


def _path(source: object) -> str | None:
    """The path that a source is; None of another kind of source, an address among them."""
    path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    is_path = isinstance(path, str) and "://" not in path and "\0" not in path
    return path if is_path else None


def _resolved(path: str, folder_of: Callable[[str], str]) -> str:
    """The path without links and dots in its folder, which is looked up once for all its files."""
    folder, name = os.path.split(path)
    if name in ("", os.curdir, os.pardir):
        return folder_of(path)
    return os.path.join(folder_of(folder or os.curdir), name)
