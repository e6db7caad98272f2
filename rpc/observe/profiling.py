"""Profiles that follow calls to other workers.

Owns a profiler that is torch's legacy one and, in addition, records each call
made in its block and what ran for it on other workers, as an extension of calls.
A call appears as ``rpc_async#function(here -> there)``, what ran there under
that name and ``#remote_op:``. Other workers' clocks are not compared with this
one's: what ran there is shown from the start of its call.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import astuple, dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import EventList, FunctionEvent

from rpc.errors import FrameError
from rpc.wire import codec
from rpc.worker_info import WorkerInfo

EXTENSION = "rpc.observe.profiling"

_CLOCK_MARK = "rpc.observe.profiling: now"
_MARKS = 5
_REMOTE = "#remote_op: "
_FIELDS = (
    *("name", "thread", "input_shapes", "scope", "cpu_memory_usage", "device_memory_usage"),
    *("is_async", "sequence_nr", "fwd_thread", "flops", "stack"),
)


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Extras that a profile records besides names and times; see ``profiler_legacy.profile``."""

    record_shapes: bool = False
    with_flops: bool = False
    profile_memory: bool = False
    with_stack: bool = False


class RemoteEvent(NamedTuple):
    """Something that ran on another worker, as it travels.

    Args:
        node_id: where.
        start: microseconds since the handler began.
        end: likewise.
        values: of the attributes in ``_FIELDS``.
    """

    node_id: int
    start: float
    end: float
    values: tuple[Any, ...]

    @classmethod
    def of(cls, event: FunctionEvent, here: int) -> RemoteEvent:
        """Describes an event of this worker, or one that came from another."""
        node_id = event.node_id if event.is_remote else here
        values = tuple(getattr(event, name) for name in _FIELDS)
        return cls(node_id, event.time_range.start, event.time_range.end, values)

    def placed(self, key: str, start: float, number: int) -> FunctionEvent:
        """The event as part of a call that began at ``start`` microseconds."""
        values = dict(zip(_FIELDS, self.values, strict=True))
        name = values["name"] = f"{key}{_REMOTE}{values['name']}"
        return FunctionEvent(  # type: ignore[no-untyped-call]
            id=number,
            trace_name=name,
            start_us=start + self.start,
            end_us=start + self.end,
            is_remote=True,
            is_legacy=True,
            node_id=self.node_id,
            **values,
        )


