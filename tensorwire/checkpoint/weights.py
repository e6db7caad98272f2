"""Publishes a program's state as versions of a chain, and follows it in other processes.

Each owner writes what changed of its share: it is told the checksums of the tensors that lie in
the chain, writes those that have another one now, and answers with the new ones. Nothing that is
spread out is gathered, and nobody keeps a copy to compare with.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

import rpc
from rpc import TlsOptions
from tensorwire.checkpoint.chain import Kind, Version, VersionFile
from tensorwire.checkpoint.chain_writer import ChainWriter
from tensorwire.checkpoint.checksums import checksum_of
from tensorwire.checkpoint.errors import DamagedCheckpointError, NotSavedError
from tensorwire.checkpoint.files import Checkpoint, PartWriter
from tensorwire.checkpoint.fitting import decoded
from tensorwire.checkpoint.following import Followed, Held, begun
from tensorwire.checkpoint.remote.sources import source_of
from tensorwire.checkpoint.saving import part_of, take_apart
from tensorwire.checkpoint.shard_file import bytes_of
from tensorwire.checkpoint.spread import Source
from tensorwire.checkpoint.structure import Json, decode, encode

if TYPE_CHECKING:
    from typing_extensions import Self

_HERE: Final = "common"
_FORMAT: Final = "checkpoint.publish"


@dataclass(frozen=True, slots=True)
class _Written:
    """The part of a version that one owner wrote.

    Args:
        document: its values, as ``encode`` returns them.
        checksums: of all its tensors, by name.
        files: that it wrote.
    """

    document: Json
    checksums: Mapping[str, str]
    files: Mapping[str, VersionFile]


def _write(folder: str, part: str, values: Json, known: Mapping[str, str]) -> _Written:
    """Writes the tensors among values whose checksums are not known."""
    checksums: dict[str, str] = {}
    with PartWriter(folder, part) as writer:

        def put(name: str, tensor: torch.Tensor) -> None:
            tensor = tensor.to("cpu").contiguous()
            kind = known.get(name, ":").partition(":")[0] or None
            checksums[name] = checksum_of(bytes_of(tensor), kind) + str(tuple(tensor.shape))
            if known.get(name) != checksums[name]:
                writer.add(name, tensor)

        document = encode(values, "state", put)
        writer.finish()
        files = {name: VersionFile.of(Path(folder) / name) for name in writer.files}
    return _Written(document, checksums, files)


def _write_shares(
    folder: str, part: str, shares: Sequence[tuple[str, Source]], known: Mapping[str, str]
) -> _Written:
    """Writes these shares at their owner; see :func:`_write`."""
    return _write(folder, part, {name: dict(source.save()) for name, source in shares}, known)


class Publishing:
    """Publishes versions of a program's state, each by :meth:`update`. Made by :func:`publish`.

    Used as a context manager, it is closed at the end.

    Attributes:
        folder: of the chain.
    """

    def __init__(self, state: Mapping[str, Any], writer: ChainWriter, base_every: int) -> None:
        self.folder = writer.folder
        self._state = dict(state)
        self._writer = writer
        self._base_every = base_every
        self._deltas = 0
        self._step = 0
        self._known: dict[str, Mapping[str, str]] = {}

    def update(self, step: int | None = None) -> Version:
        """Writes the state as it is now as the next version: the tensors that changed, or all.

        Returns when it is on disk. Values of plain data are written as they were when
        :func:`publish` was called; modules and optimizers as they are.

        Args:
            step: of the training; default one more than that of the version before.

        Raises:
            OSError: the disk is full or out of reach. The version is not there then; the next one
                has what it would have had.
            UnsavableValueError: something in the state is neither spread out nor plain data.
            WorkerLostError: an owner was lost. The version is not there then.
        """
        is_base = self._deltas >= self._base_every - 1 or self._writer.needs_base
        kind = Kind.BASE if is_base or not self._known else Kind.DELTA
        step = self._step + 1 if step is None else step
        number = self._writer.next_number()
        try:
            parts = self._write_parts(number, {} if kind is Kind.BASE else self._known)
            files = {name: each for part in parts.values() for name, each in part.files.items()}
            about = {"content": _FORMAT, "parts": {n: each.document for n, each in parts.items()}}
            version = self._writer.commit(number, kind, step, files, about)
        except BaseException:
            self._writer.discard(number)
            raise
        self._known = {name: part.checksums for name, part in parts.items()}
        self._deltas = 0 if kind is Kind.BASE else self._deltas + 1
        self._step = step
        return version

    def _write_parts(
        self, number: int, known: Mapping[str, Mapping[str, str]]
    ) -> dict[str, _Written]:
        shares: dict[str, list[tuple[str, Source]]] = {}
        plain = take_apart(self._state, "", shares, {})
        folder = str(self._writer.folder_of(number))
        waits: dict[str, Callable[[], _Written]] = {}
        for worker, each in shares.items():
            part = part_of(worker)
            arguments = folder, part, each, known.get(part, {})
            waits[part] = rpc.rpc_async(worker, _write_shares, arguments, timeout=0).wait
        try:
            written = {_HERE: _write(folder, _HERE, plain, known.get(_HERE, {}))}
            for part in list(waits):
                written[part] = waits.pop(part)()
        finally:
            for wait in waits.values():  # somebody failed; nobody may write into what is removed
                with contextlib.suppress(Exception):
                    wait()
        return written

    def close(self) -> None:
        """Publishes no more; the published versions stay, and another writer may go on."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def publish(
    state: Mapping[str, Any],
    folder: str | Path,
    *,
    step: int = 0,
    base_every: int = 20,
    keep_bases: int = 2,
) -> Publishing:
    """Publishes a program's state as a chain of versions; writes the first one now.

    Other processes :func:`follow` the folder and so have the newest weights, without being in the
    group. A version has only the tensors that changed since the one before; every so often one has
    all.

    Args:
        state: by name, what is published: modules, remote modules, pipelines, optimizers, tensors
            and plain data, as for :func:`save`.
        folder: of the chain; made if it is not there. All owners must see it under this path.
        step: of the first version. Default 0.
        base_every: each so many versions one has all tensors. Default 20.
        keep_bases: as many of those stay, with what follows them. Default 2.

    Raises:
        BlockingIOError: somebody else publishes there.
        CheckpointError: safetensors is not installed.
        UnsavableValueError: something in ``state`` is neither spread out nor plain data.
        ValueError: ``base_every`` or ``keep_bases`` is less than 1.

    Example::

        with checkpoint.publish({"policy": policy}, "weights") as publishing:
            for step in range(1, 1000):
                train(policy)
                publishing.update(step)
    """
    if base_every < 1:
        raise ValueError(f"base_every={base_every!r} must be at least 1")
    writer = ChainWriter(folder, keep_bases)
    publishing = Publishing(state, writer, base_every)
    try:
        writer.say_what_goes_on()
        publishing.update(step)
    except BaseException:
        publishing.close()
        raise
    return publishing


