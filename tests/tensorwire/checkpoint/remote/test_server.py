"""Readers follow a chain over the network, with a key that lets them read and do nothing else."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rpc import BringUpError, TlsOptions
from tensorwire import checkpoint
from tensorwire.checkpoint import (
    ChainServer,
    CheckpointError,
    Following,
    MismatchError,
    NoPublisherError,
    Publishing,
    WrongKeyError,
)
from tensorwire.checkpoint.remote import messages, mirror, server
from tensorwire.checkpoint.remote.client import PublishedChain
from tensorwire.checkpoint.remote.handshake import HELLO_BYTES, NONCE_BYTES, ReaderSide
from tensorwire.checkpoint.remote.keys import write_reader_key
from tests import waiting
from tests.free_ports import free_port
from tests.rpc.transports.tensorwire import certificates
from tests.tensorwire.checkpoint.folders import flip

_KEY = checkpoint.reader_key(b"the key of the group")


class _Published:
    """A model that is published, and a server of its chain."""

    def __init__(self, folder: Path, size: int = 3, base_every: int = 20) -> None:
        self.folder = folder
        self.model = nn.Linear(size, 2)
        self.publishing: Publishing = checkpoint.publish(
            {"model": self.model}, folder / "chain", base_every=base_every, keep_bases=1
        )
        self.key_file = folder / "reader.key"
        write_reader_key(self.key_file, _KEY)
        self.server = ChainServer(folder / "chain", _KEY)

    def update(self) -> int:
        with torch.no_grad():
            for each in self.model.parameters():
                each += 1
        return self.publishing.update().number

    def follow(self, **given: Any) -> Following:
        url = f"tensorwire://127.0.0.1:{self.server.port}"
        return checkpoint.follow(url, key_file=self.key_file, interval=0.01, **given)

    def assert_same(self, weights: Following) -> None:
        found = nn.Linear(self.model.in_features, 2)
        weights.load_into(found)
        torch.testing.assert_close(found.state_dict(), self.model.state_dict(), rtol=0, atol=0)

    def close(self) -> None:
        self.server.close()
        self.publishing.close()


@pytest.fixture
def published(tmp_path: Path) -> Iterator[_Published]:
    with contextlib.closing(_Published(tmp_path)) as made:
        yield made


def test_readers_have_each_version_that_comes(published: _Published) -> None:
    with published.follow() as one, published.follow() as other:
        for _ in range(3):
            number = published.update()
            for weights in (one, other):
                weights.wait_for(number, timeout=60)
                published.assert_same(weights)
                assert weights.error is None


def test_a_follower_leaves_nothing_behind(
    published: _Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with published.follow() as weights:
        (folder,) = (tmp_path / "tmp").iterdir()
        weights.wait_for(published.update(), timeout=60)
        waiting.until(lambda: not list(folder.iterdir()), 90)
    assert not list((tmp_path / "tmp").iterdir())


def test_a_follower_waits_for_its_publisher_and_for_the_first_version(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"no version after 0.0 seconds: nobody answers at"):
        _follow_nobody(tmp_path)
    with (
        ChainServer(tmp_path / "chain", _KEY) as late,
        pytest.raises(TimeoutError, match=r"no version after 0.0 seconds$"),
    ):
        _follow(f"tensorwire://localhost:{late.port}", tmp_path)


def _follow_nobody(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    _follow(f"tensorwire://127.0.0.1:{port}", folder)


def _follow(url: str, folder: Path, key: bytes = _KEY, tls: TlsOptions | None = None) -> None:
    write_reader_key(folder / "some.key", key)
    checkpoint.follow(url, key_file=folder / "some.key", tls=tls, timeout=0.0).close()


@pytest.mark.parametrize("key", [b"the key of the group", b"x" * 64])
def test_another_key_is_refused(published: _Published, tmp_path: Path, key: bytes) -> None:
    with pytest.raises(WrongKeyError, match=r"refuses the key: give key_file= the file that"):
        _follow(f"tensorwire://127.0.0.1:{published.server.port}", tmp_path, key)


def _answer(listener: socket.socket, data: bytes) -> None:
    with listener, listener.accept()[0] as connected:
        connected.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            while connected.recv(100):
                pass


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n" * 9, "does not speak the protocol"),
        (b"\xf5TWread\x09" + bytes(32), "speaks version 9 of the protocol, not 1"),
        (b"\xf5TWread\x01" + bytes(32) + b"\1" * 33, "does not have the key"),
    ],
)
def test_somebody_else_who_answers_is_not_believed(tmp_path: Path, data: bytes, said: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    thread = threading.Thread(target=_answer, args=(listener, data))
    thread.start()
    with pytest.raises(CheckpointError, match=said):
        _follow(f"tensorwire://127.0.0.1:{port}", tmp_path)
    thread.join()


def test_a_follower_outlives_its_publisher(
    published: _Published, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()  # nobody else takes it meanwhile
    published.server.close()
    published.server = ChainServer(published.folder / "chain", _KEY, port=port)
    with published.follow() as weights:
        published.server.close()
        waiting.until(lambda: isinstance(weights.error, NoPublisherError), 90)
        published.assert_same(weights)
        assert "is served on, as no newer one can be taken over" in caplog.text
        with ChainServer(published.folder / "chain", _KEY, port=port):
            weights.wait_for(published.update(), timeout=60)
            published.assert_same(weights)


def test_a_cache_is_fetched_once(published: _Published, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with published.follow(cache=cache) as weights:
        weights.wait_for(published.update(), timeout=60)
        with pytest.raises(BlockingIOError, match="another follower fetches versions into cache="):
            published.follow(cache=cache)
    before = {path: path.stat().st_mtime_ns for path in cache.glob("*/*")}
    assert {path.parent.name for path in before} == {"0000000000.base", "0000000001.delta"}
    victim = sorted(path for path in before if path.parent.name.endswith("delta"))[0]
    flip(victim, 100)
    with published.follow(cache=cache) as weights:
        assert weights.version == 1
        published.assert_same(weights)
    after = {path: path.stat().st_mtime_ns for path in cache.glob("*/*")}
    assert {path.parent.name for path in after if after[path] != before[path]} == {
        "0000000001.delta"
    }


def test_a_reader_that_fell_behind_starts_from_the_next_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if versions go while it fetches them."""
    with contextlib.closing(_Published(tmp_path, base_every=2)) as published:
        chain = PublishedChain(f"tensorwire://127.0.0.1:{published.server.port}", _KEY)
        told = chain.way(None)
        for _ in range(2):
            published.update()
        chain.way = lambda after: told if after is None else []  # type: ignore[method-assign]
        source = mirror.Mirror(chain, None)
        assert not list(source.route(None))
        assert "version 0 of tensorwire://" in caplog.text
        assert "is not followed, but the next base" in caplog.text
        source.close()
        with published.follow() as weights:
            assert weights.version == 2


