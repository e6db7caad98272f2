"""Warns of a group that strangers can reach, and that has nothing to tell them from members."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ipaddress import ip_address

_logger = logging.getLogger("rpc")

_ANYONE = "whoever reaches that address can"
_WITHOUT_KEY = (
    f"this group has no group_key, and listens at %s: {_ANYONE} join it, and run code in every "
    "worker. Give all workers one key, in a file of mode 0600 that RPC_GROUP_KEY_FILE names"
)
_WITHOUT_DEFENCE = (
    "this group uses TENSORPIPE, which asks nobody who they are, and listens at %s: "
    f"{_ANYONE} run code in every worker, or end it with a few bytes. Use the backend TENSORWIRE "
    "with a group_key, or see to it that only the group's hosts reach that network"
)


def warn_if_exposed(rank: int, hosts: Sequence[str], can_have_key: bool, has_key: bool) -> None:
    """Says in the log, in one worker of the group, that others than members can reach it.

    Args:
        rank: this worker's; the one with rank 0 speaks.
        hosts: the addresses at which it listens.
        can_have_key: its transport tells members from strangers, if there is a key.
        has_key: there is one.
    """
    open_to_others = [host for host in hosts if not is_loopback(host)]
    if rank or has_key or not open_to_others:
        return
    text = _WITHOUT_KEY if can_have_key else _WITHOUT_DEFENCE
    _logger.warning(text, ", ".join(open_to_others))


def is_loopback(address: str) -> bool:
    """True of an IP address that no other host can reach."""
    return ip_address(address.partition("%")[0]).is_loopback
