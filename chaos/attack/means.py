"""The means of somebody who reaches a job's ports and has no key: each does one thing, once."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import random
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch._C._distributed_c10d import TCPStore

from chaos.attack.surroundings import Doors
from rpc.group.store_gate import HELLO, NONCE_BYTES, PROOF_BYTES
from rpc.transports.tensorwire.handshake import ChannelKind, Hello, Identity, Initiator

_HOST = "127.0.0.1"
_CONNECT_SECONDS, _READ_SECONDS = 5.0, 0.3
_HELD_PER_PORT, _SLOW_AT_ONCE, _RESETS = 300, 50, 100
_FLOOD_SECONDS = 1.0
_GREETING = struct.pack("<BI", 0, 0x3C85F7CE)
"""The first bytes of a client of torch's store."""
_OURS = ("tensorwire", "/tensorwire", "/job/")


@dataclass(slots=True)
class Scene:
    """All that one means sees of the job, and where it counts.

    Args:
        draw: of everything random.
        doors: where the job listens now.
        stores: ports of its stores.
        run_id: the job's.
        conversations: what members were heard to send, as pieces, by the port.
        datagrams: likewise.
        counts: how often each thing was done.
        lock: of ``counts``.
    """

    draw: random.Random
    doors: Doors = field(default_factory=Doors)
    stores: tuple[int, ...] = ()
    run_id: str = ""
    conversations: Mapping[int, Sequence[Sequence[bytes]]] = field(default_factory=dict)
    datagrams: Sequence[bytes] = ()
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str, times: int = 1) -> None:
        with self.lock:
            self.counts[what] += times

    def port(self) -> int:
        """One of the ports, at random.

        Raises:
            ConnectionError: there is none at present.
        """
        if not self.doors.tcp:
            raise ConnectionError
        return self.draw.choice(self.doors.tcp)


def _connected(port: int) -> socket.socket:
    made = socket.create_connection((_HOST, port), _CONNECT_SECONDS)
    made.settimeout(_READ_SECONDS)
    return made


def _say(scene: Scene, what: str, port: int, *pieces: bytes) -> bytes:
    """Sends something and returns what comes back; a refusal is none of an error's."""
    scene.count(what)
    heard = b""
    with contextlib.suppress(OSError), _connected(port) as stranger:
        for piece in pieces:
            stranger.sendall(piece)
        heard = stranger.recv(4096)
    return heard


# --- Bytes


def garbage(scene: Scene) -> None:
    port, size = scene.port(), scene.draw.choice((1, 7, 100, 257, 4096, 70_000))
    _say(scene, "random bytes", port, scene.draw.randbytes(size))


class Evil:
    """Leaves a file if anybody unpickles it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (self._path, os.O_CREAT)


def other_protocols(scene: Scene) -> None:
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + scene.draw.randbytes(508)
    said = (
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        hello,
        pickle.dumps(Evil(f"/tmp/evil-{scene.run_id}")),
        _GREETING + b"\x03" + struct.pack("<Q", 1 << 62),
        _GREETING + b"\x0a" + struct.pack("<Q", 1 << 40),
        b"TWhs\x02\x01\xff\xff" + scene.draw.randbytes(300),
    )
    _say(scene, "bytes of other protocols", scene.port(), scene.draw.choice(said))


def flood(scene: Scene) -> None:
    """Sends as fast as it is taken."""
    beginning = scene.draw.choice((b"", HELLO, _GREETING + b"\x01", b"TWhs\x02\x01"))
    data, until = scene.draw.randbytes(1 << 16), time.monotonic() + _FLOOD_SECONDS
    scene.count("floods")
    with contextlib.suppress(OSError), _connected(scene.port()) as stranger:
        stranger.sendall(beginning)
        while time.monotonic() < until:
            stranger.sendall(data)


def resets(scene: Scene) -> None:
    """Connects and breaks off, without a good-bye."""
    port = scene.port()
    for _ in range(_RESETS):
        with contextlib.suppress(OSError), _connected(port) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            scene.count("connections that were reset")


# --- Handshakes


def half_handshakes_with_stores(scene: Scene) -> None:
    """Begins, guesses, or gives back what it was given."""
    nonce, port = scene.draw.randbytes(NONCE_BYTES), scene.port()
    heard = _say(scene, "half handshakes with stores", port, HELLO + nonce)
    guess = scene.draw.choice((scene.draw.randbytes(PROOF_BYTES), nonce, heard[:NONCE_BYTES]))
    _say(scene, "half handshakes with stores", port, HELLO + heard[:NONCE_BYTES], guess)
    _say(scene, "half handshakes with stores", port, HELLO + nonce + guess + b"\x11")
    _say(scene, "half handshakes with stores", port, HELLO[: scene.draw.randrange(1, 8)])


def half_handshakes_with_workers(scene: Scene) -> None:
    """Guesses who listens, hears the worker's proof, and gives that back as its own."""
    who = Identity(scene.draw.randrange(8), scene.draw.randrange(3))
    whom = Identity(scene.draw.randrange(8), scene.draw.randrange(3))
    kind = scene.draw.choice(list(ChannelKind))
    token, nonce = scene.draw.randbytes(16), scene.draw.randbytes(NONCE_BYTES)
    begin = Initiator(b"", Hello(kind, who, whom, token, nonce)).begin()
    scene.count("half handshakes with workers")
    with contextlib.suppress(OSError), _connected(scene.port()) as stranger:
        stranger.sendall(begin)
        heard = stranger.recv(4096)
        proof = heard[-PROOF_BYTES:] or scene.draw.randbytes(PROOF_BYTES)
        stranger.sendall(b"TWhs\x02\x03" + struct.pack("<H", len(proof)) + proof)
        scene.count("answers of workers to half handshakes", bool(heard))
        stranger.recv(4096)