@dataclass(frozen=True, slots=True)
class _State:
    """A program's state at one version.

    Args:
        tensors: by part, and by name.
        documents: by part, the values as ``encode`` returned them.
    """

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    documents: Mapping[str, Json]


class State:
    """A program's state at one version. Made by :class:`Following`; never changes.

    Attributes:
        version: its number.
        step: of the training.
    """

    def __init__(self, held: Held[_State]) -> None:
        self.version = held.version.number
        self.step = held.version.step
        self._folder = held.version.folder.parent
        self._value = held.value

    def names(self) -> list[str]:
        """The names under which something was published."""
        return sorted({name for each in self._value.documents.values() for name in each})

    def value(self, name: str) -> Any:
        """Returns what was published under a name: of a module its ``state_dict``.

        Tensors in it are shared by all who ask, and must not be changed.

        Raises:
            DamagedCheckpointError: the version does not say what it should.
            NotSavedError: nothing was published under that name.
        """
        documents = {p: each[name] for p, each in self._value.documents.items() if name in each}
        if not documents:
            raise NotSavedError(f"{self._folder} has nothing named {name!r}, but {self.names()}")
        spread: dict[str, Any] = {}
        for part, document in documents.items():
            if part != _HERE:
                spread |= self._decoded(part, document)
        return spread or self._decoded(_HERE, documents[_HERE])

    def _decoded(self, part: str, document: Json) -> Any:
        where = f"version {self.version} of {self._folder}"
        return decoded(where, lambda: decode(document, self._value.tensors[part].__getitem__))

    def load_into(self, module: nn.Module, name: str | None = None) -> None:
        """Copies weights into a module.

        Args:
            module: any that takes the state; it may be on any device.
            name: under which its state was published; may be left out if there is but one.

        Raises:
            NotSavedError: nothing was published under that name.
            RuntimeError: names or shapes are not those of the module.
            ValueError: ``name`` was left out, and several states are there.
        """
        if name is None:
            names = self.names()
            if len(names) != 1:
                raise ValueError(f"load_into: name one of {names}")
            (name,) = names
        module.load_state_dict(self.value(name))


