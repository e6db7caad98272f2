"""Serves the page of one job, on a thread of its own."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tensorwire.watching.dashboard.answers import JobAnswer, Watched
from tensorwire.watching.dashboard.connections import Connections, Listener
from tensorwire.watching.dashboard.guard import COOKIE, Guard
from tensorwire.watching.hub import NoAnswerError

_STATIC: Final = Path(__file__).parent / "static"
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_LOOPBACK: Final = "127.0.0.1"
_LONGEST_TRACE: Final = 30.0
_PIECE: Final = 1 << 16


class Page:
    """The page of a job.

    Args:
        watched: the job.
        where: ``[HOST:]PORT``; the loopback address by default, port 0 for any that is free.
        tls: files with certificate and key; None for plain HTTP.

    Raises:
        ValueError: ``where`` is no address.
        OSError: nobody can listen there.
    """

    def __init__(self, watched: Watched, where: str, tls: tuple[str, str] | None = None) -> None:
        host, port = parse_address(where)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        connections = Connections()
        self._socket = Listener(family, connections)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(128)
        except OSError as error:
            self._socket.close()
            raise OSError(error.errno, f"--dashboard={where}: {error.strerror}") from error
        self.port: int = self._socket.getsockname()[1]
        self.token = secrets.token_urlsafe(18)
        shown = f"[{host}]" if ":" in host else host
        scheme = "https" if tls else "http"
        self.address = f"{scheme}://{shown}:{self.port}/?token={self.token}"
        self._names: set[str] = set()
        guard = Guard(self.token, host, self.port, self._names)
        config = uvicorn.Config(
            _Guarded(_application(watched, guard), guard, connections),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            ssl_certfile=tls[0] if tls else None,
            ssl_keyfile=tls[1] if tls else None,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._run, name="rpcrun-page", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # strangers' garbage is no news
        self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}  # may ask a server
        self._server.run(sockets=[self._socket])

    def close(self) -> None:
        """Ends the server."""
        self._server.should_exit = True
        self._thread.join(10)
        with contextlib.suppress(OSError):
            self._socket.close()


class _Server(uvicorn.Server):
    """One that leaves the process's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Captures none."""
        yield


def parse_address(where: str) -> tuple[str, int]:
    """Host and port of ``[HOST:]PORT``.

    Raises:
        ValueError: it is none.
    """
    host, _, port = where.rpartition(":")
    host = host.strip("[]") or _LOOPBACK
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--dashboard={where}: give [HOST:]PORT, such as 8265 or 10.0.0.1:8265")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """True if only this machine reaches that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _application(watched: Watched, guard: Guard) -> Any:
    """The ASGI application, for whoever is let in."""
    job = JobAnswer(watched)

    def asks(what: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            question: dict[str, object] = {"ask": what}
            if "worker" in request.query_params:
                question["worker"] = request.query_params["worker"]
            if what == "trace":
                given = request.query_params.get("seconds", "5")
                try:
                    question["seconds"] = min(max(float(given), 0.1), _LONGEST_TRACE)
                except ValueError:
                    return PlainTextResponse(f"seconds={given} is no number", 400)
            try:
                answered = await run_in_threadpool(watched.answer, question)
            except NoAnswerError as error:
                return PlainTextResponse(str(error), 404)
            return (
                PlainTextResponse(answered) if isinstance(answered, str) else JSONResponse(answered)
            )

        return answer

    async def state(request: Request) -> Response:
        is_packed = "gzip" in request.headers.get("accept-encoding", "")
        data = await run_in_threadpool(job.packed if is_packed else job.plain)
        headers = {"Content-Encoding": "gzip"} if is_packed else {}
        headers["Content-Length"] = str(len(data))
        return StreamingResponse(_pieces(data), media_type="application/json", headers=headers)

    async def index(request: Request) -> Response:
        if "token" not in request.query_params:
            return FileResponse(_STATIC / "index.html")
        response = RedirectResponse("./", 303)  # so that the token is not seen in the address
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, guard.token, httponly=True, samesite="strict", secure=secure)
        return response

    return Starlette(
        routes=[
            Route("/", index),
            Route("/api/job", state),
            Route("/api/stacks", asks("stacks")),
            Route("/api/log", asks("log")),
            Route("/api/trace", asks("trace"), methods=["POST"]),
            Mount("/static", StaticFiles(directory=_STATIC)),
        ]
    )


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    """Parts that are sent one after the other, so that nobody who reads slowly has a copy made."""
    for begin in range(0, len(data), _PIECE):
        yield data[begin : begin + _PIECE]


class _Guarded:
    """An ASGI application that refuses whoever the guard refuses."""

    def __init__(self, application: Any, guard: Guard, connections: Connections) -> None:
        self._application, self._guard = application, guard
        self._connections = connections

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        headers = {name.lower(): value for name, value in request.headers.items()}
        refused = self._guard.refuses(request.method, headers, request.query_params.get("token"))

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.lower().encode(), value.encode()) for name, value in _HEADERS.items()),
                ]
            await send(message)

        if refused is not None:
            ends = {"Connection": "close"}  # whatever else is sent over it is not read
            response = PlainTextResponse(refused.why, refused.status, ends)
            await response(scope, receive, send_with_headers)
            return
        self._connections.showed_token(scope["client"])
        await self._application(scope, receive, send_with_headers)
