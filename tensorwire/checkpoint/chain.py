"""A chain of versions on disk: bases, which are whole, and deltas, which change the version before.

A chain is a folder with a folder for each version: ``0000000012.base``, ``0000000013.delta``. In
each lie the files that the owners wrote and ``version.json``, which names the files with their
sizes and checksums, the chain, and the version before with the checksum of *its* ``version.json``.
A reader can therefore tell a gap, a damaged file and a version of another chain from what it needs.

A base may name a version before it, but needs none: it replaces everything. A delta is applied to
exactly the version that it names. Numbers only rise; a number may be missing, if its version was
given up. :mod:`~tensorwire.checkpoint.chain_writer` writes chains. No content is known here.
"""

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tensorwire.checkpoint import bounded
from tensorwire.checkpoint.checksums import Checksum, checksum_of
from tensorwire.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MismatchError,
    NoCheckpointError,
)
from tensorwire.checkpoint.manifest import count, dumped, require, typed, unsealed
from tensorwire.checkpoint.placing import DRAFT
from tensorwire.checkpoint.shard_file import require_size

FORMAT: Final = "tensorwire-chain"
RELEASE: Final = 1
ABOUT: Final = "version.json"
"""The file of a version that says what the version is."""

_FILE: Final = re.compile(r"[A-Za-z0-9_~%-][A-Za-z0-9_.~%-]{0,239}")
_CHAIN: Final = re.compile(r"[0-9a-f]{32}")
_FOLDER: Final = re.compile(r"([0-9]{10,18})\.(base|delta)")
_CHUNK: Final = 1 << 20
_Stamp = tuple[int, int] | None


class Kind(enum.Enum):
    """The two kinds of versions."""

    BASE = "base"
    """Whole: what a version holds does not depend on those before."""
    DELTA = "delta"
    """The changes since the version that it names as the previous one."""


@dataclass(frozen=True, slots=True)
class VersionFile:
    """One file of a version.

    Args:
        bytes: its size.
        checksum: of all its bytes, as ``tensorwire.checkpoint.checksums`` writes them.
    """

    bytes: int
    checksum: str

    @classmethod
    def of(cls, path: str | Path) -> VersionFile:
        """Reads a finished file; its owner calls this where the file was written.

        Raises:
            DamagedCheckpointError: it is not there, cannot be read, or is no regular file.
        """
        with bounded.opened(Path(path)) as (descriptor, size):
            return cls(size, _checksum(descriptor, size))


