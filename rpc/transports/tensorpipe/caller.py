"""Makes the calls of one TensorPipe transport: from a frame to a call of torch's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from rpc.devices import moves_host, reverse
from rpc.ids import new_tuple
from rpc.transports.base import Frame, FrameKind, Peer
from rpc.transports.flow import FlowWindow
from rpc.transports.loopback import Loopback
from rpc.transports.tensorpipe import wire
from rpc.transports.tensorpipe.address import TensorPipeAddress
from rpc.transports.tensorpipe.device_readiness import question
from rpc.transports.tensorpipe.links import PeerLink
from rpc.transports.tensorpipe.outstanding import (
    MOST_IN_BATCH,
    RECEIPT_AFTER_BYTES,
    SentCalls,
    encode_receipt,
    is_large,
)
from rpc.transports.tensorpipe.shared_tensors import HostMemory
from rpc.transports.tensorpipe.torch_agent import PipeBrokenError, TorchAgent, error_of, refusal_of
from rpc.transports.tensorpipe.wire import Envelope, Payload, SenderId

if TYPE_CHECKING:
    from rpc.options import TensorPipeRpcBackendOptions


class PipeCaller:
    """Makes calls.

    Args:
        sender: this worker, which makes them.
        lock: guards the links.
        agent: carries the calls.
        broke: told of a pipe that broke, and why.
        failed: told of a request to which no reply will come, by its correlation, and why.
    """

    def __init__(
        self,
        sender: SenderId,
        lock: threading.Lock,
        agent: TorchAgent,
        broke: Callable[[PeerLink, str], None],
        failed: Callable[[PeerLink, int, str], None],
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
    ) -> PeerLink:
        """Makes the link to a peer.

        Args:
            peer: the peer; may be this worker itself.
            name: this worker's name.
            options: this worker's.
            memory: this worker's.
            loopback: this worker's way to itself, unless tensors change their device on it.
        """
        address = TensorPipeAddress.decode(peer.address)
        replies = reverse(address.devices.maps.get(name, {}))
        requests = options.device_maps.get(peer.info.name, {})
        me = self._sender.worker_id
        host = "" if moves_host(requests) or moves_host(replies) else address.host
        itself = peer.info.id == me
        if itself:
            route, host = self._agent.myself(), ""
        else:
            route = self._agent.reach(peer.info.name, address.url.encode(), replies)
        most = options.max_bytes_in_flight
        link = PeerLink(
            peer,
            route,
            precedes_me=peer.info.id < me,
            requests=requests,
            replies=replies,
            shared=memory.shared_with(peer.info.name, host),
            window=FlowWindow(peer.info.name, most, options.when_full),
            reply_window=FlowWindow(peer.info.name, most, gives_way=False),
            loopback=loopback if itself and not requests and not replies else None,
            calls=SentCalls(min(most // 4, RECEIPT_AFTER_BYTES)),
        )
        if itself:  # torch was told of these devices when it began
            link.readiness.answered("")
        return link

    def begin(self, link: PeerLink, kind: int, correlation: int = 0) -> Envelope:
        """Numbers a call. Needs the lock; :meth:`carry` comes next, without it."""
        number = link.calls.begin(kind, correlation)
        envelope: Envelope = new_tuple(Envelope, (kind, *self._sender, correlation, number))
        return envelope

    def carry(self, link: PeerLink, envelope: Envelope, frame: Frame) -> None:
        """Makes a call that has its number.

        Raises:
            PipeBrokenError: its pipe is broken.
            RuntimeError: torch cannot make it.
        """
        data, tensors = wire.pack(envelope, frame, link.requests_lent_from)
        if envelope.kind == FrameKind.REQUEST:
            future = self._agent.ask(link.route, wire.call_pickle(data), tensors)
            table = frame.split()[0] if type(frame) is wire.PlacedFrame else b""
            future.add_done_callback(partial(self._request_ended, link, envelope, table))
        else:
            self._agent.tell(link.route, wire.call_pickle(data), tensors)

    def _request_ended(
        self, link: PeerLink, envelope: Envelope, table: bytes, future: torch.futures.Future[None]
    ) -> None:
        """Fails a request that torch answers with an error of its own.

        The peer may not have taken it: then its number is still to come, with the table of what
        the request has in shared memory, as nobody has read that.
        """
        problem = refusal_of(future)
        if not problem:
            return
        with self._lock:
            if not link.calls.failed(envelope.number):
                return
        void = envelope._replace(kind=wire.VOID)
        self.carry_or_break(link, void, Frame(FrameKind.NOTICE, 0, b"", table))
        self._failed(link, envelope.correlation, problem)

    def carry_or_break(self, link: PeerLink, envelope: Envelope, frame: Frame) -> None:
        """Makes a call; if torch cannot, its pipe counts as broken."""
        try:
            self.carry(link, envelope, frame)
        except RuntimeError as error:
            self._broke(link, f"torch cannot send to it: {error}")

    def void(self, link: PeerLink, envelope: Envelope, frame: Frame) -> None:
        """Sends VOID for a call that could not be made, and takes back its shared memory."""
        with self._lock:
            if not link.calls.void(envelope.number):
                return
        link.shared.take_back(frame)
        void = envelope._replace(kind=wire.VOID)
        self.carry_or_break(link, void, Frame(FrameKind.NOTICE, 0, b""))

    def send_batch(self, link: PeerLink, batch: list[Frame]) -> None:
        """Sends frames that were taken from the link, if there are any."""
        if not batch:
            return
        frame = Frame(FrameKind.NOTICE, 0, b"", wire.join(batch))
        with self._lock:
            link.calls.under_way -= 1  # which the batch was already
            envelope = self.begin(link, wire.BATCH)
        self.carry_or_break(link, envelope, frame)

    def may_wait(self, link: PeerLink | None, frame: Frame) -> bool:
        """Returns whether a frame need not leave at once, but may leave with others in a batch."""
        if frame.tensors or len(frame.header) + len(frame.payload) > MOST_IN_BATCH:
            return False
        if frame.kind is FrameKind.NOTICE:
            return True
        return link is not None and link.in_burst(time.perf_counter())

    def reply_in_frame(self, link: PeerLink, frame: Frame) -> None:
        """Answers a request that came in a batch, and has no call to be answered."""
        alone = type(frame) is wire.PlacedFrame or is_large(frame)
        with self._lock:
            if alone:
                envelope = self.begin(link, frame.kind, frame.correlation)
            else:
                link.outbox.append(frame)
            batch = link.take_batch()
        if alone:
            self.carry_or_break(link, envelope, frame)
        self.send_batch(link, batch)

    def offer_segment(self, link: PeerLink) -> None:
        """Tells a peer of new shared memory, if there is any for it."""
        offer = link.shared.take_offer()
        if offer is not None:
            self._send(link, wire.SEGMENT, offer)

    def answer_offer(self, link: PeerLink, offer: Payload) -> None:
        """Maps shared memory that a peer offers, and says whether it can be used."""
        self._send(link, wire.SEGMENT_ANSWER, link.shared.map(offer))

    def ask_for_devices(self, link: PeerLink) -> None:
        """Asks a peer to make its devices ready for our requests."""
        self._send(link, wire.DEVICES, question(link.requests))

    def _send(self, link: PeerLink, kind: int, frame: Frame) -> None:
        with self._lock:
            if link.lost is not None:
                return
            envelope = self.begin(link, kind)
        self.carry_or_break(link, envelope, frame)

    def take_receipt(self, link: PeerLink) -> tuple[Envelope, Frame] | None:
        """Begins a receipt, if one is owed. Needs the lock."""
        received = link.calls.take_received()
        if not received:
            return None
        frame = Frame(FrameKind.NOTICE, 0, b"", encode_receipt(received))
        return self.begin(link, wire.RECEIPT), frame

    def open_lifeline(self, link: PeerLink) -> None:
        """Makes the call on a pipe by which its end is noticed."""
        self._watch(link, self._sender.envelope(wire.LIFELINE))

    def send_close(self, link: PeerLink) -> None:
        """Tells a peer that this worker leaves, and how many calls it made."""
        self._watch(link, self._sender.envelope(wire.CLOSE), str(link.calls.sent).encode())

    def _watch(self, link: PeerLink, envelope: Envelope, payload: bytes = b"") -> None:
        """Makes a call that carries no frame and whose failure shows that its pipe broke."""
        try:
            future = self._agent.ask(link.route, self.pickle(envelope, payload), [])
        except PipeBrokenError as error:
            self._broke(link, str(error))
        else:
            future.add_done_callback(partial(self._ended, link))

    def _ended(self, link: PeerLink, future: torch.futures.Future[None]) -> None:
        error = error_of(future)
        if error:
            self._broke(link, error)

    def pickle(self, envelope: Envelope, payload: bytes = b"") -> bytes:
        """Returns the pickle of a call that carries no frame."""
        frame = Frame(FrameKind.NOTICE, 0, b"", payload)
        return wire.call_pickle(wire.pack(envelope, frame)[0])
