"""Asks the page of a job from another machine, as ``rpcrun top http://HOST:PORT`` does."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Mapping
from typing import Any, Final

from tensorwire.watching.hub import NoAnswerError

_SECONDS: Final = 40.0
_LARGEST: Final = 64 << 20
_TOKEN: Final = "TENSORWIRE_TOKEN"
_GZIP: Final = 31
"""The argument of zlib for the format of gzip, with the largest window."""


class PageClient:
    """A job's page as a source of answers.

    Args:
        address: ``http[s]://HOST:PORT``, also with the ``?token=`` that rpcrun printed.
        token: default that of the address, or the environment variable ``TENSORWIRE_TOKEN``.
    """

    def __init__(self, address: str, token: str | None) -> None:
        parts = urllib.parse.urlsplit(address)
        asked = urllib.parse.parse_qs(parts.query).get("token", [""])[0]
        self._token = token or asked or os.environ.get(_TOKEN, "")
        self._base = f"{parts.scheme}://{parts.netloc}"

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Asks one question.

        Raises:
            NoAnswerError: the page cannot be reached, or says why there is no answer.
        """
        query = {key: str(value) for key, value in question.items() if key != "ask"}
        url = f"{self._base}/api/{question['ask']}?{urllib.parse.urlencode(query)}"
        method = "POST" if question["ask"] == "trace" else "GET"
        headers = {"Authorization": f"Bearer {self._token}", "Accept-Encoding": "gzip"}
        request = urllib.request.Request(url, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                data = answer.read(_LARGEST)
                if answer.headers.get("Content-Encoding") == "gzip":
                    data = zlib.decompressobj(_GZIP).decompress(data, _LARGEST)
                is_json = answer.headers.get_content_type() == "application/json"
        except urllib.error.HTTPError as error:
            with error:
                raise NoAnswerError(f"{self._base}: {error.read(4096).decode()}") from None
        except OSError as error:
            raise NoAnswerError(f"{self._base} cannot be reached: {error}") from error
        return json.loads(data) if is_json else data.decode()

    def __enter__(self) -> PageClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None
