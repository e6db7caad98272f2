"""The extensions one agent has loaded, and how they are run around messages.

Loads an extension the first time this worker uses it or a message names it.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, cast

import torch

from rpc.errors import AgentClosedError, DecodeError, EncodeError
from rpc.extensions import AUTOGRAD, CallExtension, CallObserver
from rpc.runtime.text import text_of
from rpc.wire.messages import Extensions

_logger = logging.getLogger("rpc")

Scopes = list[AbstractContextManager[object]]
"""The scopes that a handler runs in, in the order in which they were entered."""


class ExtensionSet:
    """The extensions of one agent.

    Args:
        name: of their worker.
        make: makes an extension of a class, for their worker.
    """

    __slots__ = ("_closed", "_lock", "_make", "_name", "loaded", "observers", "used")

    def __init__(self, name: str, make: Callable[[Any], CallExtension]) -> None:
        self._name = name
        self._make = make
        self._lock = threading.Lock()
        self.loaded: dict[str, CallExtension] = {}
        """The loaded extensions by name; to look at only."""
        self._closed = False
        self.used = False
        """True once any is loaded."""
        self.observers: tuple[CallObserver, ...] = ()
        """The extensions that look at calls."""

    def load(self, name: str) -> CallExtension:
        """The extension of module ``name``, imported and made if need be.

        Raises:
            DecodeError: there is no such module here, or it defines no extension.
            AgentClosedError: it was not loaded before, and nobody would close it any more.
        """
        loaded = self.loaded.get(name)
        if loaded is not None:
            return loaded
        try:
            kind = importlib.import_module(name).RPC_EXTENSION
        except (ImportError, AttributeError) as error:
            raise DecodeError(
                f"the message needs the extension {name!r}, which worker "
                f"{self._name!r} cannot import: {error}"
            ) from error
        made = self._make(kind)
        with self._lock:
            if self._closed:
                raise AgentClosedError(f"{name} cannot be loaded: this worker shut down")
            self.used = True
            if name not in self.loaded and hasattr(kind, "call_begins"):
                self.observers += (cast(CallObserver, made),)
            return self.loaded.setdefault(name, made)

    def close(self) -> None:
        """Closes those that are loaded, whatever one of them raises; no other will be."""
        with self._lock:
            self._closed = True
        with ExitStack() as each:
            for extension in reversed(self.all()):
                each.callback(extension.close)

    def worker_lost(self, worker_id: int, reason: str) -> None:
        """Tells all of them that a worker is gone, whatever one of them raises."""
        for extension in self.all():
            try:
                extension.on_worker_lost(worker_id, reason)
            except Exception:  # the others, and a shutdown, have to hear of it all the same
                _logger.exception("the extension %r could not be told of a loss", extension.name)

    def all(self) -> list[CallExtension]:
        """The loaded extensions."""
        return list(self.loaded.values())

    def debug_info(self) -> dict[str, object]:
        """Collects what all of them count; of one that cannot tell, its name and why."""
        report: dict[str, object] = {}
        for extension in self.all():
            name = extension.name
            try:
                counts = extension.debug_info()
                _require_mapping(name, counts)
                report.update(counts)
            except Exception as error:
                _logger.exception("debug_info of the extension %r failed", name)
                report[name] = f"debug_info failed: {type(error).__name__}: {text_of(error)}"
        return report

    def attach_request(
        self, to: int, tensors: Sequence[torch.Tensor], severed: type[torch.Tensor] | None
    ) -> Extensions:
        """The metadata of a request to ``to`` that carries ``tensors``."""
        attached: list[tuple[str, bytes]] = []
        for extension in list(self.loaded.values()):
            data = extension.outgoing_request(to, tensors)
            if data is not None:
                if not isinstance(data, bytes):
                    raise _not_bytes(extension.name, "outgoing_request", data)
                attached.append((extension.name, data))
        if severed is not None:
            _require_whole(severed, attached)
        return tuple(attached)

    def attach_observers(self, to: int, tensors: Sequence[torch.Tensor]) -> Extensions:
        """The metadata that observers of calls give an extension's message to ``to``."""
        attached = [(each.name, each.outgoing_request(to, tensors)) for each in self.observers]
        return tuple((name, data) for name, data in attached if data is not None)

    def attach_reply(
        self,
        to: int,
        request: Extensions,
        tensors: Sequence[torch.Tensor],
        severed: type[torch.Tensor] | None,
    ) -> Extensions:
        """The metadata of the reply to a request that had some."""
        attached: list[tuple[str, bytes]] = []
        if severed is not None:
            _require_whole(severed, request)
        for name, sent in request:
            data = (self.loaded.get(name) or self.load(name)).outgoing_reply(to, sent, tensors)
            if data is not None:
                if not isinstance(data, bytes):
                    raise _not_bytes(name, "outgoing_reply", data)
                attached.append((name, data))
        return tuple(attached)

    def on_request(
        self, sender: int, request: Extensions, scopes: Scopes, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Replaces a request's tensors, and enters the scopes that its handler runs in.

        They are added to ``scopes``, which :func:`leave` leaves.
        """
        for name, data in request:
            extension, count = self.loaded.get(name) or self.load(name), len(tensors)
            answer = extension.incoming_request(sender, data, tensors)
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise _no_pair(name, answer)
            tensors, scope = answer
            if not isinstance(tensors, list | tuple) or len(tensors) != count:
                raise _not_as_many(name, "incoming_request", tensors, count)
            if scope is not None:
                scope.__enter__()
                scopes.append(scope)
        return tensors

    def on_reply(
        self, sender: int, request: Extensions, reply: Extensions, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Replaces a reply's tensors."""
        sent = dict(request)
        for name, data in reply:
            extension, count = self.loaded.get(name) or self.load(name), len(tensors)
            tensors = extension.incoming_reply(sender, sent.get(name, b""), data, tensors)
            if not isinstance(tensors, list | tuple) or len(tensors) != count:
                raise _not_as_many(name, "incoming_reply", tensors, count)
        return tensors


def leave(scopes: Scopes, error: BaseException | None) -> None:
    """Leaves the scopes, the last one first, whatever one of them raises.

    Args:
        scopes: that were entered; empty afterwards.
        error: what was raised in them.
    """
    try:
        kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
        scopes.pop().__exit__(kind, error, trace)
    finally:
        if scopes:
            leave(scopes, error)


def _not_bytes(extension: str, hook: str, answer: object) -> TypeError:
    return _not_returned(extension, hook, answer, "bytes or None")


def _require_mapping(extension: str, answer: object) -> None:
    if not isinstance(answer, Mapping):
        raise _not_returned(extension, "debug_info", answer, "a mapping of names to counts")


def _no_pair(extension: str, answer: object) -> TypeError:
    wanted = "a pair of tensors and a context manager or None"
    return _not_returned(extension, "incoming_request", answer, wanted)


def _not_as_many(extension: str, hook: str, answer: object, count: int) -> TypeError:
    return _not_returned(extension, hook, answer, f"a list of {count} tensors, as it was given")


def _not_returned(extension: str, hook: str, answer: object, wanted: str) -> TypeError:
    return TypeError(
        f"{hook} of the extension {extension!r} must return {wanted}, but returned {answer!r}"
    )


def require_future(extension: str, answer: object) -> None:
    """Refuses what ``on_message`` must not return in place of an answer.

    Raises:
        TypeError: it is no future of one.
    """
    if not isinstance(answer, torch._C.Future):
        raise _not_returned(extension, "on_message", answer, "bytes, a tuple, or a future of these")


def _require_whole(severed: type[torch.Tensor], riding: Iterable[tuple[str, bytes]]) -> None:
    """Refuses a tensor that was cut off from its graph where its gradient is wanted.

    Raises:
        EncodeError: the message belongs to an autograd context.
    """
    if any(name == AUTOGRAD for name, _ in riding):
        raise EncodeError(
            f"a {severed.__qualname__} that is part of a graph cannot be sent within an "
            "autograd context, as its gradient would be lost: send it detached, or a plain tensor"
        )
