"""The template: a process that has imported what workers import, and forks them off itself.

rpcrun forks it off itself before it has threads, connections or a store. It has one thread of
its own, of BLAS and of OpenMP, and has not touched CUDA, so that a child may do anything. A
worker is forked twice: the process between ends at once, and the agent, which has asked the
kernel for that, becomes its parent. So the agent sees its end as that of any child, also if the
template is gone.

The agent's end is :class:`Template`, the other :func:`_serve`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from json import dumps, loads
from typing import Any, Final, NoReturn

from tensorwire.launch.becoming import Order, become

_logger = logging.getLogger("rpcrun")

_LENGTH: Final = struct.Struct("!I")
_PR_SET_CHILD_SUBREAPER: Final = 36
_SECONDS_TO_IMPORT: Final = 120.0
_SECONDS_BETWEEN_POLLS: Final = 0.01


class NotReadyError(Exception):
    """There is no process at hand that could become a worker."""


class TemplateLostError(NotReadyError):
    """The template does not fork any more."""


class Template:
    """The agent's end of a template.

    Make it before anything that a fork does not survive: threads, connections, CUDA.

    Args:
        imports: modules that the template imports first.
        prepare: functions that it calls after that, as ``MODULE:NAME``.
    """

    def __init__(self, imports: Sequence[str] = (), prepare: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self.process = os.fork()
        if self.process == 0:
            ours.close()
            _be_template(theirs, imports, prepare)
        theirs.close()
        self._socket: socket.socket | None = ours

    def start(self, order: Order) -> ForkedProcess:
        """Starts a worker; waits until the template has imported everything, if need be.

        Raises:
            TemplateLostError: it cannot. It is not asked again.
        """
        if self._socket is None:
            raise TemplateLostError("the template has ended")
        try:
            with _adopting():
                self._socket.settimeout(_SECONDS_TO_IMPORT)
                send(self._socket, asdict(order))
                process = receive(self._socket)
        except OSError as error:
            self.close()
            raise TemplateLostError(f"the template does not answer: {error}") from error
        if not isinstance(process, int):
            self.close()
            raise TemplateLostError("the template has ended")
        return ForkedProcess(process)

    def close(self) -> None:
        """Ends the template; its workers live on."""
        if self._socket is None:
            return
        self._socket.close()
        self._socket = None
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)

    def let_go(self) -> None:
        """Lets go of the template in a process that was forked off the agent: it is not its own."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class ForkedProcess:
    """A child that was forked elsewhere, with the methods of ``Popen`` that torch uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                process, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has asked
                self.returncode = 1
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if process else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its exit code.

        Raises:
            TimeoutExpired: it still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_SECONDS_BETWEEN_POLLS)
        return code


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Has the kernel give this process the orphans among its descendants, for the block."""
    system = ctypes.CDLL(None, use_errno=True)
    if system.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot adopt workers")
    try:
        yield
    finally:
        system.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def send(to: socket.socket, value: Any) -> None:
    """Sends a value of JSON's, such as the fields of an order."""
    text = dumps(value).encode()
    to.sendall(_LENGTH.pack(len(text)) + text)


def receive(connection: socket.socket) -> Any:
    """The next value; None at the end."""
    head = _read(connection, _LENGTH.size)
    return loads(_read(connection, _LENGTH.unpack(head)[0])) if head else None


def call(function: str) -> None:
    """Calls a function, which is named as ``MODULE:NAME``."""
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)()


def _read(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            return b""
        received += piece
    return bytes(received)


# --- In the template


def _be_template(orders: socket.socket, imports: Sequence[str], prepare: Sequence[str]) -> NoReturn:
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)
        gc.disable()  # looking for garbage is a fifth of the time of imports, which leave none
        for module in imports:
            importlib.import_module(module)
        for function in prepare:
            call(function)
        _serve(orders)
    except (BrokenPipeError, ConnectionResetError):  # the agent is gone
        os._exit(0)
    except BaseException:
        _logger.exception("the template of workers failed; workers start more slowly")
        os._exit(1)
    os._exit(0)


def _serve(orders: socket.socket) -> None:
    gc.collect()
    gc.freeze()  # what children share is not to be written to by their collectors
    gc.enable()
    while (fields := receive(orders)) is not None:
        order = Order(**{**fields, "program": tuple(fields["program"])})
        send(orders, _fork_off(order, orders))


def _fork_off(order: Order, orders: socket.socket) -> int:
    """Forks twice; returns the process id of the worker."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        worker = os.fork()
        if worker == 0:
            for descriptor in (read, write, orders.detach()):
                os.close(descriptor)
            os.setsid()
            become(order)
        os.write(write, str(worker).encode())
        os._exit(0)
    os.close(write)
    try:
        return int(os.read(read, 32))
    finally:
        os.close(read)
        os.waitpid(between, 0)
