"""``save`` and ``load``: a whole program's state, of which every owner writes its own part.

The state is a dict of anything: remote modules, pipelines and distributed optimizers, whose
owners write their shares themselves; local modules, optimizers and schedulers, by their
``state_dict``; tensors and plain data. Nothing that is spread out is gathered.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import rpc
from tensorwire.checkpoint import writing
from tensorwire.checkpoint.errors import MismatchError
from tensorwire.checkpoint.files import Checkpoint, Draft, PartWriter, retain
from tensorwire.checkpoint.fitting import about_local, decoded
from tensorwire.checkpoint.loading import Loading, Stateful, join
from tensorwire.checkpoint.spread import Source, as_spread_out
from tensorwire.checkpoint.structure import decode, encode

_COMMON: Final = "common"


def save(
    path: str | Path,
    state: Mapping[str, Any],
    keep: int | None = None,
    *,
    overwrite: bool = False,
) -> Checkpoint:
    """Saves a program's state; returns when all of it is on disk.

    Args:
        path: of the checkpoint, a folder that is made; all owners must see it under this path.
        state: by name, what is to be saved, nested in dicts and lists as may be. Saving
            ``{"step": 7, "model": pipe}`` makes two entries.
        keep: how many complete checkpoints stay in the same folder, this one among them; the
            oldest are removed. None: all.
        overwrite: whether a checkpoint at ``path`` is replaced, as that of the step from which
            one resumed; it stays until the new one is whole. Default False.

    Raises:
        FileExistsError: something is at ``path`` that is not to be replaced.
        UnsavableValueError: something in ``state`` is neither spread out nor plain data.
        WorkerLostError: an owner was lost. The checkpoint is not there then.

    Example::

        state = {"model": pipe, "optimizer": optimizer, "step": step}
        checkpoint.save(f"checkpoints/{step}", state, keep=3)
    """
    saving = _Saving(path, state, keep, overwrite)
    try:
        saving.write_parts()
        return saving.commit()
    except BaseException:
        saving.discard()
        raise


def save_in_background(
    path: str | Path,
    state: Mapping[str, Any],
    keep: int | None = None,
    *,
    overwrite: bool = False,
) -> Saving:
    """Saves like :func:`save`, but returns as soon as everything is copied in the owners' memory.

    Saves the state as it is now; training can go on meanwhile. Each owner needs memory for a
    copy of its own share until that is on disk.

    Args:
        path: of the checkpoint, a folder that is made.
        state: by name, what is to be saved; as for :func:`save`.
        keep: how many complete checkpoints stay in the same folder. None: all.
        overwrite: whether a checkpoint at ``path`` is replaced. Default False.

    Example::

        saving = checkpoint.save_in_background("checkpoints/7", state)
        train_on()
        saving.wait()
    """
    saving = _Saving(path, state, keep, overwrite)
    try:
        saving.copy_parts()
    except BaseException:
        saving.discard()
        raise
    return Saving(saving)


def load(
    source: str | Path | Checkpoint, state: Mapping[str, Any], *, strict: bool = True
) -> dict[str, Any]:
    """Loads what :func:`save` saved, after all of it was checked at all owners.

    Args:
        source: the checkpoint or its path.
        state: what takes the state over: under each name, an object that was saved under it, or
            one like it with other owners, and any number of them. Names of plain data may be
            missing; what stands under them is ignored.
        strict: whether dtypes, and classes of optimizers and schedulers, must be those that were
            saved. Otherwise values are converted, and optimizers of another class begin anew,
            which is said in the log. Default True.

    Returns:
        ``state`` with the plain data and tensors that were saved, including those it lacked.

    Raises:
        DamagedCheckpointError: the checkpoint is damaged.
        MismatchError: it lacks what ``state`` names, or has something else there: other names,
            shapes, dtypes or classes. Nothing was loaded then.
        NoCheckpointError: there is no such checkpoint.
        UnsafeCheckpointError: the file is a pickle.

    Example::

        state = checkpoint.load(checkpoint.latest("checkpoints"), {"model": pipe, "optimizer": opt})
        step = state["step"]
    """
    saved = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    if _COMMON not in saved.parts:
        raise MismatchError(f"{saved.path} was not made by checkpoint.save")
    meta = saved.parts[_COMMON].meta
    where = f"part {_COMMON!r} of {saved.path}"
    plain = decoded(where, lambda: decode(meta["state"], lambda n: saved.tensor(_COMMON, n)))
    loading = Loading(saved, meta.get("objects"), strict)
    result = loading.prepare(plain, dict(state), "")
    loading.check()
    loading.run()
    loaded: dict[str, Any] = result
    return loaded


class Saving:
    """A checkpoint that is being written in the background. Made by :func:`save_in_background`."""

    def __init__(self, saving: _Saving) -> None:
        self._saving = saving
        self._checkpoint: Checkpoint | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._finish, name="tensorwire-checkpoint-commit")
        self._thread.start()

    def done(self) -> bool:
        """True if the checkpoint is complete, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Checkpoint:
        """Returns the checkpoint when it is complete.

        Args:
            timeout: in seconds; None: as long as it takes.

        Raises:
            TimeoutError: it is not complete yet.
            Exception: what went wrong. The checkpoint is not there then.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._saving.path} is not complete after {timeout} seconds")
        if self._error is not None:
            raise self._error
        assert self._checkpoint is not None
        return self._checkpoint

    def _finish(self) -> None:
        try:
            self._saving.wait_parts()
            self._checkpoint = self._saving.commit()
        except BaseException as error:
            self._saving.discard()
            self._error = error


class _Saving:
    """The coordinator's work on one checkpoint."""

    def __init__(
        self, path: str | Path, state: Mapping[str, Any], keep: int | None, overwrite: bool
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep!r} must be at least 1")
        self._keep = keep
        self._shares: dict[str, list[tuple[str, Source]]] = {}
        self._objects: dict[str, Any] = {}
        self._plain = take_apart(dict(state), "", self._shares, self._objects)
        self._draft = Draft.create(path, overwrite)
        self._token = uuid.uuid4().hex
        self._waits: list[Callable[[], Any]] = []

    @property
    def path(self) -> Path:
        """The folder of the checkpoint to come."""
        return self._draft.path

    def write_parts(self) -> None:
        """Has every owner write its part, and writes what is here."""
        arguments = {
            worker: (str(self._draft.folder), part_of(worker), shares)
            for worker, shares in self._shares.items()
        }
        self._begin(writing.write_part, arguments)
        self._write_common()
        self.wait_parts()

    def copy_parts(self) -> None:
        """Has every owner copy its part and begin to write; copies and writes what is here."""
        arguments = {
            worker: (self._token, str(self._draft.folder), part_of(worker), shares)
            for worker, shares in self._shares.items()
        }
        self._begin(writing.copy_part, arguments)
        self._write_common()
        self.wait_parts()
        self._begin(writing.wait_part, dict.fromkeys(self._shares, (self._token,)))

    def wait_parts(self) -> None:
        """Waits for what was begun at the owners."""
        while self._waits:
            self._waits.pop(0)()

    def commit(self) -> Checkpoint:
        """Makes the draft a checkpoint, and removes those that are too many."""
        parts = [_COMMON, *map(part_of, self._shares)]
        done = self._draft.commit(parts)
        if self._keep is not None:
            retain(done.path.parent, self._keep)
        return done

    def discard(self) -> None:
        """Removes the draft, when nobody writes there any more."""
        while self._waits:
            with contextlib.suppress(Exception):
                self._waits.pop(0)()
        self._draft.discard()

    def _begin(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]]
    ) -> None:
        for worker, each in arguments.items():
            self._waits.append(rpc.rpc_async(worker, function, each, timeout=0).wait)

    def _write_common(self) -> None:
        with PartWriter(self._draft.folder, _COMMON) as part:
            state = encode(self._plain, "state", part.add)
            part.finish({"state": state, "objects": self._objects})


def part_of(worker: str) -> str:
    """The name of a worker's part."""
    return f"worker {worker}"


def take_apart(
    value: Any, name: str, shares: dict[str, list[tuple[str, Source]]], objects: dict[str, Any]
) -> Any:
    """Replaces objects by what of them is plain; notes what their owners have, and their kinds."""
    spread = as_spread_out(value)
    if spread is not None:
        for share in spread.checkpoint_shares():
            shares.setdefault(share.worker, []).append((name, share.source))
        return spread.checkpoint_common()
    if isinstance(value, dict):
        return {
            key: take_apart(each, join(name, key), shares, objects) for key, each in value.items()
        }
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(
            take_apart(each, join(name, place), shares, objects) for place, each in enumerate(value)
        )
    if not isinstance(value, Stateful):
        return value
    about = about_local(value)
    if about:
        objects[name] = about
    return value.state_dict()
