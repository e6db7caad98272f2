"""Decides how a backward pass spreads over workers and when it is over. Sans-IO.

A pass is a diffusing computation (E. W. Dijkstra and C. S. Scholten, "Termination
detection for diffusing computations", 1980). It starts at the *root*, the worker
that called ``backward``, and spreads by requests, mostly gradients of a message
for the worker that sent it. Each request is acknowledged once. The request that
*engages* a worker is acknowledged when that worker has nothing to do and all its
own requests are acknowledged; requests to an engaged worker at once. When the
root has nothing to do and is owed no acknowledgement, nothing happens anywhere.

Most workers have one more thing to send when they are done: gradients for the very
worker that engaged them. These travel with the acknowledgement, which spares a
request and its answer. Nothing is lost sight of thereby: whoever is acknowledged
is still engaged, and is not done before it has worked on what came along.

That ends the pass, unless gradients are *stuck* somewhere: they wait behind a
send whose gradient never comes because its output was not used. Acknowledgements
carry the change in the number of stuck workers, so the root knows. It then runs
rounds of two more diffusions:

    SURVEY  Every worker follows its stuck gradients through its graph to recv
            nodes and promises the senders of those messages a gradient; they
            follow the promised gradients further in the same way.
    SETTLE  Sends without a promise are resolved as having no gradient. What
            was stuck behind them runs, and the pass continues.

A promise can be broken: a node that is reached may pass on no gradient after all.
Then a further round is needed. Every round resolves something: of all sends
that still wait when nothing moves, take one whose message was sent last in causal
order. Whatever would give it a gradient could only wait for a send later still,
so nothing will, and nobody promises it one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from autograd_dist.failure import Failure
from autograd_dist.recv_node import Origin

P = TypeVar("P")
"""A request's gradients; opaque here."""

T = TypeVar("T")
"""Identifies an arrived request to whoever acknowledges it; opaque here."""


class PassId(NamedTuple):
    """Identifies a pass: the ``number``-th that worker ``root`` started in a context."""

    context_id: int
    root: int
    number: int


@dataclass(frozen=True, slots=True)
class Gradients:
    """Request: the gradients of a message that the receiver sent in the forward pass."""

    message_id: int


@dataclass(frozen=True, slots=True)
class Survey:
    """Request: find out what gradients that are stuck would reach."""

    round: int


@dataclass(frozen=True, slots=True)
class Promise:
    """Request: tensors at ``positions`` of a message will get a gradient; find out what follows."""

    round: int
    message_id: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Settle:
    """Request: resolve the sends that were promised nothing in this round."""

    round: int


Request = Gradients | Survey | Promise | Settle


class Ack(NamedTuple):
    """Answers one request.

    Attributes:
        stuck: change in the number of stuck workers since the answerer's last report.
        resolved: sends resolved as having no gradient since then.
        error: why the pass failed, if it did.
        stepped: workers that ran the pass's sequel since then; see ``sequels``.
    """

    stuck: int = 0
    resolved: int = 0
    error: Failure | None = None
    stepped: int = 0


_NOTHING_NEW = Ack()


@dataclass(frozen=True, slots=True)
class Returned(Generic[P]):
    """Gradients of a message that the acknowledged worker sent in the forward pass."""

    message_id: int
    payload: P


@dataclass(frozen=True, slots=True)
class Send(Generic[P]):
    """Effect: send a request; its acknowledgement, or failure, is to be reported."""

    to: int
    request: Request
    payload: P | None = None


@dataclass(frozen=True, slots=True)
class Acknowledge(Generic[P, T]):
    """Effect: answer an arrived request, with gradients if there are any to come along."""

    token: T
    ack: Ack
    returned: Returned[P] | None = None


@dataclass(frozen=True, slots=True)
class RunWave(Generic[P]):
    """Effect: run the local engine; reports ``wave_finished``, or ``failed``.

    Attributes:
        arrived: gradients that came, by message.
        only_promised: None, or the only sent messages that may still wait; all
            others are resolved as having no gradient.
    """

    arrived: tuple[tuple[int, P], ...]
    only_promised: frozenset[int] | None


_FIRST_WAVE: RunWave[Any] = RunWave((), None)


@dataclass(frozen=True, slots=True)
class FollowStuck:
    """Effect: find what stuck gradients reach; reports ``reach_found``."""


