"""The copies that a worker keeps: of its own stages, and of those that it backs up.

The functions at the end are called from afar, by the driver and by owners of stages.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

import rpc
from rpc import extend
from tensorwire.pipeline.backups.copies import Draft, Key, Rest, StageCopy, copied_into
from tensorwire.pipeline.backups.places import Found, Seat
from tensorwire.pipeline.backups.shelf import Epoch, Shelf
from tensorwire.pipeline.errors import PipelineError, SupersededError

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_PIECE: Final = 16 << 20
_UNDER_WAY: Final = 2
_NO_LIMIT: Final = 0


@dataclass(frozen=True, slots=True)
class Keep:
    """The orders about backups for a worker that takes part in a formation.

    Args:
        pipeline: names the pipeline for as long as it is trained.
        epoch: of the formation.
        backups: the worker that backs each seat up.
        version: that all go back to; None: stages are as they are.
        sources: the worker with the copy of each seat.
        keep_for: seconds for which copies outlive the driver.
        lives: of all workers that take part, those that only keep backups among them.
    """

    pipeline: str
    epoch: Epoch
    backups: Mapping[Seat, str]
    version: int | None
    sources: Mapping[Seat, str]
    keep_for: float
    lives: Mapping[str, extend.Life]


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A copy that is not whole yet.

    Args:
        tensors: that have come.
        places: memory for the others.
    """

    tensors: dict[Key, torch.Tensor]
    places: Mapping[Key, torch.Tensor]


