"""Decides whose values a dense group begins with: those of the first trainer to claim that."""

from __future__ import annotations

from typing import Final

from tensorwire.parameter_server.client.dense import DenseGroup
from tensorwire.parameter_server.client.exchange import PullRequest
from tensorwire.parameter_server.decisions.lives import Verdict
from tensorwire.parameter_server.decisions.views import Server
from tensorwire.parameter_server.messaging.calling import verdict_on
from tensorwire.parameter_server.messaging.settings import Meeting

_PAUSE: Final = 0.25
"""Seconds between two checks that the loader lives; news of what it did comes at once."""


def begin(group: DenseGroup) -> None:
    """Sets the values of a dense group at the servers, or gets those that another has set.

    Args:
        group: which was declared.
    """
    cluster = group.cluster
    news, asked = cluster.session.news, set()
    while True:
        seen = news.count
        pulled = cluster.exchange(None, PullRequest(dense=(group.name,))).wait()
        assert pulled is not None
        values = pulled.dense[group.name]
        if values is not None:
            group.accept(values)
            return
        loader = _loader(group)
        if loader is None:
            group.upload(keeps_state=False)
            news.tell(())
        elif loader not in asked:  # and looks once more, as it may have been done meanwhile
            asked.add(loader)
            news.listen_to(loader.name)
        else:
            news.wait(seen, _PAUSE)


def _loader(group: DenseGroup) -> Server | None:
    """The worker that says how the group begins; None if it is this one.

    Another that died is none.
    """
    session = group.cluster.session
    meeting = Meeting(session.worker)
    key = f"{session.cluster}/{group.name}/{session.view.generation}"
    me = f"{session.client.name}\n{session.client.incarnation}"
    claimer = meeting.claim(key, None, me)
    if claimer == me or claimer is None:
        return None
    name, _, incarnation = claimer.partition("\n")
    loader = Server(name, int(incarnation))
    if verdict_on(session.worker, loader) is not Verdict.OVER:
        return loader
    return None if meeting.claim(key, claimer, me) == me else loader