# --- Replays


def replays(scene: Scene) -> None:
    """Says what a member said: to the same port, or another; as it was, cut off, or changed."""
    if not scene.conversations:
        return
    port = scene.draw.choice(list(scene.conversations))
    pieces = list(scene.draw.choice(scene.conversations[port]))
    to = port if port in scene.doors.tcp and scene.draw.random() < 0.7 else scene.port()
    way = scene.draw.randrange(3)
    if way == 1:
        pieces = pieces[: scene.draw.randrange(1, len(pieces) + 1)]
    elif way == 2:
        changed = bytearray(pieces[-1])
        changed[scene.draw.randrange(len(changed))] ^= 1 << scene.draw.randrange(8)
        pieces[-1] = bytes(changed)
    scene.count("replays of connections")
    with contextlib.suppress(OSError), _connected(to) as stranger:
        for piece in pieces:
            stranger.sendall(piece)
            with contextlib.suppress(TimeoutError):
                stranger.settimeout(0.02)
                stranger.recv(1 << 16)


def datagrams(scene: Scene) -> None:
    """Random ones, recorded ones, and recorded ones that were changed."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for port in scene.doors.udp:
            for _ in range(50):
                data = scene.draw.randbytes(scene.draw.randrange(1500))
                if scene.datagrams and scene.draw.random() < 0.7:
                    data = scene.draw.choice(scene.datagrams)
                    data = data[: scene.draw.choice((len(data), len(data), 17, len(data) - 1))]
                with contextlib.suppress(OSError):
                    stranger.sendto(data, (_HOST, port))
                    scene.count("datagrams")


# --- Unix sockets


def unix_sockets(scene: Scene) -> None:
    """The abstract ones, which anybody on the machine may connect to."""
    for name in scene.doors.unix:
        said = scene.draw.choice((scene.draw.randbytes(300), b"TWhs\x02\x01\x10\x00", b"", HELLO))
        scene.count("connections to Unix sockets")
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger,
        ):
            stranger.settimeout(_READ_SECONDS)
            stranger.connect(b"\0" + bytes.fromhex(name))
            stranger.sendall(said)
            stranger.recv(4096)


# --- What lasts


class Held:
    """Connections that it keeps, silent."""

    def __init__(self) -> None:
        self._held: dict[int, deque[socket.socket]] = {}

    def __call__(self, scene: Scene) -> None:
        for port in [port for port in self._held if port not in scene.doors.tcp]:
            for each in self._held.pop(port):
                each.close()
        for port in scene.doors.tcp:
            held = self._held.setdefault(port, deque())
            with contextlib.suppress(OSError):
                for _ in range(20):
                    held.append(_connected(port))
                    scene.count("connections that were held")
            while len(held) > _HELD_PER_PORT:
                held.popleft().close()


class Slow:
    """Connections over which the beginning of something sensible comes, a byte at a time."""

    def __init__(self) -> None:
        self._slow: list[tuple[socket.socket, Iterator[int]]] = []

    def __call__(self, scene: Scene) -> None:
        left = []
        for stranger, said in self._slow:
            try:
                stranger.send(bytes([next(said)]))
            except (OSError, StopIteration):
                stranger.close()
            else:
                left.append((stranger, said))
        self._slow = left
        with contextlib.suppress(OSError):
            while len(self._slow) < _SLOW_AT_ONCE:
                beginning = scene.draw.choice((HELLO, _GREETING + b"\x01", b"TWhs\x02\x01\x68\x00"))
                said = itertools.chain(beginning, iter(lambda: scene.draw.randrange(256), -1))
                self._slow.append((_connected(scene.port()), said))
                scene.count("slow connections")
        time.sleep(0.2)


# --- Torch's store, which knows nobody


def _keys(scene: Scene) -> list[str]:
    names = ["plan", "changes", "beat/0", "gone/0", "closed", "first", "nodes", "torchs", "store"]
    names += ["member/ps:0", "names/1", "id/1", "mode", "rank/0", "default_pg/0//0"]
    below = [f"/job/{scene.run_id}/tensorwire/extend/rpcrun/value", f"/job/{scene.run_id}"]
    below += ["tensorwire/extend/rpcrun/value", "tensorwire", "/tensorwire", "torch.rendezvous"]
    return [f"{folder}/{name}" for folder in below for name in names]


def torchs_store(scene: Scene) -> None:
    """With torch's own client: reads all names, deletes, overwrites, and fills it."""
    if not scene.stores:
        return
    store = TCPStore(_HOST, scene.draw.choice(scene.stores), wait_for_workers=False)
    try:
        _overwrite(scene, store)
        _delete(scene, store)
        store.set("filling", "x" * (7 << 20))
        store.compare_set("filling", "", "x")
    except (RuntimeError, OSError, ValueError):  # it was closed, or is full
        scene.count("connections of torch's client that were closed")


