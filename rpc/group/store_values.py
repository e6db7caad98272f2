"""Decides what clients of the group's store are told. Sans-IO.

It speaks the protocol of torch's ``TCPStore``, as that of its "libuv" server, and holds a
bounded number of bytes that are stored and of bytes that are under way. What does not fit is
refused, and whoever takes most is closed first. Values that carry the group's proof (see
``signed_store``) are not given up for others.

``store_process`` uses it, which the interpreter runs without ``site``, ``rpc`` or torch; so
this file, too, imports C modules only.
"""

from _collections import deque  # type: ignore[import-not-found]
from _operator import _compare_digest
from _struct import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator

VERSION, END_OF_HEAD = b"2", b"="
MARK_DIGITS, CODE_DIGITS = 4, 32
HEAD_BYTES = len(VERSION) + MARK_DIGITS + CODE_DIGITS + len(END_OF_HEAD)
KEY_BYTES = 32

MOST_STORED, MOST_UNDER_WAY = 64 << 20, 32 << 20
MOST_OPEN_STORED = MOST_OPEN_UNDER_WAY = 16 << 20
"""Bytes for values, and for requests and replies under way, in the open part of a store that also
has a closed one.
"""
HAS_CLOSED_PART = b"/tensorwire/closed-part"
"""A key that is there, in the open part of a store, if it has a closed one as well."""
MOST_VALUE = 8 << 20
"""Bytes of one key or value; torch's servers take as much."""
CHUNK = 1 << 18
"""With so many bytes still to be sent to a client, no more of its requests are read."""
MOST_KEYS = 1 << 17
"""Keys in one request; torch's servers take as many."""

_MAGIC = 0x3C85F7CE
_SHORT, _LENGTH, _NUMBER = Struct("<I"), Struct("<Q"), Struct("<q")
_PER_ENTRY, _PER_QUEUE, _PER_PIECE = 256, 1024, 64  # bytes that Python takes beside the contents
_DIGITS_OF_NUMBER = 20
_GOES_ON, _WAIT_IS_OVER, _WAIT_CANCELLED = b"\0", b"\0", b"\1"

if TYPE_CHECKING:
    Reading = Generator[int, bytes, None]
    """Reads a request: yields how many bytes it needs, and is sent them."""


class RefusedError(Exception):
    """A client asks for what it cannot have: its connection is closed."""


def to_be_signed(name: bytes, value: "bytes | bytearray") -> bytes:
    """The bytes over which a member's proof for a value is made."""
    return len(name).to_bytes(4, "little") + name + value


