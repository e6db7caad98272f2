"""The decision which agent hosts the store: pure, for hosts of all kinds."""

from __future__ import annotations

import pytest

from rpc.extend import HostAddress
from tensorwire.launch.endpoint import EndpointError, Host, Place, find_place, is_loopback

ONE, TWO, DOCKER = "10.0.0.1", "10.0.0.2", "172.17.0.1"


def host(name: str, address: str) -> Host:
    addresses = [HostAddress(address, "eth0"), HostAddress(DOCKER, "docker0", True)]
    return Host([*addresses, HostAddress("127.0.0.1", "lo", True)], [f"{name}.lan"], address)


FIRST, SECOND = host("one", ONE), host("two", TWO)
Resolver = dict[str, list[str]]
DEBIAN = ({"one": ["127.0.1.1"]}, {"one": [ONE]})
"""Addresses of names on the first machine and on the second."""


def who_hosts(endpoint: str, names: tuple[Resolver, Resolver], least: int = 2) -> list[bool]:
    """True for each of the two machines that hosts the store."""
    hosts = zip((FIRST, SECOND), names, strict=True)
    return [
        find_place(endpoint, known.get(endpoint, []), each, least, None).is_here
        for each, known in hosts
    ]


@pytest.mark.parametrize(
    ("endpoint", "names"),
    [
        (ONE, ({ONE: [ONE]}, {ONE: [ONE]})),
        ("one", ({"one": [ONE]}, {"one": [ONE]})),
        ("one", DEBIAN),
        ("one", ({"one": ["127.0.1.1", ONE]}, {"one": [ONE]})),
        ("one", ({}, {"one": [ONE]})),  # known to others only
        ("ONE", ({}, {})),
        ("head", ({"head": [ONE, TWO]}, {"head": [ONE, TWO]})),  # one name of two machines
    ],
)
def test_exactly_one_machine_hosts_it(endpoint: str, names: tuple[Resolver, Resolver]) -> None:
    assert who_hosts(endpoint, names) == [True, False]


def test_nobody_does_before_the_name_is_known() -> None:
    assert who_hosts("head", ({}, {})) == [False, False]


@pytest.mark.parametrize("endpoint", ["localhost", "127.0.0.1", DOCKER])
def test_an_address_that_every_machine_has_is_refused_for_several(endpoint: str) -> None:
    resolved = ["127.0.0.1"] if endpoint == "localhost" else [endpoint]
    with pytest.raises(EndpointError) as raised:
        find_place(endpoint, resolved, FIRST, 2, None)
    for told in (f"--rdzv-endpoint={endpoint}", f"{ONE} (eth0)", "is_host=true"):
        assert told in str(raised.value)
    assert find_place(endpoint, resolved, FIRST, 1, None).is_here
    assert find_place(endpoint, resolved, FIRST, 2, True).is_here
    assert not find_place(endpoint, resolved, FIRST, 2, False).is_here


def test_workers_are_told_an_address_that_others_can_reach() -> None:
    assert find_place("one", ["127.0.1.1"], FIRST, 2, None) == Place(True, ONE)
    assert find_place("one", ["127.0.1.1"], FIRST, 2, True) == Place(True, ONE)
    assert find_place("one", [], FIRST, 2, None) == Place(True, ONE)
    assert find_place("one", [ONE], SECOND, 2, None) == Place(False, "one")
    assert find_place("localhost", ["::1", "127.0.0.1"], FIRST, 1, None).told == "127.0.0.1"


def test_a_name_of_a_machine_that_has_only_its_loopback_interface_is_refused_for_several() -> None:
    alone = Host([HostAddress("127.0.0.1", "lo", True)], ["one"], None)
    assert find_place("one", ["127.0.1.1"], alone, 1, None) == Place(True, "one")
    with pytest.raises(EndpointError, match=r"stands for 127\.0\.1\.1 here"):
        find_place("one", ["127.0.1.1"], alone, 2, None)


def test_loopback_is_known_by_name_and_by_address() -> None:
    assert [is_loopback(each) for each in ("localhost", "127.0.0.1", "::1", "one", ONE)] == [
        *(True, True, True),
        *(False, False),
    ]
