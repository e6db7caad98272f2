"""The right connection is closed when too many are unauthenticated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rpc.transports.tensorwire.unauthenticated import UnauthenticatedConnections


def enter(
    connections: UnauthenticatedConnections[str], *clients: str, now: float = 100.0
) -> list[str | None]:
    """Adds connections, each of the origin that its first letter names; returns the evicted."""
    return [connections.add(client, client[0], now) for client in clients]


def test_as_long_as_there_is_room_nobody_goes() -> None:
    connections = UnauthenticatedConnections[str](2, 0.0)
    assert enter(connections, "a1", "a2") == [None, None]
    connections.discard("a1")
    connections.discard("a1")
    assert enter(connections, "a3") == [None]


def test_the_oldest_goes_of_those_from_where_most_came_from() -> None:
    connections = UnauthenticatedConnections[str](4, 0.0)
    assert enter(connections, "a1", "b1", "b2", "c1", "c2", "b3", "b4") == [
        *[None] * 4,
        "b1",
        "b2",
        "c1",
    ]


def test_where_all_come_from_one_place_the_oldest_goes() -> None:
    connections = UnauthenticatedConnections[str](2, 0.0)
    assert enter(connections, "a1", "a2", "a3", "a4") == [None, None, "a1", "a2"]


def test_those_who_have_time_are_not_pushed_out_by_their_like() -> None:
    connections = UnauthenticatedConnections[str](2, 1.0)
    assert enter(connections, "a1", "a2") == [None, None]
    assert enter(connections, "a3", now=100.9) == ["a3"]
    assert enter(connections, "a4", now=101.0) == ["a1"]


def test_whoever_comes_from_elsewhere_gets_in_at_once() -> None:
    connections = UnauthenticatedConnections[str](2, 1.0)
    assert enter(connections, "a1", "a2", "b1", "b2") == [None, None, "a1", "b2"]


@given(st.integers(2, 8), st.sampled_from([0.0, 1.0]), st.integers(0, 20))
def test_who_is_alone_at_its_place_stays_whatever_comes_from_another(
    most: int, seconds: float, before: int
) -> None:
    connections = UnauthenticatedConnections[str](most, seconds)
    enter(connections, *[f"f{number}" for number in range(before)])
    left = enter(connections, "m", *[f"f{number}" for number in range(before, before + 50)])
    assert "m" not in left


_PLACES = st.lists(st.sampled_from("abbccccccccccccc"), max_size=100)


@given(_PLACES, st.integers(2, 8), st.sampled_from([0.0, 1.0]))
def test_there_are_never_too_many_and_who_goes_was_inside(
    places: list[str], most: int, seconds: float
) -> None:
    connections = UnauthenticatedConnections[str](most, seconds)
    inside: set[str] = set()
    for number, place in enumerate(places):
        client = f"{place}{number}"
        inside.add(client)
        evicted = connections.add(client, place, 100.0)
        assert (evicted is None) == (len(inside) <= most)
        assert evicted is None or evicted in inside
        inside.discard(evicted or "")