def _overwrite(scene: Scene, store: TCPStore) -> None:
    plan = json.dumps({"phase": scene.draw.choice(("failed", "succeeded", "running"))})
    values = (plan, "", "\xff\xfe\0", "no number", "[" * 5000, "9" * 40)
    for key in _keys(scene):
        store.set(key, scene.draw.choice(values))
        scene.count("values that were written to torch's store")


def _delete(scene: Scene, store: TCPStore) -> None:
    written = {each.lstrip("/") for each in _keys(scene)}
    for name in store.list_keys():
        if name.startswith(_OURS) and name.lstrip("/") not in written:
            scene.count("values of ours that torch's store showed")
        store.delete_key(name)
        scene.count("values that were deleted from torch's store")


def raw_requests(scene: Scene) -> None:
    """Requests to a store's open part that torch's client does not make."""
    if not scene.stores:
        return
    port, key = scene.draw.choice(scene.stores), scene.draw.choice(_keys(scene)).encode()
    packed = struct.pack("<Q", len(key)) + key
    requests = [bytes([number]) + packed for number in range(19)]
    requests += [b"\x06" + struct.pack("<Q", 100) + packed * 100]
    requests += [b"\x0e" + packed + struct.pack("<Q", 1 << 12) + bytes(1 << 12)] * 200
    scene.draw.shuffle(requests)
    _say(scene, "raw requests to the open part", port, _GREETING, *requests)


MEANS: Mapping[str, Callable[[], Callable[[Scene], None]]] = {
    "garbage": lambda: garbage,
    "other protocols": lambda: other_protocols,
    "floods": lambda: flood,
    "resets": lambda: resets,
    "handshakes with stores": lambda: half_handshakes_with_stores,
    "handshakes with workers": lambda: half_handshakes_with_workers,
    "replays": lambda: replays,
    "datagrams": lambda: datagrams,
    "unix sockets": lambda: unix_sockets,
    "held": Held,
    "slow": Slow,
    "torch's store": lambda: torchs_store,
    "raw requests": lambda: raw_requests,
}
"""Makers of each."""
