"""``serve`` and ``set_event``: a worker that only answers calls, and what ends that.

Decides when a server is done: the launcher or a person says so by a signal, a named event is
set in the group's store, or the workers that do not serve have left. One thread asks the
store; the thread that called ``serve`` sleeps until somebody tells it to stop.

Keys of the store, in a namespace of its own: ``event/NAME`` is there when that event was
set, ``serving/NAME`` when the worker NAME serves.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType

from rpc import api
from rpc.agent import Agent
from rpc.current import current_agent
from rpc.errors import AgentClosedError, RpcError, RpcTimeoutError, WorkerLostError
from rpc.group.events import MembershipChange, MembershipEvent
from rpc.group.key_values import KeyValueStore
from rpc.runtime.clock import Alarm
from rpc.runtime.executor import blocking
from rpc.runtime.threads import Thread
from rpc.worker_info import may_exist

_logger = logging.getLogger("rpc")

_NAMESPACE = "rpc.serving"
_SECONDS_BETWEEN_LOOKS = 0.25
_SECONDS_TO_LEAVE = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _End(enum.Enum):
    """The reason why the serving ended."""

    SIGNAL = enum.auto()
    EVENT = enum.auto()
    OTHERS_LEFT = enum.auto()
    EXPELLED = enum.auto()


class _ToldToEndError(BaseException):
    """A signal came while a static group was waited for. Never leaves this module."""


def serve(until: str | None = None) -> None:
    """Answers calls until this worker is not needed any more, then leaves the group.

    Call it in place of ``shutdown``, on the main thread, in a worker that has nothing of its
    own to do. It returns when one of these happens first:

    * SIGTERM or SIGINT arrives. rpcrun sends SIGTERM to its ``service`` roles when the others
      are done.
    * The event named by ``until`` was set, by whichever worker called :func:`set_event`.
    * Without ``until`` and without rpcrun, the workers that do not serve are done: they have
      called ``shutdown`` (or were lost), and there was at least one.

    By then the worker has left: it answers no more calls, and its own objects are as the last
    call left them.

    Args:
        until: name of an event. Default none.

    Raises:
        NotInitializedError: ``init_rpc`` was not called.
        WorkerLostError: the others declared this worker lost. It has shut down, and may join
            again.
        RpcError: this is a worker of rpcrun whose role is not marked ``service``, so that the
            job would wait for it and it for the job.
        TypeError: ``until`` is no text.
        ValueError: ``until`` has other characters than an event may have.

    Example::

        rpc.init_rpc()
        rpc.serve()
    """
    agent = current_agent()
    if until is not None:
        _require_event(until)
    _refuse_to_wait_for_itself(agent, until)
    end = _wait(agent, until)
    if end is _End.EXPELLED:
        api.shutdown(graceful=False)
        life = agent.life.incarnation
        raise WorkerLostError(agent.info.name, life, "the others declared it lost")
    if agent.membership is None:
        _leave_static_group(end)
    else:
        _leave_dynamic_group()


def set_event(name: str) -> None:
    """Sets a named event of the group: workers that serve until it return.

    It stays set for as long as the group's store lives, also for workers that join later.

    Args:
        name: letters, digits, ``-``, ``_`` and ``:``.

    Raises:
        NotInitializedError: ``init_rpc`` was not called.
        ValueError: the name has other characters.

    Example::

        rpc.set_event("trained")  # ends rpc.serve(until="trained") elsewhere
    """
    _require_event(name)
    _store_of(current_agent()).set(f"event/{name}", b"")


def _require_event(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"an event is named by a str, but got {name!r}")
    if not may_exist(name):
        raise ValueError(f"event {name!r}: use letters, digits, '-', '_' and ':'")


def _store_of(agent: Agent) -> KeyValueStore:
    return agent.worker.store(_NAMESPACE)


def _is_seated(agent: Agent) -> bool:
    """True if rpcrun started this worker, and says itself when it has served enough."""
    return os.environ.get("RPC_WORKER_NAME") == agent.info.name


def _refuse_to_wait_for_itself(agent: Agent, until: str | None) -> None:
    if until is None and _is_seated(agent) and os.environ.get("RPC_SERVICE") == "0":
        role = agent.info.name.partition(":")[0]
        raise RpcError(
            f"{agent.info.name!r} calls rpc.serve(), which ends when the job's other workers "
            f"are done, but its role is no service, so the job would wait for it in turn; "
            f"start it with: rpcrun --role {role}:COUNT,service"
        )


def _wait(agent: Agent, until: str | None) -> _End:
    """Sleeps until something ends the serving; in a static group, that ``shutdown`` may wait."""
    told: SimpleQueue[_End] = SimpleQueue()  # its put may be called in a signal handler
    looks: list[_Looks] = []
    if until is not None:
        looks.append(_Looks(agent, lambda store: _is_set(store, until), _End.EVENT, told))
    elif agent.membership is None:
        return _End.OTHERS_LEFT
    elif not _is_seated(agent):
        _store_of(agent).set(f"serving/{agent.info.name}", b"")
        looks.append(_Looks(agent, _Others(agent).have_left, _End.OTHERS_LEFT, told))

    def hear(event: MembershipEvent) -> None:
        if event.worker == agent.info and event.change is MembershipChange.LOST:
            told.put(_End.EXPELLED)

    def hear_signal(number: int, frame: FrameType | None) -> None:
        told.put(_End.SIGNAL)

    stop_hearing = agent.events.subscribe(hear)
    if agent.is_expelled:
        told.put(_End.EXPELLED)
    try:
        with _handling_signals(hear_signal), blocking():
            for look in looks:
                look.start()
            return told.get()
    finally:
        stop_hearing()
        for look in looks:
            look.stop()


@contextlib.contextmanager
def _handling_signals(handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handles signals so for the block, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Looks:
    """Asks the store again and again, on a thread of its own, and says when the answer is yes.

    Args:
        agent: the worker.
        ask: the question.
        end: what to say.
        told: whom.
    """

    def __init__(
        self,
        agent: Agent,
        ask: Callable[[KeyValueStore], bool],
        end: _End,
        told: SimpleQueue[_End],
    ) -> None:
        self._store = _store_of(agent)
        self._ask, self._end, self._told = ask, end, told
        self._alarm = Alarm()
        self._stopping = False
        self._thread = Thread(target=self._run, name=f"rpc-{agent.info.name}-serving", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._alarm.set()
        if self._thread.ident:
            self._thread.join(_SECONDS_TO_LEAVE)

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self._ask(self._store):
                    self._told.put(self._end)
                    return
                self._alarm.wait(_SECONDS_BETWEEN_LOOKS)
        except AgentClosedError:
            return
        except RpcError as error:
            _logger.error(
                "the group's store was lost, and with it word of when to stop serving; "
                "a signal still ends it (%s)",
                error,
            )


def _is_set(store: KeyValueStore, event: str) -> bool:
    return store.get(f"event/{event}") is not None


class _Others:
    """The members of a dynamic group that do not serve."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._came: set[str] = set()
        """Members, and former ones, that did not serve when they were last looked at."""

    def have_left(self, store: KeyValueStore) -> bool:
        """True if there was one at least, and there is none any more."""
        me = self._agent.info
        living = {each.name for each in self._agent.group.living() if each != me}
        serving = {name for name in living if store.get(f"serving/{name}") is not None}
        self._came |= living
        self._came -= serving
        return living == serving and bool(self._came)


def _leave_static_group(end: _End) -> None:
    """Waits until the others have called ``shutdown``; a signal ends that."""
    if end is _End.SIGNAL:
        api.shutdown(graceful=False)
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _ToldToEndError

    with contextlib.suppress(_ToldToEndError), _handling_signals(stop):
        api.shutdown()


def _leave_dynamic_group() -> None:
    """Leaves without waiting for ever to be quiet, as others may go on calling this worker."""
    try:
        api.shutdown(timeout=_SECONDS_TO_LEAVE)
    except RpcTimeoutError as error:
        _logger.warning("a server left the group in the middle of its work: %s", error)
