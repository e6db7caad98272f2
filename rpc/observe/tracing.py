"""Distributed traces: what every worker did for some calls, in one picture.

Rides on calls as an extension. A traced request carries the number of its trace
and its own; the callee then records its stages, and so do the calls that its
handler makes. When the trace ends, the worker that began it collects everyone's
records. Owns who records what and when; the records are ``trace_records``,
clocks are ``trace_clocks``', the picture ``trace_view``'s.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
import random
import struct
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from rpc.current import current_agent
from rpc.errors import FrameError
from rpc.observe.trace_clocks import ClockSample, Offset, estimate, samples_of
from rpc.observe.trace_records import (
    CallKind,
    CallRecord,
    HandlerRecord,
    WorkerTrace,
    from_json,
    to_json,
)
from rpc.observe.trace_view import chrome_trace
from rpc.outcomes.futures import Future
from rpc.runtime.clock import Clock, MonotonicClock
from rpc.wire.messages import Extensions
from rpc.worker_info import WorkerInfo

T = TypeVar("T")

MAX_RECORDS = 100_000
"""Calls, and handlers, that one worker records for one trace; more are only counted."""

_FINISHED_REMEMBERED = 1024
_METADATA = struct.Struct("<QIQ")


@dataclass(frozen=True, slots=True)
class TracePlace:
    """The trace, and the handler if any, in which code runs."""

    recording: TraceRecording
    handler: HandlerRecord | None


_place: contextvars.ContextVar[TracePlace | None] = contextvars.ContextVar(
    "rpc_trace", default=None
)
_sending: contextvars.ContextVar[tuple[TraceRecording, CallRecord] | None] = contextvars.ContextVar(
    "rpc_traced_call", default=None
)

active: Callable[[], TracePlace | None] = _place.get
"""The place of the running code; None outside traces. Asked by every call."""


class TracedWorker(Protocol):
    """The worker whose calls are recorded."""

    @property
    def info(self) -> WorkerInfo:
        """Its name and id."""

    @property
    def clock(self) -> Clock:
        """Its time."""


class TracingWorker(TracedWorker, Protocol):
    """The worker that begins a trace."""

    def load_extension(self, name: str) -> object:
        """Its extension of this module."""

    def get_worker_infos(self) -> list[WorkerInfo]:
        """The workers that are not lost."""

    def why_lost(self, worker: WorkerInfo) -> Exception | None:
        """Says why a worker is lost; None if it is not."""

    def send_extension_message(self, to: int, extension: str, body: bytes) -> Future[bytes]:
        """Asks the extension of another worker."""


class TraceRecording:
    """The records of one trace on one worker.

    Args:
        me: the worker.
        clock: its time.
        trace: number of the trace.
        owner: id of the worker that began it.
        spans: numbers for its calls.
    """

    def __init__(
        self, me: WorkerInfo, clock: Clock, trace: int, owner: int, spans: Iterator[int]
    ) -> None:
        self._me = me
        self._clock = clock
        self._spans = spans
        self._lock = threading.Lock()
        self._operators: Any = None
        self.trace = trace
        self.owner = owner
        self.now = clock.now
        self.records = WorkerTrace(me.id, me.name, _process(clock))

    def begin_call(self, kind: CallKind, name: str, to: int) -> CallRecord:
        """Begins the record of a call of this worker."""
        span = (self.records.worker + 1) << 40 | next(self._spans)
        record = CallRecord(span, kind, name, to, self._thread(), self.now())
        with self._lock:
            self._keep(self.records.calls, record)
        return record

    def begin_handler(self, span: int, name: str, sender: int) -> HandlerRecord:
        """Begins the record of a request that a thread takes on."""
        record = HandlerRecord(span, name, sender, self._thread(), self.now())
        with self._lock:
            self._keep(self.records.handlers, record)
        return record

    def record_operators(self) -> None:
        """Begins to record torch's operators."""
        from rpc.observe.trace_operators import OperatorRecorder

        self._operators = OperatorRecorder(self._clock)

    def stop(self) -> None:
        """Ends the recording; the records are complete."""
        recorder, self._operators = self._operators, None
        if recorder is not None:
            self.records.operators += recorder.stop()

    def of(self, worker: WorkerInfo) -> bool:
        """True if these are the records of ``worker``, and of no namesake in this process."""
        return self._me is worker

    def metadata(self, record: CallRecord) -> bytes:
        """The metadata that the request of a call carries."""
        return _METADATA.pack(self.trace, self.owner, record.span) + record.name.encode()

    def _thread(self) -> int:
        native = threading.get_native_id()
        if native not in self.records.threads:
            self.records.threads[native] = threading.current_thread().name
        return native

    def _keep(self, records: list[Any], record: object) -> None:
        if len(records) < MAX_RECORDS:
            records.append(record)
        else:
            self.records.dropped += 1


