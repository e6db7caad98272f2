"""The autograd contexts that exist on a worker, and what each has recorded there.

A context is created by one worker and comes into being on others when a call
carries its id there. Other modules decide who sends what, and how backward runs.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final
from weakref import ReferenceType, ref

from autograd_dist.border import SentTensor
from autograd_dist.errors import UnknownContextError
from autograd_dist.gradients import LeafGradients
from autograd_dist.recv_node import Node

_CREATOR_SHIFT = 48
_LIFE_SHIFT = 32
_MOST_LIVES = 1 << _CREATOR_SHIFT - _LIFE_SHIFT
_RELEASED_IDS_KEPT = 4096
_RECEIPTS_BEFORE_PRUNING = 64

current_id: Final[contextvars.ContextVar[int | None]] = contextvars.ContextVar(
    "autograd_dist_context_id", default=None
)

current_context_id: Final[Callable[[], int | None]] = current_id.get
"""Gives the context that the running code belongs to, if any."""


class entered:
    """Runs the block inside a context.

    Args:
        context_id: of the context.
    """

    __slots__ = ("_context_id", "_token")

    def __init__(self, context_id: int) -> None:
        self._context_id = context_id

    def __enter__(self) -> None:
        self._token = current_id.set(self._context_id)

    def __exit__(self, *_: object) -> None:
        current_id.reset(self._token)


make_current: Final[Callable[[int | None], object]] = current_id.set
"""Lets the running code belong to a context, or to none, from now on."""


def highest_context_id(worker_id: int) -> int:
    """The highest id that a context created by a worker can have."""
    return (worker_id + 1 << _CREATOR_SHIFT) - 1


def creator_of(context_id: int) -> int:
    """The worker that created a context."""
    return context_id >> _CREATOR_SHIFT


def is_of_life(context_id: int, incarnation: int) -> bool:
    """True if a context was created in this life of its creator."""
    return (context_id >> _LIFE_SHIFT) % _MOST_LIVES == incarnation % _MOST_LIVES


def lives_after(context_id: int, incarnation: int) -> int:
    """Counts the creator's lives from that one to a context's creation; negative: before."""
    after = ((context_id >> _LIFE_SHIFT) - incarnation) % _MOST_LIVES
    return after if after < _MOST_LIVES // 2 else after - _MOST_LIVES


def _always_lives(_: int) -> bool:
    return True


class SendFunction:
    """The tensors of one message as an autograd node would show them; for people and programs
    that look at a context.

    Args:
        sent: the tensors.
    """

    def __init__(self, sent: Sequence[SentTensor]) -> None:
        self._sent = sent

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]:
        """The edges by which gradients for the tensors enter the graph."""
        return tuple((each.edge.node, each.edge.output_nr) for each in self._sent)

    def name(self) -> str:
        """The name that torch gives such a node."""
        return "torch::distributed::autograd::SendRpcBackward"


class DistAutogradContext:
    """The records of one autograd context on one worker.

    Args:
        context_id: the same on every worker.
        life: which of this worker's, so that no message of a later one has the id of its.

    Attributes:
        known: the workers that this one exchanged calls with in the context; to look at only.
        sends: gives a copy of everything sent so far, by message.
        sequels: those that were begun here, and once more each that was done; see ``sequels``.
    """

    def __init__(self, context_id: int, life: int = 0) -> None:
        self.context_id = context_id
        self._last_message_id = life << _LIFE_SHIFT
        self.leaves = LeafGradients()
        self.sequels: list[bytes] = []
        self._lock = threading.Lock()
        self._sends: dict[int, Sequence[SentTensor]] = {}
        self._receipts: dict[tuple[int, int], ReferenceType[Node]] = {}
        self._most_receipts = _RECEIPTS_BEFORE_PRUNING
        self.known: set[int] = set()
        # One step of the interpreter, so that it needs no lock.
        self.sends: Callable[[], dict[int, Sequence[SentTensor]]] = self._sends.copy

    def add_send(self, tensors: Sequence[SentTensor]) -> int:
        """Records tensors that leave in one message; returns the message's id."""
        with self._lock:
            message_id = self._last_message_id = self._last_message_id + 1
            self._sends[message_id] = tensors
        return message_id

    def add_receipt(self, sender: int, message_id: int, node: Node) -> None:
        """Notes the node through which a message's tensors entered the graph."""
        with self._lock:
            self._receipts[sender, message_id] = ref(node)
            if len(self._receipts) > self._most_receipts:
                living = {k: node for k, node in self._receipts.items() if node() is not None}
                self._receipts = living
                self._most_receipts = 2 * len(living) + _RECEIPTS_BEFORE_PRUNING

    def add_worker(self, worker_id: int) -> None:
        """Notes another worker that takes part."""
        with self._lock:
            self.known.add(worker_id)

    def remove_worker(self, worker_id: int) -> bool:
        """Forgets a worker that is gone; True if it took part, as far as this one knew."""
        with self._lock:
            known = worker_id in self.known
            self.known.discard(worker_id)
        return known

    def workers(self, *excepted: int | None) -> list[int]:
        """The workers that this one exchanged calls with in the context, but for some."""
        with self._lock:
            return sorted(self.known.difference(excepted))

    def _context_id(self) -> int:
        return self.context_id

    def _send_functions(self) -> dict[int, SendFunction]:
        return {number: SendFunction(sent) for number, sent in self.sends().items()}

    def _recv_functions(self) -> dict[tuple[int, int], Node]:
        with self._lock:
            nodes = {key: node() for key, node in self._receipts.items()}
        return {key: node for key, node in nodes.items() if node is not None}

    def _known_worker_ids(self) -> set[int]:
        return set(self.workers())


