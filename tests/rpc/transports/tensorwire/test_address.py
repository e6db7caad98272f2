"""Addresses: what is published is understood, and says where to connect."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.devices import DeviceInfo, as_device_map
from rpc.errors import BringUpError, FrameError
from rpc.transports.tensorwire.address import (
    TensorWireAddress,
    address_facing,
    listen_tcp,
    listen_unix,
    reachable_at,
    unix_path,
)

DEVICES = DeviceInfo(2, (), {"worker1": as_device_map({0: 1})})
NONE = b'{"count": 0, "devices": [], "maps": {}}'


@given(
    st.text(max_size=50),
    st.text(max_size=50),
    st.lists(st.tuples(st.text(max_size=30), st.integers(0, 65535)), max_size=4),
    st.binary(max_size=40),
)
def test_an_address_is_read_as_it_was_written(
    host: str, unix: str, tcp: list[tuple[str, int]], secret: bytes
) -> None:
    address = TensorWireAddress(host, unix, tuple(tcp), secret, DEVICES)
    assert TensorWireAddress.decode(address.encode()) == address


@given(st.binary(max_size=100))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        TensorWireAddress.decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"[]",
        b'{"version": 2}',
        b'{"version": 2, "host": "", "unix": "", "tcp": 5, "secret": "", "devices": %b}' % NONE,
        b'{"version": 2, "host": "", "unix": "", "tcp": [], "secret": "x", "devices": %b}' % NONE,
        b'{"version": 2, "host": "", "unix": "", "tcp": [], "secret": "", "devices": []}',
    ],
)
def test_what_is_not_an_address_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        TensorWireAddress.decode(data)


def test_a_unix_socket_leaves_nothing_in_the_file_system() -> None:
    with listen_unix() as listener, socket.socket(socket.AF_UNIX) as client:
        name = listener.getsockname()
        assert isinstance(name, bytes)
        assert name.startswith(b"\0")
        client.connect(unix_path(name[1:].decode()))


@pytest.mark.parametrize(
    ("bind", "expected"), [(None, "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")]
)
def test_a_listener_is_reachable_where_it_is_bound(bind: str | None, expected: str) -> None:
    (listener,) = listen_tcp(bind)
    with listener:
        ((host, port),) = reachable_at(listener)
        assert host == expected
        socket.create_connection((host, port)).close()


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_a_wildcard_is_published_as_addresses_that_lead_here(wildcard: str) -> None:
    (listener,) = listen_tcp(wildcard)
    with listener:
        addresses = reachable_at(listener)
        assert not {"0.0.0.0", "::"} & {host for host, _ in addresses}
        for host, port in addresses:
            socket.create_connection((host, port), timeout=10).close()


@pytest.mark.parametrize("bind", ["192.0.2.77", "no.such.host.invalid", "a..b"])
def test_an_address_that_is_not_ours_is_named(bind: str) -> None:
    with pytest.raises(BringUpError, match=f"bind_address='{bind}' .*; give an address or a host"):
        listen_tcp(bind)


@pytest.mark.parametrize("bind", ["fe80::1%lo", "fe80::1"])
def test_an_address_that_says_nothing_to_other_hosts_is_refused(bind: str) -> None:
    with pytest.raises(BringUpError, match=r"link-local address: .* give another address"):
        listen_tcp(bind)


def test_an_address_that_says_nothing_to_other_hosts_is_not_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (listener,) = listen_tcp("::")
    found = [(socket.AF_INET6, 1, 6, "", ("fe80::1%eth0", 0, 0, 2))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with listener:
        assert "::1" in {host for host, _ in reachable_at(listener)}
        assert not [host for host, _ in reachable_at(listener) if host.startswith("fe80")]


def test_traffic_to_this_host_leaves_from_the_loopback_interface() -> None:
    assert address_facing("127.0.0.1") == "127.0.0.1"
    assert address_facing("no such host.invalid") is None