# --- What callers and callees report


@contextlib.contextmanager
def sending(place: TracePlace, record: CallRecord) -> Iterator[None]:
    """Marks, for a block, that a traced request is encoded and sent."""
    token = _sending.set((place.recording, record))
    try:
        yield
    finally:
        _sending.reset(token)


def riding() -> Extensions:
    """The metadata of a traced message that no other extension has anything to say about."""
    current = _sending.get()
    if current is None:
        return ()
    recording, record = current
    record.sent = recording.now()
    return ((Tracing.name, recording.metadata(record)),)


def served(arrived: float, replied: float, failed: bool) -> None:
    """Notes that the reply to the request that runs here was sent, or is about to be."""
    place = _place.get()
    if place is not None and place.handler is not None:
        record = place.handler
        record.arrived, record.replied, record.failed = arrived, replied, failed


def apart(function: Callable[[T], None], argument: T) -> None:
    """Calls what is no part of the handler that runs here, outside of that one's record."""
    context = contextvars.copy_context()
    context.run(_place.set, None)
    context.run(function, argument)


class Tracing:
    """The call extension that records traces, one object for each worker.

    Args:
        worker: whose calls it records.
    """

    name: ClassVar[str] = "rpc.tracing"

    def __init__(self, worker: TracedWorker) -> None:
        self._me = worker.info
        self._clock = worker.clock
        self._lock = threading.Lock()
        self._spans = count(1)
        self._recordings: dict[int, TraceRecording] = {}
        self._finished: deque[int] = deque(maxlen=_FINISHED_REMEMBERED)

    def recording(self, trace: int, owner: int) -> TraceRecording | None:
        """This worker's records of a trace, begun if need be; None if it is over."""
        with self._lock:
            if trace in self._finished:
                return None
            recording = self._recordings.get(trace)
            if recording is None:
                recording = TraceRecording(self._me, self._clock, trace, owner, self._spans)
                self._recordings[trace] = recording
            return recording

    def finish(self, trace: int) -> TraceRecording | None:
        """Ends a trace here; what was recorded, if anything."""
        with self._lock:
            self._finished.append(trace)
            recording = self._recordings.pop(trace, None)
        if recording is not None:
            recording.stop()
        return recording

    def outgoing_request(self, to: int, tensors: Sequence[torch.Tensor]) -> bytes | None:
        """Notes that the arguments are encoded."""
        for _, metadata in riding():
            return metadata
        return None

    def incoming_request(
        self, sender: int, metadata: bytes, tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], AbstractContextManager[object]]:
        """Begins to record a handler. Its context is its own, so the place need not be undone."""
        if len(metadata) < _METADATA.size:
            raise FrameError(f"{len(metadata)} bytes are no trace metadata")
        trace, owner, span = _METADATA.unpack_from(metadata)
        recording = self.recording(trace, owner)
        if recording is not None:
            name = metadata[_METADATA.size :].decode(errors="replace")
            _place.set(TracePlace(recording, recording.begin_handler(span, name, sender)))
        return tensors, nullcontext()

    def outgoing_reply(
        self, to: int, request_metadata: bytes, tensors: Sequence[torch.Tensor]
    ) -> bytes | None:
        """Notes that the result is encoded."""
        place = _place.get()
        if place is not None and place.handler is not None:
            place.handler.encoded = place.recording.now()
        return None

    def incoming_reply(
        self, sender: int, request_metadata: bytes, metadata: bytes, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Does nothing: replies carry nothing."""
        return tensors

    def on_message(self, sender: int, body: bytes, tensors: list[torch.Tensor]) -> bytes:
        """Begins or ends a trace that ``sender`` owns."""
        asked = json.loads(body)
        arrived = self._clock.now()
        if asked["do"] == "begin":
            recording = self.recording(asked["trace"], sender)
            if recording is not None and asked["operators"]:
                recording.record_operators()
            return json.dumps([arrived, self._clock.now()]).encode()
        finished = self.finish(asked["trace"])
        return to_json(finished.records) if finished is not None else b""

    def on_worker_lost(self, worker_id: int, reason: str) -> None:
        """Forgets the traces of a lost worker."""
        with self._lock:
            orphans = [t for t, r in self._recordings.items() if r.owner == worker_id]
        for trace in orphans:
            self.finish(trace)

    def debug_info(self) -> dict[str, int]:
        """The number of traces under way."""
        return {"traces": len(self._recordings)}

    def close(self) -> None:
        """Ends all traces."""
        for trace in list(self._recordings):
            self.finish(trace)


RPC_EXTENSION = Tracing


# --- What users see


class Trace:
    """A trace, under way or finished; made by :func:`trace`.

    Args:
        worker: the one that began it.
        operators: whether torch's operators are recorded too.
    """

    def __init__(self, worker: TracingWorker, operators: bool) -> None:
        self._worker = worker
        self._clock = worker.clock
        self._operators = operators
        self._number = random.SystemRandom().getrandbits(64)
        self._extension = _extension_of(worker)
        self._told: set[WorkerInfo] = set()
        self._samples: list[ClockSample] = []
        self._origin = self._clock.now()
        self.workers: tuple[WorkerTrace, ...] = ()
        """The workers' records, this worker's first; empty until the trace is finished."""
        self.offsets: Mapping[int, Offset] = {}
        """The offsets of the workers' clocks, by id."""
        self.problems: tuple[str, ...] = ()
        """The workers that could not be asked, or could not do what they were asked, and why."""

    def chrome_trace(self) -> dict[str, Any]:
        """The finished trace in Chrome's JSON object format."""
        drawn = chrome_trace(self.workers, self.offsets, self._origin)
        drawn["otherData"]["problems"] = list(self.problems)
        return drawn

    def begin(self) -> TraceRecording:
        """Tells everyone; from then on calls made at the returned recording's place are traced."""
        recording = self._extension.recording(self._number, self._worker.info.id)
        assert recording is not None
        if self._operators:
            recording.record_operators()
        sent = self._clock.now()
        for worker, answer in self._ask("begin").items():
            arrived, replied = json.loads(answer)
            here = self._worker.info.id
            received = self._clock.now()
            self._samples.append(ClockSample(here, worker, sent, arrived, replied, received))
        self._origin = self._clock.now()
        return recording

    def finish(self) -> None:
        """Collects what everyone recorded."""
        try:
            mine = self._extension.finish(self._number)
        finally:  # the others are to end, whatever happened here
            theirs = self._ask("collect")
        records = [mine.records] if mine is not None else []
        records += [from_json(answer) for answer in theirs.values() if answer]
        self.workers = tuple(records)
        samples = [*samples_of(records), *self._samples]
        self.offsets = estimate(self._worker.info.id, samples)

    def _ask(self, what: str) -> dict[int, bytes]:
        """Sends a question to all others; the answers of those that gave one."""
        body = {"do": what, "trace": self._number, "operators": self._operators}
        asked = {}
        answers: dict[int, bytes] = {}
        living = [w for w in self._worker.get_worker_infos() if w != self._worker.info]
        problems = {*self.problems, *map(self._what_became_of, self._told.difference(living))}
        self._told.update(living)
        for worker in living:
            try:
                asked[worker] = self._worker.send_extension_message(
                    worker.id, Tracing.name, json.dumps(body).encode()
                )
            except RuntimeError as error:
                problems.add(f"{worker.name}: {error}")
        for worker, future in asked.items():
            try:
                answers[worker.id] = future.wait()
            except RuntimeError as error:
                problems.add(f"{worker.name}: {error}")
        self.problems = tuple(sorted(problems))
        return answers

    def _what_became_of(self, worker: WorkerInfo) -> str:
        lost = self._worker.why_lost(worker)
        return f"{worker.name}: {lost or 'another took its place'}"


@contextlib.contextmanager
def trace(
    path: str | os.PathLike[str] | None = None, *, operators: bool = False
) -> Iterator[Trace]:
    """Records the calls made inside the ``with`` block, on all workers they reach.

    Traces all calls made inside the block and on its thread: calls, the calls
    that their handlers make, and so on. The result is one Chrome trace, for
    chrome://tracing or https://ui.perfetto.dev: a process per worker, arrows from
    calls to handlers, all on the clock of this worker.

    Args:
        path: where to write it; None to use only the returned object. The file is
            created at once, to learn that it can be written, and is empty until the end.
        operators: record torch's operators too, on all threads of all workers.
            Costs a few microseconds per operator. A process that runs a
            ``torch.profiler`` of its own keeps its operators to itself. Where it is
            the first profile of a process and begins on another thread than the one
            that imported torch, torch prints ``ERROR: External init callback must
            run in same thread as registerClient``, which means nothing.

    Yields:
        The trace, which can be looked at when the block is over.

    Raises:
        TypeError: ``path`` is no path.
        OSError: nothing can be written there; the subclass and the text say why.
        NotInitializedError: there is no RPC.
        RuntimeError: this context is in a trace already.

    Example::

        with rpc.tracing.trace("step.json", operators=True):
            train_step()
    """
    worker: TracingWorker = current_agent()
    if _place.get() is not None:
        raise RuntimeError("a trace is being recorded here already")
    file_name = None if path is None else _writable(path)
    result = Trace(worker, operators)
    try:
        token = _place.set(TracePlace(result.begin(), None))
    except BaseException:
        result.finish()
        raise
    try:
        yield result
    finally:
        _place.reset(token)
        result.finish()
        if file_name is not None:
            with open(file_name, "w", encoding="utf-8") as file:
                json.dump(result.chrome_trace(), file)


def _writable(path: str | os.PathLike[str]) -> str:
    """The same file's absolute path, for the working directory may change; makes an empty file.

    What is there already stays as it is. What is no ordinary file, such as a pipe, is not
    opened yet: whoever reads from it would take that for the trace.
    """
    if not isinstance(path, str | os.PathLike):
        # A number would be a descriptor, of whatever file or socket, to write to and close.
        raise TypeError(f"path={path!r} is a {type(path).__name__}, not the path of a file")
    problem = f"path={path!r} is no file that the trace could be written to"
    try:
        if os.path.isfile(path) or os.path.isdir(path) or not os.path.exists(path):
            with open(path, "a"):
                pass
    except OSError as error:
        raise OSError(error.errno, f"{problem}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{problem}: {error}") from error
    return os.path.abspath(path)


@functools.cache
def _token(process: int) -> str:
    return f"{process}-{uuid.uuid4().hex}"


def _process(clock: Clock) -> str:
    """Names this process; the same for all its workers whose clocks tell the same time."""
    which = "" if type(clock) is MonotonicClock else f"-{id(clock):x}"
    return _token(os.getpid()) + which


def _extension_of(worker: TracingWorker) -> Tracing:
    extension = worker.load_extension(Tracing.name)
    assert isinstance(extension, Tracing)
    return extension
