"""Says what a roll-back has undone: of each trainer, who says it of itself in the group's store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from tensorwire.parameter_server.client.news import News
from tensorwire.parameter_server.decisions.views import Client, View
from tensorwire.parameter_server.messaging.settings import Meeting

_SECONDS: Final = 5.0
"""Seconds for which trainers are waited for to say it."""
_LONGEST_PAUSE: Final = 0.5
"""Seconds before a look without news, as of one whose loss nobody has told of."""


def undone_of_others(
    meeting: Meeting,
    cluster: str,
    me: Client,
    generation: int,
    latest: Callable[[], View],
    news: News,
) -> Counter[str]:
    """The number of pushes that were undone of other trainers, present and former ones, by name.

    A trainer that died meanwhile is not waited for.

    Args:
        meeting: the group's store.
        cluster: the cluster's name.
        me: whom to leave out.
        generation: to which the cluster went back.
        latest: looks for the latest view.
        news: tells when others may have said it.
    """
    view, deadline = latest(), time.monotonic() + _SECONDS
    undone = Counter(view.undone)
    waiting = {each for each in view.trainers if each.client != me}
    while waiting and view.generation == generation and time.monotonic() < deadline:
        seen = news.count
        for trainer in list(waiting):
            pushes = meeting.undone(cluster, generation, trainer.number)
            undone[trainer.client.name] += pushes or 0
            if pushes is not None or trainer not in view.trainers:
                waiting.discard(trainer)
        if waiting:
            news.wait(seen, min(_LONGEST_PAUSE, max(0.0, deadline - time.monotonic())))
            view = latest()
    return undone