@dataclass(frozen=True, slots=True)
class Place:
    """A version as somebody names it who has applied it.

    Args:
        number: its number.
        chain: that it is of.
        checksum: of its ``version.json``.
    """

    number: int
    chain: str
    checksum: str


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a chain, as its ``version.json`` says.

    Args:
        number: rises from version to version.
        kind: base or delta.
        step: of the training; falls where training went back.
        time: at which it was cut, in seconds since 1970.
        base: number of the base from which it is reached; its own if it is one.
        previous: number of the version before; None for the first one.
        folder: where its files lie.
        about: plain JSON data of the writer.
        files: by name.
        chain: names the chain, 32 hexadecimal digits.
        previous_checksum: of the ``version.json`` of the version before; None for the first.
        checksum: of this version's ``version.json``.
    """

    number: int
    kind: Kind
    step: int
    time: float
    base: int
    previous: int | None
    folder: Path
    about: Mapping[str, Any]
    files: Mapping[str, VersionFile]
    chain: str
    previous_checksum: str | None
    checksum: str = field(repr=False)

    @property
    def bytes(self) -> int:
        """The bytes of its files."""
        return sum(each.bytes for each in self.files.values())

    def path(self, name: str) -> Path:
        """Checks one file, and returns where it is. All of it is read.

        Raises:
            DamagedCheckpointError: it is missing, or not as it was written.
            KeyError: the version has no file of that name.
        """
        expected, path = self.files[name], self.folder / name
        require_size(path, expected.bytes)
        with bounded.opened(path) as (descriptor, size):
            checksum = _checksum(descriptor, size, expected.checksum.partition(":")[0])
        if checksum != expected.checksum:
            raise DamagedCheckpointError(
                f"{path} is damaged: its checksum is {checksum}, not {expected.checksum}"
            )
        return path

    def verify(self) -> None:
        """Reads all files, and checks that they are as they were written.

        Raises:
            DamagedCheckpointError: one is not, the first that was found.
        """
        for name in self.files:
            self.path(name)

    @property
    def place(self) -> Place:
        """Names it among all versions."""
        return Place(self.number, self.chain, self.checksum)

    def follows(self, other: Version | Place) -> bool:
        """Says whether ``other`` is the version before, exactly as it was then."""
        return (
            self.chain == other.chain
            and self.previous == other.number
            and self.previous_checksum == other.checksum
        )


class Chain:
    """The versions that a folder holds, as they were when it was read.

    Made by :meth:`open`. Files are looked at when they are needed, see :meth:`Version.path`.
    """

    def __init__(
        self, folder: Path, versions: tuple[Version, ...], errors: Mapping[int, CheckpointError]
    ) -> None:
        self.folder = folder
        self._versions = versions
        self._errors = errors
        self._by_number = {each.number: each for each in versions}
        self._stamps: Mapping[int, _Stamp] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Chain:
        """Reads which versions there are.

        Args:
            folder: of the chain. One without versions is a chain that has none yet.

        Raises:
            CheckpointError: the folder cannot be read.
            NoCheckpointError: there is no such folder.
        """
        return cls._read(Path(folder).absolute(), {}, {})

    def again(self) -> Chain:
        """Reads the folder again, and of versions only those that are new since.

        Raises:
            CheckpointError: the folder cannot be read.
            NoCheckpointError: it is gone.
        """
        return self._read(self.folder, self._by_number, self._stamps)

    @classmethod
    def _read(
        cls, folder: Path, known: Mapping[int, Version], stamps: Mapping[int, _Stamp]
    ) -> Chain:
        versions: list[Version] = []
        errors: dict[int, CheckpointError] = {}
        now: dict[int, _Stamp] = {}
        for number, path in version_folders(folder):
            try:
                version, now[number] = known.get(number), _stamp(path / ABOUT)
                if version is None or version.folder != path or now[number] != stamps[number]:
                    version = read_version(path)
                if number in errors or (versions and versions[-1].number == number):
                    raise DamagedCheckpointError(f"{folder} has two versions {number}")
                versions.append(version)
            except CheckpointError as error:
                if path.exists():  # not removed a moment ago
                    errors[number] = error
        versions = [each for each in versions if each.number not in errors]
        made = cls(folder, tuple(versions), errors)
        made._stamps = now
        return made

    def versions(self) -> tuple[Version, ...]:
        """Those whose ``version.json`` is whole, the oldest first."""
        return self._versions

    def errors(self) -> Mapping[int, CheckpointError]:
        """By number, what is wrong with versions that are left out of :meth:`versions`."""
        return MappingProxyType(self._errors)

    def latest(self) -> Version | None:
        """The one with the highest number; None if there is none."""
        return self._versions[-1] if self._versions else None

    def route(self, after: Version | None = None, to: Version | None = None) -> tuple[Version, ...]:
        """The versions to apply, in order.

        Args:
            after: what one has; None for nothing. If that leads on to ``to``, only the deltas
                since are in the answer. Otherwise the answer begins with a base.
            to: where to get; default the newest version that the folder has, damaged or not.

        Returns:
            Nothing if one is there already or the chain has no version yet.

        Raises:
            DamagedCheckpointError: a version on the way is missing or damaged.
            MismatchError: a version on the way, or ``after``, is of another chain.
        """
        way = self.way(None if after is None else after.place, to)
        for version in way:
            for name, each in version.files.items():
                require_size(version.folder / name, each.bytes)
        return way

    def way(self, after: Place | None = None, to: Version | None = None) -> tuple[Version, ...]:
        """The versions to apply, as :meth:`route` gives them, but without a look at their files.

        Args:
            after: names what one has; None for nothing.
            to: where to get; default the newest version.

        Returns:
            The versions to apply, in order.

        Raises:
            DamagedCheckpointError: a version on the way is missing.
            MismatchError: a version on the way, or ``after``, is of another chain.
        """
        target = to or self._newest()
        if target is None or (after is not None and after.checksum == target.checksum):
            return ()
        if after is not None:
            self._require_same(after, target)
        way = [target]
        while way[0].kind is Kind.DELTA and not (after is not None and way[0].follows(after)):
            way.insert(0, self._before(way[0]))
        return tuple(way)

    def _newest(self) -> Version | None:
        latest = self.latest()
        newest_error = max(self._errors, default=-1)
        if newest_error > (latest.number if latest else -1):
            raise self._errors[newest_error]
        return latest

    def _require_same(self, after: Place, target: Version) -> None:
        if after.chain != target.chain:
            raise MismatchError(
                f"{self.folder} holds another chain ({target.chain}) than the one that version "
                f"{after.number} is of ({after.chain}): begin anew to follow it"
            )
        if target.number <= after.number:
            raise MismatchError(
                f"{self.folder} has version {target.number}, which is not newer than version "
                f"{after.number} that was taken from it: an older copy was put in its place"
            )

    def _before(self, version: Version) -> Version:
        """The version to which a delta is to be applied."""
        assert version.previous is not None
        previous = self._by_number.get(version.previous)
        if previous is None:
            damage = self._errors.get(version.previous)
            raise DamagedCheckpointError(
                f"{version.folder} changes version {version.previous}, which "
                + (f"is damaged: {damage}" if damage else f"{self.folder} does not have")
            )
        if previous.chain != version.chain:
            raise MismatchError(f"{previous.folder} and {version.folder} are of different chains")
        if not version.follows(previous) or previous.base != version.base:
            raise DamagedCheckpointError(
                f"{previous.folder} is not the version that {version.folder} changes: it has been "
                "put in its place"
            )
        return previous


def _stamp(path: Path) -> _Stamp:
    """Tells a file from another one that was put in its place."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def version_folders(folder: Path) -> list[tuple[int, Path]]:
    """The folders of versions with their numbers, in order; drafts and others are left out.

    Raises:
        CheckpointError: the folder cannot be read.
        NoCheckpointError: there is no such folder.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise NoCheckpointError(f"there is no folder {str(folder)!r}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(folder)!r} cannot be read: {error}") from None
    numbered = [(parsed_folder_name(name), folder / name) for name in names]
    return sorted((number, path) for number, path in numbered if number is not None)


def parsed_folder_name(name: str) -> int | None:
    """The number of the version whose folder has this name; None if it is no version's."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def folder_name(number: int, kind: Kind) -> str:
    """The name of a version's folder."""
    return f"{number:010}.{kind.value}"


