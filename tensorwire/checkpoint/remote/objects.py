"""Chains in object stores, through fsspec: copied there by a publisher, and read from there.

A version is there once its ``version.json`` is, which is written last and removed first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

from tensorwire.checkpoint.chain import (
    ABOUT,
    Chain,
    Version,
    folder_name,
    parsed,
    parsed_folder_name,
)
from tensorwire.checkpoint.errors import CheckpointError, NoCheckpointError
from tensorwire.checkpoint.remote.mirror import RemovedError

_PIECE: Final = 1 << 20
_logger: Final = logging.getLogger("tensorwire")


def _opened(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it.

    Raises:
        CheckpointError: fsspec is not installed, or cannot open it.
    """
    try:
        import fsspec
    except ImportError:
        raise CheckpointError(f"{url!r} needs fsspec: pip install 'tensorwire[objects]'") from None
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError, OSError) as error:
        raise CheckpointError(f"{url!r} cannot be opened: {error}") from None
    return filesystem, str(path).rstrip("/")


class StoredChain:
    """A chain in an object store, for one follower.

    Args:
        url: any that fsspec knows, such as ``s3://bucket/model``.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._files, self._root = _opened(url)
        self._texts: dict[str, bytes] = {}
        self._is_closed = False

    def __str__(self) -> str:
        return self._url

    def way(self, after: Version | None) -> list[bytes]:
        """See ``mirror.Remote``.

        Raises:
            CheckpointError: there is no way, or the store cannot be read.
        """
        texts: dict[str, bytes] = {}
        versions: list[Version] = []
        errors: dict[int, CheckpointError] = {}
        for name, number in _folders(self._files, self._root).items():
            try:
                text = self._text(name)
                versions.append(parsed(text, Path(name)))
                texts[name] = text  # others are read again: they may be under way
            except CheckpointError as error:
                errors[number] = error
        self._texts = texts
        chain = Chain(Path(self._url), tuple(versions), errors)
        way = chain.way(None if after is None else after.place)
        return [self._texts[folder_name(each.number, each.kind)] for each in way]

    def _text(self, name: str) -> bytes:
        known = self._texts.get(name)
        if known is not None:
            return known
        try:
            return bytes(self._files.cat_file(f"{self._root}/{name}/{ABOUT}"))
        except Exception as error:
            raise CheckpointError(f"{self._url}/{name}/{ABOUT} cannot be read: {error}") from None

    def read(self, version: Version, name: str, offset: int) -> Iterator[bytes]:
        """See ``mirror.Remote``.

        Raises:
            CheckpointError: the file is not there any more, or cannot be read.
        """
        path = f"{self._root}/{folder_name(version.number, version.kind)}/{name}"
        try:
            with self._files.open(path, "rb") as file:
                file.seek(offset)
                while not self._is_closed and (piece := file.read(_PIECE)):
                    yield piece
        except FileNotFoundError:
            raise RemovedError(f"{self._url} has no version {version.number} any more") from None
        except OSError as error:
            raise CheckpointError(f"{path} of {self._url} cannot be read: {error}") from None

    def interrupt(self) -> None:
        """See ``mirror.Remote``."""
        self._is_closed = True

    def close(self) -> None:
        """Does nothing: this holds nothing."""


def _folders(files: Any, root: str) -> dict[str, int]:
    """The numbers of the versions that are there, by the names of their folders, in order.

    Raises:
        CheckpointError: the store cannot be read.
        NoCheckpointError: nothing is there.
    """
    try:
        files.invalidate_cache()
        listed = files.find(root)
    except FileNotFoundError:
        raise NoCheckpointError(f"there is no {root!r}") from None
    except Exception as error:
        raise CheckpointError(f"{root!r} cannot be read: {type(error).__name__}: {error}") from None
    paths = [PurePosixPath(each) for each in listed]
    names = {path.parent.name for path in paths if path.name == ABOUT}
    numbers = {name: number for name in names if (number := parsed_folder_name(name)) is not None}
    return dict(sorted(numbers.items(), key=lambda each: each[1]))


class ChainCopier:
    """Copies the versions of a chain into an object store, the newest ones as they come.

    Args:
        folder: of the chain; may be made later.
        url: of a place for this chain alone, which nobody else writes to.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, folder: str | Path, url: str) -> None:
        self._folder = Path(folder).absolute()
        self._url = url
        self._files, self._root = _opened(url)
        self._chain: Chain | None = None

    def copy(self) -> int:
        """Copies what is not there yet, and removes what the folder does not have any more.

        Returns:
            How many versions were copied.

        Raises:
            CheckpointError: the folder cannot be read, or a version in it is damaged.
            OSError: the store cannot be written.
        """
        self._chain = Chain.open(self._folder) if self._chain is None else self._chain.again()
        try:
            there = _folders(self._files, self._root)
        except NoCheckpointError:
            there = {}
        versions = {folder_name(e.number, e.kind): e for e in self._chain.versions()}
        new = [name for name in versions if name not in there]
        for name in new:
            self._put(name, versions[name])
        for name in there:
            if name not in versions:
                self._remove(name)
        return len(new)

    def _put(self, name: str, version: Version) -> None:
        target = f"{self._root}/{name}"
        self._files.makedirs(target, exist_ok=True)
        for each in version.files:
            self._files.put_file(str(version.path(each)), f"{target}/{each}")
        self._files.put_file(str(version.folder / ABOUT), f"{target}/{ABOUT}")

    def _remove(self, name: str) -> None:
        target = f"{self._root}/{name}"
        self._files.rm_file(f"{target}/{ABOUT}")
        self._files.rm(target, recursive=True)