class Keeper:
    """The copies of one pipeline on this worker; its methods may be called from any thread."""

    def __init__(self, pipeline: str) -> None:
        self.pipeline = pipeline
        self.keep_for = 0.0
        self.driver: extend.Life | None = None
        self.timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._shelf: Shelf[StageCopy] = Shelf()
        self._arriving: dict[tuple[Epoch, Seat, int], _Arriving] = {}
        self._recycled: dict[Seat, Mapping[Key, torch.Tensor]] = {}

    def enter(self, epoch: Epoch) -> None:
        """Obeys an epoch from now on.

        Raises:
            SupersededError: a later one is known.
        """
        with self._lock:
            if not self._shelf.enter(epoch):
                raise self._superseded(epoch)

    def found(self) -> Found:
        """The copies that this worker has."""
        with self._lock:
            return Found(_host(), self._shelf.copies())

    def reign(self) -> int:
        """The number of the driver's life that is obeyed; -1 if there was none."""
        with self._lock:
            return -1 if self._shelf.epoch is None else self._shelf.epoch.reign

    def get(self, seat: Seat, version: int) -> StageCopy | None:
        """A copy, if it is here."""
        with self._lock:
            return self._shelf.get(seat, version)

    def put(self, epoch: Epoch, seat: Seat, version: int, copied: StageCopy) -> None:
        """Keeps a copy.

        Raises:
            SupersededError: a later epoch is known.
        """
        with self._lock:
            if not self._shelf.put(epoch, seat, version, copied):
                raise self._superseded(epoch)

    def settle(self, epoch: Epoch, version: int) -> None:
        """Drops older versions."""
        with self._lock:
            self._recycle(self._shelf.settle(epoch, version))

    def go_back(self, epoch: Epoch, version: int) -> None:
        """Drops newer versions, also those that are arriving."""
        with self._lock:
            self._recycle(self._shelf.go_back(epoch, version))
            self._arriving.clear()

    def clear(self, epoch: Epoch) -> None:
        """Drops everything: the pipeline begins anew."""
        with self._lock:
            self._shelf.clear(epoch)
            self._arriving.clear()
            self._recycled.clear()

    def recycled(self, seat: Seat) -> Mapping[Key, torch.Tensor]:
        """Hands out memory of a copy that was dropped."""
        with self._lock:
            return self._recycled.pop(seat, {})

    def arrive(self, piece: Piece) -> None:
        """Takes in a piece of a copy, and keeps the copy when it is whole.

        Raises:
            PipelineError: what arrived is not what was sent.
            SupersededError: a later epoch is known.
        """
        at = piece.epoch, piece.seat, piece.version
        with self._lock:
            if not self._shelf.enter(piece.epoch):
                raise self._superseded(piece.epoch)
            arriving = self._arriving.get(at) or self._begins(piece)
        for key, tensor in zip(piece.keys, piece.tensors, strict=True):
            arriving.tensors[key] = copied_into(arriving.places.get(key), tensor)
        if piece.rest is None:
            return
        with self._lock:
            self._arriving.pop(at, None)
        copied = StageCopy(piece.seat, arriving.tensors, piece.rest, piece.checksum)
        copied.require_whole()
        self.put(piece.epoch, piece.seat, piece.version, copied)

    def _begins(self, piece: Piece) -> _Arriving:
        """Begins a copy with its first piece; what came in other epochs will never be whole.

        A piece of one may still be written on another thread, so its memory is not used again.
        """
        for at in [each for each in self._arriving if each[0] != piece.epoch]:
            del self._arriving[at]
        begun = _Arriving({}, self._recycled.pop(piece.seat, {}))
        self._arriving[piece.epoch, piece.seat, piece.version] = begun
        return begun

    def _recycle(self, dropped: list[StageCopy]) -> None:
        self._recycled.update({each.seat: each.tensors for each in dropped})

    def _superseded(self, epoch: Epoch) -> SupersededError:
        known = self._shelf.epoch
        assert known is not None, "the first epoch is obeyed"
        why = (
            "its driver was taken for dead, and another goes on"
            if (known.reign != epoch.reign or known.driver != epoch.driver)
            else "the pipeline was formed again"
        )
        return SupersededError(f"pipeline {self.pipeline!r} has other owners now: {why}")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a copy on its way to a backup; the last one has the rest.

    Args:
        epoch: of the formation.
        seat: whose state it is.
        version: of the state.
        keys: of the tensors.
        tensors: some of the copy's.
        rest: what is no tensor; None if more pieces follow.
        checksum: of the whole copy.
    """

    epoch: Epoch
    seat: Seat
    version: int
    keys: tuple[Key, ...]
    tensors: tuple[torch.Tensor, ...]
    rest: Rest | None = None
    checksum: int = 0


class Keepers:
    """All pipelines of which a worker keeps copies."""

    def __init__(self, me: extend.Worker) -> None:
        self._lock = threading.Lock()
        self._keepers: dict[str, Keeper] = {}
        self._me = me
        self._end = me.on_membership(self._changed)

    @classmethod
    def here(cls) -> Keepers:
        """The copies of the current worker."""
        return extend.worker_state(
            "tensorwire.pipeline.backups", lambda: cls(extend.worker()), cls.close
        )

    def of(self, pipeline: str) -> Keeper:
        """The copies of one pipeline."""
        with self._lock:
            return self._keepers.setdefault(pipeline, Keeper(pipeline))

    def names(self) -> list[str]:
        """The pipelines of which something is kept here."""
        with self._lock:
            return list(self._keepers)

    def held_by(self, pipeline: str, driver: extend.Life, keep_for: float) -> Keeper:
        """The same, which a driver holds from now on."""
        keeper = self.of(pipeline)
        if keeper.timer is not None:
            keeper.timer.cancel()
            keeper.timer = None
        keeper.driver, keeper.keep_for = driver, keep_for
        return keeper

    def forget(self, pipeline: str) -> None:
        """Drops all copies of a pipeline."""
        with self._lock:
            keeper = self._keepers.pop(pipeline, None)
        if keeper is not None and keeper.timer is not None:
            keeper.timer.cancel()

    def close(self) -> None:
        """Drops everything, as the worker shuts down."""
        self._end()
        with self._lock:
            keepers = list(self._keepers.values())
        for keeper in keepers:
            self.forget(keeper.pipeline)
            if keeper.timer is not None:
                keeper.timer.join()

    def _changed(self, event: extend.MembershipEvent) -> None:
        if event.change not in (extend.MembershipChange.LOST, extend.MembershipChange.LEFT):
            return
        gone = extend.Life(event.worker.id, event.incarnation)
        with self._lock:
            orphans = [each for each in self._keepers.values() if each.driver == gone]
        for keeper in orphans:
            if keeper.keep_for <= 0:
                self.forget(keeper.pipeline)
                continue
            keeper.timer = threading.Timer(keeper.keep_for, self.forget, (keeper.pipeline,))
            keeper.timer.daemon = True
            keeper.timer.start()


@dataclass
class Cut:
    """A cut under way on one worker: copies its stages, and sends the copies to their backups.

    Args:
        keeper: of this worker.
        keep: what it was told.
        version: of the cut.
        drafts: of each seat here that has no such copy yet.
    """

    keeper: Keeper
    keep: Keep
    version: int
    drafts: Mapping[Seat, Draft | StageCopy]
    _thread: threading.Thread | None = None
    _errors: list[BaseException] = field(default_factory=list)

    def start(self) -> None:
        """Begins, on a thread of its own."""
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="tensorwire-backup", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until it is over, well or not."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Waits until all backups have acknowledged.

        Raises:
            WorkerLostError: one is gone.
        """
        self.wait()
        if self._errors:
            raise self._errors[0]

    def _run(self) -> None:
        try:
            for seat, draft in self.drafts.items():
                self._copy(seat, draft)
        except BaseException as error:  # raised by finish()
            self._errors.append(error)

    def _copy(self, seat: Seat, draft: Draft | StageCopy) -> None:
        if isinstance(draft, Draft):
            copied = draft.finish(self.keeper.recycled(seat))
            self.keeper.put(self.keep.epoch, seat, self.version, copied)
        else:
            copied = draft
        if backup := self.keep.backups.get(seat):
            send(self.keep, copied, self.version, backup)


