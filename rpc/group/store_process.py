"""Keeps the group's store in a process of its own, in bounded memory.

A stranger may send as much as the network carries. This process holds a bounded number of
connections, and moves bytes between them and two stores, whose decisions are in
``store_values``: the open one, for torch's clients, and, if there is a key, the closed one, for
those that prove it (``store_gate``). Of a client that has done neither it holds 256 bytes for
five seconds. Strangers never take the place of who has proven the key, and are served after them.

The interpreter runs this file by its path, without ``site``, ``rpc`` or torch, and beside its
neighbours it imports C modules only: so it starts in about 20 ms and takes 10 MB. ``store_host``
starts it.
"""

import posix
import resource
import select
import sys
from _socket import AF_INET, AF_INET6, SOCK_STREAM, socket
from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from rpc.group.store_gate import (
        HELLO,
        NONCE_BYTES,
        RUN_BYTES,
        SECONDS_TO_PROVE,
        Gate,
        NotProvenError,
    )
    from rpc.group.store_values import (
        CHUNK,
        KEY_BYTES,
        MOST_OPEN_STORED,
        MOST_OPEN_UNDER_WAY,
        MOST_STORED,
        MOST_UNDER_WAY,
        Client,
        RefusedError,
        Room,
        Store,
    )
else:  # run by its path
    sys.path.append(__file__.rpartition("/")[0])
    from store_gate import HELLO, NONCE_BYTES, RUN_BYTES, SECONDS_TO_PROVE, Gate, NotProvenError
    from store_values import (
        CHUNK,
        KEY_BYTES,
        MOST_OPEN_STORED,
        MOST_OPEN_UNDER_WAY,
        MOST_STORED,
        MOST_UNDER_WAY,
        Client,
        RefusedError,
        Room,
        Store,
    )

MOST_CONNECTIONS = 8192

_MOST_AT_ONCE = 64
_CHUNK_OF_STRANGERS = 1 << 12
"""Bytes read at once from a client of the open part, if there is a closed one."""
_MOST_UNKNOWN = 128
"""Bytes read at once from a connection that has not shown what it is."""
_SPARE_DESCRIPTORS = 32


class _Connected:
    """A connection.

    Attributes:
        store: which of the two it uses; None as long as it has not shown that.
        client: what that one knows it by; None likewise.
        gate: where it proves the key, if it does.
        is_full: it takes no more replies at present, and is not read meanwhile.
        events: where it is registered.
    """

    __slots__ = ("client", "events", "gate", "is_full", "origin", "socket", "store")

    def __init__(self, origin: str, connected: socket, events: select.epoll) -> None:
        self.origin = origin
        self.events = events
        self.socket = connected
        self.store: Store | None = None
        self.client: Client | None = None
        self.gate: Gate | None = None
        self.is_full = False


