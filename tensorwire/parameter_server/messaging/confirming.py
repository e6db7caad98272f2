"""Confirms with the servers of a cluster what a newcomer has read of it in the group's store.

A store may belong to somebody else, who can put an old view back. Whoever has read a later one goes
on with that; a worker that has just come remembers nothing. So before it acts on a view it asks the
servers that are named there, by whichever life has their names now, for the view that they know.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from rpc import extend
from tensorwire.parameter_server.decisions import views
from tensorwire.parameter_server.decisions.lives import Verdict
from tensorwire.parameter_server.decisions.views import Server, View
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.calling import Caller, latest_life, verdict_on

_AT_ONCE: Final = 0.001


def confirmed(worker: extend.Worker, cluster: str, view: View, timeout: float) -> View:
    """Returns the latest view of a cluster, given one that was read in the store.

    One server that knows the cluster is enough. If all servers that are named are gone, or know
    nothing of the cluster, as they have just come themselves, the view stays as it was read.

    Args:
        worker: the newcomer.
        cluster: the cluster's name.
        view: as the newcomer has read it.
        timeout: seconds that servers have to answer.

    Raises:
        TimeoutError: none that may know the cluster has answered.
    """
    named = {each.name for each in views.servers_of(view)} | set(view.settings.get("servers", ()))
    lives = views.servers_of(view) | {Server(name, _latest(worker, name)) for name in named}
    known = known_view(worker, cluster, lives, timeout)
    return known if known is not None and known.number > view.number else view


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
    me = Server(worker.info.name, worker.life.incarnation)
    waiting = {
        each for each in lives if each != me and verdict_on(worker, each) is not Verdict.OVER
    }
    answers: queue.SimpleQueue[tuple[Server, Any]] = queue.SimpleQueue()
    caller = Caller(worker, cluster)
    for each in sorted(waiting):
        caller.call(each, messages.LatestView(), partial(_put, answers, each))
    deadline = time.monotonic() + timeout
    try:
        while waiting:
            server, answer = answers.get(timeout=max(deadline - time.monotonic(), _AT_ONCE))
            if isinstance(answer, str):
                return View.decode(answer)
            waiting.discard(server)
    except queue.Empty:
        silent = ", ".join(str(each) for each in sorted(waiting))
        raise TimeoutError(
            f"what the store holds of cluster {cluster!r} was not confirmed within {timeout:g} s: "
            f"servers {silent} do not answer"
        ) from None
    finally:
        caller.give_up()
    return None


def _put(answers: queue.SimpleQueue[tuple[Server, Any]], server: Server, answer: Any) -> None:
    answers.put((server, answer))


def _latest(worker: extend.Worker, name: str) -> int:
    """The incarnation of the latest life of a name that was heard of."""
    latest = latest_life(worker, name)
    return 0 if latest is None else latest.incarnation