class ContextTable:
    """The contexts of one worker.

    Args:
        me: this worker's id.
        incarnation: which life of it. Other workers remember the contexts that are over, and
            must not take those of a later life for them.
        lives: whether the creator of a context is not lost, as far as is known here. It is
            not before :meth:`all` shows what it created, to be released.

    Attributes:
        get: gives the context that exists here with an id, or None.
    """

    def __init__(
        self, me: int, incarnation: int = 0, lives: Callable[[int], bool] = _always_lives
    ) -> None:
        self._me = me
        self.lives = lives
        self._lock = threading.Lock()
        self._life = incarnation % _MOST_LIVES
        self._ids = itertools.count((me << _CREATOR_SHIFT) + (self._life << _LIFE_SHIFT))
        self._contexts: dict[int, DistAutogradContext] = {}
        self.get: Callable[[int], DistAutogradContext | None] = self._contexts.get
        self._released: OrderedDict[int, None] = OrderedDict()

    def create(self) -> DistAutogradContext:
        """A new context of this worker's own."""
        with self._lock:
            context_id = next(self._ids)
            context = self._contexts[context_id] = DistAutogradContext(context_id, self._life)
        return context

    def find(self, context_id: int) -> DistAutogradContext:
        """A context that exists here.

        Raises:
            UnknownContextError: it does not.
        """
        context = self.get(context_id)
        if context is None:
            raise UnknownContextError(context_id)
        return context

    def join(self, context_id: int) -> DistAutogradContext | None:
        """A context that another worker mentions; None if it is over.

        Only some thousands that are over are remembered: what was joined here before is to
        be had from ``get``, or it might come back.
        """
        with self._lock:
            context = self._contexts.get(context_id)
            if context is not None or self._is_over(context_id):
                return context
            context = self._contexts[context_id] = DistAutogradContext(context_id, self._life)
        if self.lives(context_id):
            return context
        self.release(context_id)  # of those of a lost worker, all that were here have been
        return None

    def _is_over(self, context_id: int) -> bool:
        """True if a context that is not here existed once. Needs the lock."""
        return context_id in self._released or context_id >> _CREATOR_SHIFT == self._me

    def release(self, context_id: int) -> DistAutogradContext | None:
        """Removes a context; a late call cannot bring it back. None if it was not here."""
        with self._lock:
            self._released[context_id] = None
            if len(self._released) > _RELEASED_IDS_KEPT:
                self._released.popitem(last=False)
            return self._contexts.pop(context_id, None)

    def all(self) -> list[DistAutogradContext]:
        """The contexts that exist here now."""
        with self._lock:
            return list(self._contexts.values())
