"""A client that waits for others hears at once when they have done something."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rpc import extend
from rpc.agent import Agent
from rpc.testing import as_worker, local_group
from tensorwire.parameter_server.client.news import News
from tests import waiting

_FOR_EVER = 60.0


@contextmanager
def _news(agent: Agent, failures: list[Exception]) -> Iterator[News]:
    with as_worker(agent):
        worker = extend.worker()
        condition = threading.Condition(threading.RLock())
        made = News(worker, "news", condition, lambda: failures[0] if failures else None)
        forget = worker.subscribe("news", lambda sender, body, _: made.hear(sender, body))
        try:
            yield made
        finally:
            forget()


def test_who_is_named_or_listens_is_told_and_nobody_else() -> None:
    with (
        local_group("a", "b", "c", "d") as agents,
        _news(agents[0], []) as teller,
        _news(agents[1], []) as named,
        _news(agents[2], []) as listener,
        _news(agents[3], []) as other,
    ):
        listener.listen_to("a")
        waiting.until(lambda: teller._listeners)
        teller.tell(["a", "b", "nobody"])

        named.wait(0, _FOR_EVER)
        listener.wait(0, _FOR_EVER)
        assert [each.count for each in (teller, named, listener, other)] == [0, 1, 1, 0]


def test_what_has_come_before_the_wait_ends_it_and_a_failure_is_raised() -> None:
    failures: list[Exception] = []
    with local_group("a") as agents, _news(agents[0], failures) as news:
        seen = news.count
        news.note()
        news.wait(seen, _FOR_EVER)
        failures.append(ValueError("broken"))
        with pytest.raises(ValueError, match="broken"):
            news.wait(news.count, _FOR_EVER)
