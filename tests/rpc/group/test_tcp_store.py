"""Our client of torch's store servers: the same answers as torch's own, and deadlines."""

from __future__ import annotations

import gc
import select
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from rpc.group import tcp_store
from rpc.group.tcp_store import StoreLostError, TcpStoreClient
from tests.rpc.stores import SECONDS, SOON
from tests.waiting import until


@pytest.fixture(params=[True, False], ids=["libuv", "poll"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of one of torch's servers."""
    host = serving(use_libuv=request.param)
    yield host.port
    del host


def serving(port: int = 0, use_libuv: bool = True) -> TCPStore:
    given = {"wait_for_workers": False, "use_libuv": use_libuv}
    return TCPStore("127.0.0.1", port, None, True, SECONDS, **given)


def of_torch(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, False, SECONDS)


def ours(port: int) -> TcpStoreClient:
    return TcpStoreClient("127.0.0.1", port, SOON)


@pytest.fixture
def frozen() -> Iterator[socket.socket]:
    """Accepts connections, and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_torchs_clients_see_what_it_writes_and_it_sees_theirs(port: int) -> None:
    host, client = of_torch(port), ours(port)
    client.set("text", "value")
    host.set("bytes", "\x00\x01")
    assert (host.get("text"), client.get("bytes")) == (b"value", b"\x00\x01")
    assert client.multi_get(["text", "bytes"]) == [b"value", b"\x00\x01"]
    assert [client.add("count", 3), host.add("count", -1)] == [3, 2]
    assert client.check(["text", "count"])
    assert not client.check(["text", "nothing"])
    assert client.delete_key("text")
    assert not client.delete_key("text")
    assert client.num_keys() == host.num_keys()


def test_compare_set_answers_as_torchs(port: int) -> None:
    host, client = of_torch(port), ours(port)
    steps = [("", "1"), ("", "2"), ("1", "3"), ("1", "4"), ("3", "3")]
    answers = [client.compare_set("ours", *step) for step in steps]
    assert answers == [host.compare_set("theirs", *step) for step in steps]
    absent = [store.compare_set("absent", "x", "y") for store in (client, host)]
    assert absent == [b"x", b"x"]


def test_many_changes_take_few_round_trips_and_are_answered_in_order(port: int) -> None:
    changes = [(f"key{number}", "", f"{number}" * 100) for number in range(300)]
    assert ours(port).compare_set_all(changes) == [value.encode() for _, _, value in changes]


def test_a_wait_ends_when_the_keys_are_there_or_the_time_is_over(port: int) -> None:
    host, client = of_torch(port), ours(port)
    with pytest.raises(TimeoutError):
        client.wait(["key"], timedelta(seconds=0.01))
    assert client.add("count", 1) == 1, "the answers are in step"
    setting = threading.Timer(0.05, host.set, ("key", "value"))
    setting.start()
    client.wait(["key", "count"], SECONDS)
    setting.join()


def test_a_prefix_of_torchs_may_stand_before_it(port: int) -> None:
    client = ours(port)
    PrefixStore("mine", client).set("key", "value")
    assert client.get("mine/key") == b"value"


def test_a_frozen_server_is_waited_for_until_the_deadline_and_named_in_the_log(
    frozen: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_store, "SECONDS_OF_SILENCE", 0.05)
    port = frozen.getsockname()[1]
    client = TcpStoreClient("127.0.0.1", port, 60)
    for request in (lambda: client.check(["key"]), lambda: client.wait(["key"])):
        client.until = time.monotonic() + 0.2
        with pytest.raises(StoreLostError, match=f"127.0.0.1:{port} did not answer in time"):
            request()
    assert f"the group's store at 127.0.0.1:{port} has not answered for 0.05 s" in caplog.text


def test_a_server_that_is_gone_is_named_and_a_later_one_is_found() -> None:
    host = serving()
    port = host.port
    client = ours(port)
    client.set("key", "value")
    assert client.check(["key"])
    del host
    with pytest.raises(OSError, match=r"closed the connection|reset|refused"):
        client.check(["key"])
    later: list[TCPStore] = []

    def host_again() -> bool:
        try:
            later.append(serving(port))
        except RuntimeError:  # the port is not free yet
            return False
        return True

    until(host_again)
    assert not client.check(["key"])


def test_a_wrong_server_cannot_have_it_allocate_at_will(frozen: socket.socket) -> None:
    client = ours(frozen.getsockname()[1])

    def answer() -> None:
        accepted, _ = frozen.accept()
        with accepted:
            accepted.recv(5)
            accepted.recv(100)
            accepted.sendall(b"\xff" * 8)

    answering = threading.Thread(target=answer)
    answering.start()
    with pytest.raises(StoreLostError, match="sent a value of"):
        client.compare_set("key", "", "value")
    answering.join()


def test_what_a_connection_swallows_is_asked_again_over_another(port: int) -> None:
    """A cut does so: a connection that is there already recovers late from it."""
    swallowed: list[socket.socket] = []

    def relay(listener: socket.socket) -> None:
        swallowed.append(listener.accept()[0])
        connected = listener.accept()[0]
        with connected, socket.create_connection(("127.0.0.1", port)) as onward:
            ends = {connected: onward, onward: connected}
            while True:
                for ready in select.select(list(ends), [], [])[0]:
                    data = ready.recv(4096)
                    if not data:
                        return
                    ends[ready].sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=relay, args=(listener,))
        thread.start()
        client = TcpStoreClient("127.0.0.1", listener.getsockname()[1], 60)
        client.attempt = 0.1
        client.set("key", "value")
        client.attempt = 60
        assert client.get("key") == b"value"
        assert client.add("count", 0) == 0
        assert len(swallowed) == 1
        del client
        gc.collect()
        thread.join()
        swallowed[0].close()


def test_an_attempt_is_not_the_last_before_the_deadline(frozen: socket.socket) -> None:
    client = TcpStoreClient("127.0.0.1", frozen.getsockname()[1], 0.5)
    client.attempt = 0.05
    with pytest.raises(StoreLostError, match="did not answer in time"):
        client.check(["key"])
    frozen.settimeout(5)
    for _ in range(2):  # more than one connection came
        frozen.accept()[0].close()
