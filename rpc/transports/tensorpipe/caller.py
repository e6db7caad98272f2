"""Makes the calls of one TensorPipe transport.

Owns the way from a frame to a call of torch's, first made or made again. Who may
be called, what comes back and what a broken pipe means is for others to know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from rpc.devices import moves_host, reverse
from rpc.transports.base import Frame, FrameKind, Peer
from rpc.transports.flow import FlowWindow
from rpc.transports.loopback import Loopback
from rpc.transports.tensorpipe import wire as wire
from rpc.transports.tensorpipe.address import Address
from rpc.transports.tensorpipe.device_readiness import question
from rpc.transports.tensorpipe.ledger import (
    RECEIPT_AFTER_BYTES,
    Call,
    Calls,
    Served,
    encode_receipt,
)
from rpc.transports.tensorpipe.links import Link
from rpc.transports.tensorpipe.shared_tensors import HostMemory
from rpc.transports.tensorpipe.torch_agent import PipeBrokenError, TorchAgent, error_of, refusal_of
from rpc.transports.tensorpipe.wire import Envelope, Payload, Sender

if TYPE_CHECKING:
    from torch._C import _distributed_rpc as torch_rpc

    from rpc.options import TensorPipeRpcBackendOptions

_MOST_IN_BATCH = 16_384

Begun = tuple[Envelope, "torch_rpc.WorkerInfo | None"]
"""A call that has its number, and the way it is to take; without one, it waits for the mender."""


class Caller:
    """Makes calls.

    Args:
        sender: who makes them.
        lock: guards the links.
        agent: carries them.
        broke: told of a pipe that broke, by the attempt that it belongs to, and why.
        failed: told of a request to which no reply will come, by its correlation, and why.
    """

    def __init__(
        self,
        sender: Sender,
        lock: threading.Lock,
        agent: TorchAgent,
        broke: Callable[[Link, int, str], None],
        failed: Callable[[Link, int, str], None],
    ) -> None:
        self._sender = sender
        self._lock = lock
        self._agent = agent
        self._broke = broke
        self._failed = failed

    def link_to(
        self,
        peer: Peer,
        name: str,
        options: TensorPipeRpcBackendOptions,
        memory: HostMemory,
        loopback: Loopback,
    ) -> Link:
        """Opens the way to a peer.

        Args:
            peer: who it is; may be this worker itself.
            name: this worker's name.
            options: this worker's.
            memory: this worker's.
            loopback: this worker's way to itself, unless tensors change their device on it.
        """
        address = Address.decode(peer.address)
        replies = reverse(address.devices.maps.get(name, {}))
        requests = options.device_maps.get(peer.info.name, {})
        seconds = options.link_resume_timeout if address.life else 0.0
        me = self._sender.worker_id
        host = "" if moves_host(requests) or moves_host(replies) else address.host
        itself = peer.info.id == me
        if itself:
            route, seconds, host = self._agent.myself(), 0.0, ""
        else:
            route = self._agent.reach(peer.info.name, address.url.encode(), replies)
        most = options.max_bytes_in_flight
        link = Link(
            peer,
            route,
            precedes_me=peer.info.id < me,
            requests=requests,
            replies=replies,
            calls=Calls(bool(seconds), min(most // 4, RECEIPT_AFTER_BYTES)),
            served=Served(bool(seconds)),
            seconds=seconds,
            shared=memory.shared_with(peer.info.name, host),
            window=FlowWindow(peer.info.name, most, options.when_full),
            reply_window=FlowWindow(peer.info.name, most, gives_way=False),
            loopback=loopback if itself and not requests and not replies else None,
        )
        if itself:  # torch was told of these devices when it began
            link.readiness.answered("")
        return link

    def begin(self, link: Link, kind: int, frame: Frame) -> Begun:
        """Gives a call its number. Needs the lock; :meth:`carry` comes next, without it."""
        number = link.calls.begin(kind, frame)
        me, life = self._sender
        return Envelope(kind, me, life, frame.correlation, number, link.epoch.attempt), link.route

    def carry(self, link: Link, begun: Begun, frame: Frame) -> None:
        """Makes a call that has its number.

        Raises:
            PipeBrokenError: it waits for the mender, which has to be told.
            RuntimeError: torch cannot make it.
        """
        envelope, route = begun
        if route is None:
            return
        data, tensors = wire.pack(envelope, frame, link.requests_lent_from)
        if envelope.kind == FrameKind.REQUEST or envelope.kind == wire.AGAIN:
            future = self._agent.ask(route, wire.call_pickle(data), tensors)
            table = frame.split()[0] if type(frame) is wire.PlacedFrame else b""
            future.add_done_callback(partial(self._request_ended, link, envelope, table))
        else:
            self._agent.tell(route, wire.call_pickle(data), tensors)

    def _request_ended(
        self, link: Link, envelope: Envelope, table: bytes, future: torch.futures.Future[None]
    ) -> None:
        """Lets a call fail that torch answers with an error of its own.

        The peer may not have taken it: then its number is still to come, with the table of what
        the request has in shared memory, as nobody has read that.
        """
        problem = refusal_of(future)
        if not problem:
            return
        instead = Frame(FrameKind.NOTICE, 0, b"", table)
        with self._lock:
            if not link.calls.failed(envelope.number, instead):
                return
            nothing = envelope._replace(kind=wire.VOID, attempt=link.epoch.attempt)
            begun = nothing, link.route
        self.carry_or_break(link, begun, instead)
        self._failed(link, envelope.correlation, problem)

    def carry_or_break(self, link: Link, begun: Begun, frame: Frame) -> None:
        """Makes a call; if torch cannot, its pipe counts as broken."""
        try:
            self.carry(link, begun, frame)
        except RuntimeError as error:
            self._broke(link, begun[0].attempt, f"torch cannot send to it: {error}")

    def void(self, link: Link, begun: Begun, frame: Frame) -> None:
        """A call could not be made; one that says nothing takes its number.

        What it has in shared memory is taken back, unless the mender may have made the call: on
        a pipe that took the place of the one that it was begun for.
        """
        envelope, route = begun
        with self._lock:
            if not link.calls.void(envelope.number):
                return
            unsent = route is not None and link.epoch.attempt == envelope.attempt
        if unsent:
            link.shared.take_back(frame)
        nothing = envelope._replace(kind=wire.VOID)
        self.carry_or_break(link, (nothing, route), Frame(FrameKind.NOTICE, 0, b""))

    def send_batch(self, link: Link, batch: list[Frame]) -> None:
        """Sends frames that were taken from the link, if there are any."""
        if not batch:
            return
        frame = Frame(FrameKind.NOTICE, 0, b"", wire.join(batch))
        with self._lock:
            link.calls.under_way -= 1  # which the batch was already
            begun = self.begin(link, wire.BATCH, frame)
        self.carry_or_break(link, begun, frame)

    def may_wait(self, link: Link | None, frame: Frame) -> bool:
        """Whether a frame need not leave at once, but with others in a batch."""
        if is_large(frame):
            return False
        if frame.kind is FrameKind.NOTICE:
            return True
        return link is not None and link.in_burst(time.perf_counter())

    def reply_in_frame(self, link: Link, frame: Frame) -> None:
        """Answers a request that came in a batch, and has no call to be answered."""
        alone = type(frame) is wire.PlacedFrame or is_large(frame)
        with self._lock:
            if alone:
                begun = self.begin(link, frame.kind, frame)
            else:
                link.outbox.append(frame)
            batch = link.take_batch()
        if alone:
            self.carry_or_break(link, begun, frame)
        self.send_batch(link, batch)

    def offer_segment(self, link: Link) -> None:
        """Tells a peer of new shared memory, if there is any for it."""
        offer = link.shared.take_offer()
        if offer is not None:
            self._say(link, wire.SEGMENT, offer)

    def answer_offer(self, link: Link, offer: Payload) -> None:
        """Maps shared memory that a peer offers, and says whether it can be used."""
        self._say(link, wire.SEGMENT_ANSWER, link.shared.map(offer))

    def ask_for_devices(self, link: Link) -> None:
        """Asks a peer to make its devices ready for what we ask."""
        self._say(link, wire.DEVICES, question(link.requests))

    def _say(self, link: Link, kind: int, frame: Frame) -> None:
        with self._lock:
            if link.lost is not None:
                return
            begun = self.begin(link, kind, frame)
        self.carry_or_break(link, begun, frame)

    def take_receipt(self, link: Link) -> tuple[Begun, Frame] | None:
        """Begins a receipt, if one is owed. Needs the lock."""
        received, arrived = link.calls.take_received(), link.served.take_arrived()
        if not received and not arrived:
            return None
        frame = Frame(FrameKind.NOTICE, 0, b"", encode_receipt(received, arrived))
        return self.begin(link, wire.RECEIPT, frame), frame

    def call_again(
        self, link: Link, route: torch_rpc.WorkerInfo, attempt: int, number: int, call: Call
    ) -> None:
        """Makes a call on another pipe."""
        kind, frame = call
        envelope = self._sender.envelope(kind, frame.correlation, number, attempt)
        self.carry(link, (envelope, route), frame)

    def open_lifeline(self, link: Link, route: torch_rpc.WorkerInfo, attempt: int) -> None:
        """Makes the call on a pipe by which its end is noticed."""
        self.ask(link, route, self._sender.envelope(wire.LIFELINE, attempt=attempt))

    def say_farewell(self, link: Link) -> None:
        """Tells a peer that this worker leaves, and how many calls it made."""
        farewell = self._sender.envelope(wire.FAREWELL, attempt=link.epoch.attempt)
        if link.route is not None:
            self.ask(link, link.route, farewell, str(link.calls.sent).encode())

    def ask(
        self, link: Link, route: torch_rpc.WorkerInfo, envelope: Envelope, payload: bytes = b""
    ) -> None:
        """Makes a call that carries no frame and that shows when its pipe breaks."""
        try:
            future = self._agent.ask(route, self.pickle(envelope, payload), [])
        except PipeBrokenError as error:
            self._broke(link, envelope.attempt, str(error))
        else:
            future.add_done_callback(partial(self._ended, link, envelope.attempt))

    def _ended(self, link: Link, attempt: int, future: torch.futures.Future[None]) -> None:
        error = error_of(future)
        if error:
            self._broke(link, attempt, error)

    def pickle(self, envelope: Envelope, payload: bytes = b"") -> bytes:
        """A call that carries no frame."""
        frame = Frame(FrameKind.NOTICE, 0, b"", payload)
        return wire.call_pickle(wire.pack(envelope, frame)[0])

    def request_to_resume(self, attempt: int, token: str) -> bytes:
        """A call that asks a peer to go on over another pipe."""
        return self.pickle(self._sender.envelope(wire.RESUME, attempt=attempt), token.encode())


def is_large(frame: Frame) -> bool:
    """Whether a frame never travels in a batch."""
    return bool(frame.tensors) or len(frame.header) + len(frame.payload) > _MOST_IN_BATCH