class Room:
    """A number of bytes of which some are taken."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    def has(self, size: int) -> bool:
        """True if as many bytes are left."""
        return self.taken + size <= self.most


class Client:
    """One connection, as the store sees it.

    Attributes:
        replies: what it is to be sent.
        taken: bytes under way for it: received and not yet dealt with, and to be sent.
        used: those of the request that is being read.
        awaited: the keys for which it waits.
    """

    __slots__ = ("awaited", "conversation", "needed", "received", "replies", "taken", "used")

    def __init__(self, store: "Store") -> None:
        self.received = bytearray()
        self.replies = bytearray()
        self.awaited: set[bytes] = set()
        self.taken = 0
        self.used = 0
        self.conversation: Reading | None = store.converse(self)
        self.needed = next(self.conversation)

    def forget(self) -> None:
        """Frees what it holds now; the two refer to each other, and the collector may not come."""
        self.received.clear()
        self.replies.clear()
        self.conversation = None


class Store:
    """Decides what clients are told. No I/O.

    Args:
        stored: how many bytes it may store.
        under_way: how many bytes of requests and replies it may hold.
        close: is told of a client that must be closed for others.
        warn: is told in words that the store is full.
        is_part: there is a closed part beside this one.

    Attributes:
        clients: all that are open.
        replied: those that have new replies; emptied by whoever sends them.
    """

    def __init__(
        self,
        stored: Room,
        under_way: Room,
        close: "Callable[[Client], object]",
        warn: "Callable[[str], object]",
        is_part: bool = False,
    ) -> None:
        self._is_part = is_part
        self.clients: set[Client] = set()
        self.replied: set[Client] = set()
        self._stored = stored
        self._under_way = under_way
        self._close = close
        self._warn = warn
        self._values: dict[bytes, bytes | bytearray] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[bytes, dict[Client, None]] = {}
        self._keys: list[bytes] = []
        self._has_warned = False
        self._requests: dict[int, Callable[[Client], Reading]] = {
            1: self._set,
            2: self._compare_set,
            3: self._get,
            4: self._add,
            5: self._check,
            6: self._wait,
            7: self._number_of_keys,
            8: self._delete,
            9: self._append,
            10: self._multi_get,
            11: self._multi_set,
            12: self._cancel_wait,
            13: self._ping,
            14: self._queue_push,
            15: self._queue_pop,
            16: self._queue_length,
            17: self._list_keys,
            18: self._barrier,
        }

    def trust(self, key: bytes) -> None:
        """Has the store keep what is signed with this key, whoever fills it."""
        self._keys.append(key)

    # --- Clients

    def opened(self) -> Client:
        """A new client."""
        client = Client(self)
        self.clients.add(client)
        return client

    def closed(self, client: Client) -> None:
        """Forgets a client."""
        self._stop_waiting(client)
        self._give(client, client.taken)
        self.clients.discard(client)
        self.replied.discard(client)
        client.forget()

    def receive(self, client: Client, data: bytes) -> None:
        """Takes what a client has sent; empty to go on with what it sent before.

        It goes on until there are many bytes to be sent to it.

        Raises:
            RefusedError: the client must be closed.
        """
        self._take(client, len(data))
        received, conversation = client.received, client.conversation
        if conversation is None:
            raise RefusedError
        received += data
        at, needed = 0, client.needed
        while (
            len(received) - at >= needed and len(client.replies) < CHUNK and client in self.clients
        ):
            piece = bytes(received[at : at + needed])
            at += needed
            client.used += len(piece)
            needed = conversation.send(piece)
            if needed > MOST_VALUE:
                raise RefusedError
        client.needed = needed
        del received[:at]

    def sent(self, client: Client, size: int) -> None:
        """Notes that as many bytes of its replies are gone."""
        del client.replies[:size]
        self._give(client, size)

    def converse(self, client: Client) -> "Reading":
        """Reads one request after the other, and answers."""
        if (yield 1) != _GOES_ON or _SHORT.unpack((yield 4))[0] != _MAGIC:
            raise RefusedError
        while True:
            self._give(client, client.used)
            client.used = 0
            request = self._requests.get((yield 1)[0])
            if request is None:
                raise RefusedError
            yield from request(client)

    def _take(self, client: Client, size: int) -> None:
        """Raises ``RefusedError`` if nobody takes more than this client, and there is no room."""
        if client not in self.clients:
            raise RefusedError
        while not self._under_way.has(size):
            largest = max(self.clients, key=lambda each: each.taken)
            if largest is client or not largest.taken:
                raise RefusedError
            self._close(largest)
        self._under_way.taken += size
        client.taken += size

    def _give(self, client: Client, size: int) -> None:
        if client in self.clients:
            self._under_way.taken -= size
            client.taken -= size

    def _reply(self, client: Client, *parts: "bytes | bytearray") -> None:
        reply = b"".join(parts)
        self._take(client, len(reply))
        client.replies += reply
        self.replied.add(client)

    # --- The parts of a request

    def _bytes(self, client: Client) -> "Generator[int, bytes, bytes]":
        size: int = _LENGTH.unpack((yield 8))[0]
        if size > MOST_VALUE:
            raise RefusedError
        self._take(client, _PER_PIECE)
        client.used += _PER_PIECE
        return (yield size) if size else b""

    def _several(self, client: Client) -> "Generator[int, bytes, list[bytes]]":
        count: int = _LENGTH.unpack((yield 8))[0]
        if count > MOST_KEYS:
            raise RefusedError
        strings = []
        for _ in range(count):
            strings.append((yield from self._bytes(client)))
        return strings

    # --- Requests

    def _set(self, client: Client) -> "Reading":
        key = yield from self._bytes(client)
        self._put(key, (yield from self._bytes(client)))

    def _compare_set(self, client: Client) -> "Reading":
        key = yield from self._bytes(client)
        expected = yield from self._bytes(client)
        desired = yield from self._bytes(client)
        stored = self._values.get(key, b"")
        if stored == expected and stored != desired:
            self._put(key, desired)
            stored = desired
        elif key not in self._values:
            stored = expected  # as torch's servers say of a key that is not there
        self._reply(client, _LENGTH.pack(len(stored)), stored)

    def _get(self, client: Client) -> "Reading":
        stored = self._values.get((yield from self._bytes(client)), b"")
        self._reply(client, _LENGTH.pack(len(stored)), stored)

    def _add(self, client: Client) -> "Reading":
        key = yield from self._bytes(client)
        amount: int = _NUMBER.unpack((yield 8))[0]
        count = self._count(key, amount)
        self._wake_all(key)
        self._reply(client, _NUMBER.pack(count))

    def _check(self, client: Client) -> "Reading":
        keys = yield from self._several(client)
        self._reply(client, b"\0" if all(map(self._is_there, keys)) else b"\1")

    def _wait(self, client: Client) -> "Reading":
        missing = {key for key in (yield from self._several(client)) if not self._is_there(key)}
        self._stop_waiting(client)
        if not missing:
            self._reply(client, _WAIT_IS_OVER)
        for key in missing:
            self._await(client, key)

    def _number_of_keys(self, client: Client) -> "Reading":
        self._reply(client, _NUMBER.pack(len(self._values)))
        yield from ()

    def _delete(self, client: Client) -> "Reading":
        key = yield from self._bytes(client)
        was_there = key in self._values
        self._drop(key)
        self._reply(client, _NUMBER.pack(was_there))

    def _append(self, client: Client) -> "Reading":
        key = yield from self._bytes(client)
        self._extend(key, (yield from self._bytes(client)))

    def _multi_get(self, client: Client) -> "Reading":
        for key in (yield from self._several(client)):
            stored = self._values.get(key, b"")
            self._reply(client, _LENGTH.pack(len(stored)), stored)

    def _multi_set(self, client: Client) -> "Reading":
        count: int = _LENGTH.unpack((yield 8))[0]
        if count > MOST_KEYS:
            raise RefusedError
        for _ in range(count):
            yield from self._set(client)

    def _cancel_wait(self, client: Client) -> "Reading":
        self._stop_waiting(client)
        self._reply(client, _WAIT_CANCELLED)
        yield from ()

    def _ping(self, client: Client) -> "Reading":
        self._reply(client, (yield 4))

    def _queue_push(self, client: Client) -> "Reading":
        key = yield from self._bytes(client)
        value = yield from self._bytes(client)
        size = _size(key, value) + (0 if key in self._queues else _PER_QUEUE)
        self._make_room(size)
        self._stored.taken += size
        self._queues.setdefault(key, deque()).append(value)
        self._wake(key, 1)

    def _queue_pop(self, client: Client) -> "Reading":
        key = yield from self._bytes(client)
        queue = self._queues.get(key)
        if queue is None:
            self._reply(client, _NUMBER.pack(0))
            return
        count, value = len(queue), queue.popleft()
        self._stored.taken -= _size(key, value)
        if not queue:
            del self._queues[key]
            self._stored.taken -= _PER_QUEUE
        self._reply(client, _NUMBER.pack(count), _LENGTH.pack(len(value)), value)

    def _queue_length(self, client: Client) -> "Reading":
        key = yield from self._bytes(client)
        self._reply(client, _NUMBER.pack(len(self._queues.get(key, ()))))

    def _list_keys(self, client: Client) -> "Reading":
        keys = [_LENGTH.pack(len(key)) + key for key in self._values]
        self._reply(client, _NUMBER.pack(len(keys)), *keys)
        yield from ()

    def _barrier(self, client: Client) -> "Reading":
        key = yield from self._bytes(client)
        size: int = _NUMBER.unpack((yield 8))[0]
        if self._count(key, 1) >= size:
            self._wake_all(key)
            self._reply(client, _WAIT_IS_OVER)
        else:
            self._await(client, key)

    # --- Values

    def _is_there(self, key: bytes) -> bool:
        if self._is_part and key == HAS_CLOSED_PART:
            return True
        return key in self._values or key in self._queues

    def _count(self, key: bytes, amount: int) -> int:
        """Adds to a counter."""
        try:
            count = int(self._values.get(key, b"0")[:_DIGITS_OF_NUMBER]) + amount
        except ValueError:
            raise RefusedError from None
        if not -(2**63) <= count < 2**63:
            raise RefusedError
        self._store(key, b"%d" % count)
        return count

    def _put(self, key: bytes, value: "bytes | bytearray") -> None:
        self._store(key, value)
        self._wake_all(key)

    def _store(self, key: bytes, value: "bytes | bytearray") -> None:
        if len(value) > MOST_VALUE:
            raise RefusedError
        before = self._values.get(key)
        more = len(value) - len(before) if before is not None else _size(key, value)
        self._make_room(more)
        if before is not None and key not in self._values:
            more = _size(key, value)  # it was given up meanwhile
        self._values[key] = value
        self._stored.taken += more

    def _extend(self, key: bytes, more: bytes) -> None:
        """Appends in place: a copy each time would let a stranger keep the process busy."""
        before = self._values.get(key, b"")
        if len(before) + len(more) > MOST_VALUE:
            raise RefusedError
        if key in self._values:
            self._make_room(len(more))
        if key not in self._values:  # or it was given up meanwhile
            self._put(key, before + more)
            return
        grown = before if isinstance(before, bytearray) else bytearray(before)
        grown += more
        self._values[key] = grown
        self._stored.taken += len(more)
        self._wake_all(key)

    def _drop(self, key: bytes) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._stored.taken -= _size(key, value)

    def _make_room(self, size: int) -> None:
        """Gives up what carries no proof of a member, the newest first, if there is no room.

        Raises:
            RefusedError: there is none then, or no key by which proofs could be known.
        """
        if self._stored.has(size):
            return
        self._say_it_is_full()
        if self._keys:
            self._drop_strangers(self._stored.most * 3 // 4 - size)
        if not self._stored.has(size):
            raise RefusedError

    def _say_it_is_full(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            if self._keys:
                does = "gives up what members of the group did not write"
            elif self._is_part:
                does = "refuses more; the values of its members are in the other part"
            else:
                does = "refuses more, as without a group_key it cannot know whose values to keep"
            part = "open part of the group's store" if self._is_part else "group's store"
            self._warn(f"the {part} is full: it has {self._stored.most >> 20} MiB, and {does}")

    def _drop_strangers(self, enough: int) -> None:
        for key in reversed(list(self._values)):
            if self._stored.taken <= enough:
                return
            if not self._is_members(key, self._values[key]):
                self._drop(key)

    def _is_members(self, key: bytes, value: "bytes | bytearray") -> bool:
        from _hashlib import hmac_digest

        head, signed = value[:HEAD_BYTES], to_be_signed(key[1:], value[HEAD_BYTES:])
        code = head[len(VERSION) + MARK_DIGITS : -len(END_OF_HEAD)]
        return any(
            _compare_digest(hmac_digest(each, signed, "sha256").hex()[:CODE_DIGITS].encode(), code)
            for each in self._keys
        )

    # --- Waiting

    def _await(self, client: Client, key: bytes) -> None:
        self._take(client, len(key) + _PER_ENTRY)
        client.awaited.add(key)
        self._waiting.setdefault(key, {})[client] = None

    def _stop_waiting(self, client: Client) -> None:
        for key in list(client.awaited):
            self._woken(client, key)

    def _wake_all(self, key: bytes) -> None:
        self._wake(key, len(self.clients))

    def _wake(self, key: bytes, most: int) -> None:
        """Tells the first of those who wait for a key that it is there."""
        for client in list(self._waiting.get(key, ()))[:most]:
            self._woken(client, key)
            if not client.awaited and client in self.clients:
                try:
                    self._reply(client, _WAIT_IS_OVER)
                except RefusedError:
                    self._close(client)

    def _woken(self, client: Client, key: bytes) -> None:
        if key not in client.awaited:
            return
        client.awaited.discard(key)
        self._give(client, len(key) + _PER_ENTRY)
        waiting = self._waiting[key]
        del waiting[client]
        if not waiting:
            del self._waiting[key]


def _size(key: bytes, value: "bytes | bytearray") -> int:
    return len(key) + len(value) + _PER_ENTRY
