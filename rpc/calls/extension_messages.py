"""Makes the calls by which an extension asks its counterpart on another worker.

Such a message is a request without a function: the counterpart's ``on_message`` takes its
body and tensors, and what that returns is the reply.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rpc.calls import packing
from rpc.calls.call_parts import CallParts
from rpc.calls.caller import Call, Caller
from rpc.calls.packing import NOTHING_BESIDE
from rpc.constants import UNSET_RPC_TIMEOUT
from rpc.ids import new_tuple
from rpc.observe import tracing
from rpc.observe.spans import WatchedSink, traced, watching
from rpc.outcomes.futures import Future
from rpc.outcomes.sinks import FutureSink, Sink
from rpc.runtime import deadlines
from rpc.runtime.signals import restore, shut_out
from rpc.runtime.stack_room import require as require_room
from rpc.transports.base import Patience
from rpc.wire import codec
from rpc.wire.messages import Operation, Request
from rpc.wire.simple_values import encode_simple
from rpc.wire.tensor_table import pack_tensors
from rpc.worker_info import WorkerInfo

_EXTENSION = Operation.EXTENSION


class ExtensionMessages:
    """The messages that the extensions of one worker send.

    Args:
        shared: with the other parts of the worker's calls.
        caller: opens the calls, sends the requests and takes the replies.
    """

    def __init__(self, shared: CallParts, caller: Caller) -> None:
        self._shared = shared
        self._caller = caller

    def send(
        self, to: int, extension: str, body: bytes, timeout: float = UNSET_RPC_TIMEOUT
    ) -> Future[bytes]:
        """Sends an extension's own message to its counterpart on worker ``to``.

        Args:
            to: its id.
            extension: the extension's name.
            body: what the extension makes of it.
            timeout: seconds until the future fails, -1 for the default, 0 for no limit.

        Returns:
            A future of what the counterpart's ``on_message`` returned.
        """
        info = self._shared.group.peer(to).info
        future = self._caller.future(f"{extension} message to {info.name}")
        sink = FutureSink(future, self._shared.completions)
        self.ask(info, extension, body, (), timeout, sink)
        return future

    def ask(
        self,
        to: WorkerInfo,
        extension: str,
        body: bytes,
        tensors: Sequence[torch.Tensor],
        timeout: float,
        sink: Sink,
    ) -> None:
        """Sends an extension's own message; the answer's bytes go to ``sink``."""
        extensions = self._shared.extensions
        name, is_traced = f"{extension} message", traced() is not None
        is_watched = (is_traced or extensions.observers) and extension != tracing.Tracing.name
        if is_watched and type(sink) is not WatchedSink:
            me, load, looking_on = self._shared.me, extensions.load, extensions.observers
            with watching(me, _EXTENSION, to, name, sink, load, looking_on) as watched:
                self.ask(to, extension, body, tensors, timeout, watched)
            return
        if timeout == UNSET_RPC_TIMEOUT:
            timeout = self._shared.timeouts.default
        timeout = 0.0 if timeout >= deadlines.FOREVER else timeout
        before = shut_out()
        try:
            require_room()
            shared, caller, value = self._shared, self._caller, (body, *tensors)
            encoded = encode_simple(value) or codec.encode_any(value)
            beside = NOTHING_BESIDE
            if encoded.tensors or encoded.references:
                beside = packing.pack(
                    encoded,
                    to.id,
                    shared.references,
                    shared.host_moves,
                    None,
                    borrow=True,
                    lower=pack_tensors,
                )
            _, loan, table, slots = beside
            riding = tracing.riding() if is_traced else ()
            if is_watched:
                riding += extensions.attach_observers(to.id, tensors)
            call = Call(name, sink, timeout, loan, riding, caller.book[name, to.id], to.id)
            call.patience = Patience.HURRIES  # user code waits for what waits for this
            target, plain = extension.encode(), encoded.plain
            parts = _EXTENSION, plain, timeout, target, riding, loan.table, table, b""
            request: Request = new_tuple(Request, parts)
            caller.send(call, request.encode(), encoded.payload, slots)
        finally:
            restore(before)
