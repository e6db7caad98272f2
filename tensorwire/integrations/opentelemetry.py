"""Spans of calls for OpenTelemetry; the trace's context goes with each call to other workers.

A worker that lacks OpenTelemetry, or has set up no exporter, serves such calls all the same. With
the API alone it passes the context on, so what its handlers call is in the same trace.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

import torch

import rpc
from rpc import extend
from rpc.errors import FrameError

try:
    from opentelemetry import context, propagate, trace
except ImportError:
    IS_INSTALLED = False
else:
    IS_INSTALLED = True

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

__all__ = ["trace_calls"]

_NAME = "tensorwire.integrations.opentelemetry"


def trace_calls(provider: TracerProvider | None = None) -> None:
    """Makes a span, from now on, of each call of the current worker and of each handler it runs.

    Call it after ``init_rpc``. Workers that serve calls of this one need not do so: they make
    spans of the calls that come with a trace's context, by their process's tracer provider.
    A span has the function's name and the attributes ``rpc.system``, ``rpc.method``,
    ``tensorwire.kind`` (``sync``, ``async``, ``remote``, ``to_here``; ``message`` for what
    distributed autograd sends), ``tensorwire.worker`` and ``tensorwire.peer``; errors are recorded.

    Args:
        provider: makes the spans. Default the process's, ``trace.get_tracer_provider()``.

    Raises:
        ImportError: OpenTelemetry's API is not installed; the extra ``opentelemetry`` has it.
        NotInitializedError: there is no current worker.

    Example::

        trace.set_tracer_provider(provider)
        rpc.init_rpc("trainer")
        trace_calls()
    """
    if not IS_INSTALLED:
        raise ImportError("OpenTelemetry is missing: pip install 'tensorwire[opentelemetry]'")
    extend.call_extension(_NAME).use(provider)


class WithoutSpans:
    """The call extension of a worker that has no OpenTelemetry: passes what comes over."""

    name: ClassVar[str] = _NAME

    def __init__(self, worker: extend.Worker) -> None:
        self._me = worker.info

    def outgoing_request(self, to: int, tensors: Sequence[torch.Tensor]) -> bytes | None:
        """Attaches nothing to calls."""

    def incoming_request(
        self, sender: int, metadata: bytes, tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], AbstractContextManager[object] | None]:
        """Leaves the tensors as they are."""
        return tensors, None

    def outgoing_reply(
        self, to: int, request_metadata: bytes, tensors: Sequence[torch.Tensor]
    ) -> bytes | None:
        """Attaches nothing to replies."""

    def incoming_reply(
        self, sender: int, request_metadata: bytes, metadata: bytes, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Does nothing: replies carry nothing."""
        return tensors

    def on_message(self, sender: int, body: bytes, tensors: list[torch.Tensor]) -> bytes:
        """Returns nothing, as nobody sends messages."""
        return b""

    def on_worker_lost(self, worker_id: int, reason: str) -> None:
        """Does nothing: the calls that wait for it fail, which ends their spans."""

    def debug_info(self) -> dict[str, int]:
        """Returns nothing, as there is nothing to count."""
        return {}

    def close(self) -> None:
        """Does nothing: exporters are the program's."""


class CallSpans(WithoutSpans):
    """The call extension that makes spans, one object for each worker.

    Args:
        worker: whose calls and handlers they are of.
    """

    def __init__(self, worker: extend.Worker) -> None:
        super().__init__(worker)
        self.use(None)

    def use(self, provider: TracerProvider | None) -> None:
        """Has spans made by ``provider``, None for the process's."""
        self._tracer = trace.get_tracer("tensorwire", rpc.__version__, provider)

    def call_begins(self, kind: str, name: str, to: rpc.WorkerInfo) -> extend.ObservedCall:
        """Begins the span of a call, in the trace of the context that makes it."""
        attributes = self._attributes(name, to) | {"tensorwire.kind": kind}
        span = self._tracer.start_span(name, kind=trace.SpanKind.CLIENT, attributes=attributes)
        return _CallSpan(span)

    def outgoing_request(self, to: int, tensors: Sequence[torch.Tensor]) -> bytes | None:
        """Attaches the context of the span that is current, which is the call's."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return json.dumps(carrier).encode() if carrier else None

    def incoming_request(
        self, sender: int, metadata: bytes, tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], AbstractContextManager[object] | None]:
        """Takes over the caller's context, for the rest of the request's own one."""
        try:
            carrier = json.loads(metadata)
            texts = {str(name): str(value) for name, value in carrier.items()}
        except (ValueError, AttributeError) as error:
            raise FrameError(f"{metadata[:80]!r} is no context of a trace") from error
        context.attach(propagate.extract(texts))
        return tensors, None

    def handler_begins(self, name: str, caller: rpc.WorkerInfo) -> extend.ObservedHandler:
        """Begins the span of a handler, and has calls that it makes belong to it."""
        attributes = self._attributes(name, caller)
        span = self._tracer.start_span(name, kind=trace.SpanKind.SERVER, attributes=attributes)
        context.attach(trace.set_span_in_context(span))
        return _HandlerSpan(span)

    def _attributes(self, name: str, peer: rpc.WorkerInfo) -> dict[str, str]:
        return {
            "rpc.system": "tensorwire",
            "rpc.method": name,
            "tensorwire.worker": self._me.name,
            "tensorwire.peer": peer.name,
        }


class _HandlerSpan:
    """The span of a handler, under way."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def ended(self, error: BaseException | None) -> None:
        """Ends the span, as failed if there is an error."""
        if error is not None:
            self._span.record_exception(error)
            first_line = extend.text_of(error).partition("\n")[0]  # a remote traceback follows
            text = f"{type(error).__name__}: {first_line}"
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, text))
        self._span.end()


class _CallSpan(_HandlerSpan):
    """The span of a call, under way."""

    def sending(self) -> AbstractContextManager[object]:
        """Makes the span the current one, so that its context goes with the request."""
        return trace.use_span(self._span, record_exception=False, set_status_on_exception=False)

    def replied(self) -> None:
        """Notes when the reply arrived, which may have to wait to be decoded."""
        self._span.add_event("replied")


RPC_EXTENSION: type[extend.CallExtension] = CallSpans if IS_INSTALLED else WithoutSpans
