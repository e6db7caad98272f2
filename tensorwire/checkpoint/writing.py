"""The code that runs at the owners: writes and reads their parts of a checkpoint, at once or aside.

The functions here are called from afar. A part that is written aside is first copied, so
that training can go on; the copy is held until it is on disk, and nobody else has it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from rpc import extend
from tensorwire.checkpoint.errors import DamagedCheckpointError, MismatchError, NotSavedError
from tensorwire.checkpoint.files import Checkpoint, PartWriter
from tensorwire.checkpoint.fitting import Fit, decoded
from tensorwire.checkpoint.spread import Names, Source
from tensorwire.checkpoint.structure import Json, decode, encode

Shares: TypeAlias = Sequence[tuple[str, Source]]
"""The shares of one owner, each with the name of the object that it is a share of."""


def write_part(folder: str, part: str, shares: Shares) -> None:
    """Writes this worker's part of a draft."""
    _write(folder, part, {name: source.save() for name, source in shares})


def copy_part(token: str, folder: str, part: str, shares: Shares) -> None:
    """Copies this worker's part and begins to write the copy; see :func:`wait_part`."""
    copies = {name: _copy(source.save()) for name, source in shares}
    Writers.here().begin(token, lambda: _write(folder, part, copies))


def wait_part(token: str) -> None:
    """Returns when a copied part is on disk; raises what went wrong."""
    Writers.here().wait(token)


def check_part(path: str, shares: Shares) -> list[tuple[str, Fit]]:
    """Compares this worker's share of some objects with what was saved, by the objects' names."""
    saved = Checkpoint.open(path)
    return [
        (name, decoded(f"{name!r} in {path}", partial(source.check, saved_values(saved, name))))
        for name, source in shares
    ]


def read_part(path: str, shares: Shares) -> None:
    """Takes over this worker's share of some objects, whoever wrote it."""
    saved = Checkpoint.open(path)
    for name, source in shares:
        try:
            source.load(saved_values(saved, name))
        except KeyError as error:
            raise MismatchError(
                f"{name!r} in {saved.path} has no {error}; it may be of another model"
            ) from error


def saved_values(saved: Checkpoint, name: str) -> Names:
    """The values of an object that is spread out, by name, in whichever parts they are."""
    places: dict[str, tuple[str, Json]] = {}
    shared = {part: _shares(part, each.meta).get(name) for part, each in saved.parts.items()}
    if all(each is None for each in shared.values()):
        raise NotSavedError(f"{saved.path} holds nothing by the name {name!r}")
    for part, documents in shared.items():
        if documents is not None and not isinstance(documents, dict):
            raise DamagedCheckpointError(f"{name!r} in {saved.path} has no names")
        for key, document in (documents or {}).items():
            places[key] = part, document

    def read(key: str) -> Any:
        part, document = places[key]
        return decode(document, lambda tensor: saved.tensor(part, tensor))

    return Names(list(places), read)


def _shares(part: str, meta: Mapping[str, Any]) -> Mapping[str, Any]:
    shares = meta.get("shares", {})
    if not isinstance(shares, dict):
        raise DamagedCheckpointError(f"part {part!r} has no shares of objects")
    return shares


class Writers:
    """The parts that one worker writes aside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[str, _Writing] = {}

    @classmethod
    def here(cls) -> Writers:
        """The writers of the current worker."""
        return extend.worker_state("tensorwire.checkpoint", cls, cls.close)

    def begin(self, token: str, write: Callable[[], None]) -> None:
        """Starts to write."""
        writing = _Writing(write)
        with self._lock:
            self._threads[token] = writing
        writing.start()

    def wait(self, token: str) -> None:
        """Returns when a part is written; raises what went wrong."""
        with self._lock:
            writing = self._threads.pop(token)
        writing.join()
        if writing.error is not None:
            raise writing.error

    def close(self) -> None:
        """Waits for what is being written; its checkpoint is not committed any more."""
        with self._lock:
            threads = list(self._threads.values())
            self._threads.clear()
        for each in threads:
            each.join()


class _Writing(threading.Thread):
    """Runs a function and keeps what it raised."""

    def __init__(self, write: Callable[[], None]) -> None:
        super().__init__(name="tensorwire-checkpoint")
        self.error: BaseException | None = None
        self._write: Callable[[], None] | None = write

    def run(self) -> None:
        try:
            assert self._write is not None
            self._write()
        except BaseException as error:
            self.error = error
        finally:
            self._write = None  # and with it the copies


def _write(folder: str, part: str, values: Mapping[str, Mapping[str, Any]]) -> None:
    with PartWriter(folder, part) as writer:
        shares = {
            name: {key: encode(each, f"{name}/{key}", writer.add) for key, each in share.items()}
            for name, share in values.items()
        }
        writer.finish({"shares": shares})


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_copy(each) for each in value)
    if isinstance(value, list):
        return [_copy(each) for each in value]
    return value
