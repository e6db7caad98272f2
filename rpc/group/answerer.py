"""Runs the process that gives signs of life for a worker, and stands in for it.

The process (``liveness_process``) starts when it is needed, and again should it end. While
there is none, the worker answers itself, whenever its pulse beats.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Final

from rpc.group import liveness_process
from rpc.group.liveness_process import MOST_BYTES, Answering

_logger = logging.getLogger("rpc")

_MOST_AT_ONCE: Final = 1000


class Answerer:
    """Answers, at a socket, that this worker runs.

    Args:
        name: of the worker, for lists of processes.
        datagrams: the socket; it stays open here, so that what comes before the process runs
            waits in it.
        key: of the group's datagrams.
        token: this worker's.

    Attributes:
        process: that answers; None if there is none.
    """

    def __init__(self, name: str, datagrams: socket.socket, key: bytes, token: bytes) -> None:
        self._name = name
        self.datagrams = datagrams
        self._secret = key + token
        self._here = Answering(key, token, lambda: True)
        self._owner = os.getpid()
        self._expelled: list[bytes] = []
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._note: str | None = None
        self._closed = False
        self._was_asked = False
        self._has_warned = False

    def serve(self, at_once: bool) -> None:
        """Answers what has come, unless the process does.

        Args:
            at_once: start the process now; else when somebody has asked.
        """
        self.note()
        with self._lock:
            if self._control is not None or self._closed:
                return
        if not (at_once or self._was_asked):
            return
        if self.process is not None:
            _logger.info("the process that gave signs of life for %s ended", self._name)
            self._end()
        try:
            self._start()
        except OSError as error:
            self._warn(error)

    def expel(self, token: bytes) -> None:
        """Has the asker with this token told that it was declared lost."""
        self._here.expel(token)
        with self._lock:
            self._expelled.append(token)
            if self._control is not None:
                with contextlib.suppress(OSError):
                    self._control.send(token)

    def note(self) -> str | None:
        """The latest note that came for this worker."""
        with self._lock:
            if self._control is None and not self._closed:
                self._answer()
            while self._control is not None:
                try:
                    text = self._control.recv(MOST_BYTES)
                except BlockingIOError:
                    break
                except OSError:
                    text = b""
                if text:
                    self._take_note(text)
                else:
                    self._control.close()
                    self._control = None
            return self._note

    def close(self) -> None:
        """Ends the process; in a fork of the worker, lets go of it."""
        with self._lock:
            self._closed = True
            if self._control is not None:
                self._control.close()
                self._control = None
        self.datagrams.close()
        self._end()

    def _take_note(self, text: bytes) -> None:
        self._note = text.decode(errors="replace")

    def _answer(self) -> None:
        """Replies to what has come; needs the lock."""
        for _ in range(_MOST_AT_ONCE):
            try:
                data, sender = self.datagrams.recvfrom(MOST_BYTES)
                reply, note = self._here.reply(data)
                self._was_asked = self._was_asked or bool(reply)
                if reply:
                    self.datagrams.sendto(reply, sender)
            except OSError:
                return
            if note:
                self._take_note(note)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "no process can be started that gives signs of life for %s, which will be taken "
                "for frozen if a call holds the interpreter lock for long: %s",
                self._name,
                error,
            )

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.setblocking(False)
            ours.send(self._secret)
            self.process = start_process(self._name, os.getpid(), self.datagrams, theirs)
            with self._lock:
                self._control = ours
                for token in self._expelled:
                    ours.send(token)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def _end(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        if os.getpid() != self._owner:
            process.returncode = 0  # it is no child of this process
            return
        process.send_signal(signal.SIGKILL)
        process.wait()


def start_process(
    name: str, worker: int, datagrams: socket.socket, control: socket.socket
) -> subprocess.Popen[bytes]:
    """Starts the process, in a session of its own: signals to this one's group are not for it.

    Args:
        name: of the worker, for lists of processes.
        worker: the number of its process.
        datagrams: see ``liveness_process.main``.
        control: likewise.

    Raises:
        OSError: there is no interpreter to run it, or no room for it.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise OSError("this program does not know where its Python interpreter is")
    life = os.pidfd_open(worker)
    try:
        descriptors = (datagrams.fileno(), control.fileno(), life)
        numbers = [str(number) for number in (worker, *descriptors)]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", liveness_process.__file__, name, *numbers],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
        )
    finally:
        os.close(life)