def send(keep: Keep, copied: StageCopy, version: int, backup: str) -> None:
    """Sends a copy to a backup, unless that has it; returns when it was acknowledged.

    Raises:
        WorkerLostError: the backup is gone.
        SupersededError: the backup knows of a later epoch.
    """
    offer = keep.pipeline, keep.epoch, copied.seat, version, copied.checksum
    if not rpc.rpc_sync(backup, wants, offer, timeout=_NO_LIMIT):
        return
    under_way: deque[rpc.Future[None]] = deque()
    for piece in _pieces(keep.epoch, copied, version):
        if len(under_way) == _UNDER_WAY:
            under_way.popleft().wait()
        if piece.rest is not None:
            while under_way:
                under_way.popleft().wait()
        under_way.append(rpc.rpc_async(backup, receive, (keep.pipeline, piece), timeout=_NO_LIMIT))
    while under_way:
        under_way.popleft().wait()


def _pieces(epoch: Epoch, copied: StageCopy, version: int) -> Iterator[Piece]:
    keys: list[Key] = []
    size = 0
    for key, tensor in copied.tensors.items():
        keys.append(key)
        size += tensor.nbytes
        if size >= _PIECE:
            tensors = tuple(copied.tensors[each] for each in keys)
            yield Piece(epoch, copied.seat, version, tuple(keys), tensors)
            keys, size = [], 0
    tensors = tuple(copied.tensors[each] for each in keys)
    yield Piece(epoch, copied.seat, version, tuple(keys), tensors, copied.rest, copied.checksum)


def _host() -> str:
    return _BOOT.read_text().strip() if _BOOT.exists() else ""


def wants(pipeline: str, epoch: Epoch, seat: Seat, version: int, checksum: int) -> bool:
    """Says whether a copy is not here yet."""
    keeper = Keepers.here().of(pipeline)
    keeper.enter(epoch)
    kept = keeper.get(seat, version)
    return kept is None or kept.checksum != checksum


def receive(pipeline: str, piece: Piece) -> None:
    """Takes in a piece of a copy."""
    Keepers.here().of(pipeline).arrive(piece)


def fetch(pipeline: str, seat: Seat, version: int) -> StageCopy:
    """A copy.

    Raises:
        PipelineError: it is not here.
    """
    kept = Keepers.here().of(pipeline).get(seat, version)
    if kept is None:
        raise PipelineError(f"version {version} of {seat} is not on this worker any more")
    return kept


def settle(pipeline: str, epoch: Epoch, version: int) -> None:
    """Drops older versions, as all seats have this version twice."""
    Keepers.here().of(pipeline).settle(epoch, version)


def held_by(pipeline: str) -> tuple[int, extend.Life | None]:
    """The number of the pipeline's last driver that this worker obeyed, or -1, and its life."""
    keeper = Keepers.here().of(pipeline)
    return keeper.reign(), keeper.driver


def forget(pipeline: str, epoch: Epoch) -> None:
    """Drops all copies of a pipeline that is closed."""
    keepers = Keepers.here()
    keepers.of(pipeline).enter(epoch)
    keepers.forget(pipeline)


def restored(keep: Keep, seats: Mapping[int, Seat]) -> dict[int, StageCopy]:
    """The copies that this worker's stages go back to, fetched from where they are."""
    keeper = Keepers.here().of(keep.pipeline)
    if keep.version is None:
        return {}
    keeper.go_back(keep.epoch, keep.version)
    fetched: dict[int, Any] = {}
    for index, seat in seats.items():
        copied = keeper.get(seat, keep.version)
        if copied is None:
            question = keep.pipeline, seat, keep.version
            copied = rpc.rpc_sync(keep.sources[seat], fetch, question, timeout=_NO_LIMIT)
            keeper.put(keep.epoch, seat, keep.version, copied)
        fetched[index] = copied
    return fetched
