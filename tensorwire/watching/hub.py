"""The Unix socket of one agent: its workers connect to it and are asked; so may viewers.

The socket lies in a folder of mode 0700, so only processes of the same user reach it. A worker
begins with a line that names it, a viewer with one that says ``viewer``. Lines are JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from typing import Any, BinaryIO, Final

_LONGEST_LINE: Final = 32 << 20
_LONGEST_ANSWER: Final = 16 << 20
"""Bytes in one answer of a worker; a longer one, such as no worker of ours gives, ends its link."""
_MOST_QUESTIONS: Final = 16
_SECONDS_TO_SAY_WHO: Final = 5.0
_MOST_CONNECTIONS: Final = 1024
_UNREADY: Final = "new"

Question = Mapping[str, Any]


class NoAnswerError(RuntimeError):
    """A worker did not answer, or could not."""


class _Link:
    """A worker's connection: questions that are out, by number."""

    def __init__(self, connection: socket.socket, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self._connection = connection
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, Future[Any]] = {}
        self.facts: Future[Any] | None = None
        """The answer to the question for facts that is out; of use to the hub alone."""

    def ask(self, question: Question) -> Future[Any]:
        """Sends a question; the future has its answer."""
        answer: Future[Any] = Future()
        with self._lock:
            if len(self._open) >= _MOST_QUESTIONS:  # more would fill the socket, and wait for ever
                answer.set_exception(
                    NoAnswerError(f"{self.name} has not answered {_MOST_QUESTIONS} questions")
                )
                return answer
            number = next(self._numbers)
            self._open[number] = answer
        line = json.dumps({**question, "number": number}).encode() + b"\n"
        try:
            self._connection.sendall(line)
        except OSError as error:
            self._open.pop(number, None)
            answer.set_exception(NoAnswerError(f"{self.name} has hung up: {error}"))
        return answer

    def take(self, line: bytes) -> None:
        """Takes an answer that came."""
        told = json.loads(line)
        answer = self._open.pop(told.get("number"), None)
        if answer is None:
            return
        if "error" in told:
            answer.set_exception(NoAnswerError(f"{self.name}: {told['error']}"))
        else:
            answer.set_result(told.get("answer"))

    def close(self) -> None:
        """Fails all questions, as nobody answers any more."""
        for answer in list(self._open.values()):
            with contextlib.suppress(Exception):
                answer.set_exception(NoAnswerError(f"{self.name} has hung up"))


class Hub:
    """Listens for the workers and viewers of one agent; they wait until it is started.

    Args:
        path: of the socket, in a folder that is this user's alone.
        view: answers a viewer's question with what becomes JSON; may take long.
    """

    def __init__(self, path: str, view: Callable[[Question], object]) -> None:
        self.path = path
        self._view = view
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        self._connections: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unready = os.path.join(os.path.dirname(path), _UNREADY)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unready)
        self._listener.bind(unready)
        self._listener.listen(128)
        os.rename(unready, path)  # so whoever sees the socket can connect to it
        self._acceptor = threading.Thread(target=self._accept, name="rpcrun-hub", daemon=True)

    def start(self) -> None:
        """Begins to serve; ``view`` may be called from now on."""
        self._acceptor.start()

    def ask(self, name: str, question: Question, timeout: float) -> Any:
        """Asks one worker of this agent.

        Raises:
            NoAnswerError: it is not there, does not answer in time, or cannot.
        """
        with self._lock:
            link = self._links.get(name)
        if link is None:
            raise NoAnswerError(
                f"{name} has not called init_rpc on this machine, or has shut down, so it cannot "
                "be asked"
            )
        try:
            return link.ask(question).result(timeout)
        except WaitedTooLong:
            raise NoAnswerError(f"{name} has not answered within {timeout:g} s") from None

    def facts(self, names: Iterable[str], timeout: float) -> dict[str, Mapping[str, Any]]:
        """The facts of those workers that tell them in time.

        A worker that did not answer the time before is not waited for: its late answer is taken
        when it is there, and no other question is sent until then. For one caller at a time.
        """
        with self._lock:
            links = [self._links[name] for name in names if name in self._links]
        deadline = time.monotonic() + timeout
        asked = [
            (link, link.facts, 0.0) if link.facts else (link, link.ask({"ask": "facts"}), deadline)
            for link in links
        ]
        answers: dict[str, Mapping[str, Any]] = {}
        for link, answer, until in asked:
            link.facts = None
            try:
                answers[link.name] = answer.result(max(0.0, until - time.monotonic()))
            except WaitedTooLong:
                link.facts = answer
            except NoAnswerError:
                continue
        return answers

    def pids(self) -> dict[str, int]:
        """The process of each worker that has called."""
        with self._lock:
            return {link.name: link.pid for link in self._links.values()}

    def close(self) -> None:
        """Hangs up on everybody, and deletes the socket."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed or len(self._connections) >= _MOST_CONNECTIONS:
                    connection.close()
                    continue
                self._connections.add(connection)
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="rpcrun-watched", daemon=True
            )
            self._threads.add(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_SECONDS_TO_SAY_WHO)
            bad = contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError)
            with bad, connection.makefile("rb") as lines:
                first = json.loads(lines.readline(1 << 12))
                connection.settimeout(None)
                if first.get("viewer"):
                    self._serve_viewer(connection, lines)
                else:
                    link = _Link(connection, str(first["name"]), int(first["pid"]))
                    self._serve_worker(link, lines)
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)
                self._threads.discard(threading.current_thread())

    def _serve_worker(self, link: _Link, lines: BinaryIO) -> None:
        with self._lock:
            self._links[link.name] = link  # a later life takes the place of an earlier one
        try:
            while line := lines.readline(_LONGEST_ANSWER):
                link.take(line)
        finally:
            link.close()
            with self._lock:
                if self._links.get(link.name) is link:
                    del self._links[link.name]

    def _serve_viewer(self, connection: socket.socket, lines: BinaryIO) -> None:
        while line := lines.readline(1 << 16):
            try:
                told: dict[str, object] = {"answer": self._view(json.loads(line))}
            except Exception as error:  # a viewer is told what went wrong
                told = {"error": str(error) or type(error).__name__}
            connection.sendall(json.dumps(told, default=str).encode() + b"\n")


class Viewer:
    """A connection to the hub of an agent on this machine, as a viewer.

    Args:
        path: of the hub's socket.
        timeout: seconds to wait for an answer.

    Raises:
        OSError: nobody listens there.
    """

    def __init__(self, path: str, timeout: float = 15.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(path)
            self._socket.sendall(b'{"viewer": true}\n')
            self._lines = self._socket.makefile("rb")
        except BaseException:
            self._socket.close()
            raise

    def ask(self, question: Question) -> Any:
        """Asks one question.

        Raises:
            NoAnswerError: the agent says why there is no answer, or is gone.
        """
        try:
            self._socket.sendall(json.dumps(question).encode() + b"\n")
            line = self._lines.readline(_LONGEST_LINE)
            told = json.loads(line)
        except (OSError, ValueError) as error:
            raise NoAnswerError(f"the agent of the job does not answer: {error}") from error
        if "error" in told:
            raise NoAnswerError(str(told["error"]))
        return told["answer"]

    def close(self) -> None:
        """Hangs up."""
        self._lines.close()
        self._socket.close()

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
