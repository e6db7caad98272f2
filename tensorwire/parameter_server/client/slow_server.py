"""Says in the log which server is the one that a worker waits for, and why."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from tensorwire.parameter_server.client.bottleneck import Watch, reason
from tensorwire.parameter_server.decisions.views import View
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.calling import Caller

_logger: Final = logging.getLogger("tensorwire")


class SlowServer:
    """Clocks the answers of servers.

    Args:
        cluster: its name.
        caller: asks a server why it is slow.
        view: returns the latest view.
    """

    def __init__(self, cluster: str, caller: Caller, view: Callable[[], View]) -> None:
        self._cluster = cluster
        self._caller = caller
        self._view = view
        self._lock = threading.Lock()
        self._watch = Watch()  # guarded by the lock

    def answered(self, server: str, seconds: float) -> None:
        """Notes how long an answer took; logs it if this server is the one that all wait for."""
        with self._lock:
            ratio = self._watch.answered(server, seconds)
        if ratio is None:
            return
        name, mine, others = ratio
        slow = [each for each in self._view().servers if each.name == name]

        def tell(described: object) -> None:
            why = reason(described) if isinstance(described, dict) else "it does not say why"
            _logger.warning(
                "server %r is the bottleneck of cluster %r: it answers in %.1f ms, the others in "
                "%.1f ms; %s", name, self._cluster, mine * 1e3, others * 1e3, why,
            )  # fmt: skip

        for each in slow:
            self._caller.call(each, messages.Describe(), tell)