@dataclass(eq=False)
class ProfiledCall:
    """One call made while a profile was on; can be weakly referenced.

    Args:
        collector: of that profile.
        number: of the call in the profile.
        key: the call's name.
        node_id: this worker.
        started: nanoseconds.
        over: nanoseconds; None while it is under way.
        remote: what ran elsewhere.
    """

    collector: ProfiledCalls
    number: int
    key: str
    node_id: int
    started: int
    over: int | None = None
    remote: list[RemoteEvent] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Marks a request sent in the block as one that asks for what runs for it."""
        token = _recording.set(self)
        try:
            yield
        finally:
            _recording.reset(token)

    def replied(self) -> None:
        """Notes that the reply arrived; what it brings may still have to be decoded."""

    def ended(self, error: BaseException | None = None) -> None:
        """Notes that the call is over."""
        if self.over is None:
            self.over = time.perf_counter_ns()

    def events(self, offset: float, numbers: Iterator[int]) -> Iterator[FunctionEvent]:
        """The events to show; ``offset`` turns this process's microseconds into the profile's."""
        start = self.started / 1e3 + offset
        if self.over is not None:
            yield FunctionEvent(  # type: ignore[no-untyped-call]
                id=next(numbers),
                name=self.key,
                trace_name=self.key,
                thread=self.thread,
                start_us=start,
                end_us=self.over / 1e3 + offset,
                node_id=self.node_id,
                is_async=True,
                is_legacy=True,
                stack=[],
                input_shapes=[],
            )
        for event in list(self.remote):
            yield event.placed(self.key, start, next(numbers))


class ProfiledCalls:
    """The calls made while a profile was on."""

    _numbers: ClassVar[Iterator[int]] = itertools.count(1)

    def __init__(self, settings: ProfileSettings) -> None:
        self.number = next(self._numbers)
        self.settings = settings
        self._lock = threading.Lock()
        self._recordings: list[ProfiledCall] = []

    def start(self, key: str, node_id: int) -> ProfiledCall:
        """Notes a call that begins."""
        with self._lock:
            number = len(self._recordings)
            recording = ProfiledCall(self, number, key, node_id, time.perf_counter_ns())
            self._recordings.append(recording)
        return recording

    def recording(self, number: int) -> ProfiledCall:
        """One of the calls, by its number."""
        return self._recordings[number]

    def events(self, offset: float, first_id: int) -> list[FunctionEvent]:
        """All events that are known."""
        numbers = itertools.count(first_id)
        with self._lock:
            recordings = list(self._recordings)
        return [event for each in recordings for event in each.events(offset, numbers)]


_collector: ContextVar[ProfiledCalls | None] = ContextVar("rpc_profile", default=None)
_recording: ContextVar[ProfiledCall | None] = ContextVar("rpc_profiled_call", default=None)


collector = _collector.get
"""Returns the calls of the profile that is on here; None without one. Asked by every call."""


def followed() -> bool:
    """True if the request being served is recorded, and needs no other place in a profile."""
    return _session.get() is not None


class profile(profiler_legacy.profile):
    """``torch.autograd.profiler_legacy.profile``, which also follows calls to other workers.

    Takes what that takes. ``function_events`` has, besides the local ones, an event
    for each call (``node_id``: this worker) and those of what ran elsewhere
    (``is_remote``, ``node_id``: where). Calls that are not over at the end of
    the block, and those in handlers of other profiles, are not in it.

    Example::

        with rpc.observe.profiling.profile() as prof:
            rpc.rpc_sync("server", torch.mul, (a, b))
        print(prof.key_averages().table())
    """

    def __enter__(self) -> Any:
        entered = super().__enter__()  # type: ignore[no-untyped-call]
        if self.enabled:
            settings = (self.record_shapes, self.with_flops, self.profile_memory, self.with_stack)
            self._collector = ProfiledCalls(ProfileSettings(*settings))
            self._token: Token[ProfiledCalls | None] | None = _collector.set(self._collector)
            self._marks = _Marks()
        return entered

    def __exit__(self, *exc_info: object) -> bool | None:
        if not self.enabled:
            return None
        self.stop()
        self.function_events = self.all_events()
        return False

    def stop(self) -> None:
        """Ends the recording of what runs on this thread; calls under way still add to it."""
        if self._token is None:
            return
        _collector.reset(self._token)
        self._token = None
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        events: list[FunctionEvent] = list(self.function_events or ())
        self._offset = self._marks.offset(events)
        self._local = [event for event in events if event.name != _CLOCK_MARK]

    def all_events(self) -> Any:
        """The events that ran here, and the calls as far as they are over."""
        first_id = max((event.id for event in self._local), default=0) + 1
        events = [*self._local, *self._collector.events(self._offset, first_id)]
        for event in events:
            event.cpu_parent, event.cpu_children = None, []
        merged = EventList(  # type: ignore[no-untyped-call]
            sorted(events, key=lambda each: (each.time_range.start, -each.time_range.end)),
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
            with_flops=self.with_flops,
        )
        merged._build_tree()  # type: ignore[no-untyped-call]
        return merged


class _Marks:
    """Marks that it leaves in the profile that records this thread, and when it left each.

    Of several the one that took least is believed: while another was made, the thread may
    have had to wait for a processor.
    """

    def __init__(self) -> None:
        self._made = [_mark() for _ in range(_MARKS)]

    def offset(self, events: Sequence[FunctionEvent]) -> float:
        """Microseconds from this process's clock to that of the profile with these events."""
        starts = sorted(e.time_range.start for e in events if e.name == _CLOCK_MARK)
        pairs = zip(self._made, starts, strict=False)  # a profile within this one made others
        (before, after), start = min(pairs, key=lambda pair: pair[0][1] - pair[0][0])
        return float(start - (before + after) / 2e3)


