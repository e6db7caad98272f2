"""Ports for stores that another process will listen on a moment later.

The system gives one out of its own range to any connection that is opened meanwhile.
So these come from below that range, where nobody is given one without asking for it.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_START = 32768
_CHOICE = 12_000
_draw = random.SystemRandom()


def free_port() -> int:
    """A port of this host on which nobody listens."""
    start = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else _USUAL_START
    while True:
        port = _draw.randrange(max(1024, start - _CHOICE), start)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
