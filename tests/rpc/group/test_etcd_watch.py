"""Watches over keys in etcd: members that end streams, hang up, refuse, or are not there."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import logging
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rpc.group.etcd_store import EtcdPlace
from rpc.group.etcd_watch import EtcdWatch
from rpc.group.store_watch import StoreWatch
from tests.free_ports import free_port
from tests.waiting import until

SECONDS = 60.0
_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Member:
    """A member of etcd that streams what a test says."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = ("127.0.0.1", self._listener.getsockname()[1])
        self.asked: queue.Queue[tuple[bytes, list[bytes]]] = queue.Queue()
        self._streams: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            stream, _ = self._listener.accept()
            file = stream.makefile("rb")
            head = b"".join(itertools.takewhile(lambda line: line != b"\r\n", file))
            if not head:
                file.close()
                stream.close()
                return
            (length,) = (int(line[15:]) for line in head.lower().split(b"\r\n")
                         if line.startswith(b"content-length:"))  # fmt: skip
            keys = [
                base64.b64decode(json.loads(each + b"}}")["create_request"]["key"])
                for each in file.read(length).split(b"}}")
                if each
            ]
            file.close()
            stream.sendall(_HEAD)
            self._streams.append(stream)
            self.asked.put((head, keys))

    def says(self, *messages: dict[str, Any]) -> None:
        """Sends lines to the last stream."""
        data = b"".join(json.dumps(each).encode() + b"\n" for each in messages)
        self._streams[-1].sendall(b"%x\r\n%s\r\n" % (len(data), data))

    def stands(self, keys: int = 1) -> None:
        """Waits for a stream, and says that its watches are made."""
        self.asked.get(timeout=SECONDS)
        self.says(*[{"result": {"created": True}}] * keys)

    def hang_up(self) -> None:
        self._streams.pop().close()

    def close(self) -> None:
        socket.create_connection(self.place).close()
        self._thread.join(SECONDS)
        self._listener.close()
        for stream in self._streams:
            stream.close()


CHANGE = {"result": {"events": [{"kv": {"key": "Yg=="}}]}}


@pytest.fixture
def member() -> Iterator[Member]:
    with contextlib.closing(Member()) as made:
        yield made


@contextlib.contextmanager
def watch(*places: tuple[str, int], keys: int = 1) -> Iterator[tuple[EtcdWatch, queue.Queue[str]]]:
    """A watch, and what it was told."""
    told: queue.Queue[str] = queue.Queue()
    names = [f"/j/key{number}" for number in range(keys)]
    made = EtcdWatch(EtcdPlace(places), names, lambda: told.put("told"))
    try:
        yield made, told
    finally:
        made.close()
        assert not made._thread.is_alive()


def test_a_store_that_cannot_tell_may_always_have_changed() -> None:
    never = StoreWatch()
    assert never.may_have_changed()
    assert never.may_have_changed()
    assert not never.stands


def test_changes_are_told_and_nothing_is_asked_for_between_them(member: Member) -> None:
    with watch(member.place, keys=2) as (made, told):
        head, keys = member.asked.get(timeout=SECONDS)
        assert keys == [b"/j/key0", b"/j/key1"]
        assert head.startswith(b"POST /v3/watch ")
        assert b"\r\nGrpc-Metadata-hasleader: true\r\n" in head
        assert made.may_have_changed()
        assert made.may_have_changed()  # until it stands
        member.says({"result": {"created": True}})
        member.says({"result": {"created": True}})
        told.get(timeout=SECONDS)
        assert made.stands
        assert made.may_have_changed()
        assert not made.may_have_changed()
        member.says(CHANGE)
        told.get(timeout=SECONDS)
        assert made.may_have_changed()
        member.says({"result": {"header": {}}})  # no news: a sign of life
        member.says(CHANGE)
        told.get(timeout=SECONDS)
        assert told.empty()


def test_keys_are_read_now_and_then_although_nothing_is_told(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpc.group.store_watch.SECONDS_BETWEEN_READS", 0.0)
    with watch(member.place) as (made, told):
        member.stands()
        told.get(timeout=SECONDS)
        assert made.stands
        assert made.may_have_changed()
        assert made.may_have_changed()


@pytest.mark.parametrize(
    "end",
    [
        {"result": {"canceled": True, "compact_revision": "7"}},
        {"result": {"canceled": True, "cancel_reason": "etcdserver: no leader"}},
        {"error": {"grpc_code": 14, "message": "etcdserver: server stopped"}},
        None,
    ],
    ids=["compacted", "no leader", "error", "hung up"],
)
def test_a_stream_that_ends_is_followed_by_one_at_the_next_member(
    member: Member, end: dict[str, Any] | None
) -> None:
    """No change between the two is missed: the keys are read again."""
    with (
        contextlib.closing(Member()) as other,
        watch(member.place, other.place) as (made, told),
    ):
        member.stands()
        told.get(timeout=SECONDS)
        if end is None:
            member.hang_up()
        else:
            member.says(end)
        told.get(timeout=SECONDS)  # as it does not stand
        assert made.may_have_changed()
        other.stands()
        told.get(timeout=SECONDS)
        assert made.stands
        assert made.may_have_changed()
        assert not made.may_have_changed()


def test_who_relies_on_it_asks_for_itself_while_no_member_tells(
    member: Member, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rpc")
    nobody = ("127.0.0.1", free_port())
    with watch(nobody, nobody, nobody, member.place) as (made, _):
        until(lambda: "Connection refused" in caplog.text, SECONDS)
        assert "tells of changes" in caplog.text
        assert not made.stands
        assert made.may_have_changed()
        assert made.may_have_changed()
        member.stands()
        until(lambda: made.stands, SECONDS)
        until(lambda: "tells of changes again" in caplog.text, SECONDS)
    assert caplog.text.count("until one does") == 1


def test_a_stream_that_no_member_answers_ends_with_its_watch(member: Member) -> None:
    """The thread waits for the answer of a member that accepted, and says nothing."""
    with watch(member.place):
        member.asked.get(timeout=SECONDS)
