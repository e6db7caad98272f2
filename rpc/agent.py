"""One worker: everything it owns with a lifetime, started, stopped and joined here.

The only place where decisions meet I/O. It delegates: requests it makes are
``caller``'s, requests it serves ``callee``'s, what its transport tells it ``arrivals``'s,
references ``reference_keeper``'s, leaving the group ``departure``'s, losing others
``losses``'s. Several agents can live in one process.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from rpc.calls.callee import Callee
from rpc.calls.caller import Caller
from rpc.calls.channels import Channels
from rpc.calls.control_channel import ControlChannel
from rpc.calls.extension_set import ExtensionSet
from rpc.calls.gathering import Gatherings
from rpc.calls.inbound import Inbound
from rpc.calls.pending_joins import CallToCome
from rpc.calls.retrying import RetriedCall, Retries
from rpc.constants import DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC, UNSET_RPC_TIMEOUT
from rpc.current import context_of, forked_from
from rpc.debug import agent_debug_info
from rpc.errors import RpcTimeoutError, WorkerLostError
from rpc.extend import Worker
from rpc.group.events import MembershipChange, MembershipEvent, MembershipEvents
from rpc.group.loss_reports import LossReports
from rpc.group.members import Group
from rpc.group.probes import Prober
from rpc.group.shutdown import GroupShutdown, Work
from rpc.group.watch import Watch
from rpc.group.worker_loss import WorkerLoss
from rpc.ids import Life
from rpc.observe import profiling
from rpc.observe.metrics import Snapshot
from rpc.observe.names import method_name
from rpc.outcomes.completions import Completions
from rpc.outcomes.futures import Future
from rpc.outcomes.sinks import Answered, AnswerSink, FutureSink, WaitingCaller
from rpc.protocol.liveness import Evidence
from rpc.protocol.retry import Retry
from rpc.rrefs.keeper import ReferenceKeeper
from rpc.rrefs.rref import RRef
from rpc.runtime import deadlines, finalizers, signals
from rpc.runtime import exit as process_end
from rpc.runtime import forks as process_forks
from rpc.runtime.clock import Clock, MonotonicClock
from rpc.runtime.event_loop import EventLoop
from rpc.runtime.executor import SECONDS_TO_END, Executor
from rpc.runtime.pulse import Pulse
from rpc.runtime.signals import restore, shut_out
from rpc.runtime.states import States
from rpc.runtime.timers import Timers
from rpc.transports.base import Announces, MapsDevices, Peer, Transport
from rpc.transports.inherited import InheritedTransport
from rpc.wire.callables import require_call
from rpc.wire.control import ControlMessage, Leaving, encode_passed
from rpc.wire.remote_errors import raisable
from rpc.worker_info import WorkerInfo, may_exist

if TYPE_CHECKING:
    from rpc.group.member_list import Departure
    from rpc.group.membership import Membership
    from rpc.group.signed_store import SignedStore

_logger = logging.getLogger("rpc")

_SYSTEM_THREADS = 4
_SECONDS_BETWEEN_STARTS = 1.0
_SECONDS_IN_HASTE = 0.3
"""What handlers get to end in when they are not waited for."""

Destination = WorkerInfo | str | int


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What an agent is told about its own running.

    Args:
        num_worker_threads: handlers that run at once, blocked ones not counted.
        rpc_timeout: default timeout of a call in seconds, 0 for none.
        flush_seconds: how long accepted messages get to leave at shutdown.
        shutdown_timeout: seconds a graceful shutdown waits by default, 0 for no limit.
        liveness_timeout: seconds without a sign of life after which another worker is
            declared lost, 0 for never; needs a prober.
    """

    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC
    flush_seconds: float = 2.0
    shutdown_timeout: float = 0.0
    liveness_timeout: float = 0.0