class Origins:
    """Connections by where they come from: finds whom to close without a search.

    A stranger may connect from as many addresses as the loopback network has, thousands of times
    a second.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, dict[int, None]] = {}  # who was silent longest comes first
        self._by_size: list[dict[str, None]] = [{}]

    def add(self, origin: str, number: int) -> None:
        """Adds a connection that came."""
        numbers = self._numbers.setdefault(origin, {})
        numbers[number] = None
        self._resized(origin, len(numbers) - 1, len(numbers))

    def spoke(self, origin: str, number: int) -> None:
        """Makes a connection, if it is counted here, the last to be closed of its origin."""
        numbers = self._numbers.get(origin, {})
        if number in numbers:
            numbers[number] = numbers.pop(number)

    def discard(self, origin: str, number: int) -> None:
        """Forgets a connection that is gone, or not to be closed to make room."""
        numbers = self._numbers.get(origin, {})
        if number in numbers:
            del numbers[number]
            if not numbers:
                del self._numbers[origin]
            self._resized(origin, len(numbers) + 1, len(numbers))

    def longest_silent(self) -> int | None:
        """Of the origin that has most connections, the one that was silent longest."""
        origin = next(iter(self._by_size[-1]), None)
        return None if origin is None else next(iter(self._numbers[origin]))

    def _resized(self, origin: str, before: int, now: int) -> None:
        sizes = self._by_size
        if before:
            del sizes[before][origin]
        if now:
            if now == len(sizes):
                sizes.append({})
            sizes[now][origin] = None
        while len(sizes) > 1 and not sizes[-1]:
            sizes.pop()


class Server:
    """Moves bytes between clients' connections and the stores.

    Args:
        listener: where they connect; it does not block.
        most: of as many connections at a time.
        key: what clients of the closed store prove; empty if there is only the open one.
    """

    def __init__(self, listener: socket, most: int, key: bytes = b"") -> None:
        stored = Room(MOST_OPEN_STORED if key else MOST_STORED)
        under_way = Room(MOST_OPEN_UNDER_WAY if key else MOST_UNDER_WAY)
        self.store = Store(stored, under_way, self._close_client, _warn, bool(key))
        self.closed = Store(Room(MOST_STORED), Room(MOST_UNDER_WAY), self._close_client, _warn)
        self.run = posix.urandom(RUN_BYTES // 2).hex().encode()
        self._key = key
        self._listener = listener
        self._most = most
        self._events = select.epoll()
        # Who connects, proves the key or has done so is served between any two requests of others.
        self._first = select.epoll()
        self._first.register(listener.fileno(), select.EPOLLIN)
        self._events.register(self._first.fileno(), select.EPOLLIN)
        self._chunk = _CHUNK_OF_STRANGERS if key else CHUNK
        self._connections: dict[int, _Connected] = {}
        self._numbers: dict[Client, int] = {}
        self._unknown: dict[int, float] = {}  # until when each may show what it is, in this order
        self._origins = Origins()

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
            self._first.close()
            self._events.close()

    def _serve_some(self, keys: int, ends: "tuple[int, ...]") -> bool:
        """Deals with what has happened; False at the end."""
        for number, event in self._events.poll(self._until_late()):
            if number in self._connections:
                self._go_on(number, event)
            elif number == keys:
                self._take_key(keys)
            elif number in ends:
                return False
            self._serve_first()
        self._close_late()
        return True

    def _serve_first(self) -> None:
        for number, event in self._first.poll(0):
            if number in self._connections:
                self._go_on(number, event)
            elif number == self._listener.fileno():
                self._accept()

    def _until_late(self) -> float:
        """Seconds until the first must have shown what it is; -1 if there is none."""
        until = next(iter(self._unknown.values()), None)
        return -1 if until is None else max(0.0, until - monotonic()) + 0.001

    def _close_late(self) -> None:
        now = monotonic()
        for number in [number for number, until in self._unknown.items() if until <= now]:
            self._close(number)

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
            if len(self._connections) >= self._most:
                connected.close()
                return
            connected.setblocking(False)
            connection = _Connected(address[0], connected, self._first)
            self._connections[number] = connection
            self._origins.add(connection.origin, number)
            self._first.register(number, select.EPOLLIN)
            if self._key:
                self._unknown[number] = monotonic() + SECONDS_TO_PROVE
            else:
                self._admit(number, connection, self.store)

    def _admit(self, number: int, connection: _Connected, store: Store) -> None:
        """Has a connection use a store from now on."""
        self._unknown.pop(number, None)
        connection.store, connection.client = store, store.opened()
        connection.gate = None
        self._numbers[connection.client] = number
        if store is self.closed:
            self._origins.discard(connection.origin, number)
        else:
            self._first.unregister(number)
            connection.events = self._events
            self._events.register(number, select.EPOLLIN)

    def _go_on(self, number: int, event: int) -> None:
        connection = self._connections[number]
        self._origins.spoke(connection.origin, number)
        try:
            if connection.is_full and not event & select.EPOLLOUT:
                raise RefusedError  # it was closed
            if connection.is_full:
                self._send(number, connection)
            else:
                self._receive(number, connection)
        except BlockingIOError:
            pass
        except (OSError, RefusedError, NotProvenError):
            self._close(number)
        self._send_replies()

    def _receive(self, number: int, connection: _Connected) -> None:
        most = CHUNK if connection.store is self.closed else self._chunk
        data = connection.socket.recv(most if connection.store else _MOST_UNKNOWN)
        if not data:
            raise RefusedError
        if connection.store is None:
            data = self._let_in(number, connection, data)
        if connection.store is not None and connection.client is not None:
            connection.store.receive(connection.client, data)

    def _let_in(self, number: int, connection: _Connected, data: bytes) -> bytes:
        """Finds out which store a connection may use; returns what it sent to that."""
        if connection.gate is None and data[:1] != HELLO[:1]:
            self._admit(number, connection, self.store)
            return data
        if connection.gate is None:
            connection.gate = Gate(self._key, self.run, posix.urandom(NONCE_BYTES))
        gate = connection.gate
        reply = gate.receive(data)
        if reply and connection.socket.send(reply) != len(reply):
            raise NotProvenError
        if gate.is_open:
            self._admit(number, connection, self.closed)
        return gate.left

    def _send_replies(self) -> None:
        for store in (self.store, self.closed):
            while store.replied:
                number = self._numbers[store.replied.pop()]
                try:
                    self._send(number, self._connections[number])
                except (OSError, RefusedError):
                    self._close(number)

    def _send(self, number: int, connection: _Connected) -> None:
        """Sends what the socket takes of the replies; when all are sent, reads on from there."""
        store, client = connection.store, connection.client
        if store is None or client is None:
            raise RefusedError
        try:
            size = connection.socket.send(client.replies)
        except BlockingIOError:
            size = 0
        store.sent(client, size)
        if connection.is_full != bool(client.replies):
            connection.is_full = bool(client.replies)
            wanted = select.EPOLLOUT if connection.is_full else select.EPOLLIN
            connection.events.modify(number, wanted)
        if not connection.is_full:
            store.receive(client, b"")

    def _close_idle(self) -> None:
        """Closes a stranger's connection: that silent longest, of the origin that has most."""
        number = self._origins.longest_silent()
        if number is not None:
            self._close(number)

    def _close_client(self, client: Client) -> None:
        self._close(self._numbers[client])

    def _close(self, number: int) -> None:
        connection = self._connections.pop(number)
        self._unknown.pop(number, None)
        self._origins.discard(connection.origin, number)
        connection.socket.close()
        if connection.store is not None and connection.client is not None:
            del self._numbers[connection.client]
            connection.store.closed(connection.client)


def _warn(text: str) -> None:
    """Logs a warning where the group's programs log."""
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
        keys: the first message there is what clients prove, or one byte if they need not; for
            the others see :meth:`Server.serve`.
        life: can be read when the host's process has ended.
        line: a connection that the host's process closes when nothing there uses the store.
    """
    listening = socket(fileno=listener)
    listening.setblocking(False)
    most = min(MOST_CONNECTIONS, _descriptors() - _SPARE_DESCRIPTORS)
    first = posix.read(keys, KEY_BYTES)
    Server(listening, most, first if len(first) == KEY_BYTES else b"").serve(keys, (life, line))


if __name__ == "__main__":
    if posix.fork():  # who started this waits until it runs, and has no child to wait for later
        posix._exit(0)
    main(*map(int, sys.argv[2:]))
