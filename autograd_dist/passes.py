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
from rpc.extend import new_tuple

P = TypeVar("P")
"""A request's gradients; opaque here."""

T = TypeVar("T")
"""Identifies an arrived request to whoever acknowledges it; opaque here."""


class PassId(NamedTuple):
    """Identifies a pass: the ``number``-th that worker ``root`` started in a context."""

    context_id: int
    root: int
    number: int


class Gradients(NamedTuple):
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


# What each pass makes is tuples, which are made in a fifth of the time of other objects. Only
# who gives and takes the payloads and tokens in them knows their types.


class Returned(NamedTuple):
    """Gradients of a message that the acknowledged worker sent in the forward pass."""

    message_id: int
    payload: Any


class Send(NamedTuple):
    """Effect: send a request; its acknowledgement, or failure, is to be reported."""

    to: int
    request: Request
    payload: Any = None


class Acknowledge(NamedTuple):
    """Effect: answer an arrived request, with gradients if there are any to come along."""

    token: Any
    ack: Ack
    returned: Returned | None = None


class RunWave(NamedTuple):
    """Effect: run the local engine; reports ``wave_finished``, or ``failed``.

    Attributes:
        arrived: gradients that came, by message.
        only_promised: None, or the only sent messages that may still wait; all
            others are resolved as having no gradient.
    """

    arrived: tuple[tuple[int, Any], ...]
    only_promised: frozenset[int] | None


_FIRST_WAVE = RunWave((), None)


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

