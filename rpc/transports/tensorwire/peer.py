"""One other worker (or this one): its links, what is under way to it, and its end.

A peer has at most two links: the one this worker opens, lazily, with the first
frame, and the one the peer opens. It is lost as soon as one channel of either
ends that the ``Reconnector`` cannot mend; the loss is reported when the last of its
channels has been read to its end, so that what had arrived before is delivered.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from functools import partial

from rpc.devices import note_host_moves
from rpc.errors import RpcError, WorkerLostError, caused
from rpc.runtime.executor import is_shared_thread
from rpc.runtime.threads import Thread
from rpc.transports.base import Frame, FrameKind, Peer, Unreceived
from rpc.transports.flow import FlowWindow
from rpc.transports.host.frame_table import Look
from rpc.transports.tensorwire.acceptor import AuthenticatedConnection
from rpc.transports.tensorwire.channel import Sender
from rpc.transports.tensorwire.connection import Connection
from rpc.transports.tensorwire.connection_maker import ConnectionMaker
from rpc.transports.tensorwire.connector import (
    PASSING,
    ConnectError,
    Connector,
    LinkSockets,
    Target,
)
from rpc.transports.tensorwire.device_maps import PeerDeviceMap
from rpc.transports.tensorwire.handshake import ChannelKind, Hello
from rpc.transports.tensorwire.link import Link
from rpc.transports.tensorwire.outbound import checked_size, look_at_all
from rpc.transports.tensorwire.peer_parts import PeerParts
from rpc.transports.tensorwire.reconnect import Reconnector
from rpc.wire.messages import Reply, Status

_log = logging.getLogger("rpc.transports.tensorwire")

_MAIN_THREAD = threading.main_thread().ident
_SMALL_BYTES = 1 << 14
"""A frame of fewer, header and payload, is sent in one piece."""
_BURST_FROM = 8
_BURST_SECONDS = 200e-6
_FAILED = Reply(Status.ERROR).encode()
"""The reply of a transport to a request that it accepted and could not send."""


class RemotePeer:
    """One peer: its links, what is under way to it, and its end.

    Args:
        peer: name, incarnation, address.
        target: how to connect to it.
        devices: where our devices are there, for what we ask.
        devices_back: the same for what we answer.
        shared: shared with the other peers.
    """

    def __init__(
        self,
        peer: Peer,
        target: Target,
        devices: PeerDeviceMap,
        devices_back: PeerDeviceMap,
        shared: PeerParts,
    ) -> None:
        self.id = peer.info.id
        self.name = peer.info.name
        self.incarnation = peer.incarnation
        self._life = peer.life
        self._connector = Connector(target)
        self._reconnector = Reconnector(target, shared.resume_seconds, self._given_up)
        self._devices = devices
        self._devices_back = devices_back
        self._shared = shared
        self._make = ConnectionMaker(shared, self._bulk_arrived, self._channel_ended)
        receiver = shared.receiver
        self._takers = {
            FrameKind.REQUEST: receiver.take_request,
            FrameKind.REPLY: receiver.take_reply,
            FrameKind.NOTICE: receiver.deliver,
        }
        self._max_bytes = shared.resources.max_message_bytes
        self._small_bytes = min(_SMALL_BYTES, self._max_bytes)
        self.window = FlowWindow(self.name, shared.max_bytes_in_flight, shared.when_full)
        self._last_request = 0.0
        self._lock = threading.Lock()
        self.connections: dict[Sender, Connection] = {}
        self.outgoing: Link | None = None
        self._early: list[tuple[Frame, tuple[Look, ...]]] = []
        self._connecting: threading.Thread | None = None
        self._connect_thread: threading.Thread | None = None
        self.incoming: Link | None = None
        self._incoming_token = b""
        self._incoming_attempt = 0
        self._reason: str | None = None
        self._removed = False
        self._settled = threading.Event()

    def note_host_moves(self, moves: set[tuple[int, bool]]) -> None:
        """See :func:`rpc.devices.note_host_moves`."""
        requests, replies = self._devices.moves_host, self._devices_back.moves_host
        note_host_moves(moves, self.id, in_requests=requests, in_replies=replies)

    # Sending.

    def send(self, frame: Frame) -> None:
        """See :meth:`rpc.transports.base.Transport.send`."""
        if self._reason is not None:
            raise self._lost_error()
        kind, correlation, header, payload, tensors = frame
        looks = look_at_all(tensors, self._devices) if tensors else ()
        size = len(header) + len(payload)
        is_small = size < self._small_bytes and not looks and type(payload) is bytes
        if not is_small:
            size = checked_size(frame, looks, self._max_bytes)
        link = self.outgoing
        # A control message is small, and never waits: threads that others depend on send them.
        is_request = kind is FrameKind.REQUEST
        if is_request and not self.window.try_charge(correlation, size):
            self._await_window(correlation, size)
        elif not is_request and header and link is not None:  # of a channel, of any size
            self._await_sockets(link)
        try:
            if link is None:
                self._send_early(frame, looks)
            elif (
                is_request
                and len(self.window.small_under_way) >= _BURST_FROM
                and self._is_in_burst()
            ):
                link.send(frame, looks, self._shared.replies.flush_soon)
            elif is_small and link.main is not None:
                link.main.send_small(kind, correlation, header, b"", payload)
            else:
                link.send(frame, looks)
        except BaseException:  # a tensor without memory, for instance
            if is_request:
                self.window.release(frame.correlation)
            raise

    def _is_in_burst(self) -> bool:
        """True if this request, one of many, follows the last in a short time, and may wait."""
        now = time.perf_counter()
        soon, self._last_request = now - self._last_request < _BURST_SECONDS, now
        return soon

    def send_reply(self, frame: Frame) -> None:
        """Sends the reply to a request, on the connection that brought that; see :meth:`send`."""
        if self._reason is not None:
            raise self._lost_error()
        kind, correlation, header, payload, tensors = frame
        link = self.incoming
        looks = look_at_all(tensors, self._devices_back) if tensors else ()
        size = len(header) + len(payload)
        is_small = size < self._small_bytes and not looks and type(payload) is bytes
        if not is_small:
            checked_size(frame, looks, self._max_bytes)
        if link is None:
            raise self._lost_error()
        if link.unsent.count > self._shared.max_bytes_in_flight:
            self._await_sockets(link)
        requests = self._shared.requests
        if requests.batching_thread == threading.get_ident():
            link.send(frame, looks, requests.flush_soon)
        elif is_small and link.main is not None:
            link.main.send_small(kind, correlation, header, b"", payload)
        else:
            link.send(frame, looks)

    def _await_window(self, correlation: int, size: int) -> None:
        shared = self._shared
        if not self.window.charge(correlation, size, shared.may_wait, shared.receiver.patience):
            raise self._lost_error()

    def lend_memory(self, kind: FrameKind, nbytes: int) -> object | None:
        """See :meth:`rpc.transports.base.LendsMemory.lend_memory`."""
        link = self.incoming if kind is FrameKind.REPLY else self.outgoing
        return None if link is None else link.lend_memory(nbytes)

    def look_again(self) -> None:
        """See :meth:`rpc.transports.base.Transport.look_again`."""
        self.window.look_again()

    def _await_sockets(self, link: Link) -> None:
        """Waits until most of what was accepted has left, or nothing leaves any more.

        On the main thread a signal handler would have to wait, too, and on a shared one
        other handlers would.
        """
        if link.unsent.count <= self._shared.max_bytes_in_flight:
            return
        if threading.get_ident() == _MAIN_THREAD or is_shared_thread():
            return
        if self._shared.may_wait():
            half = self._shared.max_bytes_in_flight // 2
            link.unsent.wait_while_moving(half, self._shared.stuck_seconds)

    def _lost_error(self) -> WorkerLostError:
        reason = self._reason or "there is no connection to reply on"
        return WorkerLostError(self.name, self.incarnation, reason)

    # Opening our link.

    def _send_early(self, frame: Frame, looks: tuple[Look, ...]) -> None:
        for tensor in frame.tensors:
            tensor.data_ptr()  # raises here, where the caller hears of it, if there is no memory
        with self._lock:
            link = self.outgoing
            if link is None:
                self._early.append((frame, looks))
                if self._connecting is None and self._reason is None:
                    self._begin_to_connect(frame)
        if link is not None:
            link.send(frame, looks)

    def _begin_to_connect(self, frame: Frame) -> None:
        """Begins to connect. Needs the lock. Without a thread requests are refused, others wait."""
        name = f"tensorwire-connect-{self.name}"
        thread = Thread(target=self._connect, name=name, daemon=True)
        try:
            self._shared.bulk.start()
            thread.start()
        except RuntimeError as error:
            problem = f"worker {self.name!r} cannot be connected to at the moment: {error}"
            if frame.kind is FrameKind.NOTICE:
                _log.warning("%s", problem)
                return
            self._early.pop()
            raise caused(RpcError(problem), error) from error
        self._connecting = self._connect_thread = thread

    def _connect(self) -> None:
        try:
            link = self._connector.connect_for(self._make_link)
        except Exception as error:
            if not isinstance(error, ConnectError):
                _log.exception("worker %s cannot be connected to", self.name)
            self._connect_ended(f"it cannot be connected to: {error}")
            return
        if link is None:
            self._connect_ended("")
            return
        while frames := self._take_early(link):
            for frame, looks in frames:
                try:
                    link.send(frame, looks)
                except Exception as error:
                    self._could_not_leave(frame, error)
        self._settle()

    def _take_early(self, link: Link) -> list[tuple[Frame, tuple[Look, ...]]]:
        """The frames that came while there was no link; if there are none, ``link`` takes over."""
        with self._lock:
            frames, self._early = self._early, []
            if not frames:
                self.outgoing = link
                self._connecting = None
        return frames

    def _could_not_leave(self, frame: Frame, error: Exception) -> None:
        """Fails the call of a frame that was accepted; what comes after it goes its way."""
        problem = f"to worker {self.name!r} could not be sent: {type(error).__name__}: {error}"
        if frame.kind is FrameKind.NOTICE:
            _log.error("a notice %s", problem)
            return
        why = Unreceived(f"a message {problem}".encode())
        self._bulk_arrived(Frame(FrameKind.REPLY, frame.correlation, _FAILED, why))

    def _connect_ended(self, reason: str) -> None:
        with self._lock:
            self._connecting = None
        self._hang_up(reason)
        self._settle()

    def _make_link(self, sockets: LinkSockets) -> Link | None:
        shared, endpoint = self._shared, sockets.endpoint
        same_host = endpoint.family == socket.AF_UNIX
        link = Link(shared.resources, self.name, self._devices, same_host=same_host)
        connections: list[Connection] = []
        try:
            main = self._make.opened(link, sockets.main, sockets.token, endpoint, self._arrived)
            connections.append(main)
            for number, sock in enumerate(sockets.bulk, 1):
                connections.append(self._make.bulk(link, sock, sockets.token, number, endpoint))
            link.bulk = [connection.sender for connection in connections[1:]]
            with self._lock:
                wanted = self._reason is None
                if wanted:
                    self.connections.update(
                        {connection.sender: connection for connection in connections}
                    )
            if not wanted:
                self._retire(link, connections)
                return None
            for connection in reversed(connections):
                connection.listen()
        except BaseException:
            with self._lock:
                for connection in connections:
                    self.connections.pop(connection.sender, None)
            self._retire(link, connections)
            raise
        return link

    # The link the peer opens.

    def accept(self, authenticated: AuthenticatedConnection) -> None:
        """Takes a connection that the peer opened."""
        kind = authenticated.hello.kind
        if self._reason is not None:
            self._reject_lost(authenticated)
        elif kind is ChannelKind.MAIN:
            self._accept_main(authenticated)
        elif kind is ChannelKind.BULK:
            self._accept_bulk(authenticated)
        elif kind is ChannelKind.RESUME:
            self._accept_again(authenticated)
        else:
            self._answer_reconnect_request(authenticated)

    def _reject_lost(self, authenticated: AuthenticatedConnection) -> None:
        authenticated.reject(f"this life of worker {self.name!r} was declared lost")

    def _accept_main(self, authenticated: AuthenticatedConnection) -> None:
        shared = self._shared
        try:
            shared.bulk.start()
        except RuntimeError as error:
            _log.warning("worker %s cannot be let in at the moment: %s", self.name, error)
            authenticated.hang_up()
            return
        sock, token = authenticated.sock, authenticated.hello.token
        same_host = sock.family == socket.AF_UNIX
        link = Link(shared.resources, self.name, self._devices_back, same_host=same_host)
        connection = self._make.accepted(link, sock, token, self._arrived)
        with self._lock:
            lost = self._reason is not None
            late = authenticated.hello.attempt < self._incoming_attempt
            if not lost and not late:
                former, retired = self.incoming, self._take_incoming()
                self.incoming = link
                self._incoming_token = token
                self._incoming_attempt = authenticated.hello.attempt
                problem = self._add_connection(connection)
                if problem is not None:
                    self.incoming = None
        if lost or late:  # late: the peer has given this one up, and opened the link we have
            (self._reject_lost if lost else AuthenticatedConnection.hang_up)(authenticated)
            link.close()
            return
        if former is not None:
            self._retire(former, retired)
        if problem is None:
            authenticated.accept()
            return
        _log.warning("worker %s cannot be let in at the moment: %s", self.name, problem)
        self._retire(link, [connection])

    def _add_connection(self, connection: Connection) -> Exception | None:
        """Begins to read a connection, or says why it is to be closed: the other end tries again.

        Needs the lock: whoever closes it takes it out first.
        """
        self.connections[connection.sender] = connection
        try:
            connection.listen()
        except PASSING as error:
            del self.connections[connection.sender]
            return error
        return None

    def _accept_bulk(self, authenticated: AuthenticatedConnection) -> None:
        hello = authenticated.hello
        with self._lock:
            link = self.incoming
            known = link is not None and hello.token == self._incoming_token
        if not known or link is None:  # it broke meanwhile: the peer opens another
            authenticated.hang_up()
            return
        connection = self._make.bulk(link, authenticated.sock, hello.token, hello.channel, None)
        with self._lock:
            known = self.incoming is link and self._reason is None
            problem = self._add_connection(connection) if known else None
        if not known:
            connection.close()
            return
        if problem is not None:
            _log.warning("worker %s cannot be let in at the moment: %s", self.name, problem)
            connection.close()
            return
        link.bulk = [*link.bulk, connection.sender]
        authenticated.accept()

    def _accept_again(self, authenticated: AuthenticatedConnection) -> None:
        """Takes a connection in place of one that broke."""
        connection = self._find(authenticated.hello, opened_here=False)
        if connection is None:
            authenticated.reject("this worker does not know the link any more")
        else:
            self._reconnector.offered(connection, authenticated)

    def _answer_reconnect_request(self, authenticated: AuthenticatedConnection) -> None:
        """Breaks a connection that we opened and the peer lost, so that we open another."""
        if authenticated.hello.token != self._connector.token:
            authenticated.reject("this worker does not know the link any more")
            return
        authenticated.dismiss()
        connection = self._find(authenticated.hello, opened_here=True)
        if connection is not None and connection.epoch.reconnect_requested(
            authenticated.hello.attempt
        ):
            connection.sender.shutdown()

    def _find(self, hello: Hello, *, opened_here: bool) -> Connection | None:
        with self._lock:
            for connection in self.connections.values():
                same = connection.token == hello.token and connection.number == hello.channel
                if same and (connection.endpoint is not None) == opened_here:
                    return connection
        return None

    def _take_incoming(self) -> list[Connection]:
        """Forgets the link that the peer opened; returns its connections. Needs the lock."""
        self.incoming = None
        connections = self._incoming_connections()
        for connection in connections:
            del self.connections[connection.sender]
        return connections

    def _incoming_connections(self) -> list[Connection]:
        """The connections of the link that the peer opened. Needs the lock."""
        token = self._incoming_token
        return [s for s in self.connections.values() if s.endpoint is None and s.token == token]

    def _retire(self, link: Link, connections: list[Connection]) -> None:
        """Drops a link without taking it for the peer's loss."""
        for connection in connections:
            self._reconnector.withdraw(connection)
            connection.close()
        link.close()

    # Receiving.

    def _arrived(self, frame: Frame) -> None:
        if frame[0] is FrameKind.REPLY:
            self.window.release(frame[1])
        if self._removed:
            return
        try:
            self._takers[frame[0]](self._life, frame)
        except Exception:
            _log.exception("a frame from worker %s could not be delivered", self.name)

    def _bulk_arrived(self, frame: Frame) -> None:
        if frame.kind is FrameKind.REPLY:
            self._arrived(frame)
            self._shared.replies.wake()
        else:
            self._shared.requests.push((self._arrived, frame))

    # The end.

    def _channel_ended(self, sender: Sender, reason: str) -> None:
        """Takes charge of a connection that was read to its end."""
        with self._lock:
            connection = self.connections.get(sender)
        if connection is None:
            return
        connection.ignore(sender.sock)
        reason = sender.fault or reason
        if not self._reconnector.broke(connection, reason):
            self._given_up(connection, reason)

    def _given_up(self, connection: Connection, reason: str) -> None:
        """Takes the end for good of a connection."""
        with self._lock:
            link = self.incoming
            first_attempt = self._is_first_attempt(connection)
            if first_attempt:
                retired = self._take_incoming()
            else:
                known = self.connections.pop(connection.sender, None)
        if first_attempt and link is not None:
            self._retire(link, retired)
            self._settle()
            return
        connection.close()
        if known is not None:  # its link was not retired meanwhile
            self._hang_up(reason)
            self._settle()

    def _is_first_attempt(self, connection: Connection) -> bool:
        """A link that was never used may have been a first attempt of the peer. Needs the lock."""
        if self._reason is not None or connection.reader.garbled:
            return False
        connections = self._incoming_connections()
        return connection in connections and all(each.reader.silent for each in connections)

    def _hang_up(self, reason: str) -> None:
        """Ends all channels of the peer, which is lost or has been dropped."""
        with self._lock:
            first = self._reason is None
            if first:
                self._reason = reason
            senders = list(self.connections)
        if not first:
            return
        self.window.close()
        self._connector.cancel()
        for connection in self._reconnector.close():  # nobody reads them who could find them ended
            connection.close()
            with self._lock:
                self.connections.pop(connection.sender, None)
        for sender in senders:
            sender.shutdown()

    def _settle(self) -> None:
        """Frees memory and reports the loss, once nothing is open any more."""
        with self._lock:
            over = self._reason is not None and not self.connections and self._connecting is None
            if not over or self._settled.is_set():
                return
            self._settled.set()
            links = [link for link in (self.outgoing, self.incoming) if link is not None]
            self._early.clear()
        for link in links:
            link.close()
        if not self._removed:
            self._shared.lost(self._life, self._reason or "")

    def is_settled(self) -> bool:
        """True once nothing of the peer is left."""
        return self._settled.is_set()

    def remove(self) -> None:
        """Drops the peer: nothing more is delivered or reported."""
        self._removed = True
        self._hang_up("it was removed from the group")
        self._settle()

    def flush(self, deadline: float) -> bool:
        """Waits until everything accepted has left; False at the deadline (monotonic seconds)."""
        with self._lock:
            connecting = self._connecting
        if connecting is not None:
            connecting.join(_left(deadline))
            if connecting.is_alive():
                return False
        with self._lock:
            links = [link for link in (self.outgoing, self.incoming) if link is not None]
        left, is_over = partial(_left, deadline), self._settled
        return all(link.flush_queue(left()) for link in links) and all(
            link.flush_kernel(left, is_over) for link in links
        )

    def close(self, deadline: float) -> None:
        """Drops the peer and waits until its channels are gone."""
        self.remove()
        try:
            self._settled.wait(_left(deadline))
            connector = self._connect_thread
            if connector is not None and connector is not threading.current_thread():
                connector.join()
            self._reconnector.join()
        finally:
            self._close_what_is_left()

    def _close_what_is_left(self) -> None:
        with self._lock:
            stuck = list(self.connections.values())
            self.connections.clear()
        for connection in stuck:
            connection.close()
        self._settle()


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
