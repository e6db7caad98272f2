"""A source for followers: fetches versions of a chain elsewhere into a folder of this machine.

A file that came in part is fetched on from there, also after a restart if the folder is kept. Files
are checked before a follower gets them.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from tensorwire.checkpoint.chain import (
    ABOUT,
    Kind,
    Version,
    folder_name,
    parsed,
    read_version,
    version_folders,
)
from tensorwire.checkpoint.errors import CheckpointError, DamagedCheckpointError
from tensorwire.checkpoint.locking import FileLock
from tensorwire.checkpoint.placing import DRAFT

_LOCK: Final = "reader.lock"
_SECONDS_AFTER_DAMAGE: Final = 10.0
"""Seconds for which a version that came damaged is not fetched again."""
_logger: Final = logging.getLogger("tensorwire")


class RemovedError(CheckpointError):
    """A version was removed where it is fetched from, as newer ones are there."""


class Remote(Protocol):
    """A chain that lies elsewhere."""

    def way(self, after: Version | None) -> list[bytes]:
        """The texts of ``version.json`` of the versions to apply; see :meth:`Chain.way`."""

    def read(self, version: Version, name: str, offset: int) -> Iterator[bytes]:
        """The bytes of a file of a version from an offset on, in pieces."""

    def interrupt(self) -> None:
        """Has what is under way end, from any thread."""

    def close(self) -> None:
        """Lets go of what it holds."""


@dataclass(frozen=True, slots=True)
class _Damage:
    """A version that came damaged, by its checksum, and the time until which it is not fetched."""

    checksum: str
    until: float
    error: CheckpointError


class Mirror:
    """A chain elsewhere as a source.

    Args:
        remote: the chain.
        cache: folder that keeps what is fetched, from the newest base on; made if it is not there.
            None for a temporary one, from which each version goes when it has been applied.

    Raises:
        BlockingIOError: another follower uses ``cache``.
    """

    def __init__(self, remote: Remote, cache: str | Path | None) -> None:
        self._remote = remote
        self._keeps = cache is not None
        if cache is None:
            self._folder = Path(tempfile.mkdtemp(prefix="tensorwire-follow-"))
            finish: Callable[[], None] = partial(shutil.rmtree, self._folder, ignore_errors=True)
        else:
            self._folder = Path(cache).absolute()
            self._folder.mkdir(parents=True, exist_ok=True)
            finish = _locked(self._folder).close
        self._finish = weakref.finalize(self, finish)
        self._damage: _Damage | None = None

    def __str__(self) -> str:
        return str(self._remote)

    def route(self, after: Version | None) -> Iterator[Version]:
        """See :class:`~tensorwire.checkpoint.following.Source`."""
        for text in self._remote.way(after):
            version = self._placed(text)
            try:
                self._fetch(version, text)
            except RemovedError as error:
                _logger.warning(
                    "version %d of %s is not followed, but the next base: %s",
                    version.number, self, error,
                )  # fmt: skip
                return
            yield version
            self._forget(version)

    def _placed(self, text: bytes) -> Version:
        told = parsed(text, Path(str(self._remote)))
        return replace(told, folder=self._folder / folder_name(told.number, told.kind))

    def _fetch(self, version: Version, text: bytes) -> None:
        if self._damage is not None and version.checksum == self._damage.checksum:
            if time.monotonic() < self._damage.until:
                raise self._damage.error
            self._damage = None
        try:
            if not self._has(version):
                self._fetch_files(version, text)
        except DamagedCheckpointError as error:
            until = time.monotonic() + _SECONDS_AFTER_DAMAGE
            self._damage = _Damage(version.checksum, until, error)
            raise

    def _has(self, version: Version) -> bool:
        """Says whether it was fetched earlier, and is whole; removes what is not."""
        if not version.folder.exists():
            return False
        try:
            if read_version(version.folder).checksum == version.checksum:
                version.verify()
                return True
        except CheckpointError:
            pass
        shutil.rmtree(version.folder)
        return False

    def _fetch_files(self, version: Version, text: bytes) -> None:
        mark = version.checksum.partition(":")[2]
        draft = version.folder.with_name(f"{version.folder.name}{DRAFT}{mark}")
        self._forget_drafts(draft)
        draft.mkdir(exist_ok=True)
        for name in version.files:
            self._fetch_file(version, name, draft / name)
        try:
            replace(version, folder=draft).verify()
        except DamagedCheckpointError:
            shutil.rmtree(draft)
            raise
        (draft / ABOUT).write_bytes(text)
        draft.rename(version.folder)

    def _fetch_file(self, version: Version, name: str, path: Path) -> None:
        size = version.files[name].bytes
        with open(path, "ab") as file:
            if file.tell() < size or not size:
                for piece in self._remote.read(version, name, file.tell()):
                    if file.tell() + len(piece) > size:
                        raise DamagedCheckpointError(f"{self}: {name} has more than {size} bytes")
                    file.write(piece)

    def _forget_drafts(self, but: Path) -> None:
        for each in self._folder.glob(f"*{DRAFT}*"):
            if each != but:
                shutil.rmtree(each, ignore_errors=True)

    def _forget(self, applied: Version) -> None:
        """Removes what is not needed any more."""
        for number, path in version_folders(self._folder):
            is_old = number < applied.number if self._keeps else True
            if is_old and (applied.kind is Kind.BASE or not self._keeps):
                shutil.rmtree(path, ignore_errors=True)

    def interrupt(self) -> None:
        """See :class:`~tensorwire.checkpoint.following.Source`."""
        self._remote.interrupt()

    def close(self) -> None:
        """Ends the connection; a temporary folder goes."""
        self._remote.close()
        self._finish()


def _locked(folder: Path) -> FileLock:
    refusal = f"another follower fetches versions into cache={str(folder)!r}; give each its own"
    return FileLock(folder / _LOCK, refusal)
