"""Keeps the group's store in a process of its own, in bounded memory.

A store asks nobody who they are, so a stranger may send as much as the network carries. This
process holds a bounded number of connections, and moves bytes between them and the store,
whose decisions are in ``store_values``.

The interpreter runs this file by its path, without ``site``, ``rpc`` or torch, and beside its
neighbour it imports C modules only: so it starts in about 20 ms and takes 10 MB. ``store_host``
starts it.
"""

import posix
import resource
import select
import sys
from _socket import AF_INET, AF_INET6, SOCK_STREAM, socket

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from rpc.group.store_values import (
        CHUNK,
        KEY_BYTES,
        MOST_STORED,
        MOST_UNDER_WAY,
        Client,
        RefusedError,
        Room,
        Store,
    )
else:  # run by its path
    sys.path.append(__file__.rpartition("/")[0])
    from store_values import (
        CHUNK,
        KEY_BYTES,
        MOST_STORED,
        MOST_UNDER_WAY,
        Client,
        RefusedError,
        Room,
        Store,
    )

MOST_CONNECTIONS = 8192

_MOST_AT_ONCE = 64
_SPARE_DESCRIPTORS = 32


class _Connected:
    """A client and its socket."""

    __slots__ = ("client", "is_full", "origin", "socket")

    def __init__(self, client: Client, origin: str, connected: socket) -> None:
        self.client = client
        self.origin = origin
        self.socket = connected
        self.is_full = False  # it takes no more replies at present, and is not read meanwhile


class Server:
    """Moves bytes between clients' connections and the store.

    Args:
        listener: where they connect; it does not block.
        most: of as many connections at a time.
    """

    def __init__(self, listener: socket, most: int) -> None:
        self.store = Store(Room(MOST_STORED), Room(MOST_UNDER_WAY), self._close_client, _warn)
        self._listener = listener
        self._most = most
        self._events = select.epoll()
        self._events.register(listener.fileno(), select.EPOLLIN)
        self._connections: dict[int, _Connected] = {}
        self._numbers: dict[Client, int] = {}
        self._by_origin: dict[str, dict[int, None]] = {}  # who was silent longest comes first

    def serve(self, keys: int, ends: "tuple[int, ...]") -> None:
        """Serves until one of some descriptors can be read, or is closed at its other end.

        Args:
            keys: from where keys come that members' values are signed with.
            ends: the descriptors.
        """
        for descriptor in (keys, *ends):
            self._events.register(descriptor, select.EPOLLIN)
        try:
            while self._serve_some(keys, ends):
                pass
        finally:
            for number in list(self._connections):
                self._close(number)
            self._events.close()

    def _serve_some(self, keys: int, ends: "tuple[int, ...]") -> bool:
        """Deals with what has happened; False at the end."""
        for number, event in self._events.poll():
            if number in self._connections:
                self._go_on(number, event)
            elif number == self._listener.fileno():
                self._accept()
            elif number == keys:
                self._take_key(keys)
            elif number in ends:
                return False
        return True

    def _take_key(self, keys: int) -> None:
        key = posix.read(keys, KEY_BYTES)
        if len(key) == KEY_BYTES:
            self.store.trust(key)
        else:
            self._events.unregister(keys)

    def _accept(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            if len(self._connections) >= self._most:
                self._close_idle()
            try:
                number, address = self._listener._accept()  # type: ignore[attr-defined]
            except BlockingIOError:
                return
            except OSError:  # nothing is left for another
                self._close_idle()
                return
            family = AF_INET if len(address) == 2 else AF_INET6
            connected = socket(family, SOCK_STREAM, 0, number)
            connected.setblocking(False)
            connection = _Connected(self.store.opened(), address[0], connected)
            self._connections[number] = connection
            self._numbers[connection.client] = number
            self._by_origin.setdefault(connection.origin, {})[number] = None
            self._events.register(number, select.EPOLLIN)

    def _go_on(self, number: int, event: int) -> None:
        connection = self._connections[number]
        same_origin = self._by_origin[connection.origin]
        same_origin[number] = same_origin.pop(number)
        try:
            if connection.is_full and not event & select.EPOLLOUT:
                raise RefusedError  # it was closed
            if connection.is_full:
                self._send(number, connection)
            else:
                self._receive(connection)
        except BlockingIOError:
            pass
        except (OSError, RefusedError):
            self._close(number)
        self._send_replies()

    def _receive(self, connection: _Connected) -> None:
        data = connection.socket.recv(CHUNK)
        if not data:
            raise RefusedError
        self.store.receive(connection.client, data)

    def _send_replies(self) -> None:
        while self.store.replied:
            number = self._numbers[self.store.replied.pop()]
            try:
                self._send(number, self._connections[number])
            except (OSError, RefusedError):
                self._close(number)

    def _send(self, number: int, connection: _Connected) -> None:
        """Sends what it takes; once that is all, goes on with what it has sent meanwhile."""
        client = connection.client
        try:
            size = connection.socket.send(client.replies)
        except BlockingIOError:
            size = 0
        self.store.sent(client, size)
        if connection.is_full != bool(client.replies):
            connection.is_full = bool(client.replies)
            wanted = select.EPOLLOUT if connection.is_full else select.EPOLLIN
            self._events.modify(number, wanted)
        if not connection.is_full:
            self.store.receive(client, b"")

    def _close_idle(self) -> None:
        """Closes the connection that was silent longest, of the origin that has most."""
        if self._connections:
            most = max(map(len, self._by_origin.values()))
            busiest = next(each for each in self._by_origin.values() if len(each) == most)
            self._close(next(iter(busiest)))

    def _close_client(self, client: Client) -> None:
        self._close(self._numbers[client])

    def _close(self, number: int) -> None:
        connection = self._connections.pop(number)
        same_origin = self._by_origin[connection.origin]
        del same_origin[number], self._numbers[connection.client]
        if not same_origin:
            del self._by_origin[connection.origin]
        connection.socket.close()
        self.store.closed(connection.client)


def _warn(text: str) -> None:
    """Says something where the group's programs say it."""
    posix.write(2, f"tensorwire: {text}\n".encode())


def _descriptors() -> int:
    """The number of descriptors that this process may have, which becomes as high as it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    return max(soft, wanted)


def main(listener: int, keys: int, life: int, line: int) -> None:
    """Serves until the process that hosts the store ends, or its last user there is gone.

    Args:
        listener: a listening socket.
        keys: see :meth:`Server.serve`.
        life: can be read when the host's process has ended.
        line: a connection to torch's server in the host's process, which ends with that.
    """
    listening = socket(fileno=listener)
    listening.setblocking(False)
    most = min(MOST_CONNECTIONS, _descriptors() - _SPARE_DESCRIPTORS)
    Server(listening, most).serve(keys, (life, line))


if __name__ == "__main__":
    if posix.fork():  # who started this waits until it runs, and has no child to wait for later
        posix._exit(0)
    main(*map(int, sys.argv[2:]))
