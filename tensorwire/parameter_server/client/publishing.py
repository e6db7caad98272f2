"""Publishes versions of the cluster's state from a thread beside training.

The trainer that publishes is the one writer of the chain. It has the shards write what they have at
a cut into a draft, commits the draft, and only then tells the coordinator, so that shards forget
what they need not write again. A version that fails leaves nothing behind but a larger next one.
"""

from __future__ import annotations

import contextvars
import json
import logging
import os
import shutil
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tensorwire.checkpoint.chain import Kind, Version, VersionFile
from tensorwire.checkpoint.chain_writer import ChainWriter
from tensorwire.checkpoint.shard_file import require_safetensors
from tensorwire.parameter_server import errors
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.orders import Extent
from tensorwire.parameter_server.decisions.views import Snapshot
from tensorwire.parameter_server.declarations.arguments import instance, number, whole
from tensorwire.parameter_server.declarations.spec import Precision
from tensorwire.parameter_server.opaque import Function, Response
from tensorwire.parameter_server.snapshots.contents import about_samples
from tensorwire.parameter_server.snapshots.published import about_version

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster

_logger: Final = logging.getLogger("tensorwire")


@dataclass(frozen=True, slots=True)
class Steps:
    """Makes a version due each time that this trainer has made so many pushes.

    Args:
        count: how many, at least 1.

    Raises:
        TypeError: ``count`` is no whole number.
        ValueError: it is less than 1.
    """

    count: int

    def __post_init__(self) -> None:
        whole("Steps", "count", self.count)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Makes a version due each time that so many seconds are over.

    Args:
        seconds: how much, at least 0.001.

    Raises:
        TypeError: ``seconds`` is no number.
        ValueError: it is less than that.
    """

    seconds: float

    def __post_init__(self) -> None:
        number("Seconds", "seconds", self.seconds, least=0.001)


Every = Steps | Seconds


class Due:
    """Decides when versions are due. Sans-IO.

    Args:
        every: how often.
        step: pushes of this trainer so far.
        now: seconds of a clock that does not go back.
    """

    def __init__(self, every: Every, step: int, now: float) -> None:
        self._every = every
        self._step, self._from_step = step, step
        self._from_time = now
        self._is_wanted = True

    def stepped(self, step: int) -> None:
        """Notes how many pushes this trainer has made; fewer than before if it went back."""
        self._step = step
        self._from_step = min(self._from_step, step)

    def want(self) -> None:
        """Makes a version due now."""
        self._is_wanted = True

    def is_due(self, now: float) -> bool:
        """True if a version is due."""
        if isinstance(self._every, Steps):
            return self._is_wanted or self._step - self._from_step >= self._every.count
        return self._is_wanted or now - self._from_time >= self._every.seconds

    def seconds_left(self, now: float) -> float | None:
        """Seconds until one is due; None if that is no matter of time."""
        if isinstance(self._every, Steps):
            return None
        return max(0.0, self._from_time + self._every.seconds - now)

    def begun(self, now: float) -> None:
        """Notes that a version is being taken; whatever was due beside it is in it."""
        if isinstance(self._every, Steps):
            count = self._every.count
            self._from_step += (self._step - self._from_step) // count * count
        self._from_time = now
        self._is_wanted = False


class Publishing:
    """Versions that are published while training goes on. Made by ``Cluster.publish``.

    Attributes:
        folder: of the chain.
    """

    def __init__(
        self,
        cluster: Cluster,
        writer: ChainWriter,
        every: Every,
        base_every: int,
        with_state: bool,
        precision: Precision | None,
        extra: object,
    ) -> None:
        self.folder = writer.folder
        self._cluster = cluster
        self._writer = writer
        self._base_every = base_every
        self._with_state = with_state
        self._precision = precision
        self._extra = extra
        self._chain = uuid.uuid4().hex
        self._since: orders.Since | None = None
        self._deltas = 0
        self._changed = threading.Condition()
        self._due = Due(every, cluster.step, time.monotonic())
        self._begun = self._ended = 0
        self._is_stopping = False
        self._error: Exception | None = None
        self._version: Version | None = None
        context = contextvars.copy_context()  # of this worker
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="tensorwire-ps-publish", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        at = "no version yet" if self._version is None else f"version {self._version.number}"
        return f"Publishing({str(self.folder)!r}, {at})"

    @property
    def version(self) -> Version | None:
        """The last version that is on disk: its ``number``, ``kind``, ``step`` and ``folder``."""
        return self._version

    @property
    def is_running(self) -> bool:
        """False once it was stopped, or this worker has left the cluster."""
        return self._thread.is_alive() and not self._is_stopping

    def take(self) -> None:
        """Makes a version due now, beside those that are due anyway; see :meth:`wait`.

        Raises:
            ParameterServerError: it was stopped, or this worker has left the cluster.
        """
        if not self.is_running:
            raise errors.ParameterServerError(
                f"nothing is published into {str(self.folder)!r} any more; call cluster.publish"
            )
        with self._changed:
            self._due.want()
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until what is due by now is on disk.

        Args:
            timeout: seconds; default none.

        Raises:
            SnapshotError: the last one could not be written; training and publishing go on, and
                the next one holds what this one should have.
            TimeoutError: it takes longer.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            wanted = self._begun + (1 if self._is_due() else 0)
            while self._thread.is_alive() and self._ended < wanted:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"versions that are due were not written in {timeout} s")
                self._changed.wait(left)
            error, is_over = self._error, self._ended < wanted
        if is_over:
            raise errors.SnapshotError("a version was due, but this worker has left the cluster")
        if error is not None:
            raise errors.SnapshotError(f"the last version was not published: {error}") from error

    def stop(self) -> None:
        """Ends it, once the version that is being written is on disk. From then on servers do not
        note what changes; nor do they if this worker is lost."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def note_step(self, step: int) -> None:
        """Notes how many pushes this trainer has made."""
        with self._changed:
            self._due.stepped(step)
            if self._is_due():
                self._changed.notify_all()

    def _is_due(self) -> bool:
        return not self._is_stopping and self._due.is_due(time.monotonic())

    # --- the thread

    def _run(self) -> None:
        with self._writer:
            self._publish_until_stopped()
            if not self._cluster.session.is_closed:
                self._end_marks()

    def _end_marks(self) -> None:
        """Tells the servers that no more versions follow."""
        try:
            self._ask(orders.EndPublishing(self._chain), "all trainers to be at one step")
        except errors.ParameterServerError as error:
            _logger.warning(
                "nothing is published into %s any more, but servers go on noting what changes: %s",
                self.folder, error,
            )  # fmt: skip

    def _publish_until_stopped(self) -> None:
        while self._wait_until_due():
            error: Exception | None = None
            try:
                self._take()
            except Exception as failed:  # whatever it is, the next one may be published
                error = failed
                _logger.warning(
                    "a version was not published into %s; the next one holds what it should "
                    "have: %s: %s", self.folder, type(failed).__name__, failed,
                )  # fmt: skip
            with self._changed:
                self._error, self._ended = error, self._begun
                self._is_stopping |= self._cluster.session.is_closed
                self._changed.notify_all()

    def _wait_until_due(self) -> bool:
        """Waits until a version is due; False if there will be no more."""
        with self._changed:
            while not self._is_due():
                if self._is_stopping:
                    return False
                self._changed.wait(self._due.seconds_left(time.monotonic()))
            self._due.begun(time.monotonic())
            self._begun += 1
            return True

    def _take(self) -> None:
        """Takes a version: a delta if that is possible."""
        is_base = self._since is None or self._deltas >= self._base_every
        if is_base or self._writer.needs_base or not self._take_as(Kind.DELTA):
            self._since = None
            self._take_as(Kind.BASE)

    def _take_as(self, kind: Kind) -> bool:
        """Takes a version of this kind; False if it cannot be told by what has changed."""
        number = self._writer.next_number()
        try:
            draft, at = self._writer.folder_of(number), time.time()
            extent = Extent.ALL if kind is Kind.BASE else Extent.CHANGES
            rounded = self._precision.name if self._precision is not None else ""
            what = orders.Version(self._chain, extent, self._with_state, rounded)
            asked = orders.TakeVersion(what, str(draft), self._cluster.session.client, self._since)
            taken = self._ask(asked, "all shards to write a version")
            if taken is None:
                return False
            version = self._commit(number, kind, taken, at)
        finally:
            self._writer.discard(number)
        self._deltas = 0 if kind is Kind.BASE else self._deltas + 1
        self._since = taken.since
        self._version = version
        self._tell(taken, version)
        return True

    def _commit(self, number: int, kind: Kind, taken: orders.VersionTaken, at: float) -> Version:
        draft, files = self._writer.folder_of(number), {}
        for part in taken.parts:
            for name, (size, checksum) in part.files.items():
                (Path(taken.folder) / name).rename(draft / name)
                files[name] = VersionFile(size, checksum)
        for attempt in [each for each in draft.iterdir() if each.is_dir()]:
            shutil.rmtree(attempt)
        shards = [part.shard for part in taken.parts]
        cut = taken.at
        samples = about_samples(self._cluster.session.view.samplers, cut.accounts)
        about = about_version(shards, cut.counts, cut.time, self._extra, samples)
        return self._writer.commit(number, kind, taken.at.time, files, about, at)

    def _tell(self, taken: orders.VersionTaken, version: Version) -> None:
        """Says that a version is whole; if that does not arrive, the next one holds it again."""
        snapshot = None
        if self._with_state:
            cut = taken.at
            snapshot = Snapshot(str(version.folder), cut.counts, cut.time, cut.accounts)
        try:
            self._ask(orders.Commit(taken.at, taken.since, snapshot), "all shards to hear of it")
        except errors.ParameterServerError as error:
            _logger.warning("version %d is published, but %s", version.number, error)

    def _ask(self, what: orders.Request, waits_for: str) -> Response:
        ask: Function = self._cluster.session.servers.ask_coordinator
        return ask(what, patient=False, waits_for=waits_for)


def begin_publishing(
    cluster: Cluster,
    folder: str | os.PathLike[str],
    every: Every,
    base_every: int,
    *,
    state: bool,
    precision: Precision | None,
    keep_bases: int,
    extra: object,
) -> Publishing:
    """Checks what ``Cluster.publish`` is given, and begins."""
    instance("publish", "folder", folder, (str, os.PathLike), "a folder")
    instance("publish", "every", every, (Steps, Seconds), "ps.Steps(n) or ps.Seconds(s)")
    whole("publish", "base_every", base_every)
    instance("publish", "state", state, bool, "True or False")
    instance("publish", "precision", precision, (Precision, type(None)), "a ps.Precision or None")
    if state and precision is not None:
        raise ValueError(
            f"publish: precision={precision} rounds rows, from which training cannot go on bit for "
            "bit; publish with state=False, or with precision=None"
        )
    whole("publish", "keep_bases", keep_bases)
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise TypeError(f"publish: extra={extra!r} is no plain JSON data: {error}") from None
    require_safetensors()
    writer = ChainWriter(Path(folder), keep_bases)
    writer.say_what_goes_on()
    return Publishing(cluster, writer, every, base_every, state, precision, extra)
