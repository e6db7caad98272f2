"""Writes a chain of versions: a draft for each, committed at once, and what nobody needs removed.

The owners of a version write their files into the draft, each forced to disk by its owner, and say
their sizes and checksums. The one :class:`ChainWriter` of the folder then commits: it writes
``version.json``, forces it and the folders to disk, and gives the draft the version's name. A
version is therefore there whole or not at all, whoever is killed and when.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tensorwire.checkpoint import placing
from tensorwire.checkpoint.chain import (
    ABOUT,
    Chain,
    Kind,
    Version,
    VersionFile,
    folder_name,
    parsed,
    require_file_name,
    text_of,
    version_folders,
)
from tensorwire.checkpoint.errors import CheckpointError, DamagedCheckpointError, MismatchError
from tensorwire.checkpoint.locking import FileLock
from tensorwire.checkpoint.placing import DRAFT
from tensorwire.checkpoint.shard_file import require_size

if TYPE_CHECKING:
    from typing_extensions import Self

_LOCK: Final = "writer.lock"
_logger: Final = logging.getLogger("tensorwire")


class ChainWriter:
    """The one writer of a chain, as long as it is open.

    Used as a context manager, it is closed at the end. Drafts that an earlier writer left behind
    are removed. May be used by one thread at a time.

    Args:
        folder: of the chain; made if it is not there. Owners on other machines write there, too,
            so it must be on a file system that all of them see under one path.
        keep_bases: as many of the newest bases stay, with all that follows the oldest of these;
            what is older is removed when a new base is committed. Default 2: somebody who is
            reading the base before the newest is not disturbed.

    Raises:
        BlockingIOError: another writer has the folder.
        MismatchError: versions of several chains are in the folder.
        ValueError: ``keep_bases`` is less than 1.
    """

    def __init__(self, folder: str | Path, keep_bases: int = 2) -> None:
        if keep_bases < 1:
            raise ValueError(f"keep_bases={keep_bases!r}: at least one base must stay")
        self.folder = Path(folder).absolute()
        self._keep_bases = keep_bases
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder)
        try:
            self._drafts: dict[int, Path] = {}
            self._number = self._clear()
            self._chain = Chain.open(self.folder)
            self._name = self._chain_name()
        except BaseException:
            self._lock.close()
            raise

    def _clear(self) -> int:
        """Removes drafts of writers that are gone; returns the highest number that was used."""
        highest = max((number for number, _ in version_folders(self.folder)), default=-1)
        for draft in self.folder.glob(f"*{DRAFT}*"):
            number = draft.name.partition(DRAFT)[0].partition(".")[0]
            highest = max(highest, int(number) if number.isdecimal() else -1)
            shutil.rmtree(draft, ignore_errors=True)
        return highest

    def _chain_name(self) -> str:
        names = {each.chain for each in self._chain.versions()}
        if len(names) > 1:
            raise MismatchError(
                f"{self.folder} holds versions of {len(names)} chains; move those of one away"
            )
        return names.pop() if names else uuid.uuid4().hex

    @property
    def needs_base(self) -> bool:
        """True if the next version must be a base: there is none before, or it is damaged."""
        try:
            return not self._chain.route()
        except CheckpointError:
            return True

    def say_what_goes_on(self) -> None:
        """Says in the log which version there is, if any, after which a base will follow."""
        version = self.latest()
        if version is not None:
            _logger.info(
                "the versions in %s go on after version %d, of step %d; the next one is a base",
                self.folder, version.number, version.step,
            )  # fmt: skip

    def latest(self) -> Version | None:
        """The version that was committed last and is whole as far as ``version.json`` says."""
        return self._chain.latest()

    def next_number(self) -> int:
        """A number for a new version, higher than all that were given before.

        A number whose version is never committed is missing from then on, which harms nobody.
        """
        self._number += 1
        return self._number

    def folder_of(self, number: int) -> Path:
        """The draft into which the owners of version ``number`` write their files."""
        if number not in self._drafts:
            draft = self.folder / f"{number:010}{DRAFT}{uuid.uuid4().hex[:12]}"
            draft.mkdir()
            self._drafts[number] = draft
        return self._drafts[number]

    def commit(
        self,
        number: int,
        kind: Kind,
        step: int,
        files: Mapping[str, VersionFile],
        about: Mapping[str, Any],
        at: float | None = None,
    ) -> Version:
        """Makes a draft the newest version, durably and at once.

        If it fails, the draft is removed and the chain is as it was.

        Args:
            number: of the draft, from :meth:`next_number`.
            kind: a base may always be committed, a delta only if not :attr:`needs_base`. A delta
                changes the version that was committed last.
            step: of the training, at least 0; may be lower than that of the version before.
            files: by name, what lies in the draft. Each must have been forced to disk, and be
                described by :meth:`VersionFile.of` where it was written.
            about: plain JSON data that is kept with the version.
            at: when it was cut, in seconds since 1970; default now.

        Raises:
            CheckpointError: a delta was given where a base is needed, or a newer version is there.
            DamagedCheckpointError: a file is not in the draft, or one that is not in ``files`` is.
            UnsavableValueError: ``about`` is not plain JSON data.
        """
        draft = self.folder_of(number)
        try:
            version = self._described(number, kind, step, files, about, at)
            _require_files(draft, files)
            _write(draft / ABOUT, text_of(version))
            placing.sync(draft)
            self._place(draft, version.folder)
        except BaseException:
            self.discard(number)
            raise
        del self._drafts[number]
        self._chain = self._chain.again()
        if kind is Kind.BASE:
            self._retain()
        return version

    def _described(
        self,
        number: int,
        kind: Kind,
        step: int,
        files: Mapping[str, VersionFile],
        about: Mapping[str, Any],
        at: float | None,
    ) -> Version:
        self._chain = self._chain.again()
        before = self._chain.latest()
        if before is not None and number <= before.number:
            raise CheckpointError(f"version {number} is not newer than version {before.number}")
        if kind is Kind.DELTA and self.needs_base:
            raise CheckpointError(
                f"{self.folder} needs a base: it has no whole version that a delta can change"
            )
        if step < 0:
            raise ValueError(f"step={step!r}: steps are counted from 0")
        version = Version(
            number,
            kind,
            step,
            float(time.time() if at is None else at),
            number if kind is Kind.BASE or before is None else before.base,
            before.number if before else None,
            self.folder / folder_name(number, kind),
            about,
            files,
            self._name,
            before.checksum if before else None,
            "",
        )
        return parsed(text_of(version).encode(), version.folder)

    def _place(self, draft: Path, folder: Path) -> None:
        draft.rename(folder)
        try:
            placing.sync(self.folder)
        except BaseException:
            folder.rename(draft)  # it may not outlive a power failure, so it was never there
            raise

    def discard(self, number: int) -> None:
        """Removes a draft with all that was written, if there is one."""
        draft = self._drafts.pop(number, None)
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)

    def _retain(self) -> None:
        bases = [each.number for each in self._chain.versions() if each.kind is Kind.BASE]
        oldest = bases[-self._keep_bases :][0]
        for number, path in version_folders(self.folder):
            if number < oldest:
                try:
                    placing.remove(path)
                except OSError as error:
                    _logger.warning("the old version %s cannot be removed: %s", path, error)
        self._chain = self._chain.again()

    def close(self) -> None:
        """Removes drafts that were not committed, and lets another writer have the folder."""
        for number in list(self._drafts):
            self.discard(number)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _locked(folder: Path) -> FileLock:
    refusal = (
        f"another process, or another part of this one, writes versions to {str(folder)!r}; "
        "a chain has one writer"
    )
    return FileLock(folder / _LOCK, refusal)


def _require_files(draft: Path, files: Mapping[str, VersionFile]) -> None:
    for name, each in files.items():
        require_file_name(name, str(draft))
        require_size(draft / name, each.bytes)
    others = {each.name for each in draft.iterdir()} - set(files) - {ABOUT}
    if others:
        raise DamagedCheckpointError(f"{draft} holds files that nobody named: {sorted(others)}")


def _write(path: Path, text: str) -> None:
    with open(path, "x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