def _mark() -> tuple[int, int]:
    """Leaves a mark; returns the nanoseconds between which that was."""
    before = time.perf_counter_ns()
    with record_function(_CLOCK_MARK):
        return before, time.perf_counter_ns()


class _ProfiledHandler:
    """Profiles one handler, for a caller that profiles."""

    def __init__(self, settings: ProfileSettings, here: int) -> None:
        self._profile = profile(  # type: ignore[no-untyped-call]
            record_shapes=settings.record_shapes,
            with_flops=settings.with_flops,
            profile_memory=settings.profile_memory,
            with_stack=settings.with_stack,
        )
        self._here = here
        self._token: Token[_ProfiledHandler | None] | None = None
        self._thread = 0
        self._left = threading.Event()

    def __enter__(self) -> _ProfiledHandler:
        self._thread = threading.get_ident()
        self._profile.__enter__()
        self._token = _session.set(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._token is not None
        _session.reset(self._token)
        self._profile.stop()
        self._left.set()

    def events(self) -> list[RemoteEvent]:
        """All events; for the reply, which another thread may send as the handler returns."""
        if threading.get_ident() == self._thread:
            self._profile.stop()
        else:
            self._left.wait()
        return [RemoteEvent.of(event, self._here) for event in self._profile.all_events()]


_session: ContextVar[_ProfiledHandler | None] = ContextVar("rpc_profiled_handler", default=None)


class Observed(Protocol):
    """The worker that an extension belongs to."""

    @property
    def info(self) -> WorkerInfo:
        """Its name and id."""


class ProfilingExtension:
    """Asks for, makes and takes the profiles of handlers; for one calls."""

    name: ClassVar[str] = EXTENSION

    def __init__(self, worker: Observed) -> None:
        self._here = worker.info.id
        self._lock = threading.Lock()
        # Only while their profile is kept: a call that fails brings no profile back.
        self._under_way: WeakValueDictionary[tuple[int, int], ProfiledCall] = WeakValueDictionary()

    def outgoing_request(self, to: int, tensors: Sequence[torch.Tensor]) -> bytes | None:
        """Asks for a profile of the handler if the call is being recorded."""
        recording = _recording.get()
        if recording is None:
            return None
        which = recording.collector.number, recording.number
        with self._lock:
            self._under_way[which] = recording
        return codec.encode((*which, astuple(recording.collector.settings))).payload

    def incoming_request(
        self, sender: int, metadata: bytes, tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], _ProfiledHandler]:
        """Profiles the handler."""
        _, _, settings = _decoded(metadata)
        return tensors, _ProfiledHandler(ProfileSettings(*settings), self._here)

    def outgoing_reply(
        self, to: int, request_metadata: bytes, tensors: Sequence[torch.Tensor]
    ) -> bytes | None:
        """Sends what ran."""
        session = _session.get()
        if session is None:
            return None
        return codec.encode([tuple(event) for event in session.events()]).payload

    def incoming_reply(
        self, sender: int, request_metadata: bytes, metadata: bytes, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Takes what ran into the profile that asked for it."""
        collector, number, _ = _decoded(request_metadata)
        with self._lock:
            recording = self._under_way.pop((collector, number), None)
        if recording is not None:
            recording.ended()  # before anybody who waits for the call goes on
            recording.remote += [RemoteEvent(*event) for event in _decoded(metadata)]
        return tensors

    def on_message(self, sender: int, body: bytes, tensors: list[torch.Tensor]) -> bytes:
        """Raises: profiles travel on calls only."""
        raise FrameError("there are no messages about profiles")

    def on_worker_lost(self, worker_id: int, reason: str) -> None:
        """Does nothing: a call that got lost leaves only its own event."""

    def debug_info(self) -> dict[str, int]:
        """Returns nothing that would interest anybody."""
        return {}

    def close(self) -> None:
        """Does nothing: what is recorded belongs to the profiles."""


def _decoded(data: bytes) -> Any:
    return codec.decode(data, (), ())


RPC_EXTENSION = ProfilingExtension