def read_version(folder: Path) -> Version:
    """Reads what a version's folder says that it is.

    Raises:
        DamagedCheckpointError: it says nothing, or what cannot be.
    """
    path = folder / ABOUT
    text = bounded.read(path, bounded.MANIFEST_BYTES)
    version = parsed(text, folder)
    if folder.name != folder_name(version.number, version.kind):
        raise DamagedCheckpointError(
            f"{path} is of {folder_name(version.number, version.kind)}, not of {folder.name}"
        )
    return version


def parsed(text: bytes, folder: Path) -> Version:
    """The version that the text of a ``version.json`` describes.

    Args:
        text: of the file.
        folder: where the version's files lie; named in errors.

    Raises:
        DamagedCheckpointError: the text is none of a version.
    """
    where = str(folder / ABOUT)
    document = unsealed(text, where, FORMAT, RELEASE)

    def number(name: str) -> int:
        return count(document.get(name), name, where)

    kind = typed(document.get("kind"), str, "kind", where)
    require(kind in {each.value for each in Kind}, f"there is no kind {kind[:40]!r}", where)
    chain = typed(document.get("chain"), str, "chain", where)
    require(bool(_CHAIN.fullmatch(chain)), "the chain's name is not one", where)
    time = typed(document.get("time"), float, "time", where)
    require(math.isfinite(time), "time is not a number", where)
    previous = None if document.get("previous") is None else number("previous")
    before = document.get("previous_checksum")
    if previous is not None:
        typed(before, str, "previous_checksum", where)
    version = Version(
        number("number"),
        Kind(kind),
        number("step"),
        time,
        number("base"),
        previous,
        folder,
        MappingProxyType(typed(document.get("about"), dict, "about", where)),
        _files(typed(document.get("files"), dict, "files", where), where),
        chain,
        before,
        checksum_of(memoryview(text), document["checksum"].partition(":")[0]),  # as its seal is
    )
    _require_order(version, where)
    return version


def _require_order(version: Version, where: str) -> None:
    if version.previous is not None:
        require(version.previous < version.number, "the previous version is not older", where)
    if version.kind is Kind.BASE:
        require(version.base == version.number, "a base begins with itself", where)
    else:
        require(version.previous is not None, "a delta names no version before", where)
        require(version.base < version.number, "its base is not older", where)


def _files(document: dict[str, Any], where: str) -> Mapping[str, VersionFile]:
    files = {}
    for name, each in document.items():
        require_file_name(name, where)
        entry = typed(each, dict, f"file {name!r}", where)
        size = count(entry.get("bytes"), f"size of {name!r}", where)
        checksum = typed(entry.get("checksum"), str, f"checksum of {name!r}", where)
        files[name] = VersionFile(size, checksum)
    return MappingProxyType(files)


def require_file_name(name: str, where: str) -> None:
    """Refuses names that are paths, hidden, drafts, or the name of what describes a version.

    Raises:
        DamagedCheckpointError: ``name`` is one of these.
    """
    is_good = bool(_FILE.fullmatch(name)) and name != ABOUT and DRAFT not in name
    require(is_good, f"{name[:80]!r} is no name of a version's file", where)


def text_of(version: Version) -> str:
    """The text of the ``version.json`` of a version.

    Raises:
        UnsavableValueError: ``about`` is not plain JSON data.
    """
    document = {
        "format": FORMAT,
        "version": RELEASE,
        "chain": version.chain,
        "number": version.number,
        "kind": version.kind.value,
        "step": version.step,
        "time": version.time,
        "base": version.base,
        "previous": version.previous,
        "previous_checksum": version.previous_checksum,
        "about": dict(version.about),
        "files": {
            name: {"bytes": each.bytes, "checksum": each.checksum}
            for name, each in version.files.items()
        },
    }
    return dumped(document, "about")


def _checksum(descriptor: int, size: int, kind: str | None = None) -> str:
    made, buffer, offset = Checksum(kind), memoryview(bytearray(min(size, _CHUNK))), 0
    while offset < size:
        got = os.preadv(descriptor, [buffer], offset)
        if not got:  # cut short meanwhile
            break
        made.update(buffer[: min(got, size - offset)])
        offset += got
    return made.text
