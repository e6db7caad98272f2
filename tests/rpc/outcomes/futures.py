"""Futures and errors for several test files."""

from __future__ import annotations

import gc

import pytest

from rpc.outcomes.futures import Future

SECONDS = 10.0


def done(value: object = 7) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def failed(error: BaseException, description: str = "the call of f on w1") -> Future[int]:
    future: Future[int] = Future(description=description)
    future.set_exception(error)
    return future


def refuse(completion: object) -> None:
    raise AssertionError("nothing was to be left to others")


class Refused(ValueError):
    """An error with a constructor that does not take one string."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"refused with {code}")
        self.code = code
        self.hint = hint


async def awaited(future: Future[int]) -> int:
    return await future


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect(1)
    return [record.getMessage() for record in caplog.records if record.name == "rpc"]
