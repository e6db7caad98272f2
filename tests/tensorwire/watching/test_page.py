"""A job's page: who is let in, and what it answers."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import ssl
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tensorwire.watching.dashboard.answers import JobAnswer
from tensorwire.watching.dashboard.connections import MOST
from tensorwire.watching.dashboard.guard import COOKIE, Guard
from tensorwire.watching.dashboard.remote import PageClient
from tensorwire.watching.dashboard.server import Page, parse_address
from tensorwire.watching.hub import NoAnswerError, Question
from tests.rpc.transports.tensorwire import certificates

PATHS = ("/", "/api/job", "/api/stacks?worker=a:0", "/api/log?worker=a:0", "/static/page.js", "/x")


class Job:
    """A job of which all is known beforehand."""

    def answer(self, question: Question) -> object:
        if question["ask"] == "job":
            return {"job": "<b>j</b>"}
        if question.get("worker") != "a:0":
            raise NoAnswerError("no worker of that name")
        return f"{question['ask']} of a:0"


@pytest.fixture
def page() -> Iterator[Page]:
    with contextlib.closing(Page(Job(), "0")) as page:
        yield page


def get(
    page: Page, path: str, headers: Mapping[str, str], method: str = "GET"
) -> tuple[int, str, Mapping[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_stranger_without_the_token_gets_nothing_from_any_path(page: Page, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": f"{COOKIE}=wrong"}):
        for method in ("GET", "POST", "PUT", "DELETE"):
            status, body, _ = get(page, path, headers, method)
            assert status == 401
            assert "token" in body
            assert "a:0" not in body


def test_the_address_that_was_printed_opens_the_page_and_hides_the_token(page: Page) -> None:
    status, _, headers = get(page, f"/?token={page.token}", {})
    assert status == 303
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    status, body, headers = get(page, "/", {"Cookie": cookie.partition(";")[0]})
    assert status == 200
    assert "page.js" in body
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer"


def test_another_host_and_another_site_are_refused_even_with_the_token(page: Page) -> None:
    known = {"Authorization": f"Bearer {page.token}"}
    assert get(page, "/api/job", {**known, "Host": f"evil.example:{page.port}"})[0] == 421
    assert get(page, "/api/job", {**known, "Host": "127.0.0.1:1"})[0] == 421
    mine = f"{socket.gethostname().upper()}:{page.port}"
    assert get(page, "/api/job", {**known, "Host": mine})[0] == 200
    assert get(page, "/api/job", {**known, "Sec-Fetch-Site": "cross-site"})[0] == 403
    assert get(page, "/api/job", {**known, "Origin": "http://evil.example"})[0] == 403
    traced = "/api/trace?worker=a:0"
    assert get(page, traced, {**known, "Origin": "null"}, "POST")[0] == 403
    assert get(page, traced, known)[0] == 405
    assert get(page, traced, known, "POST")[:2] == (200, "trace of a:0")


def test_answers_and_their_lack_come_as_they_are(page: Page) -> None:
    known = {"Authorization": f"Bearer {page.token}"}
    status, body, headers = get(page, "/api/job", known)
    assert (status, json.loads(body)) == (200, {"job": "<b>j</b>"})
    assert headers["content-type"] == "application/json"
    status, body, headers = get(page, "/api/log?worker=a:0", known)
    assert (status, body) == (200, "log of a:0")
    assert headers["content-type"].startswith("text/plain")
    assert headers["x-content-type-options"] == "nosniff"
    assert get(page, "/api/stacks?worker=b:0", known)[0] == 404
    assert get(page, "/static/../server.py", known)[0] == 404


def test_a_stranger_gets_no_websocket_and_his_body_is_not_read(page: Page) -> None:
    """A request that would change protocols is refused like others, and so is a long body."""
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
               "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
    assert get(page, "/api/job", upgrade)[0] == 401
    with socket.create_connection(("127.0.0.1", page.port), timeout=60) as stranger:
        head = f"POST /api/trace HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n"
        stranger.sendall(f"{head}Content-Length: 1000000000000\r\n\r\n".encode())
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while data := stranger.recv(1 << 16):
                answer += data
    assert b" 401 " in answer
    assert b"connection: close" in answer


@pytest.mark.parametrize("is_private", [False, True])
def test_silent_strangers_keep_nobody_out(is_private: bool, tmp_path: Path) -> None:
    """Neither over TLS, where they do not even begin a handshake."""
    files = certificates.write(tmp_path, "localhost")
    tls = (str(files.certificate), str(files.private_key)) if is_private else None
    context = ssl.create_default_context(cafile=str(files.ca)) if is_private else None
    with contextlib.ExitStack() as stack:
        page = stack.enter_context(contextlib.closing(Page(Job(), "0", tls)))
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", page.port), timeout=60))
            for _ in range(200)
        ]
        client = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        address = page.address.replace("127.0.0.1", "localhost")
        asked = urllib.request.Request(address.replace("?", "api/log?worker=a:0&"))
        with client.open(asked, timeout=60) as answer:
            assert answer.read() == b"log of a:0"
        ended = [stranger for stranger in strangers[:-MOST] if stranger.recv(1) == b""]
        assert len(ended) == 200 - MOST


def test_many_who_ask_for_the_job_have_it_put_together_once() -> None:
    asked = []

    class Counted:
        def answer(self, question: Question) -> object:
            asked.append(question)
            return {"job": "j" * 1000}

    answer = JobAnswer(Counted())
    packed = [answer.packed() for _ in range(10)]
    assert len(asked) == 1
    assert gzip.decompress(packed[-1]) == answer.plain()
    assert len(packed[0]) < 100


def test_a_page_can_be_asked_from_elsewhere(page: Page) -> None:
    with PageClient(page.address, None) as client:
        assert client.ask({"ask": "job"}) == {"job": "<b>j</b>"}
        assert client.ask({"ask": "stacks", "worker": "a:0"}) == "stacks of a:0"
        with pytest.raises(NoAnswerError, match="no worker of that name"):
            client.ask({"ask": "stacks", "worker": "b:0"})
    stranger = PageClient(f"http://127.0.0.1:{page.port}", "wrong")
    with pytest.raises(NoAnswerError, match="token, which rpcrun printed"):
        stranger.ask({"ask": "job"})


def test_a_visit_by_a_link_elsewhere_is_let_in_but_nothing_else_is() -> None:
    guard = Guard("t", "10.0.0.1", 80)
    headers = {"host": "10.0.0.1:80", "cookie": f"{COOKIE}=t", "sec-fetch-site": "cross-site"}
    assert guard.refuses("GET", {**headers, "sec-fetch-mode": "navigate"}, None) is None
    assert guard.refuses("POST", {**headers, "sec-fetch-mode": "navigate"}, None) is not None
    assert guard.refuses("GET", {**headers, "sec-fetch-mode": "cors"}, None) is not None


@pytest.mark.parametrize("where", ["", "x", "host:", "1.2.3.4:99999", ":-1"])
def test_an_address_that_is_none_is_refused(where: str) -> None:
    with pytest.raises(ValueError, match=r"give \[HOST:\]PORT"):
        parse_address(where)
    assert parse_address("[::1]:80") == ("::1", 80)
    assert parse_address("80") == ("127.0.0.1", 80)
