"""The page keeps so many connections open, and those who have shown the token the longest."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tensorwire.watching.dashboard.connections import Connections

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made = [socket.socketpair() for _ in range(6)]
    yield made
    for pair in made:
        for each in pair:
            each.close()


def ended(pair: Pair) -> bool:
    pair[1].setblocking(False)
    try:
        return pair[1].recv(1) == b""
    except BlockingIOError:
        return False


def open_all(connections: Connections, pairs: list[Pair]) -> None:
    for port, pair in enumerate(pairs):
        connections.opened(("127.0.0.1", port), pair[0])


def test_too_many_end_the_oldest_of_those_without_the_token(pairs: list[Pair]) -> None:
    connections = Connections(3)
    open_all(connections, pairs[:3])
    connections.showed_token(("127.0.0.1", 0))
    for port in (3, 4):
        connections.opened(("127.0.0.1", port), pairs[port][0])
    assert [ended(pair) for pair in pairs] == [False, True, True, False, False, False]


def test_among_those_with_the_token_the_one_that_asked_the_longest_ago_goes(
    pairs: list[Pair],
) -> None:
    connections = Connections(3)
    open_all(connections, pairs[:3])
    for port in (1, 0, 2, 1):
        connections.showed_token(("127.0.0.1", port))
    connections.opened(("127.0.0.1", 3), pairs[3][0])
    assert [ended(pair) for pair in pairs[:4]] == [True, False, False, False]


def test_those_that_closed_make_room(pairs: list[Pair]) -> None:
    connections = Connections(3)
    open_all(connections, pairs[:3])
    pairs[1][0].close()
    connections.opened(("127.0.0.1", 3), pairs[3][0])
    assert not any(map(ended, (pairs[0], pairs[2], pairs[3])))


def test_addresses_of_ipv6_are_known_by_their_first_two_parts(pairs: list[Pair]) -> None:
    connections = Connections(2)
    connections.opened(("::1", 0, 0, 0), pairs[0][0])
    connections.opened(("::1", 1, 0, 0), pairs[1][0])
    connections.showed_token(("::1", 0))
    connections.opened(("::1", 2, 0, 0), pairs[2][0])
    assert [ended(pair) for pair in pairs[:3]] == [False, True, False]
