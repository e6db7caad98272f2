"""One worker: everything it owns with a lifetime, started, stopped and joined here.

The only place where decisions meet I/O. It delegates: requests it makes to ``calls.caller``,
requests it serves to ``calls.callee``, what its transport tells it to ``calls.inbound``,
references to ``rrefs.keeper``, leaving the group to ``group.shutdown``, the loss of others to
``group.worker_loss``. Several agents can live in one process.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from rpc.calls.call_parts import CallParts
from rpc.calls.callee import Callee
from rpc.calls.caller import Caller
from rpc.calls.channels import Channels
from rpc.calls.control_channel import ControlChannel
from rpc.calls.early_frames import EarlyFrames
from rpc.calls.extension_messages import ExtensionMessages
from rpc.calls.extension_set import ExtensionSet
from rpc.calls.gathering import Gatherings
from rpc.calls.inbound import Inbound
from rpc.calls.work_report import WorkReport
from rpc.constants import DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC
from rpc.current import context_of, forked_from
from rpc.errors import WorkerLostError
from rpc.group.directory import Destination, Directory
from rpc.group.events import MembershipChange, MembershipEvent, MembershipEvents
from rpc.group.loss_reports import LossReports
from rpc.group.members import Group
from rpc.group.probes import Prober
from rpc.group.shutdown import GroupShutdown
from rpc.group.watch import Watch
from rpc.group.worker_loss import WorkerLoss
from rpc.ids import Life
from rpc.outcomes.completions import Completions
from rpc.protocol.liveness import Evidence
from rpc.rrefs.keeper import ReferenceKeeper
from rpc.runtime import deadlines, finalizers, prompt_signals, signals
from rpc.runtime import exit as process_end
from rpc.runtime import forks as process_forks
from rpc.runtime.clock import Clock, MonotonicClock
from rpc.runtime.deadlines import Timeouts
from rpc.runtime.event_loop import EventLoop
from rpc.runtime.executor import SECONDS_TO_END, Executor
from rpc.runtime.pulse import Pulse
from rpc.runtime.states import States
from rpc.runtime.timers import Timers
from rpc.transports.base import MapsDevices, Peer, Transport
from rpc.transports.inherited import InheritedTransport
from rpc.wire.control import ControlMessage, Leaving
from rpc.worker import Worker
from rpc.worker_info import WorkerInfo

if TYPE_CHECKING:
    from rpc.group.member_list import Departure
    from rpc.group.membership import Membership
    from rpc.group.signed_store import SignedStore

_logger = logging.getLogger("rpc")

_SYSTEM_THREADS = 4
_SECONDS_BETWEEN_STARTS = 1.0
_SECONDS_IN_HASTE = 0.3
"""Seconds that handlers get to end in when a shutdown does not wait for them."""


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """The options that an agent runs by.

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


