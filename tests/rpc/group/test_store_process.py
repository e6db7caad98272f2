"""The process that keeps the group's store: torch's protocol, and what it never holds more of."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore

from rpc.group.signed_store import SignedStore, signing_key
from rpc.group.store_host import StoreServer, host_store, open_server
from rpc.group.store_process import Origins, Server
from rpc.group.store_values import (
    KEY_BYTES,
    MOST_KEYS,
    MOST_VALUE,
    Client,
    RefusedError,
    Room,
    Store,
)
from rpc.group.tcp_store import TcpStoreClient
from tests.rpc.stores import SECONDS, SOON
from tests.waiting import until

HELLO = struct.pack("<BI", 0, 0x3C85F7CE)
SET, COMPARE_SET, GET, ADD, WAIT, APPEND, MULTI_GET, CANCEL, PUSH, BARRIER = (
    *(1, 2, 3, 4, 6, 9, 10, 12, 14, 18),
)
KEY = b"the group's key"


def request(kind: int, *parts: bytes | int, count: int | None = None) -> bytes:
    """A request as clients send it: bytes with their lengths, numbers as they are."""
    told = bytes([kind]) + (b"" if count is None else struct.pack("<Q", count))
    return told + b"".join(
        struct.pack("<q", part) if isinstance(part, int) else struct.pack("<Q", len(part)) + part
        for part in parts
    )


def replied(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


class Played:
    """A store without sockets."""

    def __init__(
        self, stored: int = 1 << 20, under_way: int = 1 << 20, is_part: bool = False
    ) -> None:
        self.stored, self.under_way = Room(stored), Room(under_way)
        self.closed: list[Client] = []
        self.warnings: list[str] = []
        self.store = Store(self.stored, self.under_way, self.close, self.warnings.append, is_part)

    def close(self, client: Client) -> None:
        self.closed.append(client)
        self.store.closed(client)

    def client(self) -> Client:
        client = self.store.opened()
        self.store.receive(client, HELLO)
        return client

    def ask(self, client: Client, *requests: bytes) -> bytes:
        """Sends requests, reads what comes."""
        self.store.receive(client, b"".join(requests))
        return self.read(client)

    def read(self, client: Client) -> bytes:
        found = bytes(client.replies)
        self.store.sent(client, len(found))
        return found


# --- As torch's server


def of_torch() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, SECONDS, wait_for_workers=False)


@pytest.mark.parametrize("make", [lambda: open_server("127.0.0.1", 0, None), of_torch])
def test_torchs_client_gets_the_same_from_ours_and_from_torchs_server(
    make: Callable[[], StoreServer | TCPStore],
) -> None:
    """All but the newest requests, which older torch has not: queues, barriers, lists."""
    host = make()
    store, other = (TCPStore("127.0.0.1", host.port, None, False, SECONDS) for _ in range(2))
    before = store.num_keys()
    store.set("a", "1")
    assert [store.add("a", 5), store.add("new", -3)] == [6, -3]
    assert store.compare_set("a", "6", "x") == b"x"
    assert store.compare_set("a", "6", "y") == b"x"
    assert store.compare_set("none", "6", "y") == b"6"
    assert store.compare_set("none", "", "y") == b"y"
    store.append("a", "yz")
    store.multi_set(["b", "c"], ["2", ""])
    assert other.multi_get(["a", "b", "c"]) == [b"xyz", b"2", b""]
    assert store.check(["a", "c"])
    assert not store.check(["a", "d"])
    assert [store.delete_key("c"), store.delete_key("c")] == [True, False]
    assert store.num_keys() == before + 4
    waiting = threading.Thread(target=other.wait, args=(["later", "a"],))
    waiting.start()
    store.set("later", b"\0" * (1 << 20))
    waiting.join()
    assert len(other.get("later")) == 1 << 20


def test_requests_come_in_pieces_of_any_size() -> None:
    played = Played()
    client = played.client()
    told = request(SET, b"/k", b"value") + request(GET, b"/k") + request(ADD, b"/n", 7)
    for byte in told:
        played.store.receive(client, bytes([byte]))
    assert played.read(client) == replied(b"value") + struct.pack("<q", 7)
    assert played.under_way.taken == 0


def test_who_waits_is_told_once_when_the_last_key_comes_and_not_after_giving_up() -> None:
    played = Played()
    one, other, third = (played.client() for _ in range(3))
    assert played.ask(one, request(WAIT, b"/a", b"/b", count=2)) == b""
    assert played.ask(other, request(WAIT, b"/b", count=1)) == b""
    assert played.ask(other, request(CANCEL)) == b"\1"
    played.ask(third, request(COMPARE_SET, b"/b", b"nothing", b"nothing"))
    played.ask(third, request(SET, b"/a", b""))
    assert played.read(one) == b""
    played.ask(third, request(SET, b"/b", b""), request(SET, b"/b", b""))
    assert [played.read(one), played.read(other)] == [b"\0", b""]
    assert played.under_way.taken == 0


def test_a_barrier_lets_all_pass_when_the_last_has_come() -> None:
    played = Played()
    clients = [played.client() for _ in range(3)]
    found = [played.ask(client, request(BARRIER, b"/b", 3)) for client in clients]
    assert found == [b"", b"", b"\0"]
    assert [played.read(client) for client in clients[:2]] == [b"\0", b"\0"]


# --- What it never holds more of


@pytest.mark.parametrize(
    ("is_part", "why"),
    [
        (
            False,
            "the group's store is full: it has 0 MiB, and refuses more, as without a group_key",
        ),
        (True, "the open part of the group's store is full: it has 0 MiB, and refuses more; the "),
    ],
)
def test_a_store_that_is_full_refuses_more_and_says_so_once(is_part: bool, why: str) -> None:
    played = Played(stored=100_000, is_part=is_part)
    client = played.client()
    played.ask(client, request(SET, b"/first", b"kept"))
    for number in range(300):
        with contextlib.suppress(RefusedError):
            played.ask(played.client(), request(SET, b"/%d" % number, b"x" * 1000))
        with contextlib.suppress(RefusedError):
            played.ask(played.client(), request(PUSH, b"/queue", b"x" * 1000))
        with contextlib.suppress(RefusedError):
            played.ask(played.client(), request(APPEND, b"/long", b"x" * 1000))
        assert played.stored.taken <= 100_000
    assert played.ask(client, request(GET, b"/first")) == replied(b"kept")
    assert len(played.warnings) == 1
    assert played.warnings[0].startswith(why)


def test_what_is_appended_to_a_long_value_is_not_a_copy_of_it() -> None:
    """A client that appends a byte again and again would else keep the process from others."""
    played = Played()
    client = played.client()
    played.ask(client, request(SET, b"/long", b"x" * 1000))
    played.ask(client, request(APPEND, b"/long", b"y"))
    value = played.store._values[b"/long"]
    played.ask(client, *[request(APPEND, b"/long", b"z")] * 100)
    assert played.store._values[b"/long"] is value
    assert played.ask(client, request(GET, b"/long")) == replied(b"x" * 1000 + b"y" + b"z" * 100)
    assert played.stored.taken == len(b"/long") + 1101 + 256
    played.ask(client, request(SET, b"/long", b""))
    assert played.stored.taken == len(b"/long") + 256


def test_with_a_key_it_gives_up_what_strangers_wrote_and_nothing_else() -> None:
    played, written = Played(stored=100_000), HashStore()
    played.store.trust(signing_key(KEY))
    member = SignedStore(written, KEY, "group")
    stranger = SignedStore(written, b"a guess", "group")
    client = played.client()
    names = [f"group/{number}" for number in range(20)]
    for number, name in enumerate(names):
        member.set(str(number), b"m" * 100)
        played.ask(client, request(SET, f"/{name}".encode(), written.get(name)))
    for number in range(3000):
        stranger.set("guess", b"%d" % number)
        value = written.get("group/guess") + b"x" * 100
        played.ask(client, request(SET, b"/group/s%d" % number, value))
        assert played.stored.taken <= 100_000
    for name in names:
        assert played.ask(client, request(GET, f"/{name}".encode())) == replied(written.get(name))
    member.set("20", b"m" * 20_000)
    played.ask(client, request(SET, b"/group/20", written.get("group/20")))  # there is room
    assert "gives up" in played.warnings[0]


def test_who_has_most_under_way_is_closed_for_who_has_less() -> None:
    played = Played(under_way=50_000)
    greedy, modest = played.client(), played.client()
    played.store.receive(greedy, request(SET, b"/k", b"x" * 40_000)[:-1])
    played.store.receive(modest, request(SET, b"/k", b"x" * 20_000)[:-1])
    assert played.closed == [greedy]
    with pytest.raises(RefusedError):
        played.store.receive(modest, b"x" * 40_000)
    played.store.closed(modest)
    assert played.under_way.taken == 0


@pytest.mark.parametrize("kind", [MULTI_GET, WAIT])
def test_many_keys_and_replies_that_nobody_reads_count(kind: int) -> None:
    played = Played(under_way=1 << 20)
    client, stranger = played.client(), played.client()
    played.ask(client, request(SET, b"/k", b"x" * 10_000))
    keys = [b"/k" if kind == MULTI_GET else b"/%d" % number for number in range(9000)]
    with pytest.raises(RefusedError):
        played.store.receive(stranger, request(kind, *keys, count=len(keys)))
    assert played.under_way.taken <= 1 << 20


@pytest.mark.parametrize(
    "told",
    [
        b"GET / HTTP/1.1\r\n",
        b"\xff" * 8,
        HELLO[:1] + b"\0" * 4,
        HELLO + bytes([99]),
        HELLO + HELLO,
        HELLO + bytes([SET]) + struct.pack("<Q", MOST_VALUE + 1),
        HELLO + bytes([MULTI_GET]) + struct.pack("<Q", MOST_KEYS + 1),
        HELLO + request(SET, b"/k", b"no number") + request(ADD, b"/k", 1),
        HELLO + request(ADD, b"/n", 2**63 - 1) * 2,
    ],
)
def test_nonsense_and_impossible_sizes_are_refused_at_once(told: bytes) -> None:
    played = Played()
    with pytest.raises(RefusedError):
        played.store.receive(played.store.opened(), told)


# --- Connections


@pytest.fixture
def serve() -> Iterator[Callable[[int], int]]:
    """Serves in a thread, at most as many connections; returns the port."""
    with contextlib.ExitStack() as held:

        def begin(most: int) -> int:
            listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            listener.setblocking(False)
            pairs = [socket.socketpair() for _ in range(2)]
            (_, keys), (end, far_end) = pairs
            for each in (*pairs[0], *pairs[1]):
                held.enter_context(each)
            ends = (far_end.fileno(),)
            served = partial(Server(listener, most).serve, keys.fileno(), ends)
            thread = threading.Thread(target=served)
            thread.start()
            held.callback(thread.join)
            held.callback(end.close)
            return int(listener.getsockname()[1])

        yield begin


@given(st.lists(st.tuples(st.sampled_from(["add", "spoke", "discard"]), st.integers(0, 11))))
def test_who_was_silent_longest_of_the_busiest_origin_is_closed(
    steps: list[tuple[str, int]],
) -> None:
    """A search through all finds the same; a quarter of the connections share an origin."""
    origins, silent = Origins(), dict[int, str]()
    for do, number in steps:
        origin = f"127.0.0.{number if number % 4 else 0}"
        if do == "add" and number in silent:
            continue
        getattr(origins, do)(origin, number)
        if do == "add":
            silent[number] = origin
        elif number in silent:
            del silent[number]
            if do == "spoke":
                silent[number] = origin
        found = origins.longest_silent()
        if found is None:
            assert not silent
        else:
            counts = Counter(silent.values())
            assert counts[silent[found]] == max(counts.values())
            assert found == next(each for each in silent if silent[each] == silent[found])


def test_idle_connections_are_bounded_and_a_member_that_was_closed_connects_again(
    serve: Callable[[int], int],
) -> None:
    port = serve(20)
    member = TcpStoreClient("127.0.0.1", port, SOON)
    member.set("key", "value")
    with contextlib.ExitStack() as held:
        strangers = [
            held.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(60)
        ]
        for stranger in strangers[:30]:
            stranger.settimeout(SOON)
            assert stranger.recv(1) == b""  # those that came first are closed
        assert member.get("key") == b"value"
        assert [member.add("n", 2), member.add("n", 2)] == [2, 4]
        assert member.delete_key("n")
        waiting = threading.Thread(target=member.wait, args=(["later"],))
        waiting.start()
        for _ in range(60):
            held.enter_context(socket.create_connection(("127.0.0.1", port)))
        other = TcpStoreClient("127.0.0.1", port, SOON)
        other.set("later", "")
        waiting.join(SOON)
        assert not waiting.is_alive()


def test_who_does_not_read_gets_the_rest_later(serve: Callable[[int], int]) -> None:
    port = serve(20)
    member = TcpStoreClient("127.0.0.1", port, SOON)
    value = bytes(range(256)) * (1 << 12)
    member.set("k", value)
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(HELLO + request(GET, b"/k") * 30)
        member.get("k")  # meanwhile, others are served
        slow.settimeout(SOON)
        received = bytearray()
        while len(received) < 30 * (len(value) + 8):
            received += slow.recv(1 << 20)
        assert received == replied(value) * 30


def test_the_process_ends_when_nobody_uses_the_store_and_with_its_host() -> None:
    server = open_server("127.0.0.1", 0, None)
    port = server.port
    assert len(signing_key(KEY)) == KEY_BYTES
    server.trust(KEY)
    socket.create_connection(("127.0.0.1", port), SOON).close()
    del server

    def is_gone() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), SOON).close()
            return False
        return True

    until(is_gone)


# --- What the process takes

DOCUMENTED_MIB = 200
LARGE = 8 << 20


def packed(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def halves() -> Iterator[bytes]:
    """Values of which the last byte never comes, each on a connection of its own."""
    while True:
        yield bytes([SET]) + struct.pack("<Q", LARGE) + bytes(LARGE - 1)


def many_keys() -> Iterator[bytes]:
    """Requests for many short keys, of which the last never comes."""
    keys = b"".join(packed(b"/%x" % number) for number in range(MOST_KEYS - 1))
    while True:
        yield bytes([MULTI_GET]) + struct.pack("<Q", MOST_KEYS) + keys


def small_values() -> Iterator[bytes]:
    """Values of no length under names of one."""
    for start in range(0, 1 << 40, 1000):
        numbers = range(start, start + 1000)
        yield b"".join(bytes([PUSH]) + packed(b"/%x" % each, b"") for each in numbers)


def peak_mib(port: int) -> int:
    """The most memory that the process which keeps the store at a port ever took."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"127.0.0.1:%d" % port in (folder / "cmdline").read_bytes().split(b"\0"):
                lines = (folder / "status").read_text().splitlines()
                (peak,) = (line for line in lines if line.startswith("VmHWM"))
                return int(peak.split()[1]) >> 10
    raise AssertionError("there is no such process")


@pytest.mark.slow
@pytest.mark.parametrize("shape", [halves, many_keys, small_values])
@pytest.mark.parametrize("key", [b"", KEY], ids=["open", "beside-a-closed-part"])
def test_the_process_takes_no_more_memory_than_the_page_on_security_says(
    shape: Callable[[], Iterator[bytes]], key: bytes
) -> None:
    """The kernel counts it. Strangers send twice as much, on as many connections as that takes.

    Those of the closed part are served meanwhile.
    """
    host = host_store("127.0.0.1", 0, key)
    sent, requests, at_once = 0, shape(), 500 if shape is small_values else 1
    with ExitStack() as held:
        for _ in range(60):
            stranger = held.enter_context(socket.create_connection(("127.0.0.1", host.port), SOON))
            stranger.settimeout(SOON)
            with contextlib.suppress(OSError):
                stranger.sendall(HELLO)
                for request in itertools.islice(requests, at_once):
                    stranger.sendall(request)
                    sent += len(request)
            if sent > 2 * DOCUMENTED_MIB << 20:
                break
        assert host.client(60.0).num_keys() >= 0, "it still answers"
    assert peak_mib(host.port) < DOCUMENTED_MIB
