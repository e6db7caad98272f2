"""Asks the servers of a cluster for the view that they know, for a newcomer (``confirmation``)."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from rpc import extend
from tensorwire.parameter_server.decisions.confirmation import Confirmation, named_in
from tensorwire.parameter_server.decisions.lives import Verdict
from tensorwire.parameter_server.decisions.views import Server, View
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.calling import (
    LOST,
    Caller,
    latest_life,
    verdict_on,
)

_AT_ONCE: Final = 0.001
_PAUSE: Final = 0.05


def confirmed(worker: extend.Worker, cluster: str, view: View, timeout: float) -> View:
    """Returns the latest view of a cluster, given one that was read in the store.

    Args:
        worker: the newcomer.
        cluster: the cluster's name.
        view: as the newcomer has read it.
        timeout: seconds that servers have to answer.

    Raises:
        TimeoutError: none that may know the cluster has answered.
    """
    latest = partial(_latest, worker)
    later = _asked(worker, cluster, view, lambda: named_in(view, latest), timeout)
    assert later is not None
    return later


def known_view(
    worker: extend.Worker, cluster: str, lives: Iterable[Server], timeout: float
) -> View | None:
    """Asks servers for the view that they know; the first one that knows any answers for all.

    Args:
        worker: who asks.
        cluster: the cluster's name.
        lives: the servers.
        timeout: seconds that they have to answer.

    Returns:
        The view; None if all are gone or know none.

    Raises:
        TimeoutError: none of them has answered with a view, and some not at all.
    """
    return _asked(worker, cluster, None, lambda: lives, timeout)


def _asked(
    worker: extend.Worker,
    cluster: str,
    read: View | None,
    lives: Callable[[], Iterable[Server]],
    timeout: float,
) -> View | None:
    me = Server(worker.info.name, worker.life.incarnation)
    confirmation = Confirmation(read)
    answers: queue.SimpleQueue[tuple[Server, object]] = queue.SimpleQueue()
    caller = Caller(worker, cluster)
    deadline = time.monotonic() + timeout

    def may_know(life: Server) -> bool:
        return life != me and verdict_on(worker, life) is not Verdict.OVER

    def take(server: Server, answer: object) -> None:
        if answer is LOST and verdict_on(worker, server) is not Verdict.OVER:
            confirmation.missed(server)
        else:
            known = View.decode(answer) if isinstance(answer, str) else None
            confirmation.answered(server, known)

    try:
        while asked := confirmation.to_ask(filter(may_know, lives())):
            for each in asked:
                caller.call(each, messages.LatestView(), partial(_put, answers, each))
            while confirmation.waiting:
                take(*answers.get(timeout=max(deadline - time.monotonic(), _AT_ONCE)))
            if confirmation.unheard:
                _rest(deadline)
    except queue.Empty:
        missing = sorted(confirmation.waiting | confirmation.unheard)
        silent = ", ".join(str(each) for each in missing)
        raise TimeoutError(
            f"what the store holds of cluster {cluster!r} was not confirmed within {timeout:g} s: "
            f"servers {silent} do not answer"
        ) from None
    finally:
        caller.give_up()
    return confirmation.view


def _rest(deadline: float) -> None:
    """Waits a little for news of lives that nothing was heard of yet."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise queue.Empty
    time.sleep(min(_PAUSE, left))


def _put(answers: queue.SimpleQueue[tuple[Server, object]], server: Server, answer: object) -> None:
    answers.put((server, answer))


def _latest(worker: extend.Worker, name: str) -> int:
    """The incarnation of the latest life of a name that was heard of."""
    latest = latest_life(worker, name)
    return 0 if latest is None else latest.incarnation