class Agent(process_forks.ForkAware):
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
        self.clock = clock or MonotonicClock()
        self.timeouts = Timeouts(deadlines.limit_of(self.options.rpc_timeout), self.clock.now)
        self.group = Group()
        self.directory = Directory(self.group, self.timeouts)
        self.store: SignedStore | None = None  # kept, for one worker may be the host of it
        self.is_expelled = False
        self.liveness = ""
        self._at_process_end: weakref.finalize[[], Agent] | None = None
        self._hears_signals = False
        self._make_threads(transport)
        self._make_calls(transport)
        bound = self.options.liveness_timeout
        self.watch = Watch(self, bound, prober) if bound and prober is not None else None
        self.loss_reports = LossReports(self, bound)

    def _make_threads(self, transport: Transport) -> None:
        context, name = context_of(self), f"rpc-{self.info.name}"
        short, threads = self._short_of_threads, self.options.num_worker_threads
        self.executor = Executor(name, threads, context, short)
        self.system_executor = Executor(f"{name}-system", _SYSTEM_THREADS, context, short)
        self.event_loop = EventLoop(f"{name}-asyncio", self.executor)
        self.pulse = Pulse(f"{name}-pulse", self.clock, self._beat)
        self.completions = Completions(self.system_executor, transport, self.activity_changed)
        self.timers = Timers(self.pulse.wake, self.completions.submit)
        self.events = MembershipEvents(self.completions.submit)
        self.states = States()

    def _make_calls(self, transport: Transport) -> None:
        self.control = ControlChannel(self.group, transport)
        self.references = ReferenceKeeper(
            self.info,
            self.life,
            self.group,
            self.timeouts,
            self.control,
            self.completions,
            self.activity_changed,
        )
        self.extensions = ExtensionSet(self.info.name, lambda kind: kind(self.worker))
        self.group_shutdown = GroupShutdown(self)
        self.worker_loss: WorkerLoss = WorkerLoss(self)
        self._shared = shared = CallParts(
            me=self.info,
            group=self.group,
            clock=self.clock,
            timeouts=self.timeouts,
            transport=transport,
            host_moves=transport.host_moves if isinstance(transport, MapsDevices) else frozenset(),
            control=self.control,
            references=self.references,
            extensions=self.extensions,
            completions=self.completions,
            timers=self.timers,
            shutdown=self.group_shutdown,
            early=EarlyFrames(),
            refused=self.worker_loss.refused,
        )
        self.caller = Caller(shared, self.directory, self.pulse.wake)
        self.references.call_by(self.caller)
        self.callee = Callee(
            shared,
            self.executor,
            self.system_executor,
            self.event_loop,
        )
        self.report = WorkReport(
            shared,
            self.caller,
            self.callee,
            self.directory,
            self.executor,
            self.options.num_worker_threads,
        )
        self.channels = Channels(shared, self.executor)
        self.inbound = Inbound(shared, self.caller, self.callee, self.channels, self.worker_loss)
        self.messages = ExtensionMessages(shared, self.caller)
        self.worker: Worker = Worker(
            self.life,
            shared,
            self.caller,
            self.messages,
            self.channels,
            self.events,
            self.states,
            lambda: self.store,
            self.directory,
        )
        self.retries = self.caller.retries
        self.gatherings = Gatherings(
            self.info, self.group, self.completions, self.caller, self.directory, self.timeouts
        )
        self._lend_methods()

    def _lend_methods(self) -> None:
        """Offers methods of the worker's parts as its own, so that calls need not pass here."""
        caller, directory, group, report = self.caller, self.directory, self.group, self.report
        self.rpc_sync, self.rpc_async = caller.rpc_sync, caller.rpc_async
        self.remote, self.later = caller.remote, caller.later
        self.destinations = caller.destinations
        self.send_extension_message = self.messages.send
        self.load_extension = self.extensions.load
        self.find, self.find_now = directory.find, directory.find_now
        self.get_worker_infos, self.lives = group.living, group.lives
        self.hurry = self.pulse.wake
        self.debug_info, self.metrics = report.debug_info, report.metrics
        self.work, self.is_quiet, self.under_way = report.work, report.is_quiet, report.under_way
        self.get_debug_info, self.name_of = report.get_debug_info, report.name_of
        self.inventory, self.leaks = self.references.report.inventory, self.references.report.leaks

    @property
    def transport(self) -> Transport:
        """The transport that moves its frames."""
        return self._shared.transport

    @transport.setter
    def transport(self, transport: Transport) -> None:
        self._shared.transport = self.control.transport = transport

    @property
    def host_moves(self) -> Set[tuple[int, bool]]:
        """See ``transports.base.MapsDevices``."""
        return self._shared.host_moves

    @property
    def membership(self) -> Membership | None:
        """Its place in a dynamic group."""
        return self.directory.membership

    @membership.setter
    def membership(self, membership: Membership | None) -> None:
        self.directory.membership = membership

    @property
    def rpc_timeout(self) -> float:
        """The default timeout of its calls in seconds, 0 for none."""
        return self.timeouts.default

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float) -> None:
        self.timeouts.default = seconds

    # --- Life

    def start(self) -> bytes:
        """Begins to listen; returns the address for the other workers."""
        finalizers.watch()
        signals.use()
        self._hears_signals = prompt_signals.use()
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
        """Begins to give and to ask for signs of life; logs what cannot be begun."""
        if self.watch is None:
            return
        try:
            self.liveness = self.watch.start()
        except OSError as error:
            _logger.warning("frozen workers will not be noticed: %s", error)

    def _beat(self, now: float) -> float | None:
        """Expires calls, runs timers and looks after others; returns when to do it again."""
        watched = None if self.watch is None else self.watch.beat(now)
        times = (self.caller.expire(now), self.timers.beat(now), watched)
        return min((time for time in times if time is not None), default=None)

    def _short_of_threads(self, executor: Executor) -> None:
        self.timers.at(self.clock.now() + _SECONDS_BETWEEN_STARTS, executor.try_again)

    def add_peer(self, peer: Peer) -> None:
        """Makes a worker known that joined, or came back in a new life; not if this raises."""
        with self.inbound.early.held_back():
            self._add_peer(peer)

    def _add_peer(self, peer: Peer) -> None:
        """Adds a peer, first to the transport: whoever finds it in the group can reach it.

        A worker that was declared lost takes in nobody.
        """
        known = self.group.latest(peer.info.id)
        if known is not None and known.incarnation < peer.incarnation:
            if peer.info == self.info:
                self.worker_loss.expelled("a later life of this worker joined the group")
                return
            self.worker_loss.lost(known.life, "it was replaced")
        self.transport.add_peer(peer)
        if not self.group.add(peer):
            self.transport.remove_peer(peer.info.id)
            return
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
                self.states.leave()
                self.group_shutdown.leave_alone(timeout)
                self._say_goodbye()
            else:
                self._say_goodbye()
            seconds = SECONDS_TO_END if graceful else _SECONDS_IN_HASTE
        finally:
            self._close(seconds)

    def _say_goodbye(self) -> None:
        """Tells the others that this worker leaves. They hang up, which is no loss of theirs."""
        self.group_shutdown.closing()
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
        if self._hears_signals:
            self._hears_signals = False
            prompt_signals.stop()
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
        yield self.report.name_what_runs_on
        yield self.group_shutdown.closed

    def after_fork_in_child(self) -> None:
        """Leaves all to the parent: this process only refuses what is asked of this worker."""
        process_forks.keep_for_good(self)
        self._hears_signals = False
        self.transport = InheritedTransport(self.info.name, self.transport)
        forked_from(self)

    # --- What user programs ask

    def get_worker_info(
        self, worker: str | int | None = None, *, wait_for_return: float | None = None
    ) -> WorkerInfo:
        """A worker that is in the group now, by name or id; see :func:`rpc.get_worker_info`."""
        if worker is None:
            return self.info
        if wait_for_return is None:
            return self.directory.look_up(worker)
        return self.directory.await_return(worker, wait_for_return)

    def device_map(self, to: Destination) -> Mapping[torch.device, torch.device]:
        """Maps this worker's devices to those of ``to`` on which tensors arrive; maybe empty."""
        worker = self.find(to)
        transport = self.transport
        return transport.device_map(worker.id) if isinstance(transport, MapsDevices) else {}

    def _get_device_map(self, to: Destination) -> dict[torch.device, torch.device]:
        """Another name of :meth:`device_map`, which programs of the original use."""
        return dict(self.device_map(to))

    def why_lost(self, worker: WorkerInfo) -> WorkerLostError | None:
        """Says why a worker is lost; None if it is not."""
        return self.group.lost_error(worker.id)

    def steps_to_rest(self) -> Iterator[Callable[[float], object]]:
        """The steps that bring it to rest when its process ends."""
        yield lambda _: self.caller.close("the process of this worker ended")
        yield self.event_loop.close
        yield partial(self.transport.close, 0.0)
        yield self.executor.close
        yield self.system_executor.close

    # --- What its components ask of each other by way of it

    def declare_lost(self, life: Life, reason: str, evidence: Evidence) -> None:
        """Removes a lost worker soon, and tells the others."""
        self.completions.submit(partial(self.worker_loss.declare, life, reason, evidence))

    def take_as_expelled(self, reason: str) -> None:
        """Does soon what is to be done if the others declared this worker lost."""
        self.completions.submit(partial(self.worker_loss.expelled, reason))

    def give_up(self, reason: str) -> None:
        """Declares this worker lost through the group's member list, so that others learn of it."""
        if self.membership is None:
            self.take_as_expelled(reason)
        else:
            self.membership.remove(self.life, reason, lambda: True, lambda: None)

    def why_expelled(self) -> str | None:
        """The reason why others declared this worker lost; None if none did, as far as it knows."""
        return None if self.watch is None else self.watch.verdict()

    def watches(self) -> bool:
        """True if this worker asks others for signs of life."""
        return self.watch is not None

    def leave_note(self, life: Life, reason: str) -> None:
        """Leaves a note for a worker that was declared lost, in case it lives."""
        if self.watch is not None:
            self.watch.tell_lost(life, reason)

    def look_at_store(self) -> None:
        """Asks the store of a dynamic group soon whether it answers."""
        if self.membership is not None:
            self.membership.look_soon()

    def was_out_of_touch(self, seconds: float, within: float) -> bool:
        """True if the store of a dynamic group has lately left this worker without an answer."""
        membership = self.membership
        return membership is not None and membership.was_out_of_touch(seconds, within)

    def reached_few(self) -> bool:
        """True if it was cut off from most of the group when it lately lost somebody."""
        return self.watch is not None and self.watch.reached_few(self.clock.now())

    def doubt(self, life: Life, until: float) -> None:
        """Asks a worker that was lost if it lives; if it does, takes this worker for lost."""
        if self.watch is not None:
            self.watch.doubt(life, until)

    def strike_off(
        self, life: Life, reason: str, wanted: Callable[[], bool], done: Callable[[], None]
    ) -> None:
        """Takes a life off the store's list, if this is a dynamic group."""
        if self.membership is None:
            done()
        else:
            self.membership.remove(life, reason, wanted, done)

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

    def end_references(self, reason: str) -> None:
        """Ends all references to and of others, those included that it has never met."""
        self.references.expelled(reason)

    def release_references(self) -> None:
        """Makes the references of this worker unusable and tells the owners."""
        self.references.release_all_users()

    def activity_changed(self) -> None:
        """Notes the end of something that a graceful shutdown may be waiting for."""
        self.group_shutdown.activity_changed()
