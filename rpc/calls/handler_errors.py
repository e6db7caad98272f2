"""Errors of handlers, as they are told where they happened, and of handlers that were given up."""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress

from rpc.errors import CallCancelledError, RpcError, RpcTimeoutError
from rpc.runtime.text import repr_of
from rpc.worker_info import WorkerInfo

_logger = logging.getLogger("rpc")


def tell_in_a_line(error: BaseException, worker: WorkerInfo, function: str, caller: int) -> None:
    """Logs one line about an error whose traceback the caller gets.

    Never raises, whatever the error and the log's handlers are: the caller waits for a reply.
    """
    with suppress(BaseException):
        _logger.info(
            "on %r, %s raised %s; worker %d, which called it, has the traceback",
            worker.name, function, repr_of(error), caller,
        )  # fmt: skip


def print_traceback(error: BaseException, worker: WorkerInfo) -> None:
    """Prints the traceback of an error that the caller may never look at.

    Never raises, whatever ``sys.stderr`` is: the caller waits for a reply.
    """
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        sys.stderr.write(f"On {worker}:\n{''.join(lines)}")  # at once: others write there too
    except BaseException:
        with suppress(BaseException):  # where the log goes may be as broken
            _logger.error("sys.stderr does not take this traceback", exc_info=error)


def why_given_up(function: str, seconds: float, cancelled: bool) -> RpcError:
    """The error that the caller raises if it hears of this before it gives up itself.

    Args:
        function: the name of what it called.
        seconds: the limit of the call.
        cancelled: the caller cancelled it.
    """
    if cancelled:
        return CallCancelledError(f"{function} was cancelled by its caller")
    return RpcTimeoutError(
        f"RPC ran for more than set timeout ({seconds * 1000:g} ms) and did not start before it "
        "was over"
    )
