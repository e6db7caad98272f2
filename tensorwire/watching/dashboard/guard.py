"""Decides which requests a job's page answers: by token, ``Host`` and origin. No I/O.

The token proves who asks. ``Host`` is checked as a page elsewhere may have its own name stand for
this address, and the origin as another page may send requests with this browser's cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Container, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Final

COOKIE: Final = "tensorwire_token"
_SITES: Final = ("same-origin", "none")


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer to a request that is not let in.

    Args:
        status: of HTTP.
        why: one sentence.
    """

    status: int
    why: str


@dataclass(frozen=True, slots=True)
class Guard:
    """The requests that the page answers.

    Args:
        token: whoever knows it may look.
        host: the address at which the page is served.
        port: its port.
        names: of this machine, by which the page may be asked for, too.
    """

    token: str
    host: str
    port: int
    names: Container[str] = ()

    def refuses(
        self, method: str, headers: Mapping[str, str], query_token: str | None
    ) -> Refused | None:
        """None if the request is answered.

        Args:
            method: of HTTP.
            headers: of the request, with names in lower case.
            query_token: the token in its address, if there is one.
        """
        if not self._is_ours(headers.get("host", "")):
            return Refused(421, "this page has another address; use the one that rpcrun printed")
        site = headers.get("sec-fetch-site")
        # a link elsewhere may lead here, but nothing is sent along with it
        is_visit = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if site is not None and site not in _SITES and not is_visit:
            return Refused(403, "requests from other sites are refused")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers.get("host"):
            return Refused(403, "requests from other sites are refused")
        if not self._knows(headers, query_token):
            return Refused(401, "open the address with the token, which rpcrun printed")
        return None

    def _is_ours(self, host: str) -> bool:
        name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        name = (name or host).strip("[]").lower()
        if port and port != str(self.port):
            return False
        if name in ("localhost", self.host.lower()) or name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _knows(self, headers: Mapping[str, str], query_token: str | None) -> bool:
        given = [query_token or ""]
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given.append(bearer.strip())
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        if cookie is not None:
            given.append(cookie.value)
        mine = self.token.encode()
        return any(hmac.compare_digest(each.encode(), mine) for each in given)
