"""Watches over keys in etcd v3, by the JSON gateway that each of its members has.

A member streams one line of JSON for each change. If the stream ends, or that member has lost the
others (then etcd ends it), the next member is asked. The keys may have changed between two
streams, so whoever watches is told to read them once each time one begins: no revision is asked
for that etcd may have compacted meanwhile, and nothing is missed.

A stream that breaks in silence is noticed by the kernel, which probes the connection.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rpc.group.store_watch import ToldWatch
from rpc.runtime.threads import Thread

if TYPE_CHECKING:
    from rpc.group.etcd_store import EtcdPlace

_logger = logging.getLogger("rpc")

_SECONDS_OF_AN_ATTEMPT: Final = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_TRIES_IN_SILENCE: Final = 3
"""Streams that fail one after the other before the log says so: a member may just have died."""
_SECONDS_TO_END: Final = 5.0
_PROBES: Final = (
    (socket.TCP_KEEPIDLE, 3),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 6000),
)
"""Seconds, seconds, probes and milliseconds after which a silent connection is given up."""


class EtcdWatch(ToldWatch):
    """A watch over some keys, on a thread and a connection of its own.

    Args:
        place: the etcd cluster.
        keys: full names of the keys.
        told: called when they may have changed; must neither block nor raise.
    """

    def __init__(self, place: EtcdPlace, keys: Sequence[str], told: Callable[[], None]) -> None:
        super().__init__(told)
        self._place, self._keys = place, tuple(keys)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._failures = 0
        self._thread = Thread(target=self._run, name="rpc-etcd-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch."""
        self._over.set()
        with self._lock:
            self._hang_up()
        self._thread.join(_SECONDS_TO_END)

    # --- On the thread

    def _run(self) -> None:
        member, pause = 0, _FIRST_PAUSE
        while not self._over.is_set():
            began = time.monotonic()
            try:
                for _ in self._lines(member):
                    self.tell()
                problem = "the stream ended"
            except (OSError, ValueError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            finally:
                self._stands = False
                with self._lock:
                    self._hang_up()
            if self._over.is_set():
                return
            self._count_failure(problem)
            self.tell()  # whoever relied on the watch looks for itself from now on
            if time.monotonic() - began > _LONGEST_PAUSE:
                pause = _FIRST_PAUSE
            self._over.wait(pause)
            member, pause = (member + 1) % len(self._place.members), min(2 * pause, _LONGEST_PAUSE)

    def _lines(self, member: int) -> Iterator[None]:
        """Yields whenever something may have changed: as the watch stands, and at each change."""
        connection = self._connect(member)
        with contextlib.closing(connection):
            response = self._request(connection, member)
            created = 0
            while line := response.readline():
                result = _checked(json.loads(line))
                created += bool(result.get("created"))
                if created < len(self._keys):
                    continue
                if not self._stands:
                    self._stand()
                    yield
                elif result.get("events"):
                    yield

    def _connect(self, member: int) -> http.client.HTTPConnection:
        host, port = self._place.members[member]
        connection = _connection(self._place, host, port)
        connection.connect()
        for option, value in _PROBES:
            connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with self._lock:
            self._socket = connection.sock
            if self._over.is_set():
                self._hang_up()
        return connection

    def _request(
        self, connection: http.client.HTTPConnection, member: int
    ) -> http.client.HTTPResponse:
        """Begins a stream; it waits for what comes without a limit."""
        # Then etcd ends streams of a member that has lost the others.
        headers = {"Grpc-Metadata-hasleader": "true"}
        if self._place.user:
            headers["Authorization"] = self._log_in(member)
        asked = [{"create_request": {"key": _text(key)}} for key in self._keys]
        connection.request("POST", "/v3/watch", "".join(map(json.dumps, asked)), headers)
        waits = connection.sock
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise OSError(f"HTTP {response.status}: {response.read(500)!r}")
        waits.settimeout(None)
        return response

    def _log_in(self, member: int) -> str:
        password = Path(self._place.password_file).read_text().strip()
        asked = json.dumps({"name": self._place.user, "password": password})
        with contextlib.closing(_connection(self._place, *self._place.members[member])) as fresh:
            fresh.request("POST", "/v3/auth/authenticate", asked)
            answer = json.loads(fresh.getresponse().read())
        if "token" not in answer:
            raise OSError(f"etcd refuses the user {self._place.user!r}: {answer}")
        return str(answer["token"])

    def _stand(self) -> None:
        if self._failures >= _TRIES_IN_SILENCE:
            _logger.info("etcd at %s tells of changes again", self._place)
        self._failures, self._stands = 0, True

    def _count_failure(self, problem: str) -> None:
        self._failures += 1
        if self._failures == _TRIES_IN_SILENCE:
            _logger.warning(
                "no member of etcd at %s tells of changes (%s): until one does, keys are read "
                "again and again",
                self._place,
                problem,
            )

    def _hang_up(self) -> None:
        """Ends the stream, whoever reads it. Needs the lock."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket = None


def _connection(place: EtcdPlace, host: str, port: int) -> http.client.HTTPConnection:
    if not place.ca:
        return http.client.HTTPConnection(host, port, timeout=_SECONDS_OF_AN_ATTEMPT)
    context = ssl.create_default_context(cafile=place.ca)
    if place.cert:
        context.load_cert_chain(place.cert, place.cert_key)
    return http.client.HTTPSConnection(host, port, timeout=_SECONDS_OF_AN_ATTEMPT, context=context)


def _checked(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The result in a line of the stream.

    Raises:
        OSError: etcd ends the watch; says why.
    """
    result: Mapping[str, Any] = message.get("result") or {}
    if "error" in message or result.get("canceled"):
        error = message.get("error") or {}
        raise OSError(result.get("cancel_reason") or error.get("message") or "it was cancelled")
    return result


def _text(key: str) -> str:
    return base64.b64encode(key.encode()).decode()
