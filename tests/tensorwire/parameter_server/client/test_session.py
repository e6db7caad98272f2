"""A trainer's session: messages to shards while views change."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from rpc.testing import local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.decisions.views import Server, View
from tensorwire.parameter_server.messaging.messages import Exchange, Message
from tests.tensorwire.parameter_server.clusters import run
from tests.waiting import until


def _with_other_shards(view: View) -> View:
    """The next view, in which other shards keep all rows."""
    shards = tuple(replace(each, number=each.number + view.made) for each in view.shards)
    slots = tuple(number + view.made for number in view.slots)
    return replace(view, epoch=view.epoch + 1, shards=shards, slots=slots)


def test_a_pull_that_is_split_anew_before_all_of_it_is_sent_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Splits the pull as a thread does that hears of a later view while another one sends."""

    def go() -> list[float]:
        cluster = ps.connect(["ps0", "ps1"], consistency=ps.Async())
        table = cluster.table("counts", 1, ps.SGD(lr=1.0))
        table.push(torch.arange(20), -torch.ones(20, 1))
        session, views = cluster.session, [cluster.session.view]
        views.append(_with_other_shards(views[0]))
        caller, epochs = session._caller, list[int]()
        held = deque[Callable[[], object]]()
        call = caller.call

        def call_while_views_change(
            to: Server, message: Message, then: Callable[[object], object]
        ) -> None:
            if isinstance(message, Exchange) and message.pull is not None:
                epochs.append(message.pull.epoch)
                session.packer.split(session._asked[session.pulls], views[len(epochs) % 2])
            held.append(partial(call, to, message, then))
            while held and len(epochs) != 1:  # no answer comes while it is split by another view
                held.popleft()()

        monkeypatch.setattr(caller, "call", call_while_views_change)
        found = table.pull(torch.arange(20)).flatten().tolist()
        assert epochs[:2] == [views[0].epoch] * 2
        return found

    with local_group("ps0", "ps1", "trainer0") as agents:
        assert run(agents[2:], [go]) == [[1.0] * 20]


def test_a_reload_without_dense_parameters_leaves_nothing_to_wait_for() -> None:
    """Asks servers for nothing: they have no answer to that, and a shutdown waited for ever."""

    def go() -> None:
        ps.connect(["ps0", "ps1"]).reload()

    with local_group("ps0", "ps1", "trainer0") as agents:
        run(agents[2:], [go])
        until(agents[2].is_quiet)
