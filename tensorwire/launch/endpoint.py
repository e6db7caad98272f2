"""Decides which agent hosts the store of a rendezvous, given what each knows of its own host.

No I/O: takes the endpoint, the addresses that its name stands for here, and this host's own;
returns where the store is, or says why it cannot be there. Each agent decides alone, and never
do two of them host it: an address is one host's, and one that every host has is refused where
several hosts are the least that a job begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from rpc.extend import HostAddress, describe_addresses

_LOOPBACK = "127.0.0.1"
_IS_HOST = "--rdzv-conf is_host=true on one machine and is_host=false on the others"


class EndpointError(ValueError):
    """Agents cannot meet at that endpoint; says why, and what to give in its place."""


@dataclass(frozen=True, slots=True)
class Host:
    """The addresses and names of an agent's host.

    Args:
        addresses: of its interfaces.
        names: that it goes by.
        outward: the address that it tells others, as far as it knows.
    """

    addresses: Sequence[HostAddress]
    names: Sequence[str]
    outward: str | None

    def address(self, address: str) -> HostAddress | None:
        """One of its addresses; None if it is another host's."""
        if ip_address(address).is_loopback:
            return HostAddress(address, "lo", True)
        return next((each for each in self.addresses if each.address == address), None)

    def has_name(self, name: str) -> bool:
        """True of a name that it goes by, with its domain or without."""
        known = {each.lower() for each in self.names}
        return name.lower() in known | {each.partition(".")[0] for each in known}


@dataclass(frozen=True, slots=True)
class Place:
    """The place of the store of a rendezvous.

    Args:
        is_here: this agent hosts it, unless another one of this machine does.
        told: what this machine's workers call its host.
    """

    is_here: bool
    told: str


def is_loopback(host: str) -> bool:
    """True if only processes of this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def find_place(
    endpoint: str, resolved: Sequence[str], host: Host, least: int, is_host: bool | None
) -> Place:
    """Decides where the store is.

    Args:
        endpoint: the host in ``--rdzv-endpoint``, a name or an address.
        resolved: the addresses that it stands for on this host; none if it is not known here.
        host: this one.
        least: agents that the job begins with.
        is_host: what ``--rdzv-conf is_host`` says, if it does.

    Raises:
        EndpointError: the endpoint is an address that every machine has.
    """
    told = _LOOPBACK if is_loopback(endpoint) else endpoint
    if is_host is False:
        return Place(False, told)
    chosen = _one_of(resolved)
    mine = host.address(chosen) if chosen else None
    is_here = bool(is_host) or (mine is not None if chosen else host.has_name(endpoint))
    if is_here and not chosen and host.outward is not None:
        return Place(True, host.outward)
    if mine is None or not mine.is_local:
        return Place(is_here, told)
    is_name = endpoint != "localhost" and endpoint not in resolved
    if is_name and ip_address(mine.address).is_loopback and host.outward is not None:
        return Place(is_here, host.outward)  # as Debian has a host's own name stand for 127.0.1.1
    if least > 1 and is_host is None:
        raise EndpointError(_refusal(endpoint, mine, host, least))
    return Place(is_here, told)


def _one_of(resolved: Sequence[str]) -> str | None:
    """The address that decides, the same one on each host; loopback only where that is all."""
    by_host = [each for each in resolved if not ip_address(each).is_loopback]
    return min(by_host or resolved, default=None)


def _refusal(endpoint: str, mine: HostAddress, host: Host, least: int) -> str:
    at = f", which stands for {mine.address} here," if endpoint != mine.address else ""
    return (
        f"--rdzv-endpoint={endpoint}{at} is an address that every machine has ({mine.interface}), "
        f"so each of the {least} agents that --nnodes asks for would wait on its own machine; give "
        f"an address by which the others reach this one ({describe_addresses(host.addresses)}), or "
        f"say {_IS_HOST}"
    )