class Following(Followed[_State]):
    """The newest version of a published state. Made by :func:`follow`.

    May be used by several threads. Used as a context manager, it is closed at the end.
    """

    def now(self) -> State:
        """The newest version that is ready."""
        return State(self._follower.held)

    @property
    def version(self) -> int:
        """The number of the newest version that is ready; only rises."""
        return self._follower.held.version.number

    @property
    def step(self) -> int:
        """The step of the training at which it was published; falls if training went back."""
        return self._follower.held.version.step

    def value(self, name: str) -> Any:
        """The value of the newest version under a name; see :meth:`State.value`.

        Args:
            name: under which it was published.

        Raises:
            NotSavedError: nothing was published under that name.
        """
        return self.now().value(name)

    def load_into(self, module: nn.Module, name: str | None = None) -> None:
        """Copies weights of the newest version into a module; see :meth:`State.load_into`.

        Args:
            module: any that takes the state.
            name: under which its state was published; may be left out if there is but one.

        Raises:
            NotSavedError: nothing was published under that name.
            RuntimeError: names or shapes are not those of the module.
        """
        self.now().load_into(module, name)

    @contextmanager
    def pinned(self) -> Iterator[State]:
        """Holds one version: all that is read of it fits together."""
        with self._follower.pinned() as held:
            yield State(held)


def follow(
    folder: str | Path,
    *,
    key_file: str | os.PathLike[str] | None = None,
    tls: TlsOptions | None = None,
    cache: str | Path | None = None,
    timeout: float = 60.0,
    interval: float = 0.2,
    max_pinned: int = 2,
) -> Following:
    """Follows a published state, in any process that sees the folder; no group is needed.

    Args:
        folder: that :func:`publish` was given. Or ``tensorwire://host:port`` of a publisher, or
            a URL of an object store into which one copies.
        key_file: with the reader key; for a publisher's address, which needs it.
        tls: certificates of which this end's is for the name ``reader``, if the publisher has
            TLS. Default none.
        cache: folder of this process alone that keeps what was fetched from a URL, so that a
            restart fetches only what is new. Default a temporary one, which keeps nothing.
        timeout: seconds in which there must be a first version. Default 60.
        interval: seconds between two looks for newer versions. Default 0.2.
        max_pinned: versions that ``pinned`` may hold at a time; while as many are held, newer
            ones wait. Default 2.

    Raises:
        CheckpointError: what is there is damaged, or of something else.
        TimeoutError: nothing is there after ``timeout`` seconds.
        ValueError: an argument is out of range, or for another kind of place.
        WrongKeyError: the publisher has another key.

    Example::

        weights = checkpoint.follow("weights")
        while True:
            weights.load_into(policy)
            play(policy)
    """
    follower = begun(source_of(folder, key_file, tls, cache), _taken, interval, max_pinned, timeout)
    return Following(follower)


def _taken(held: Held[_State] | None, version: Version) -> _State:
    """The state at a version, which shares the tensors that did not change."""
    documents = version.about.get("parts")
    if version.about.get("content") != _FORMAT or not isinstance(documents, dict):
        raise DamagedCheckpointError(f"{version.folder} was not made by checkpoint.publish")
    version.verify()
    saved = Checkpoint.of_parts(version.folder, list(documents), version.about)
    before = held.value.tensors if held and version.kind is Kind.DELTA else {}
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for part, document in documents.items():
        new = {name: tensor.clone() for name, tensor in saved.tensors(part)}
        names: list[str] = []
        decoded(str(version.folder), lambda d=document, n=names: decode(d, _named(n)))
        every = {**before.get(part, {}), **new}
        missing = [name for name in names if name not in every]
        if missing or not isinstance(document, dict):
            raise DamagedCheckpointError(f"{version.folder}: part {part!r} lacks {missing[:3]}")
        tensors[part] = {name: every[name] for name in names}
    return _State(tensors, documents)


def _named(names: list[str]) -> Callable[[str], torch.Tensor]:
    """Notes the names of the tensors that a document needs."""
    nothing = torch.empty(0, 2)

    def get(name: str) -> torch.Tensor:
        names.append(name)
        return nothing

    return get
