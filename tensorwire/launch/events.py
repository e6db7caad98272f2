"""Handlers for the events of agents and workers, as torch's customization page describes them.

Torch writes its events to a logger today; an older torch gave them to an ``EventHandler``. These
are thin adapters of the one to the other::

    from tensorwire.launch import events

    class Printer(events.EventHandler):
        def record(self, event):
            print(event.name, event.metadata["state"])

    events.configure(Printer())
"""

from __future__ import annotations

import abc
import logging

from torch.distributed.elastic import events as torchs
from torch.distributed.elastic.events.api import Event

_DESTINATION = "null"
"""The name that torch has for the place for the events of a launcher that names none."""


class EventHandler(abc.ABC):
    """Takes the events of an agent: of itself, and of each worker that starts or ends."""

    @abc.abstractmethod
    def record(self, event: Event) -> None:
        """Takes one event.

        Args:
            event: torch's; ``event.metadata`` has the role, the state and the process id.
        """


class NullEventHandler(EventHandler):
    """Drops all events."""

    def record(self, event: Event) -> None:
        """Does nothing.

        Args:
            event: is dropped.
        """


class _Adapter(logging.Handler):
    """Gives what torch logs to an event handler."""

    def __init__(self, handler: EventHandler) -> None:
        super().__init__()
        self._handler = handler

    def emit(self, record: logging.LogRecord) -> None:
        self._handler.record(Event.deserialize(record.getMessage()))


def configure(handler: EventHandler, destination: str = _DESTINATION) -> None:
    """Has a handler take all events from now on, in place of one that was configured before.

    Args:
        handler: yours.
        destination: whose events: what ``--event-log-handler``, or ``WorkerSpec``, names.
            Default those for which nothing is named.
    """
    logger = torchs._get_or_create_logger(destination)
    for former in [each for each in logger.handlers if isinstance(each, _Adapter)]:
        logger.removeHandler(former)
    logger.setLevel(logging.INFO)
    logger.addHandler(_Adapter(handler))
