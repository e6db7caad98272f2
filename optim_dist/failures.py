"""Asks every owner at once, and makes one error of what went wrong at any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import rpc
from rpc.extend import retell

T = TypeVar("T")


def from_each(
    what: str, owners: Iterable[rpc.WorkerInfo], ask: Callable[[rpc.WorkerInfo], rpc.Future[T]]
) -> list[T]:
    """Asks all owners, waits for all, and returns their answers in order.

    If it is interrupted it gives up what it asked for, as a call of one owner is given up.

    Args:
        what: is asked for, for errors.
        owners: each once.
        ask: starts the call to one owner.

    Raises:
        Exception: of the type that the first owner to fail raised; the text names
            every owner that failed.
    """
    asked: list[tuple[rpc.WorkerInfo, rpc.Future[T]]] = []
    answers: list[T] = []
    failures: list[tuple[rpc.WorkerInfo, Exception]] = []
    try:
        for owner in owners:
            asked.append((owner, _started(ask, owner)))
        for owner, future in asked:
            try:
                answers.append(future.wait())
            except Exception as error:
                failures.append((owner, error))
    except BaseException:  # a signal handler's: nobody waits for the answers any more
        for _, future in asked:
            future.cancel()
        raise
    if failures:
        raise _as_one(what, failures) from failures[0][1]
    return answers


def from_one(what: str, owner: rpc.WorkerInfo, ask: Callable[[rpc.WorkerInfo], T]) -> T:
    """Asks a single owner, whom ``ask`` waits for; needs no future.

    Args:
        what: is asked for, for errors.
        owner: whom to ask.
        ask: asks, and returns the answer.

    Raises:
        Exception: of the type that the owner raised; the text names it.
    """
    try:
        return ask(owner)
    except Exception as error:
        raise _as_one(what, [(owner, error)]) from error


def _started(
    ask: Callable[[rpc.WorkerInfo], rpc.Future[T]], owner: rpc.WorkerInfo
) -> rpc.Future[T]:
    try:
        return ask(owner)
    except Exception as error:
        failed: rpc.Future[T] = rpc.Future()
        failed.set_exception(error)
        return failed


def _as_one(what: str, failures: list[tuple[rpc.WorkerInfo, Exception]]) -> Exception:
    names = ", ".join(repr(owner.name) for owner, _ in failures)
    texts = "\n\n".join(f"{owner.name}: {error}" for owner, error in failures)
    return retell(failures[0][1], f"{what} failed on {names}\n{texts}")
