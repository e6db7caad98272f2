"""Replaces the broken connections of one peer, or gives the peer up.

The end that opened a link opens its connections again; the other end asks for that
with a request at the peer's listening sockets, which also shows whether the peer
lives. A thread does so while something is broken. Which connection replaces which is
decided by ``resumption.ReconnectEpoch``; what a peer that was given up means, by ``peer``.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from rpc.protocol.resumption import CannotResumeError, Replacement
from rpc.runtime.text import says
from rpc.runtime.threads import Thread
from rpc.transports.tensorwire.acceptor import AuthenticatedConnection
from rpc.transports.tensorwire.connection import Connection
from rpc.transports.tensorwire.connector import PASSING, Connector, Endpoint, GoneError, Target

_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.05
_REQUEST_EVERY_SECONDS = 0.2
_LEAST_TRIES = 4
_LEAST_SECONDS_A_TRY = 1.0

_log = logging.getLogger("rpc.transports.tensorwire")


class Reconnector:
    """Replaces the broken connections of one peer.

    Args:
        target: how to connect to the peer.
        seconds: how long a connection may be broken; 0 if it may not.
        give_up: told of a connection that cannot be replaced, and why.
    """

    def __init__(
        self, target: Target, seconds: float, give_up: Callable[[Connection, str], None]
    ) -> None:
        self._name = f"tensorwire-reconnect-{target.name}"
        self._connector = Connector(target)
        self._seconds = seconds
        # One that is not answered must leave time for another, and for other connections.
        self._seconds_a_try = max(seconds / _LEAST_TRIES, _LEAST_SECONDS_A_TRY)
        self._give_up = give_up
        self._changed = threading.Condition()
        self._broken: list[Connection] = []
        self._thread: threading.Thread | None = None
        self._serving = False
        self._closed = False

    def broke(self, connection: Connection, reason: str) -> bool:
        """Takes charge of a connection that was read to its end; False if it does not."""
        if not self._seconds or connection.reader.garbled or connection.sender.fault:
            return False
        connection.sender.stop()
        with self._changed:
            if self._closed:
                return False
            connection.epoch.broke(time.monotonic(), reason)
            successor, connection.successor = connection.successor, None
            if successor is None and not self._begin_to_serve(connection):
                return False
        if successor is not None:
            self._take_in(connection, successor)
        return True

    def _begin_to_serve(self, connection: Connection) -> bool:
        """Starts the thread; False if that cannot be. Called with the lock held."""
        self._broken.append(connection)
        self._changed.notify_all()
        if self._serving:
            return True
        thread = Thread(target=self._serve, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("%s: a connection cannot be opened again: %s", self._name, error)
            self._broken.remove(connection)
            return False
        self._thread = thread
        self._serving = True
        return True

    def offered(self, connection: Connection, successor: AuthenticatedConnection) -> None:
        """Takes a connection that the peer opened in place of another."""
        with self._changed:
            offer = connection.epoch.offered(successor.hello.attempt)
            if self._closed or not self._seconds:
                offer = Replacement.STALE
            former: AuthenticatedConnection | None = successor
            if offer is not Replacement.STALE:
                former, connection.successor = connection.successor, successor
            ready = offer is not Replacement.STALE and self._take_out(connection)
            if ready:
                connection.successor = None
        if former is not None:
            former.reject("another connection took its place")
        if ready:
            self._take_in(connection, successor)
        elif offer is not Replacement.STALE:
            connection.sender.shutdown()

    def _take_out(self, connection: Connection) -> bool:
        """Takes a connection out: whoever does goes on with it. Called with the lock held."""
        if self._closed or connection not in self._broken:
            return False
        self._broken.remove(connection)
        self._changed.notify_all()
        return True

    def _take_in(self, connection: Connection, successor: AuthenticatedConnection) -> None:
        said = successor.hello
        self._put_in_place(
            connection, successor.sock, said.received, said.attempt, successor.reject
        )

    def _put_in_place(
        self,
        connection: Connection,
        sock: socket.socket,
        received: int,
        attempt: int,
        refuse: Callable[[str], object],
    ) -> None:
        """Puts a new socket in the place of a connection's broken one, which was taken out before.

        Args:
            connection: which.
            sock: the connection, which ends here, or with the connection.
            received: how many frames have arrived at the peer.
            attempt: the connection's number.
            refuse: ends it if nothing can take the broken one's place.
        """
        reason = connection.epoch.reason
        try:
            connection.replace(sock, received, attempt)
        except PASSING as error:
            sock.close()
            self._try_again(connection, error)
        except Exception as error:
            refuse(says(error))
            self._give_up(connection, f"{reason}, and cannot be resumed: {says(error)}")
        else:
            self._look_again(connection)

    def _try_again(self, connection: Connection, error: Exception) -> None:
        """Breaks a connection that nobody reads: until its time is over, another may be."""
        connection.problem = says(error)
        if not self.broke(connection, connection.epoch.reason):
            self._give_up(
                connection, f"{connection.epoch.reason}, and cannot be resumed: {says(error)}"
            )

    def _look_again(self, connection: Connection) -> None:
        """Breaks a connection that is not wanted any more now that it is in place."""
        with self._changed:
            unwanted = self._closed or connection.successor is not None
        if unwanted:
            connection.sender.shutdown()

    def _serve(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            with self._changed:
                broken = list(self._broken)
                if not broken or self._closed:
                    self._serving = False
                    return
            for connection in broken:
                self._reconnect(connection)
            with self._changed:
                if self._broken and not self._closed:
                    self._changed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _reconnect(self, connection: Connection) -> None:
        now = time.monotonic()
        left = connection.epoch.left(now, self._seconds)
        try:
            if left <= 0:
                problem = f": {connection.problem}" if connection.problem else ""
                raise GoneError(f"it was not opened again within {self._seconds:g} s{problem}")
            if connection.endpoint is not None:
                self._open_again(connection, connection.endpoint, min(left, self._seconds_a_try))
            elif now >= connection.request_at:
                self._request_reconnect(connection, min(left, self._seconds_a_try))
        except (GoneError, CannotResumeError) as error:
            self._abandon(connection, f"{connection.epoch.reason}, and {error}")
        except Exception as error:  # the next try may do; without it nobody would ever give up
            connection.problem = says(error)

    def _open_again(self, connection: Connection, endpoint: Endpoint, seconds: float) -> None:
        attempt = connection.epoch.next_attempt()
        token, number, received = connection.token, connection.number, connection.reader.received
        sock, theirs = self._connector.replace(endpoint, token, number, attempt, received, seconds)
        with self._changed:
            wanted = self._take_out(connection)
        if not wanted:
            sock.close()
            return
        self._put_in_place(connection, sock, theirs, attempt, lambda _: sock.close())

    def _request_reconnect(self, connection: Connection, seconds: float) -> None:
        self._connector.request_reconnect(
            local=connection.sender.sock.family == socket.AF_UNIX,
            token=connection.token,
            channel=connection.number,
            attempt=connection.epoch.attempt,
            seconds=seconds,
        )
        connection.request_at = time.monotonic() + _REQUEST_EVERY_SECONDS

    def _abandon(self, connection: Connection, reason: str) -> None:
        with self._changed:
            mine = self._take_out(connection)
        if mine:
            self._give_up(connection, reason)

    def withdraw(self, connection: Connection) -> None:
        """Lets go of a connection that is not wanted any more."""
        with self._changed:
            self._take_out(connection)

    def close(self) -> list[Connection]:
        """Gives up; returns what was still broken. Does not wait, see :meth:`join`."""
        with self._changed:
            self._closed = True
            broken, self._broken = self._broken, []
            self._changed.notify_all()
        self._connector.cancel()
        return broken

    def join(self) -> None:
        """Waits for the thread to end, which it does soon after :meth:`close`."""
        with self._changed:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
