"""This host's addresses, as the kernel tells them."""

from __future__ import annotations

import socket
from concurrent.futures import ProcessPoolExecutor

import pytest

from rpc.group import host_addresses as module
from rpc.group.host_addresses import (
    HostAddress,
    _guest_bridges,
    _Interface,
    address_on_the_way_to,
    describe_addresses,
    host_addresses,
    outward_address,
    resolve_host,
)
from tests.machines import Machine, machines, require_machines
from tests.processes import ready_made


def test_the_loopback_interface_is_known_and_of_no_use_to_others() -> None:
    found = {each.address: each for each in host_addresses()}
    assert found["127.0.0.1"] == HostAddress("127.0.0.1", "lo", True)
    assert "127.0.0.1" not in describe_addresses(host_addresses())


def test_where_the_kernel_does_not_tell_the_hosts_name_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_DUMP_REQUEST", 0xFFFF)
    monkeypatch.setattr(module, "_GET_LINK", 9999)
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.1")
    assert host_addresses() == (HostAddress("127.0.0.1", "", True),)


def test_a_host_with_its_loopback_interface_only_says_so() -> None:
    mine = [HostAddress("127.0.0.1", "lo", True), HostAddress("fe80::1", "eth0")]
    assert describe_addresses(mine) == "on its loopback interface only"
    assert outward_address(mine) is None


def test_names_are_resolved_and_addresses_stand_for_themselves() -> None:
    assert resolve_host("127.0.0.1") == ["127.0.0.1"]
    assert "127.0.0.1" in resolve_host("localhost")
    with pytest.raises(OSError, match="no name of a host"):
        resolve_host("a..b")


def test_a_bridge_with_a_cable_leads_to_other_hosts() -> None:
    interfaces = {
        1: _Interface("lan0", "bridge", 0),
        2: _Interface("eth0", "", 1),
        3: _Interface("guest0", "veth", 1),
        4: _Interface("docker0", "bridge", 0),
        5: _Interface("guest1", "veth", 4),
        6: _Interface("virbr0", "bridge", 0),
    }
    assert _guest_bridges(interfaces) == {4, 6}


def _seen_on(machine: Machine) -> tuple[tuple[HostAddress, ...], str | None, str | None]:
    machine.enter()
    mine = host_addresses()
    return mine, outward_address(mine), address_on_the_way_to(machine.address, 9)


@pytest.mark.slow
@pytest.mark.usefixtures("process_server")
def test_a_bridge_for_containers_means_nothing_to_other_hosts() -> None:
    require_machines()
    with machines("one") as (one,):
        one.ip("link", "add", "docker0", "up", "type", "bridge")
        one.ip("address", "add", "172.17.0.1/16", "dev", "docker0")
        one.ip("link", "add", "guest", "up", "master", "docker0", "type", "veth")
        with ProcessPoolExecutor(1, ready_made()) as pool:
            found, outward, mine = pool.submit(_seen_on, one).result()
    where = {each.interface for each in found if each.is_local}
    assert where == {"lo", "docker0"}
    assert HostAddress("172.17.0.1", "docker0", True) in found
    assert outward == mine == one.address