@dataclass(frozen=True, slots=True)
class FollowSend:
    """Effect: find what gradients of a sent message would reach; reports ``reach_found``."""

    message_id: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Effect, at the root only: the pass is over."""

    error: Failure | None


_SUCCEEDED = Finished(None)

Effect = Send[P] | Acknowledge[P, T] | RunWave[P] | FollowStuck | FollowSend | Finished


class Participant(Generic[P, T]):
    """One worker's part in one pass.

    Every method is an event and returns the effects to carry out. At most one
    ``RunWave``, ``FollowStuck`` or ``FollowSend`` is outstanding at a time.

    Args:
        me: this worker.
        root: the worker that started the pass.
        neighbours: gives the other workers of the context that this one knows.

    Attributes:
        newly_stepped: workers that ran the sequel and were not reported yet; at the root, all.
    """

    def __init__(self, me: int, root: int, neighbours: Callable[[], Iterable[int]]) -> None:
        self._is_root = me == root
        self._me = me
        self._neighbours = neighbours
        self._parent: list[T] = []
        self._parent_id: int | None = None
        self._held: Returned[P] | None = None
        self._owed = 0
        self._is_working = False
        self._arrived: list[tuple[int, P]] = []
        self._to_follow: deque[FollowStuck | FollowSend] = deque()
        self._to_settle = False
        self._round = 0
        self._settled_round = 0
        self._promised: dict[int, set[int]] = {}
        self._stuck_here = 0
        self._stuck_known = 0
        self._newly_stuck = 0
        self._newly_resolved = 0
        self.newly_stepped = 0
        self._error: Failure | None = None
        self._over = False

    # --- Events

    def start(self) -> list[Effect[P, T]]:
        """The root worker's roots are in place; the first wave may run."""
        self._is_working = True
        return [_FIRST_WAVE]

    def received(
        self, token: T, request: Request, payload: P | None = None, asker: int | None = None
    ) -> list[Effect[P, T]]:
        """A request arrived.

        Args:
            token: names it when it is acknowledged.
            request: what is asked.
            payload: its gradients, if it has any.
            asker: whose it is; None if its acknowledgement must not carry gradients.
        """
        if self._error is not None or self._over:
            return [Acknowledge(token, Ack(error=self._error))]
        effects: list[Effect[P, T]] = []
        if self._is_root or self._parent:
            effects.append(Acknowledge(token, _NOTHING_NEW))
        else:
            self._parent.append(token)
            self._parent_id = asker
        if isinstance(request, Gradients):
            assert payload is not None
            self._arrived.append((request.message_id, payload))
        else:
            effects += self._enter(request)
        return effects + self._proceed()

    def gradients_ready(self, origin: Origin, payload: P, *, may_wait: bool) -> list[Effect[P, T]]:
        """The running wave completed the gradients of a received message.

        Args:
            origin: the message.
            payload: its gradients.
            may_wait: the wave has no other to complete, so that it is about to end.
        """
        if self._error is not None or self._over:
            return []
        if may_wait and origin.sender == self._parent_id and self._is_last():
            self._held = Returned(origin.message_id, payload)
            return []
        return self._send(origin.sender, Gradients(origin.message_id), payload)

    def wave_finished(self, is_stuck: bool, resolved: int, stepped: int = 0) -> list[Effect[P, T]]:
        """The wave is over.

        Args:
            is_stuck: gradients are waiting here.
            resolved: sends that this wave resolved as having no gradient.
            stepped: 1 if the pass's sequel ran here.
        """
        self.newly_stepped += stepped
        self._is_working = False
        self._newly_stuck += int(is_stuck) - self._stuck_here
        self._stuck_here = int(is_stuck)
        self._newly_resolved += resolved
        return self._proceed()

    def reach_found(self, reach: Mapping[Origin, Iterable[int]]) -> list[Effect[P, T]]:
        """The exploration is over: messages, and which of their tensors, that are reached."""
        self._is_working = False
        effects: list[Effect[P, T]] = []
        if self._error is None and not self._over:
            for origin, positions in reach.items():
                promise = Promise(self._round, origin.message_id, tuple(sorted(positions)))
                effects += self._send(origin.sender, promise)
        return effects + self._proceed()

    def acknowledged(self, ack: Ack, returned: Returned[P] | None = None) -> list[Effect[P, T]]:
        """One of this worker's requests was acknowledged, maybe with gradients."""
        self._owed -= 1
        self._newly_stuck += ack.stuck
        self._newly_resolved += ack.resolved
        self.newly_stepped += ack.stepped
        if ack.error is not None:
            return self.failed(ack.error)
        if returned is not None:
            self._arrived.append((returned.message_id, returned.payload))
        return self._proceed()

    def failed(self, error: Failure) -> list[Effect[P, T]]:
        """The wave raised, or a request could not be delivered."""
        self._is_working = False
        if self._error is not None or self._over:
            return []
        self._error = error
        if self._is_root:
            self._over = True
            return [Finished(error)]
        # At once: what is still under way elsewhere does not matter any more.
        return [Acknowledge(self._disengage(), Ack(error=error))] if self._parent else []

    def abandoned(self) -> list[Effect[P, T]]:
        """The pass is over, or its root is gone; nobody waits for a result."""
        self._over = True
        return [Acknowledge(self._disengage(), _NOTHING_NEW)] if self._parent else []

    # --- Decisions

    def _enter(self, request: Survey | Promise | Settle) -> list[Effect[P, T]]:
        if isinstance(request, Survey):
            return self._enter_round(request.round)
        if isinstance(request, Settle):
            return self._enter_settling(request.round)
        effects = self._enter_round(request.round)
        known = self._promised.setdefault(request.message_id, set())
        fresh = sorted(set(request.positions) - known)
        known.update(fresh)
        if fresh:
            self._to_follow.append(FollowSend(request.message_id, tuple(fresh)))
        return effects

    def _enter_round(self, number: int) -> list[Effect[P, T]]:
        if number <= self._round:
            return []
        self._round = number
        self._promised.clear()
        self._to_follow.append(FollowStuck())
        return self._flood(Survey(number))

    def _enter_settling(self, number: int) -> list[Effect[P, T]]:
        if number <= self._settled_round:
            return []
        self._settled_round = number
        self._to_settle = True
        return self._flood(Settle(number))

    def _flood(self, request: Request) -> list[Effect[P, T]]:
        others = [worker for worker in self._neighbours() if worker != self._me]
        return [effect for worker in others for effect in self._send(worker, request)]

    def _send(self, to: int, request: Request, payload: P | None = None) -> list[Effect[P, T]]:
        self._owed += 1
        return [Send(to, request, payload)]

    def _proceed(self) -> list[Effect[P, T]]:
        """Gives this worker its next piece of work, or finds that it has none."""
        if self._is_working or self._error is not None or self._over:
            return []
        has_work = self._arrived or self._to_follow or self._to_settle
        if has_work or self._owed:
            effects = self._send_held() if self._held is not None else []
            return effects + self._next_work() if has_work else effects
        if self._is_root:
            return self._quiescent()
        if self._parent:
            report = Ack(self._newly_stuck, self._newly_resolved, None, self.newly_stepped)
            self._newly_stuck = self._newly_resolved = self.newly_stepped = 0
            returned = self._held
            return [Acknowledge(self._disengage(), report, returned)]
        return []

    def _is_last(self) -> bool:
        """True if nothing is to be done or waited for here but what is being done."""
        return not (self._owed or self._to_follow or self._arrived or self._to_settle)

    def _send_held(self) -> list[Effect[P, T]]:
        held, self._held = self._held, None
        assert held is not None
        assert self._parent_id is not None
        return self._send(self._parent_id, Gradients(held.message_id), held.payload)

    def _next_work(self) -> list[Effect[P, T]]:
        self._is_working = True
        if self._to_follow:
            return [self._to_follow.popleft()]
        promised = frozenset(self._promised) if self._to_settle else None
        wave: RunWave[P] = RunWave(tuple(self._arrived), promised)
        self._arrived.clear()
        self._to_settle = False
        return [wave]

    def _disengage(self) -> T:
        self._held = self._parent_id = None
        return self._parent.pop()

    def _quiescent(self) -> list[Effect[P, T]]:
        """At the root: nothing happens anywhere, so this is the moment to decide what is next."""
        resolved = self._newly_resolved
        self._stuck_known += self._newly_stuck
        self._newly_stuck = self._newly_resolved = 0
        if self._round > self._settled_round:
            return self._enter_settling(self._round) + self._proceed()
        if not self._stuck_known:
            self._over = True
            return [_SUCCEEDED]
        if self._round and not resolved:
            stuck = f"gradients are stuck at {self._stuck_known} workers"
            return self.failed(Failure(f"{stuck} and nothing can free them"))
        return self._enter_round(self._round + 1) + self._proceed()
