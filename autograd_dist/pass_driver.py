"""Carries out what one worker's part in a pass decides.

Joins the three that do not know each other: ``passes`` decides, ``local_engine``
computes, and a wire, given from outside, sends. Takes events from any thread and
decides one at a time; whatever takes long happens outside the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol

import torch

from autograd_dist.failure import Failure
from autograd_dist.graph import edge_of
from autograd_dist.home import Home
from autograd_dist.local_engine import DeliverGradients, LocalPass
from autograd_dist.passes import (
    Ack,
    Acknowledge,
    Effect,
    Finished,
    FollowSend,
    FollowStuck,
    Participant,
    PassId,
    Request,
    Returned,
    RunWave,
    Send,
    T,
)
from autograd_dist.profiled import SEND, in_span, profiler_enabled
from autograd_dist.recv_node import Origin

Payload = list[torch.Tensor | None]

_Work = RunWave | FollowStuck | FollowSend


class Wire(Protocol[T]):
    """The network as a driver needs it. Neither method may block for a reply."""

    def send(
        self, driver: PassDriver[T], to: int, request: Request, payload: Payload | None
    ) -> None:
        """Sends a request; reports to ``driver`` when it is acknowledged or fails."""

    def acknowledge(self, token: T, ack: Ack, returned: Returned | None) -> None:
        """Answers a request that arrived, with gradients if there are any to come along."""

    def later(self, work: Callable[[], None]) -> None:
        """Does ``work`` on another thread, and soon."""


class PassDriver(Generic[T]):
    """One worker's part in one pass.

    Args:
        pass_id: the pass.
        me: this worker's id.
        participant: decides.
        make_local: given what takes the gradients of received messages, makes the
            local share of the pass.
        wire: sends.
        finished: called once, at the root, with the error or None.
        retain_graph: whether graphs must survive the pass.
        sequel: of the pass; see ``sequels``.
        run_sequel: does it here, and returns 1 if it did.

    Attributes:
        home: at the root, the thread that waits for the pass and does its local share.
    """

    def __init__(
        self,
        pass_id: PassId,
        me: int,
        participant: Participant[Payload, T],
        make_local: Callable[[DeliverGradients], LocalPass],
        wire: Wire[T],
        finished: Callable[[Failure | None], None],
        *,
        retain_graph: bool,
        sequel: bytes = b"",
        run_sequel: Callable[[bytes], int] | None = None,
    ) -> None:
        self.pass_id = pass_id
        self.retain_graph = retain_graph
        self.sequel = sequel
        self._run_sequel = run_sequel
        self.home: Home[Failure | None] | None = None
        self._me = me
        self._participant = participant
        self._participant_lock = threading.Lock()
        self._wire = wire
        self._finished = finished
        self._cause: BaseException | None = None
        self._local: LocalPass | None = make_local(self._gradients_ready)

    def start(self, roots: Sequence[torch.Tensor]) -> None:
        """At the root: begins the pass; the first wave runs in the calling thread."""
        assert self._local is not None
        self._local.add_roots(map(edge_of, roots), map(torch.ones_like, roots))
        with self._participant_lock:
            effects = self._participant.start()
        self._carry_out(effects)

    def received(
        self, token: T, request: Request, payload: Payload | None, asker: int | None = None
    ) -> None:
        """A request of this pass arrived; what it sets off runs in the calling thread."""
        with self._participant_lock:
            effects = self._participant.received(token, request, payload, asker)
        self._carry_out(effects)

    def acknowledged(self, ack: Ack, returned: Returned | None = None) -> None:
        """A request sent from here was acknowledged; does nothing that takes long."""
        with self._participant_lock:
            effects = self._participant.acknowledged(ack, returned)
        if effects:
            self._carry_out(effects, self._wire.later)

    def failed(self, error: Failure) -> None:
        """A request sent from here was not delivered or not answered."""
        with self._participant_lock:
            effects = self._participant.failed(error)
        self._carry_out(effects)

    def raised(self, error: BaseException, what: str) -> None:
        """Something could not be done here; ``what``, for people, is as for ``Failure.of``."""
        self._carry_out(self._effects_of(error, what))

    def drop(self, error: Exception) -> None:
        """Stops taking part, as the context is over; whoever waits for the pass learns why."""
        with self._participant_lock:
            effects = self._participant.dropped(lambda: Failure.of(self._me, error))
        if effects:
            self._carry_out(effects)
        self.abandon()

    def abandon(self) -> None:
        """Stops taking part, and lets go of the graph."""
        with self._participant_lock:
            effects = [] if self._participant.is_over else self._participant.abandoned()
        if effects:
            self._carry_out(effects)
        # The two refer to each other; without this the graph would wait for the
        # garbage collector. A wave that still runs has its own reference.
        local, self._local = self._local, None
        if local is not None:
            local.give_up()

    def take_cause(self) -> BaseException | None:
        """At the root: what the local share of the pass raised.

        It is given out once, as its traceback refers to the driver.
        """
        cause, self._cause = self._cause, None
        return cause

    def _gradients_ready(self, origin: Origin, gradients: Payload, is_last: bool) -> None:
        # A device map says where requests' tensors go; what answers carry stays in host memory.
        may_wait = is_last
        for gradient in gradients:
            may_wait = may_wait and (gradient is None or gradient.is_cpu)
        with self._participant_lock:
            effects = self._participant.gradients_ready(origin, gradients, may_wait=may_wait)
        if effects:
            self._carry_out(effects)

    def _carry_out(
        self,
        effects: list[Effect],
        elsewhere: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Carries out effects and what they lead to, ``elsewhere`` if given what takes long."""
        while effects:
            if len(effects) > 1:
                # Requests first: others can work on them while a wave runs here.
                effects.sort(key=_takes_long)
            following: list[Effect] = []
            for effect in effects:
                if isinstance(effect, Send):
                    self._wire.send(self, effect.to, effect.request, effect.payload)
                elif isinstance(effect, Acknowledge):
                    self._wire.acknowledge(effect.token, effect.ack, effect.returned)
                elif isinstance(effect, Finished):
                    self._finished(effect.error)
                    if effect.error is not None and self._local is not None:
                        self._local.give_up()  # a wave may still be waiting here
                elif elsewhere is None and (
                    self.home is None or self.home.thread == threading.get_ident()
                ):
                    following += self._work(effect)
                else:
                    self._leave(effect, elsewhere)
            effects = following

    def _leave(self, effect: _Work, elsewhere: Callable[[Callable[[], None]], None] | None) -> None:
        """Has another thread do what takes long."""
        leave = elsewhere if self.home is None else self.home.leave
        assert leave is not None
        leave(lambda: self._carry_out(self._work(effect)))

    def _work(self, effect: _Work) -> list[Effect]:
        """Does what takes long; returns what the outcome leads to."""
        participant, local = self._participant, self._local
        if local is None:
            with self._participant_lock:
                return participant.abandoned()
        resolved, stepped, reach = 0, 0, None
        try:
            if isinstance(effect, RunWave):
                for message_id, gradients in effect.arrived:
                    if profiler_enabled():
                        in_span(SEND, local.add_gradients, message_id, gradients)
                    else:
                        local.add_gradients(message_id, gradients)
                if effect.only_promised is not None:
                    resolved = _resolve_others(local, effect.only_promised)
                local.run_wave()
                if self.sequel:
                    stepped = self._step_if_complete(local)
            elif isinstance(effect, FollowStuck):
                reach = local.reach_of_stuck()
            else:
                reach = local.reach_of_send(effect.message_id, effect.positions)
        except BaseException as error:  # whoever waits for the pass is on another thread or worker
            return self._effects_of(error)
        with self._participant_lock:
            if reach is not None:
                return participant.reach_found(reach)
            return participant.wave_finished(bool(local.contributions), resolved, stepped)

    def _step_if_complete(self, local: LocalPass) -> int:
        """Runs the sequel if no gradient will come to this worker any more in this pass.

        At the root it may: no message of its own says that its roots' gradients are all.
        """
        if self._run_sequel is None or self.pass_id.root == self._me:
            return 0
        if local.waiting_sends or local.contributions:
            return 0
        return self._run_sequel(self.sequel)

    @property
    def stepped(self) -> int:
        """At the root: how many workers ran the sequel."""
        with self._participant_lock:
            return self._participant.newly_stepped

    def _effects_of(self, error: BaseException, what: str = "") -> list[Effect]:
        failure = Failure.of(self._me, error, what)
        with self._participant_lock:
            effects = self._participant.failed(failure)
        # What is raised because the pass had failed is not why.
        if self.pass_id.root == self._me and (effects or not isinstance(error, Exception)):
            self._cause = error
        return effects


def _resolve_others(local: LocalPass, promised: frozenset[int]) -> int:
    """Resolves sends that were promised nothing as having no gradient; returns how many."""
    unused = local.waiting_sends - promised
    for message_id in unused:
        local.resolve_without_gradient(message_id)
    return len(unused)


def _takes_long(effect: Effect) -> bool:
    return isinstance(effect, RunWave | FollowStuck | FollowSend)
