"""A checkpoint on disk: safetensors shards that several processes write, one JSON manifest.

The coordinator makes a :class:`Draft`, a folder beside the place of the checkpoint. Each
process writes its own part there with a :class:`PartWriter`. When all are done, the
coordinator commits: it checks the parts, merges their manifests, forces everything to disk
and renames the folder. So a checkpoint is either not there or whole, whoever is killed and
when. :class:`Checkpoint` reads one, and checks what it reads; no pickles are involved in either
direction.

::

    draft = Draft.create("checkpoints/1000")            # at the coordinator
    with PartWriter(draft.folder, "server0") as part:   # in each process
        part.add("rows", rows)
        part.finish({"clock": 7})
    draft.commit(["server0", "server1"], {"step": 1000})

    saved = latest("checkpoints")                       # later, anywhere
    rows = saved.tensor("server0", "rows")

The folder must be on a file system that all of these processes see under one path.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import torch

from tensorwire.checkpoint import bounded, placing
from tensorwire.checkpoint import manifest as manifests
from tensorwire.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    NoCheckpointError,
    NotSavedError,
    UnsafeCheckpointError,
)
from tensorwire.checkpoint.manifest import Manifest, Meta, PartManifest, TensorEntry
from tensorwire.checkpoint.placing import DRAFT
from tensorwire.checkpoint.shard_file import (
    ShardFile,
    dtype_name,
    reading,
    require_checksum,
    require_safetensors,
    require_size,
    tensor_of,
)

if TYPE_CHECKING:
    from typing_extensions import Self

MANIFEST: Final = "manifest.json"
SHARD_BYTES: Final = 2 << 30
_LOCK: Final = "lock"
_PICKLES: Final = (b"\x80", b"PK\x03\x04")  # a pickle, and the zip archive of torch.save


_logger: Final = logging.getLogger("tensorwire")


class PartWriter:
    """Writes one process's tensors into a draft, each as it is added.

    Used as a context manager, it closes its files however the block ends.

    Args:
        folder: of the draft, ``Draft.folder``.
        part: names this process's part; no other process may use the name.
        shard_bytes: a file that has grown to this many bytes is followed by another.

    Raises:
        CheckpointError: safetensors is not installed.
        FileNotFoundError: there is no such draft, or not on this machine.
    """

    def __init__(self, folder: str | Path, part: str, shard_bytes: int = SHARD_BYTES) -> None:
        require_safetensors()
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise FileNotFoundError(
                f"there is no draft {str(folder)!r} on this machine; a checkpoint's path must lie "
                "on a file system that all of its writers share"
            )
        self._part = part
        self._stem = quote(part, safe="")
        self._shard_bytes = shard_bytes
        self._open: dict[int, ShardFile] = {}  # by item size, so that each tensor lies aligned
        self._shards: dict[str, int] = {}
        self._tensors: dict[str, TensorEntry] = {}
        self._count = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor. It may change as soon as this returns.

        Raises:
            UnsavableValueError: it is sparse or of a dtype that safetensors cannot hold.
            ValueError: this part has a tensor of that name.
        """
        if name in self._tensors:
            raise ValueError(f"part {self._part!r} has two tensors with the name {name!r}")
        dtype_name(name, tensor)  # before there is a shard for it
        self._tensors[name] = self._shard_for(name, tensor).append(name, tensor)

    def finish(self, meta: Meta | None = None) -> None:
        """Forces the part to disk; from here it can be committed.

        Args:
            meta: plain JSON data that is kept with the part.
        """
        for shard in self._open.values():
            self._shards[shard.path.name] = shard.finish()
        self._open.clear()
        part = PartManifest(meta or {}, self._shards, self._tensors)
        _write_durably(self._folder / part_file(self._part), manifests.dump_part(part))

    @property
    def files(self) -> tuple[str, ...]:
        """The names of all files of a finished part."""
        return (*self._shards, part_file(self._part))

    def close(self) -> None:
        """Closes what is open; a part that was not finished stays unfinished."""
        for shard in self._open.values():
            shard.abandon()
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _shard_for(self, name: str, tensor: torch.Tensor) -> ShardFile:
        item = tensor.element_size()
        shard = self._open.get(item)
        if shard and not (shard.bytes < self._shard_bytes and shard.fits(name, tensor)):
            self._shards[shard.path.name] = shard.finish()
            shard = None
        if shard is None:
            shard = ShardFile(self._folder / f"{self._stem}-{self._count:05}.safetensors")
            self._open[item] = shard
            self._count += 1
        return shard


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is being written, held by its coordinator.

    Attributes:
        path: where the checkpoint will be.
        folder: where the parts are written until then.
        lock: a descriptor whose lock says, until it is closed, that the draft is in use.
        overwrite: whether a checkpoint that is at ``path`` is replaced.
    """

    path: Path
    folder: Path
    lock: int
    overwrite: bool = False

    @classmethod
    def create(cls, path: str | Path, overwrite: bool = False) -> Draft:
        """Makes the folder of a draft for a checkpoint at ``path``.

        Args:
            path: where the checkpoint will be.
            overwrite: whether a checkpoint that is there is replaced once the new one is whole.
                Anything else there is never replaced. Default False.

        Raises:
            CheckpointError: safetensors is not installed.
            FileExistsError: something is at ``path`` that is not to be replaced.
            ValueError: ``path`` has the name of a draft.
        """
        require_safetensors()
        path = Path(path).absolute()
        if DRAFT in path.name:
            raise ValueError(f"{str(path)!r}: names with {DRAFT!r} in them are those of drafts")
        _require_place(path, overwrite)
        path.parent.mkdir(parents=True, exist_ok=True)
        token = uuid.uuid4().hex[:12]
        unlocked = path.with_name(f".{token}")
        unlocked.mkdir()
        lock = os.open(unlocked / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = path.with_name(f"{path.name}{DRAFT}{token}")
        unlocked.rename(folder)  # only now may retain() find it, and it finds it locked
        return cls(path, folder, lock, overwrite)

    def commit(self, parts: Sequence[str], meta: Meta | None = None) -> Checkpoint:
        """Makes the draft the checkpoint at its path, durably and at once.

        Args:
            parts: the names of all parts.
            meta: plain JSON data that is kept with the checkpoint.

        Raises:
            DamagedCheckpointError: a part is not finished, or not visible on this machine.
            FileExistsError: another checkpoint has been put at the path meanwhile.
            UnsavableValueError: ``meta`` is not plain JSON data.
        """
        entries = {name: self._part(name) for name in parts}
        whole = Manifest(_next_sequence(self.path.parent), meta or {}, entries)
        _write_durably(self.folder / MANIFEST, manifests.dump(whole))
        for merged in self.folder.glob("*.part.json"):
            merged.unlink()
        placing.sync(self.folder)
        if _require_place(self.path, self.overwrite):
            placing.replace(self.folder, self.path)
        else:
            self.folder.rename(self.path)
        placing.sync(self.path.parent)
        (self.path / _LOCK).unlink()
        os.close(self.lock)
        return Checkpoint(self.path, whole)

    def discard(self) -> None:
        """Removes the draft with all that was written."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)

    def _part(self, name: str) -> PartManifest:
        if not (self.folder / part_file(name)).exists():
            raise DamagedCheckpointError(
                f"part {name!r} of {str(self.path)!r} is not finished, or was written where this "
                "machine does not see it: all writers must share the path's file system"
            )
        return _part_in(self.folder, name)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint, ready to be read.

    Attributes:
        path: its folder.
        manifest: what it holds.
    """

    path: Path
    manifest: Manifest
    _checked: set[tuple[str, str]] = field(default_factory=set, repr=False, compare=False)

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Reads the manifest at ``path`` and checks that every shard is there, of its size.

        The bytes of a tensor are checked when it is first read; :meth:`verify` checks all.

        Raises:
            CheckpointError: safetensors is not installed.
            DamagedCheckpointError: the manifest is damaged, or a shard missing or cut short.
            NoCheckpointError: nothing is at ``path``.
            UnsafeCheckpointError: a pickle is at ``path``.
        """
        require_safetensors()
        path = Path(path).absolute()
        try:
            is_there = path.exists()
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(f"{str(path)!r} cannot be read: {error}") from None
        if not is_there:
            raise NoCheckpointError(f"there is no checkpoint at {str(path)!r}")
        _refuse_pickles(path)
        manifest = manifests.load(_read_manifest(path), str(path / MANIFEST))
        for part in manifest.parts.values():
            _require_shards(path, part)
        return cls(path, manifest)

    @classmethod
    def of_parts(cls, path: str | Path, parts: Sequence[str], meta: Meta) -> Checkpoint:
        """The contents of a folder with finished parts that are described there, each by itself.

        Args:
            path: the folder into which :class:`PartWriter` wrote them.
            parts: their names.
            meta: plain data about all of it, which is kept elsewhere.

        Raises:
            CheckpointError: safetensors is not installed.
            DamagedCheckpointError: a part is missing, damaged, or cut short.
        """
        require_safetensors()
        path = Path(path).absolute()
        return cls(path, Manifest(0, meta, {name: _part_in(path, name) for name in parts}))

    def __repr__(self) -> str:
        parts = self.parts.values()
        tensors = sum(len(each.tensors) for each in parts)
        size = sum(sum(each.shards.values()) for each in parts)
        return (
            f"Checkpoint({str(self.path)!r}, {tensors} tensors in {len(parts)} parts, {size} bytes)"
        )

    def verify(self) -> None:
        """Reads everything, and checks that it is what was written.

        Raises:
            DamagedCheckpointError: something is not, the first that was found.
        """
        for part, content in self.parts.items():
            for _ in self.tensors(part):
                pass
            for shard, size in content.shards.items():
                expected = {n for n, each in content.tensors.items() if each.shard == shard}
                with reading(self.path / shard, size) as opened:
                    if set(opened.keys()) != expected:
                        raise DamagedCheckpointError(
                            f"{self.path / shard} holds other tensors than the manifest says"
                        )

    @property
    def meta(self) -> Meta:
        """The plain data that was kept with the checkpoint."""
        return self.manifest.meta

    @property
    def parts(self) -> Mapping[str, PartManifest]:
        """The manifest of what each process wrote, by the part's name."""
        return self.manifest.parts

    def tensor(self, part: str, name: str) -> torch.Tensor:
        """Reads one tensor, mapped from the file, and checks its bytes the first time.

        Raises:
            DamagedCheckpointError: it is not as it was written.
            NotSavedError: there is no such part or tensor.
        """
        entry = self._entry(part, name)
        with self._shard(part, entry.shard) as shard:
            return self._read(shard, part, name, entry)

    def rows(self, part: str, name: str, start: int, stop: int) -> torch.Tensor:
        """Reads ``tensor[start:stop]``, and checks all of the tensor the first time.

        Raises:
            DamagedCheckpointError: it is not as it was written.
            NotSavedError: there is no such part or tensor.
        """
        return self.tensor(part, name)[start:stop]

    def tensors(self, part: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Reads all tensors of a part, one after the other, by name, and checks them.

        Raises:
            DamagedCheckpointError: one is not as it was written.
            NotSavedError: there is no such part.
        """
        by_shard: dict[str, list[str]] = {}
        for name, entry in self._part(part).tensors.items():
            by_shard.setdefault(entry.shard, []).append(name)
        for shard_name, names in by_shard.items():
            with self._shard(part, shard_name) as shard:
                for name in names:
                    yield name, self._read(shard, part, name, self._entry(part, name))

    def _part(self, part: str) -> PartManifest:
        if part not in self.parts:
            raise NotSavedError(f"no part {part!r} in {self.path}; it has {sorted(self.parts)}")
        return self.parts[part]

    def _entry(self, part: str, name: str) -> TensorEntry:
        tensors = self._part(part).tensors
        if name not in tensors:
            raise NotSavedError(f"no tensor {name!r} in part {part!r} of {self.path}")
        return tensors[name]

    def _shard(self, part: str, name: str) -> contextlib.AbstractContextManager[Any]:
        return reading(self.path / name, self.parts[part].shards[name])

    def _read(self, shard: Any, part: str, name: str, entry: TensorEntry) -> torch.Tensor:
        path = self.path / entry.shard
        tensor = tensor_of(shard, path, name, entry)
        if (part, name) not in self._checked:
            require_checksum(tensor, path, name, entry)
            self._checked.add((part, name))
        return tensor


def part_file(part: str) -> str:
    """The name of the file that describes a part until the parts are merged."""
    return f"{quote(part, safe='')}.part.json"


def _part_in(folder: Path, name: str) -> PartManifest:
    path = folder / part_file(name)
    part = manifests.load_part(bounded.read(path, bounded.MANIFEST_BYTES), str(path))
    _require_shards(folder, part)
    return part


def complete(folder: str | Path) -> list[Checkpoint]:
    """The complete checkpoints in a folder, the oldest first, of which all bytes were checked.

    Damaged and half-written files, and files of other kinds, are left out; a line in the log says
    which.

    Raises:
        CheckpointError: safetensors is not installed, or the folder cannot be read.
    """
    return [each for each in _listed(folder) if _is_whole(each)]


def latest(folder: str | Path) -> Checkpoint | None:
    """The complete checkpoint in a folder that was committed last; None if there is none.

    Its bytes are checked. One that is damaged is passed over, and a line in the log says so.

    Raises:
        CheckpointError: safetensors is not installed, or the folder cannot be read.
    """
    return next((each for each in reversed(_listed(folder)) if _is_whole(each)), None)


def _is_whole(saved: Checkpoint) -> bool:
    try:
        saved.verify()
    except CheckpointError as error:
        _passed_over(saved.path, error)
        return False
    return True


def _passed_over(path: Path, error: CheckpointError) -> None:
    _logger.warning("the checkpoint %s is passed over: %s", path, error)


def _listed(folder: str | Path) -> list[Checkpoint]:
    """Lists checkpoints that are complete by their manifest and the sizes of their shards."""
    require_safetensors()
    checkpoints = []
    for path in _folders(Path(folder)):
        if DRAFT not in path.name and os.path.lexists(path / MANIFEST):
            try:
                checkpoints.append(Checkpoint.open(path))
            except NoCheckpointError:  # removed a moment ago
                continue
            except CheckpointError as error:
                _passed_over(path, error)
    return sorted(checkpoints, key=lambda each: (each.manifest.sequence, each.path.name))


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(each.path) for each in entries if each.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(folder)!r} cannot be read: {error}") from None


def retain(folder: str | Path, last: int) -> list[Path]:
    """Removes all but the ``last`` complete checkpoints, and drafts whose writer is gone.

    Which are complete their manifests and the sizes of their files say; nothing else is read.

    Args:
        folder: what :func:`latest` looks through.
        last: how many stay, at least 1.

    Returns:
        The paths of the checkpoints that were removed.

    Raises:
        ValueError: ``last`` is less than 1.
    """
    if last < 1:
        raise ValueError(f"last={last!r}: at least one checkpoint must stay")
    removed = [each.path for each in _listed(folder)[:-last]]
    for path in removed:
        placing.remove(path)
    for draft in Path(folder).glob(f"*{DRAFT}*"):
        if not _in_use(draft):
            shutil.rmtree(draft, ignore_errors=True)
    return removed


def _in_use(draft: Path) -> bool:
    """Says whether the process that made a draft still holds it."""
    try:
        lock = os.open(draft / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # being removed, or committed a moment ago
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _next_sequence(folder: Path) -> int:
    return max((each.manifest.sequence for each in _listed(folder)), default=0) + 1


def _require_place(path: Path, overwrite: bool) -> bool:
    """Refuses a place where something is that stays; True if what is there is to be replaced."""
    if not os.path.lexists(path):
        return False
    if not overwrite:
        raise FileExistsError(
            f"{str(path)!r} exists, and a checkpoint is not overwritten unless one says "
            "overwrite=True: save under a new name, for example with the step in it"
        )
    if not os.path.lexists(path / MANIFEST):
        raise FileExistsError(f"{str(path)!r} exists, is no checkpoint, and is not overwritten")
    return True


def _require_shards(folder: Path, part: PartManifest) -> None:
    for name, size in part.shards.items():
        require_size(folder / name, size)


def _read_manifest(path: Path) -> bytes:
    if not os.path.lexists(path / MANIFEST):
        raise DamagedCheckpointError(f"{str(path)!r} is not a checkpoint: it has no {MANIFEST}")
    return bounded.read(path / MANIFEST, bounded.MANIFEST_BYTES)


def _refuse_pickles(path: Path) -> None:
    """Names what is not ours but a pickle, such as a file of ``torch.save``."""
    suspect = path / ".metadata" if path.is_dir() else path  # of torch.distributed.checkpoint
    if not suspect.is_file():
        return
    with bounded.opened(suspect) as (descriptor, _):
        start = os.pread(descriptor, 4, 0)
    if start.startswith(_PICKLES):
        raise UnsafeCheckpointError(
            f"{str(suspect)!r} is a pickle, and reading a pickle can run any code. "
            "Load it with torch.load(..., weights_only=True) if you trust where it comes from, "
            "and save it anew"
        )


def _write_durably(path: Path, text: str) -> None:
    """Writes a file such that it is there whole or not at all."""
    beside = path.with_name(path.name + DRAFT)
    with open(beside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