def test_damage_and_another_chain_are_refused_and_named(
    published: _Published, tmp_path: Path
) -> None:
    with published.follow() as weights:
        folder = published.folder / "chain"
        moved = folder.rename(tmp_path / "moved")
        other = checkpoint.publish({"model": published.model}, folder)
        other.close()
        waiting.until(lambda: isinstance(weights.error, MismatchError), 90)
        assert "holds another chain" in str(weights.error)
        shutil.rmtree(folder)
        moved.rename(folder)
        number = published.update()
        weights.wait_for(number, timeout=60)
        (part,) = (p for p in (folder / "0000000000.base").iterdir() if p.suffix == ".safetensors")
        flip(part, -9)
        with pytest.raises(CheckpointError, match=r"safetensors is damaged: its checksum is"):
            published.follow()


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 60)


def _prove(connected: socket.socket) -> socket.socket:
    side = ReaderSide(_KEY, os.urandom(NONCE_BYTES))
    connected.sendall(side.hello())
    connected.sendall(side.prove(connected.recv(HELLO_BYTES, socket.MSG_WAITALL)))
    side.check(connected.recv(33, socket.MSG_WAITALL))
    return connected


def test_a_slow_reader_holds_nobody_up_and_takes_little_memory(tmp_path: Path) -> None:
    """It asks for many large files, and takes nothing of what comes."""
    with contextlib.closing(_Published(tmp_path, size=1 << 19)) as published:
        (version,) = checkpoint.Chain.open(tmp_path / "chain").versions()
        (name,) = (each for each in version.files if each.endswith(".safetensors"))
        ask = messages.encoded(messages.Read(version.number, version.checksum, name, 0))
        slow = [_prove(_connect(published.server.port)) for _ in range(8)]
        for each in slow:
            each.sendall(ask * 20)
        with published.follow() as weights:
            published.assert_same(weights)
        loop = published.server._loop
        written = [
            task.get_coro().cr_frame.f_locals["writer"].transport.get_write_buffer_size()
            for task in published.server._connections._tasks.values()
            if task.get_loop() is loop
        ]
        assert len(written) >= 8
        assert max(written) <= 2 * server._PIECE + (1 << 16)
        for each in slow:
            each.close()