class Agent(process_forks.Member):
    """One worker of a group.

    Args:
        info: its name and id.
        incarnation: which life of that name this is.
        transport: moves its frames; the agent starts and closes it.
        options: see :class:`AgentOptions`.
        clock: tells the time; a test's may be virtual.
        prober: asks the others for signs of life, and gives them.
    """

    def __init__(
        self,
        info: WorkerInfo,
        incarnation: int,
        transport: Transport,
        options: AgentOptions | None = None,
        clock: Clock | None = None,
        prober: Prober | None = None,
    ) -> None:
        self.options = options or AgentOptions()
        self.info = info
        self.life = Life(info.id, incarnation)
        self.transport = transport
        self.announce = transport.announce if isinstance(transport, Announces) else None
        self.host_moves = transport.host_moves if isinstance(transport, MapsDevices) else ()
        self.clock = clock or MonotonicClock()
        self.rpc_timeout = self.options.rpc_timeout
        self.group = Group()
        context = context_of(self)
        name = f"rpc-{info.name}"
        short, threads = self._short_of_threads, self.options.num_worker_threads
        self.executor = Executor(name, threads, context, short)
        self.system_executor = Executor(f"{name}-system", _SYSTEM_THREADS, context, short)
        self.completions = Completions(self.system_executor, transport, self.activity_changed)
        self.event_loop = EventLoop(f"{name}-asyncio", self.executor)
        self.control = ControlChannel(self)
        self.references = ReferenceKeeper(self, self.life)
        self.channels = Channels(self)
        self.states = States()
        self.worker = Worker(self)
        self.extensions = ExtensionSet(self)
        self.caller = Caller(self)
        self.callee = Callee(self)
        self.group_shutdown = GroupShutdown(self)
        self.events = MembershipEvents(self.completions.submit)
        self.worker_loss: WorkerLoss = WorkerLoss(self)
        self.membership: Membership | None = None
        self.store: SignedStore | None = None  # kept, for one worker may be the host of it
        self.gatherings = Gatherings(self)
        self.gil_profiling = False
        self.inbound = Inbound(self)
        bound = self.options.liveness_timeout
        self.watch = Watch(self, bound, prober) if bound and prober is not None else None
        self.liveness = ""
        self.is_expelled = False
        self.pulse = Pulse(f"{name}-pulse", self.clock, self._beat)
        self.timers = Timers(self.pulse.wake, self.completions.submit)
        self.retries = Retries(self)
        self.loss_reports = LossReports(self, bound)
        self._at_process_end: weakref.finalize[[], Agent] | None = None

    # --- Life

    def start(self) -> bytes:
        """Begins to listen; returns the address for the other workers."""
        finalizers.watch()
        signals.use()
        address = self.transport.start(self.info, self.life.incarnation, self.inbound)
        self._start_watch()
        self.pulse.start()
        self.references.start()
        process_forks.join(self)
        self._at_process_end = process_end.await_end(self)
        return address

    def join(self, peers: Sequence[Peer]) -> None:
        """Makes the group known; ``peers`` includes this worker."""
        with self.inbound.early.held_back():
            for peer in peers:
                self._add_peer(peer)

    def _start_watch(self) -> None:
        """Begins to give signs of life, and to ask for them; what cannot be is logged."""
        if self.watch is None:
            return
        try:
            self.liveness = self.watch.start()
        except OSError as error:
            _logger.warning("frozen workers will not be noticed: %s", error)

    def _beat(self, now: float) -> float | None:
        """What the pulse does; returns when to do it again."""
        watched = None if self.watch is None else self.watch.beat(now)
        times = (self.caller.expire(now), self.timers.beat(now), watched)
        return min((time for time in times if time is not None), default=None)

    def _short_of_threads(self, executor: Executor) -> None:
        self.timers.at(self.clock.now() + _SECONDS_BETWEEN_STARTS, executor.try_again)

    def add_peer(self, peer: Peer) -> None:
        """A worker joined, or came back in a new life; if this raises, it is not known."""
        with self.inbound.early.held_back():
            self._add_peer(peer)

    def _add_peer(self, peer: Peer) -> None:
        """The transport comes first: whoever finds the peer in the group can reach it."""
        known = self.group.latest(peer.info.id)
        if known is not None and known.incarnation < peer.incarnation:
            if peer.info == self.info:
                self.worker_loss.expelled("a later life of this worker joined the group")
                return
            self.worker_loss.lost(known.life, "it was replaced")
        self.transport.add_peer(peer)
        self.group.add(peer)
        self.references.worker_joined(peer.life)
        self.group_shutdown.worker_joined(peer.info.id)
        self.control.joined(peer.life)
        returned = known is not None and known.info.name == peer.info.name
        change = MembershipChange.RETURNED if returned else MembershipChange.JOINED
        self.events.announce(MembershipEvent(change, peer.info, peer.incarnation))

    def shutdown(self, graceful: bool = True, timeout: float = 0.0) -> None:
        """Leaves the group and ends every thread; see ``rpc.shutdown``."""
        if self.is_expelled:
            graceful = False  # nobody is there to be waited for
        if graceful:
            self.group_shutdown.refuse_in_handler()
        seconds = _SECONDS_IN_HASTE
        try:
            if graceful and self.membership is None:
                self.group_shutdown.leave_together(timeout)
            elif graceful:
                self.group_shutdown.leave_alone(timeout)
                self._say_goodbye()
            else:
                self._say_goodbye()
            seconds = SECONDS_TO_END if graceful else _SECONDS_IN_HASTE
        finally:
            self._close(seconds)

    def _say_goodbye(self) -> None:
        for peer in self.group.living():
            if peer != self.info:
                self.control.tell(self.group.life(peer.id), Leaving(0))

    def _close(self, seconds: float) -> None:
        """Takes every step, whatever another one raises; raises the first error at the end.

        Each step that waits for handlers does so for some ``seconds``.
        """
        first: BaseException | None = None
        for step in self._steps_of_closing(seconds):
            try:
                step()
            except BaseException as error:
                if first is None:
                    first = error
                else:
                    _logger.error("shutdown: a further step failed: %s", error, exc_info=error)
        self.store = None
        if self._at_process_end is not None:
            self._at_process_end.detach()
        process_forks.leave(self)
        if first is not None:
            raise first

    def _steps_of_closing(self, seconds: float) -> Iterator[Callable[[], object]]:
        reason = "this worker shut down"
        yield self.group_shutdown.closing
        if self.membership is not None:
            yield self.membership.leave
        yield partial(self.caller.close, reason)
        yield partial(self.retries.close, reason)
        yield partial(self.gatherings.close, reason)
        yield self.timers.drop
        yield self.extensions.close
        yield self.states.close
        yield partial(self.event_loop.close, seconds)
        yield partial(self.transport.close, self.options.flush_seconds, seconds)
        yield self.references.stop
        yield self.pulse.stop
        if self.watch is not None:
            yield self.watch.close
        yield partial(self.executor.close, seconds)
        yield partial(self.completions.close, seconds)
        yield self.group_shutdown.closed

    def after_fork_in_child(self) -> None:
        """Leaves all to the parent: this process only refuses what is asked of this worker."""
        process_forks.keep_for_good(self)
        self.transport = InheritedTransport(self.info.name, self.transport)
        self.announce = None
        forked_from(self)

    # --- What user programs ask

    def rpc_sync(
        self,
        to: Destination,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
        retry: Retry | None = None,
    ) -> Any:
        """Runs ``func`` on ``to`` and returns its result; see ``rpc.rpc_sync``."""
        require_call(func, args, kwargs)
        finalizers.refuse("rpc_sync")
        if retry is not None:
            return self.retries.sync(
                RetriedCall(to, func, args or (), kwargs or {}), timeout, retry
            )
        if profiling.wanted():
            return profiling.rpc_sync(self, to, func, args, kwargs, timeout)
        sink = WaitingCaller()
        peer = self.find(to, timeout)
        before = shut_out()
        try:
            self.caller.call(peer, func, args or (), kwargs or {}, timeout, sink)
            return self.caller.sync(sink)
        finally:
            restore(before)

    def rpc_async(
        self,
        to: Destination,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
        retry: Retry | None = None,
    ) -> Future[Any]:
        """Runs ``func`` on ``to``; see ``rpc.rpc_async``."""
        require_call(func, args, kwargs)
        if finalizers.running():
            return self.later(lambda: self.rpc_async(to, func, args, kwargs, timeout, retry))
        if retry is not None:
            return self.retries.future(
                RetriedCall(to, func, args or (), kwargs or {}), timeout, retry
            )
        if profiling.wanted():
            return profiling.rpc_async(self, to, func, args, kwargs, timeout)
        whom = to.name if isinstance(to, WorkerInfo) else to
        future = self.caller.future(f"the call of {method_name(func, args or ())} on {whom}")
        try:
            sink = FutureSink(future, self.completions)
            membership = self.membership
            if membership is not None and self._may_join(to):
                call = partial(self.caller.call, func=func, args=args or (), kwargs=kwargs or {})
                CallToCome(self, membership, to, sink, call).wait(self.timeout_of(timeout))
                return future
            peer = self.group.find(to)
            before = shut_out()
            try:
                self.caller.call(peer, func, args or (), kwargs or {}, timeout, sink)
            finally:
                restore(before)
        except (WorkerLostError, RpcTimeoutError) as error:
            future.set_exception(error)
        return future

    def remote(
        self,
        to: Destination,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
        retry: Retry | None = None,
    ) -> RRef[Any]:
        """Runs ``func`` on ``to``, which keeps the result; see ``rpc.remote``."""
        require_call(func, args, kwargs)
        finalizers.refuse("remote")
        if retry is not None:
            tried = RetriedCall(to, func, args or (), kwargs or {})
            return self.retries.create(tried, timeout, retry)
        if profiling.wanted():
            return profiling.remote(self, to, func, args, kwargs, timeout)
        owner = self.find(to, timeout)
        before = shut_out()
        try:
            rref, passed, sink = self.references.create(owner, func, self.timeout_of(timeout))
            target = encode_passed((passed,))
            try:
                sent = self.caller.call(
                    owner, func, args or (), kwargs or {}, timeout, sink, target
                )
            except BaseException as error:
                self.references.creation_not_sent(rref, passed, error)
                raise
            if not sent:
                self.references.creation_given_up(passed)
            return rref
        finally:
            restore(before)

    def later(self, start: Callable[[], Future[Any]]) -> Future[Any]:
        """The outcome of a call that is made soon, on another thread; safe in finalizers."""
        future = self.caller.future("a call made by a finalizer")

        def begin() -> None:
            try:
                call = start()
            except BaseException as error:  # such as a SystemExit of somebody's pickling
                future.set_exception(raisable(error))
            else:
                call.add_done_callback(lambda done: future.complete_from(done.value))

        self.references.do_later(lambda: self.completions.submit(begin))
        return future

    def find(self, to: Destination, timeout: float = UNSET_RPC_TIMEOUT) -> WorkerInfo:
        """The worker meant by a name, an id or a ``WorkerInfo``.

        In a dynamic group, one that has not joined yet is waited for.
        """
        membership = self.membership
        if membership is not None and self._may_join(to):
            membership.wait_for(to, self.timeout_of(timeout))
        return self.group.find(to)

    def _may_join(self, to: Destination) -> TypeGuard[str | int]:
        """True if, in a dynamic group, a worker that was never a member may be meant."""
        return isinstance(to, str | int) and not self.group.knows(to) and may_exist(to)

    def find_now(self, to: Destination) -> WorkerInfo:
        """As :meth:`find`, but without waiting; a ``WorkerInfo`` is looked up by its name."""
        return self.group.find(to.name if isinstance(to, WorkerInfo) else to)

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """A worker that is in the group now, by name or id; this one without an argument."""
        if worker is None:
            return self.info
        if self.membership is not None and self._may_join(worker):
            self.membership.look_again(self.timeout_of(UNSET_RPC_TIMEOUT))
        return self.group.find(worker)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """The workers that are not lost, by id."""
        return self.group.living()

    def device_map(self, to: Destination) -> Mapping[torch.device, torch.device]:
        """Where tensors on this worker's devices arrive at ``to``; empty without a map."""
        worker = self.find(to)
        transport = self.transport
        return transport.device_map(worker.id) if isinstance(transport, MapsDevices) else {}

    def _get_device_map(self, to: Destination) -> dict[torch.device, torch.device]:
        """The same under the name that programs of the original know."""
        return dict(self.device_map(to))

    def timeout_of(self, timeout: float) -> float:
        """Seconds left to an operation that was given ``timeout``; 0 for no limit."""
        return deadlines.effective_timeout(timeout, self.rpc_timeout, self.clock.now())

    def send_extension_message(
        self,
        to: int,
        extension: str,
        body: bytes,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Future[bytes]:
        """Sends an extension's own message to its counterpart on worker ``to``.

        Args:
            to: its id.
            extension: the extension's name.
            body: what the extension makes of it.
            timeout: seconds until the future fails, -1 for the default, 0 for no limit.

        Returns:
            A future of what the counterpart's ``on_message`` returned.
        """
        info = self.group.peer(to).info
        future = self.caller.future(f"{extension} message to {info.name}")
        sink = FutureSink(future, self.completions)
        self.caller.message(info, extension, body, (), timeout, sink)
        return future

    def ask_extension(
        self,
        to: int,
        extension: str,
        body: bytes,
        tensors: Sequence[torch.Tensor],
        answered: Answered,
    ) -> None:
        """As :meth:`send_extension_message`, with tensors, no limit of time and no future.

        Args:
            to: its id.
            extension: the extension's name.
            body: what the extension makes of it.
            tensors: sent along.
            answered: takes what the counterpart's ``on_message`` returned, or the error;
                called where the reply is delivered, and must not block there.
        """
        info = self.group.peer(to).info
        sink = AnswerSink(answered, self.completions)
        self.caller.message(info, extension, body, tensors, 0.0, sink)

    def debug_info(self) -> dict[str, Any]:
        """What this worker waits for, runs and keeps; for people."""
        counts = self.references.counts()
        info: dict[str, Any] = {name: getattr(counts, name) for name in counts.__slots__}
        info["calls"] = self.caller.outstanding()
        info["retrying"] = self.retries.paused()
        info["waiting_for"] = [] if self.membership is None else self.membership.waited_for()
        info["serving"] = self.callee.serving()
        info["handler_threads"] = self.executor.thread_count()
        info["workers"] = [worker.name for worker in self.group.living()]
        info.update(self.extensions.debug_info())
        return info

    def metrics(self) -> Snapshot:
        """What this worker's calls and those it served did so far; see ``rpc.metrics``."""
        return Snapshot(self.info.name, self.caller.metrics(), self.callee.metrics())

    def get_debug_info(self) -> dict[str, str]:
        """Counters under the names that the original gives them; see ``rpc.debug``."""
        return agent_debug_info(self)

    # --- What its components ask of each other by way of it

    def destinations(self) -> set[int]:
        """The workers that a reply is expected from."""
        return self.caller.destinations()

    def declare_lost(self, life: Life, reason: str, evidence: Evidence) -> None:
        """Removes a lost worker soon, and tells the others."""
        self.completions.submit(partial(self.worker_loss.declare, life, reason, evidence))

    def take_as_expelled(self, reason: str) -> None:
        """Does soon what is to be done if the others declared this worker lost."""
        self.completions.submit(partial(self.worker_loss.expelled, reason))

    def hurry(self) -> None:
        """Makes the pulse beat soon."""
        self.pulse.wake()

    def why_expelled(self) -> str | None:
        """Why the others declared this worker lost; None if they did not, as far as it knows."""
        return None if self.watch is None else self.watch.verdict()

    def watches(self) -> bool:
        """True if this worker asks others for signs of life."""
        return self.watch is not None

    def leave_note(self, life: Life, reason: str) -> None:
        """Leaves a note for a worker that was declared lost, in case it lives."""
        if self.watch is not None:
            self.watch.tell_lost(life, reason)

    def strike_off(self, life: Life, reason: str) -> None:
        """Takes a life off the store's list, if this is a dynamic group."""
        if self.membership is not None:
            self.membership.remove(life, reason)

    def lives(self, who: str | int) -> bool:
        """True if a worker of this name or id is a member and not lost."""
        return self.group.lives(who)

    def departed(self, life: Life, departure: Departure | None) -> None:
        """Removes a worker that the store does not list any more."""
        self.worker_loss.departed(life, departure)

    def has_a_say(self) -> bool:
        """False if this worker was declared lost, or the group is leaving together."""
        return not (self.is_expelled or self.expects_departures())

    def expects_departures(self) -> bool:
        """True when workers that go are nothing to warn of."""
        return self.group_shutdown.expects_departures()

    def tell(self, to: Life, message: ControlMessage) -> None:
        """Sends a control message at once."""
        self.control.tell(to, message)

    def end_all_of(self, life: Life, error: WorkerLostError) -> None:
        """Ends what involved a lost worker: calls, references, gatherings, contexts."""
        self.control.forget(life.worker)
        self.caller.worker_lost(life.worker, error)
        self.callee.worker_lost(life.worker)
        self.references.worker_lost(life, error.reason)
        self.gatherings.worker_lost(life, error)
        self.extensions.worker_lost(life.worker, error.reason)
        self.group_shutdown.worker_lost(life.worker)

    def work(self) -> Work:
        """What this worker has made, served and sent so far."""
        sent, received = self.control.totals()
        return Work(self.caller.sent() + self.callee.handled(), sent, received)

    def is_quiet(self) -> bool:
        """True if nothing is under way here."""
        parts = (self.caller, self.callee, self.completions, self.references)
        return all(part.quiet() for part in parts)

    def under_way(self) -> list[str]:
        """What keeps this worker from being quiet, one by one; like calls are named once."""

        def name(worker: int) -> str:
            return repr(self.group.peer(worker).info.name)

        calls = [f"{row['call']} called by {name(row['from'])}" for row in self.callee.serving()]
        calls += [f"{row['call']} called on {name(row['to'])}" for row in self.caller.outstanding()]
        others = (
            (self.caller, "calls that were given up and not answered"),
            (self.references, "notices of references"),
            (self.completions, "callbacks of futures"),
        )
        # The first of them only: what asks may itself run where callbacks do.
        return list(dict.fromkeys(calls)) or [what for part, what in others if not part.quiet()][:1]

    def leaks(self) -> list[str]:
        """The values of this worker that others still use."""
        return self.references.report.leaks()

    def release_references(self) -> None:
        """Makes the references of this worker unusable and tells the owners."""
        self.references.release_all_users()

    def activity_changed(self) -> None:
        """Something ended that a graceful shutdown may be waiting for."""
        self.group_shutdown.activity_changed()
