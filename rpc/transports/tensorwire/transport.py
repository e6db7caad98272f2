"""One worker's end of TensorWire: puts listeners, readers and peers together.

Owns their lifetimes and the table of peers; everything else is theirs.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from rpc.devices import local_device_info
from rpc.errors import NO_MEMBER, AgentClosedError, RpcError, UnknownWorkerError
from rpc.ids import Life
from rpc.runtime import signals as interrupts
from rpc.runtime.executor import SECONDS_TO_END
from rpc.transports.base import Frame, FrameKind, KnowsOutstanding, Peer, Receiver
from rpc.transports.host.copying import CopyThreads
from rpc.transports.host.identity import host_identity
from rpc.transports.host.segments import Budget
from rpc.transports.late_receipts import LateReceipts
from rpc.transports.tensorwire.acceptor import AuthenticatedConnection, ConnectionAcceptor
from rpc.transports.tensorwire.address import (
    TensorWireAddress,
    listen_tcp,
    listen_unix,
    reachable_at,
)
from rpc.transports.tensorwire.bulk import BulkMover
from rpc.transports.tensorwire.connector import Target
from rpc.transports.tensorwire.device_maps import PeerDeviceMap
from rpc.transports.tensorwire.handshake import Identity, derive_key
from rpc.transports.tensorwire.link import Resources
from rpc.transports.tensorwire.peer import RemotePeer
from rpc.transports.tensorwire.peer_parts import PeerParts
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers
from rpc.transports.tensorwire.replies import ReplySide
from rpc.transports.tensorwire.requests import RequestSide
from rpc.transports.tensorwire.settings import Settings
from rpc.transports.tensorwire.tls import Certificates
from rpc.worker_info import WorkerInfo

_log = logging.getLogger("rpc.transports.tensorwire")

_REPLY = FrameKind.REPLY
_SECRET_BYTES = 32
_IDLE_RECEIVE_BYTES = 256 << 20
_GRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Running:
    """The parts that exist between ``start`` and ``close``."""

    info: WorkerInfo
    identity: Identity
    receiver: Receiver
    address: TensorWireAddress
    acceptor: ConnectionAcceptor
    shared: PeerParts
    certificates: Certificates | None


class TensorWireTransport:
    """Sockets and shared memory; see the package's docstring.

    Args:
        settings: what can be chosen.
    """

    inline_handlers: ClassVar[int] = 1 << 30
    inline_completions: ClassVar[int] = 0
    delivers_while_waiting: ClassVar[bool] = True

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._lock = threading.Lock()
        self.peers: dict[int, RemotePeer] = {}
        self._former: list[RemotePeer] = []
        self._past: dict[int, int] = {}
        self._closed = False
        self._now: Running | None = None
        self.host_moves: set[tuple[int, bool]] = set()

    def start(self, info: WorkerInfo, incarnation: int, receiver: Receiver) -> bytes:
        """See :meth:`rpc.transports.base.Transport.start`."""
        with ExitStack() as made:  # what is closed if something cannot be made
            now = self._make(info, incarnation, receiver, made)
            made.pop_all()
        self._now = now
        now.acceptor.open(now.shared.requests)
        now.shared.replies.start()
        now.shared.requests.start()
        return now.address.encode()

    def _make(
        self, info: WorkerInfo, incarnation: int, receiver: Receiver, made: ExitStack
    ) -> Running:
        settings = self._settings
        certificates = None
        if settings.tls is not None:
            certificates = Certificates(settings.tls, info.name)
        listeners, address = self._listen(made)
        name = f"tensorwire-{info.name}"
        identity = Identity(info.id, incarnation)
        key = derive_key(settings.group_key, address.secret)
        acceptor = ConnectionAcceptor(
            listeners,
            key,
            identity,
            settings.connect_seconds,
            self._admit,
            certificates=certificates,
        )
        counts = (receiver.outstanding,) if isinstance(receiver, KnowsOutstanding) else ()
        replies = ReplySide(f"{name}-replies", settings.busy_poll_seconds, *counts)
        made.callback(replies.close)
        requests = RequestSide(name, acceptor.sweep, settings.busy_poll_seconds)
        made.callback(requests.close)
        bulk = BulkMover(f"{name}-bulk")
        made.callback(bulk.close)
        shared = PeerParts(
            Resources(
                Budget(settings.shared_memory_bytes),
                ReceiveBuffers(_IDLE_RECEIVE_BYTES),
                settings.max_message_bytes,
                CopyThreads(name),
                settings.busy_poll_seconds,
            ),
            replies,
            requests,
            bulk,
            LateReceipts(f"{name}-receipts"),
            settings.resume_seconds,
            settings.max_bytes_in_flight,
            settings.when_full,
            settings.stuck_seconds,
            receiver,
            self._lost,
        )
        return Running(info, identity, receiver, address, acceptor, shared, certificates)

    def _listen(self, made: ExitStack) -> tuple[list[socket.socket], TensorWireAddress]:
        listeners = listen_tcp(self._settings.bind_address)
        for listener in listeners:
            made.enter_context(listener)
        tcp = tuple(pair for listener in listeners for pair in reachable_at(listener))
        host = host_identity("net") if self._settings.local_paths else ""
        unix_name = ""
        if host:
            try:
                unix = listen_unix()
            except OSError as error:
                _log.warning("no Unix sockets here (%s); local peers will use TCP", error)
            else:
                listeners.append(made.enter_context(unix))
                unix_name = unix.getsockname()[1:].decode()
        devices = local_device_info(self._settings.device_maps, self._settings.devices)
        return listeners, TensorWireAddress(
            host,
            unix_name,
            tcp,
            os.urandom(_SECRET_BYTES),
            devices,
            tls=self._settings.tls is not None,
        )

    def running(self) -> Running:
        """The parts that exist while it runs.

        Raises:
            AgentClosedError: it was not started.
        """
        now = self._now
        if now is None:
            raise AgentClosedError("the transport was not started")
        return now

    # Peers.

    def add_peer(self, peer: Peer) -> None:
        """See :meth:`rpc.transports.base.Transport.add_peer`."""
        remote = self._make_peer(peer)
        with self._lock:
            known = self.peers.get(remote.id)
            if known is not None and known.incarnation >= remote.incarnation:
                return
            self.peers[remote.id] = remote
            self._remember(known)
            remote.note_host_moves(self.host_moves)
        if known is not None:
            known.remove()
        for authenticated in self.running().acceptor.kept(remote.id):
            self._admit(authenticated)

    def _remember(self, peer: RemotePeer | None) -> None:
        """Called with the lock held: ``close`` is to wait for a peer that is no longer one."""
        self._former = [former for former in self._former if not former.is_settled()]
        if peer is not None:
            self._former.append(peer)

    def _make_peer(self, peer: Peer) -> RemotePeer:
        now, settings = self.running(), self._settings
        address = TensorWireAddress.decode(peer.address)
        near = bool(now.address.unix_name) and address.host == now.address.host
        target = Target(
            peer.info.name,
            address,
            near and bool(address.unix_name),
            now.identity,
            Identity(peer.info.id, peer.incarnation),
            settings.group_key,
            settings.bulk_connections,
            settings.connect_seconds,
            settings.resume_seconds,
            now.certificates,
        )
        theirs = address.devices.maps.get(now.info.name, {})
        return RemotePeer(
            peer,
            target,
            PeerDeviceMap(peer.info.name, settings.device_maps.get(peer.info.name, {})),
            PeerDeviceMap(peer.info.name, theirs).inverse(),
            now.shared,
        )

    def remove_peer(self, worker_id: int) -> None:
        """See :meth:`rpc.transports.base.Transport.remove_peer`."""
        with self._lock:
            peer = self.peers.pop(worker_id, None)
            if peer is not None:
                self._past[worker_id] = peer.incarnation
            self._remember(peer)
        if peer is not None:
            peer.remove()

    def _admit(self, authenticated: AuthenticatedConnection) -> None:
        """Takes or refuses a proven worker's connection, or keeps it until we know the worker."""
        initiator = authenticated.hello.initiator
        peer = self.peers.get(initiator.worker_id)
        if self._closed:
            authenticated.reject("this worker is shutting down")
        elif initiator.incarnation <= self._past.get(initiator.worker_id, -1):
            authenticated.reject(NO_MEMBER)
        elif peer is None or peer.incarnation < initiator.incarnation:
            acceptor = self.running().acceptor
            acceptor.keep(authenticated)
            # The peer may have been added between the two looks.
            peer = self.peers.get(initiator.worker_id)
            if peer is not None and peer.incarnation >= initiator.incarnation:
                for authenticated in acceptor.kept(initiator.worker_id):
                    self._admit(authenticated)
        elif peer.incarnation > initiator.incarnation:
            authenticated.reject(f"incarnation {initiator.incarnation} of this worker is history")
        elif problem := authenticated.problem(peer.name):
            authenticated.reject(problem)
        else:
            peer.accept(authenticated)

    # Frames.

    def send(self, to: int, frame: Frame) -> None:
        """See :meth:`rpc.transports.base.Transport.send`."""
        peer = self.peers.get(to)
        if peer is None or self._closed:
            raise self._refusal(to)
        if frame[0] is _REPLY:
            peer.send_reply(frame)
        else:
            peer.send(frame)

    def lend_memory(self, to: int, kind: FrameKind, nbytes: int) -> object | None:
        """See :meth:`rpc.transports.base.LendsMemory.lend_memory`."""
        peer = self.peers.get(to)
        return None if peer is None else peer.lend_memory(kind, nbytes)

    def look_again(self, to: int) -> None:
        """See :meth:`rpc.transports.base.Transport.look_again`."""
        peer = self.peers.get(to)
        if peer is not None:
            peer.look_again()

    def attend(self) -> None:
        """See :meth:`rpc.transports.base.Transport.attend`."""
        now = self._now
        if now is not None and not now.shared.replies.attended:
            now.shared.replies.attend()

    def _refusal(self, to: int) -> RpcError:
        if self._closed:
            return AgentClosedError("the transport is closed")
        return UnknownWorkerError(f"worker {to} is not in the group")

    def wait(self, done: Callable[[], object], block: Callable[[], None]) -> None:
        """See :meth:`rpc.transports.base.Transport.wait`."""
        now = self._now or self.running()
        shared = now.shared
        holder = shared.requests.holder
        if holder is not None and holder.ident == threading.get_ident():
            shared.requests.about_to_block()
        shared.replies.wait(done, block)

    def device_map(self, worker_id: int) -> Mapping[torch.device, torch.device]:
        """See :meth:`rpc.transports.base.MapsDevices.device_map`."""
        peer = self.peers.get(worker_id)
        return {} if peer is None else self._settings.device_maps.get(peer.name, {})

    def wake(self) -> None:
        """See :meth:`rpc.transports.base.Transport.wake`."""
        if self._now is not None:
            self._now.shared.replies.wake()

    def _lost(self, life: Life, reason: str) -> None:
        if self._closed:
            return
        now = self.running()
        try:
            now.receiver.peer_lost(life, reason)
        except Exception:
            _log.exception("the loss of %s could not be reported", life)
        now.shared.replies.wake()

    # The end.

    def close(self, flush_seconds: float, handler_seconds: float = SECONDS_TO_END) -> None:
        """See :meth:`rpc.transports.base.Transport.close`."""
        before = interrupts.shut_out()  # but for waits: cut off anywhere else, it leaves things
        try:
            self._close(flush_seconds, handler_seconds)
        finally:
            interrupts.restore(before)

    def _close(self, flush_seconds: float, handler_seconds: float) -> None:
        with self._lock:
            already, self._closed = self._closed, True
            peers = list(self.peers.values())
        now = self._now
        if already or now is None:
            return
        first: BaseException | None = None
        for step in self._steps_of_closing(now, peers, flush_seconds, handler_seconds):
            try:
                step()
            except BaseException as error:  # Ctrl-C, most likely: what follows is to end, too
                if first is None:
                    first = error
                else:
                    _log.error("close: a further step failed: %s", error, exc_info=error)
        if first is not None:
            raise first

    def _steps_of_closing(
        self, now: Running, peers: list[RemotePeer], flush_seconds: float, handler_seconds: float
    ) -> Iterator[Callable[[], object]]:
        yield partial(_flush, peers, time.monotonic() + flush_seconds)
        yield now.acceptor.close
        with self._lock:
            peers += self._former
            self.peers.clear()
            self._former.clear()
        for peer in peers:
            yield peer.remove
        grace = time.monotonic() + _GRACE_SECONDS
        for peer in peers:
            yield partial(peer.close, grace)
        shared = now.shared
        yield shared.receipts.close
        yield partial(shared.requests.close, handler_seconds)
        yield shared.replies.close
        yield shared.bulk.close
        yield shared.resources.buffers.close
        yield shared.resources.copier.close


def _flush(peers: list[RemotePeer], deadline: float) -> None:
    for peer in peers:
        while not peer.flush(min(deadline, time.monotonic() + interrupts.DEAF_SECONDS)):
            interrupts.let_in_for_a_moment()
            if time.monotonic() >= deadline:
                break