Effect = Send | Acknowledge | RunWave | FollowStuck | FollowSend | Finished


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
        is_over: nothing more is to be done here.
    """

    def __init__(self, me: int, root: int, neighbours: Callable[[], Iterable[int]]) -> None:
        self._is_root = me == root
        self._me = me
        self._neighbours = neighbours
        self._parent: list[T] = []
        self._parent_id: int | None = None
        self._held: Returned | None = None
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
        self.is_over = False

    # --- Events

    def start(self) -> list[Effect]:
        """Begins the pass at the root worker, whose roots are in place: the first wave may run."""
        self._is_working = True
        return [_FIRST_WAVE]

    def received(
        self, token: T, request: Request, payload: P | None = None, asker: int | None = None
    ) -> list[Effect]:
        """Takes a request that arrived.

        Args:
            token: names it when it is acknowledged.
            request: what is asked.
            payload: its gradients, if it has any.
            asker: whose it is; None if its acknowledgement must not carry gradients.
        """
        if self._error is not None or self.is_over:
            return [Acknowledge(token, Ack(error=self._error))]
        effects: list[Effect] = []
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

    def gradients_ready(self, origin: Origin, payload: P, *, may_wait: bool) -> list[Effect]:
        """Sends the gradients of a received message, which the running wave completed.

        Args:
            origin: the message.
            payload: its gradients.
            may_wait: the wave has no other to complete, so that it is about to end.
        """
        if self._error is not None or self.is_over:
            return []
        if may_wait and origin.sender == self._parent_id and self._is_last():
            self._held = Returned(origin.message_id, payload)
            return []
        self._owed += 1
        request = new_tuple(Gradients, (origin.message_id,))
        return [new_tuple(Send, (origin.sender, request, payload))]

    def wave_finished(self, is_stuck: bool, resolved: int, stepped: int = 0) -> list[Effect]:
        """Takes note that the wave is over.

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

    def reach_found(self, reach: Mapping[Origin, Iterable[int]]) -> list[Effect]:
        """Takes the messages, and their tensors, that an exploration has reached."""
        self._is_working = False
        effects: list[Effect] = []
        if self._error is None and not self.is_over:
            for origin, positions in reach.items():
                promise = Promise(self._round, origin.message_id, tuple(sorted(positions)))
                effects += self._send(origin.sender, promise)
        return effects + self._proceed()

    def acknowledged(self, ack: Ack, returned: Returned | None = None) -> list[Effect]:
        """Takes the acknowledgement of one of this worker's requests, maybe with gradients."""
        self._owed -= 1
        self._newly_stuck += ack.stuck
        self._newly_resolved += ack.resolved
        self.newly_stepped += ack.stepped
        if ack.error is not None:
            return self.failed(ack.error)
        if returned is not None:
            self._arrived.append((returned.message_id, returned.payload))
        return self._proceed()

    def failed(self, error: Failure) -> list[Effect]:
        """Fails the pass: the wave raised, or a request could not be delivered."""
        self._is_working = False
        if self._error is not None or self.is_over:
            return []
        self._error = error
        if self._is_root:
            self.is_over = True
            return [Finished(error)]
        # At once: what is still under way elsewhere does not matter any more.
        return [Acknowledge(self._disengage(), Ack(error=error))] if self._parent else []

    def abandoned(self) -> list[Effect]:
        """Ends the pass, which is over or whose root is gone; nobody waits for a result."""
        self.is_over = True
        return [Acknowledge(self._disengage(), _NOTHING_NEW)] if self._parent else []

    def dropped(self, why: Callable[[], Failure]) -> list[Effect]:
        """Ends the pass with its context: whoever waits for its end learns why."""
        is_awaited = (self._is_root or self._parent) and not self.is_over
        effects = self.failed(why()) if is_awaited else []
        self.is_over = True
        return effects

    # --- Decisions

    def _enter(self, request: Survey | Promise | Settle) -> list[Effect]:
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

    def _enter_round(self, number: int) -> list[Effect]:
        if number <= self._round:
            return []
        self._round = number
        self._promised.clear()
        self._to_follow.append(FollowStuck())
        return self._flood(Survey(number))

    def _enter_settling(self, number: int) -> list[Effect]:
        if number <= self._settled_round:
            return []
        self._settled_round = number
        self._to_settle = True
        return self._flood(Settle(number))

    def _flood(self, request: Request) -> list[Effect]:
        others = [worker for worker in self._neighbours() if worker != self._me]
        return [effect for worker in others for effect in self._send(worker, request)]

    def _send(self, to: int, request: Request, payload: P | None = None) -> list[Effect]:
        self._owed += 1
        return [Send(to, request, payload)]

    def _proceed(self) -> list[Effect]:
        """Gives this worker its next piece of work, or finds that it has none."""
        if self._is_working or self._error is not None or self.is_over:
            return []
        has_work = self._arrived or self._to_follow or self._to_settle
        if has_work or self._owed:
            effects = self._send_held() if self._held is not None else []
            if has_work:
                self._is_working = True
                follow = self._to_follow
                effects.append(follow.popleft() if follow else self._next_wave())
            return effects
        if self._is_root:
            return self._quiescent()
        if self._parent:
            report = self._newly_stuck, self._newly_resolved, None, self.newly_stepped
            self._newly_stuck = self._newly_resolved = self.newly_stepped = 0
            returned, self._held, self._parent_id = self._held, None, None
            return [new_tuple(Acknowledge, (self._parent.pop(), new_tuple(Ack, report), returned))]
        return []

    def _is_last(self) -> bool:
        """True if nothing is to be done or waited for here but what is being done."""
        return not (self._owed or self._to_follow or self._arrived or self._to_settle)

    def _send_held(self) -> list[Effect]:
        held, self._held = self._held, None
        assert held is not None
        assert self._parent_id is not None
        return self._send(self._parent_id, Gradients(held.message_id), held.payload)

    def _next_wave(self) -> RunWave:
        promised = frozenset(self._promised) if self._to_settle else None
        wave: RunWave = new_tuple(RunWave, (tuple(self._arrived), promised))
        self._arrived.clear()
        self._to_settle = False
        return wave

    def _disengage(self) -> T:
        self._held = self._parent_id = None
        return self._parent.pop()

    def _quiescent(self) -> list[Effect]:
        """Decides, at the root, what is next at a moment when nothing happens anywhere."""
        resolved = self._newly_resolved
        self._stuck_known += self._newly_stuck
        self._newly_stuck = self._newly_resolved = 0
        if self._round > self._settled_round:
            return self._enter_settling(self._round) + self._proceed()
        if not self._stuck_known:
            self.is_over = True
            return [_SUCCEEDED]
        if self._round and not resolved:
            stuck = f"gradients are stuck at {self._stuck_known} workers"
            return self.failed(Failure(f"{stuck} and nothing can free them"))
        return self._enter_round(self._round + 1) + self._proceed()
