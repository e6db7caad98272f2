"""Distributed autograd on one worker: where contexts and passes meet calls.

Implements ``rpc.extensions.CallExtension``. A call made inside a context carries
the context's id and says which of its tensors require grad; on arrival those
get a recv node, and the handler runs inside the context. Requests of backward
passes are messages between the extensions, their acknowledgements the replies.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from autograd_dist.backward_passes import BackwardPasses
from autograd_dist.border import SentTensor
from autograd_dist.contexts import (
    ContextTable,
    DistAutogradContext,
    creator_of,
    current_context_id,
    is_of_life,
    lives_after,
    make_current,
)
from autograd_dist.errors import UnknownContextError
from autograd_dist.grad_fields import GradFields
from autograd_dist.recv_node import Origin, attach_recv
from autograd_dist.releases import Releases
from autograd_dist.wire import (
    EXTENSION_NAME,
    CallMetadata,
    Inquiry,
    Release,
    decode_message,
    decode_release,
    encode_call,
)
from rpc.errors import (
    AgentClosedError,
    RpcError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.extend import new_tuple

if TYPE_CHECKING:
    from rpc import Future
    from rpc.extend import Answer, Worker

_log = logging.getLogger("rpc")

_GONE = (WorkerLostError, UnknownWorkerError, AgentClosedError)
"""The errors that a message to a worker that is gone raises."""


class AutogradExtension:
    """Distributed autograd for one agent.

    Attributes:
        backward: runs a backward pass from roots on this worker.
        sequels: what this worker does when its gradients of a pass are complete.
    """

    name: ClassVar[str] = EXTENSION_NAME

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._me = worker.info.id
        self.contexts = ContextTable(self._me, worker.life.incarnation, self._creator_lives)
        self.grad_fields = GradFields(worker.time_left)
        self._passes = BackwardPasses(worker, self.contexts, self.grad_fields)
        self.backward = self._passes.run
        self.sequels = self._passes.sequels
        self._closed = False
        self._releases = Releases(f"rpc-{worker.info.name}-releases", self._tell)

    @property
    def worker_id(self) -> int:
        """The worker that this belongs to."""
        return self._me

    # --- What user programs ask

    def release(self, context_id: int, told_by: int | None = None) -> None:
        """Ends a context here and, soon, on every worker that took part.

        Args:
            context_id: of the context.
            told_by: a worker that said so, and so knows.
        """
        context = self.contexts.release(context_id)
        if context is None:
            return
        self._passes.drop(context_id, RpcError("its autograd context was released"))
        others = context.workers(self._me, told_by)
        if others:
            self._releases.put(context_id, others)

    # --- What the agent tells (``rpc.extensions.CallExtension``)

    def outgoing_request(self, to: int, tensors: Sequence[torch.Tensor]) -> bytes | None:
        """Makes a call made inside a context part of it."""
        context_id = current_context_id()
        context = None if context_id is None else self.contexts.get(context_id)
        if context is None:
            return None
        if to not in context.known:
            context.add_worker(to)
            if self.contexts.get(context.context_id) is None:
                return None  # whoever ended it meanwhile may not have seen that
        message_id, positions = _record_sent(context, tensors)
        return encode_call(context.context_id, message_id, positions, torch.is_grad_enabled())

    def incoming_request(
        self, sender: int, metadata: bytes, tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], AbstractContextManager[object] | None]:
        """Lets a handler run inside the context its call was made in."""
        received = CallMetadata.decode(metadata, len(tensors))
        context = self.contexts.get(received.context_id) or self.contexts.join(received.context_id)
        if context is None:
            self._require_creator(received.context_id)
            # Its context ended before the call arrived: no gradient will be asked for.
            return tensors, None
        if sender not in context.known:
            context.add_worker(sender)
        # It may have been lost before that: nobody else noticed.
        if self._worker.living_life(sender) is None and self._worker.why_lost(sender) is not None:
            self._lost_a_neighbour([context], sender)
        if received.positions:
            tensors = _attach_received(context, received, sender, tensors)
        make_current(context.context_id)
        return tensors, None if received.grad_enabled else torch.no_grad()

    def outgoing_reply(
        self, to: int, request_metadata: bytes, tensors: Sequence[torch.Tensor]
    ) -> bytes | None:
        """Makes a result part of the context of its call."""
        context = self.contexts.get(CallMetadata.context_of(request_metadata))
        if context is None:
            self._require_open(tensors)
            return None
        message_id, positions = _record_sent(context, tensors)
        return encode_call(context.context_id, message_id, positions) if positions else None

    def incoming_reply(
        self, sender: int, request_metadata: bytes, metadata: bytes, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Lets gradients find the way back to a result's sender."""
        received = CallMetadata.decode(metadata, len(tensors))
        context = self.contexts.get(received.context_id)
        if context is None or not received.positions:
            return tensors
        return _attach_received(context, received, sender, tensors)

    def on_message(
        self, sender: int, body: bytes, tensors: list[torch.Tensor]
    ) -> Future[Answer] | Answer:
        """Takes a request of a pass, or news that a context is over."""
        message = decode_message(body)
        if isinstance(message, Release):
            self._released(message, sender)
            return b""
        if isinstance(message, Inquiry):
            return Release(tuple(self._take_in(sender, message.context_ids))).encode()
        return self._passes.request_arrived(sender, message, tensors)

    def on_worker_lost(self, worker_id: int, reason: str) -> None:
        """Drops what belonged to the lost worker: its contexts and its passes."""
        contexts = self.contexts.all()
        for context in contexts:
            if creator_of(context.context_id) == worker_id:
                self.contexts.release(context.context_id)
                error = self._worker.why_lost(worker_id)
                self._passes.drop(context.context_id, error or RpcError(reason))
        self._passes.root_lost(worker_id)
        self._lost_a_neighbour(contexts, worker_id)

    def _lost_a_neighbour(self, contexts: Iterable[DistAutogradContext], worker_id: int) -> None:
        """Asks about contexts of whose end a lost worker may have been the one to tell."""
        inquiries: defaultdict[int, list[int]] = defaultdict(list)
        for context in contexts:
            creator = creator_of(context.context_id)
            if context.remove_worker(worker_id) and creator not in (self._me, worker_id):
                inquiries[creator].append(context.context_id)
        for creator, context_ids in inquiries.items():
            self._inquire(creator, context_ids)

    def _inquire(self, creator: int, context_ids: Sequence[int]) -> None:
        body = Inquiry(tuple(context_ids)).encode()
        try:
            future = self._worker.message(creator, self.name, body, timeout=0)
        except _GONE:
            return  # and its contexts with it
        except Exception:  # there are others to be asked
            _log.exception("worker %d is not asked which of its contexts are over", creator)
            return
        future.add_done_callback(partial(self._answered, creator))

    def _answered(self, creator: int, future: Future[bytes]) -> None:
        try:
            self._released(decode_release(future.value()), creator)
        except _GONE as error:
            _log.debug("worker %d says no more which contexts are over: %s", creator, error)
        except Exception:
            _log.exception("worker %d does not say which of its contexts are over", creator)

    def _released(self, message: Release, told_by: int) -> None:
        for context_id in message.context_ids:
            self.release(context_id, told_by)

    def _take_in(self, worker: int, context_ids: Sequence[int]) -> Iterator[int]:
        """Notes whom to tell when contexts of ours are over; returns those that are already."""
        for context_id in context_ids:
            try:
                self.contexts.find(context_id).add_worker(worker)
                self.contexts.find(context_id)  # whoever ended it since may not have seen that
            except UnknownContextError:
                yield context_id

    def _require_open(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refuses to send a result without the way back for its gradient.

        Raises:
            AgentClosedError: this worker let go of contexts that are not over.
        """
        if self._closed and any(tensor.requires_grad for tensor in tensors):
            raise AgentClosedError(
                "the gradient of the result could not come back here: this worker shut down"
            )

    def _require_creator(self, context_id: int) -> None:
        """Refuses a call in a context of a lost worker, which may still live and ask for gradients.

        Raises:
            WorkerLostError: that life of its creator is over.
        """
        if not self._creator_lives(context_id):
            error = self._worker.why_lost(creator_of(context_id))
            raise error or UnknownContextError(context_id)

    def _creator_lives(self, context_id: int) -> bool:
        """False if that life of the creator is over; one that is not known yet may not be."""
        creator = creator_of(context_id)
        living = self._worker.living_life(creator)
        if living is not None and is_of_life(context_id, living.incarnation):
            return True
        latest = self._worker.latest_life(creator)
        if latest is None:
            return True
        later = lives_after(context_id, latest.incarnation)
        return later > 0 or (later == 0 and self._worker.is_living(latest))

    def debug_info(self) -> dict[str, int]:
        """The numbers of contexts and passes."""
        return {
            "num_autograd_contexts": len(self.contexts.all()),
            "num_current_backward_passes": self._passes.running(),
        }

    def close(self) -> None:
        """Lets go of every context."""
        self._closed = True
        self._passes.close()
        self._releases.close()
        for context in self.contexts.all():
            self.contexts.release(context.context_id)
            self._passes.drop(context.context_id, AgentClosedError("this worker shut down"))

    def _tell(self, worker: int, context_ids: Sequence[int]) -> None:
        """Tells a worker that contexts are over; raises RpcError if it does not get to know."""
        body = Release(tuple(context_ids)).encode()
        noted = partial(_note_refusal, worker, context_ids)
        try:
            self._worker.ask(worker, self.name, body, (), noted)
        except _GONE as error:  # and the contexts with it
            noted(None, error)


def _record_sent(
    context: DistAutogradContext, tensors: Sequence[torch.Tensor]
) -> tuple[int, list[int]]:
    """Notes which tensors of a message may get gradients; returns its number, and these."""
    positions: list[int] = []
    sent: list[SentTensor] = []
    for position, tensor in enumerate(tensors):
        if tensor.requires_grad:
            positions.append(position)
            sent.append(SentTensor.of(tensor))
    return context.add_send(sent) if sent else 0, positions


def _attach_received(
    context: DistAutogradContext,
    received: CallMetadata,
    sender: int,
    tensors: list[torch.Tensor],
) -> list[torch.Tensor]:
    origin: Origin = new_tuple(Origin, (received.context_id, sender, received.message_id))
    tracked = attach_recv(origin, list(map(tensors.__getitem__, received.positions)))
    context.add_receipt(sender, received.message_id, tracked[0].grad_fn)
    result = list(tensors)
    for position, tensor in zip(received.positions, tracked, strict=True):
        result[position] = tensor
    return result


def _note_refusal(
    worker: int, context_ids: Sequence[int], _: object, error: Exception | None
) -> None:
    """Logs an error, for people who want to know what keeps memory; nothing depends on it."""
    if isinstance(error, _GONE):
        _log.debug("worker %d does not say that it took news of contexts: %s", worker, error)
    elif error is not None:
        problem = "worker %d may keep contexts that are over: %s"
        _log.error(problem, worker, context_ids, exc_info=error)