def test_who_proves_nothing_is_let_go(
    published: _Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_SECONDS_TO_PROVE", 0.2)
    for said in (b"", b"\xf5TWread\x01" + bytes(32), b"GET / HTTP/1.1\r\n\r\n" * 30):
        with _connect(published.server.port) as connected:
            connected.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                while connected.recv(100):
                    pass


@pytest.mark.parametrize("has_tls", [False, True])
def test_strangers_are_few_before_they_prove_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_tls: bool
) -> None:
    monkeypatch.setattr(server, "_SECONDS_TO_PROVE", 600.0)
    tls = certificates.write(tmp_path, "publisher") if has_tls else None
    with ChainServer(tmp_path / "chain", _KEY, tls=tls) as served:
        strangers = [_connect(served.port) for _ in range(2 * server._STRANGERS)]
        for each in strangers[server._STRANGERS :]:
            with each, contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b"", "it is let go at once, though others say nothing"
        for each in strangers[: server._STRANGERS]:
            each.setblocking(False)
            with each, pytest.raises(BlockingIOError):
                each.recv(1)


def test_strangers_do_not_keep_readers_out(
    published: _Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_SECONDS_TO_PROVE", 0.5)
    published.server.close()
    published.server = ChainServer(published.folder / "chain", _KEY)
    strangers = [_connect(published.server.port) for _ in range(2 * server._STRANGERS)]
    with published.follow(timeout=60.0) as weights:
        published.assert_same(weights)
    for each in strangers:
        each.close()


def test_more_readers_than_may_be_are_told_so(tmp_path: Path) -> None:
    with ChainServer(tmp_path, _KEY, max_readers=1) as served:
        chains = [PublishedChain(f"tensorwire://127.0.0.1:{served.port}", _KEY) for _ in range(2)]
        assert chains[0].way(None) == []
        with pytest.raises(CheckpointError, match=r"it has 1 readers, as many as it may have"):
            chains[1].way(None)
        for each in chains:
            each.close()


@pytest.mark.parametrize(
    "said",
    [
        messages.REQUEST_HEAD.pack(9, 0),
        messages.REQUEST_HEAD.pack(1, 60_000),
        messages.REQUEST_HEAD.pack(2, 3) + b"abc",
    ],
)
def test_a_reader_that_asks_for_what_cannot_be_is_let_go(
    published: _Published, said: bytes
) -> None:
    with _prove(_connect(published.server.port)) as connected:
        connected.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert connected.recv(1) == b""


@pytest.mark.parametrize("name", ["../reader.key", "version.json", "/etc/hostname", "", "no"])
def test_only_files_of_versions_are_given(published: _Published, name: str) -> None:
    (version,) = checkpoint.Chain.open(published.folder / "chain").versions()
    chain = PublishedChain(f"tensorwire://127.0.0.1:{published.server.port}", _KEY)
    with pytest.raises(mirror.RemovedError):
        list(chain.read(version, name, 0))
    assert len(chain.way(None)) == 1, "the connection is used on"
    chain.close()


def test_tls_binds_the_publisher_to_its_name(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("publisher", "reader", "other")}
    for each in folders.values():
        each.mkdir()
    tls = {name: certificates.write(folder, name) for name, folder in folders.items()}
    everybody = certificates.write(tmp_path, "*")
    publishing = checkpoint.publish({"x": torch.ones(3)}, tmp_path / "chain")
    publishing.close()
    write_reader_key(tmp_path / "key", _KEY)
    with ChainServer(tmp_path / "chain", _KEY, tls=tls["publisher"]) as served:
        url = f"tensorwire://127.0.0.1:{served.port}"
        for mine in (tls["reader"], everybody):
            with checkpoint.follow(url, key_file=tmp_path / "key", tls=mine) as found:
                assert torch.equal(found.value("x"), torch.ones(3))
        with pytest.raises(TimeoutError, match="does not shake hands, or wants tls="):
            _follow(url, tmp_path)
        with pytest.raises(BringUpError, match="is for 'other', not for worker 'reader'"):
            _follow(url, tmp_path, tls=tls["other"])
    with pytest.raises(BringUpError, match="not for worker 'publisher'"):
        ChainServer(tmp_path, _KEY, tls=tls["reader"])


def test_a_reader_asks_for_the_certificate_of_a_publisher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker of the group, which has a certificate too, is not taken for one."""
    other = certificates.write(tmp_path, "trainer0")
    monkeypatch.setattr(server, "PUBLISHER_NAME", "trainer0")
    with (
        ChainServer(tmp_path, _KEY, tls=other) as served,
        pytest.raises(CheckpointError, match="is for 'trainer0', not for worker 'publisher'"),
    ):
        _follow(f"tensorwire://localhost:{served.port}", tmp_path, tls=certificates.for_everybody())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: checkpoint.follow("tensorwire://host:1"), "needs key_file=, a file with"),
        (lambda: checkpoint.follow("x", key_file="key"), r"key_file='key' is for tensorwire://"),
        (lambda: checkpoint.follow("x", cache="y"), r"cache='y' is for URLs; 'x' is a folder"),
        (lambda: PublishedChain("tensorwire://host", _KEY), "is no address of a publisher"),
        (lambda: PublishedChain("tensorwire://host:1/x", _KEY), "is no address of a publisher"),
        (lambda: PublishedChain("tensorwire://host:99999", _KEY), "is no address of a publisher"),
        (lambda: checkpoint.reader_key(b""), "the group has no key"),
        (lambda: ChainServer("x", b"short"), "5 bytes are too few"),
        (lambda: ChainServer("x", _KEY, max_readers=0), "max_readers=0 must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_port_that_is_taken_is_an_error(published: _Published) -> None:
    with pytest.raises(OSError, match="in use"):
        ChainServer("x", _KEY, port=published.server.port)


def test_the_reader_key_is_hkdf_of_the_groups(tmp_path: Path) -> None:
    """Derives the key of RFC 5869 by another library."""
    hkdf = pytest.importorskip("cryptography.hazmat.primitives.kdf.hkdf")
    hashes = pytest.importorskip("cryptography.hazmat.primitives.hashes")
    info = b"reader key of published versions"
    derived = hkdf.HKDF(hashes.SHA256(), 32, b"tensorwire", info).derive(b"the key of the group")
    assert derived.hex().encode() == _KEY


def test_refusals_are_logged_without_the_key(
    published: _Published, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(WrongKeyError):
        _follow(f"tensorwire://127.0.0.1:{published.server.port}", tmp_path, b"w" * 64)
    waiting.until(lambda: "is refused: the reader does not have the key" in caplog.text, 90)
    assert "www" not in caplog.text
