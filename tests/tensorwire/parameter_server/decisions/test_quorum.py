"""Votes: who may take servers and trainers out of a view."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorwire.parameter_server.decisions import view_changes
from tensorwire.parameter_server.decisions.quorum import Electorate
from tensorwire.parameter_server.decisions.views import Client, Server, Trainer, View


def server(number: int) -> Server:
    return Server(f"ps{number}", 0)


def trainer(number: int) -> Server:
    return Server(f"trainer{number}", 0)


def view(servers: int, trainers: int, backups: int = 1) -> View:
    made = view_changes.first([server(n) for n in range(servers)], backups, {})
    joined = tuple(Trainer(n, Client(f"trainer{n}", 0)) for n in range(trainers))
    return replace(made, trainers=joined, joined=trainers)


def enough(
    of: View, agreeing: list[Server], *suspects: Server, over: tuple[Server, ...] = ()
) -> bool:
    return Electorate(of, over, suspects).is_enough(agreeing)


@pytest.mark.parametrize(
    ("servers", "votes", "is_enough"),
    [(1, 1, True), (3, 1, False), (3, 2, True), (4, 2, False), (4, 3, True)],
)
def test_a_majority_of_the_servers_is_enough(servers: int, votes: int, is_enough: bool) -> None:
    agreeing = [server(n) for n in range(votes)]
    assert enough(view(servers, 3), agreeing, server(servers)) == is_enough


def test_one_of_two_servers_needs_a_majority_of_the_trainers() -> None:
    of = view(2, 3)
    assert not enough(of, [server(0), trainer(0)], server(1))
    assert enough(of, [server(0), trainer(0), trainer(2)], server(1))


def test_votes_of_trainers_do_not_make_up_for_those_of_servers() -> None:
    assert not enough(view(3, 2), [server(0), trainer(0), trainer(1)], server(1), server(2))


def test_a_suspected_trainer_has_no_vote() -> None:
    assert enough(view(2, 2), [server(0), trainer(0)], server(1), trainer(1))


def test_servers_whose_end_is_certain_have_no_vote() -> None:
    of = view(3, 1)
    assert enough(of, [server(2)], server(0), server(1), over=(server(0), server(1)))
    assert not enough(of, [server(2)], server(0), server(1), over=(server(0),))


def test_before_trainers_come_one_of_two_servers_may_not_give_up_a_shard() -> None:
    assert enough(view(2, 0), [server(0)], server(1))
    assert not enough(view(2, 0, backups=0), [server(0)], server(1))


def test_when_trainers_are_gone_one_of_two_servers_decides_nothing() -> None:
    left = replace(view(2, 0), joined=1)
    assert not enough(left, [server(0)], server(1))
    assert enough(left, [server(0)], server(1), over=(server(1),))


def test_trainers_are_asked_only_while_they_decide() -> None:
    electorate = Electorate(view(2, 1), (), (server(1),))
    assert electorate.to_ask([server(0)]) == (server(0), server(1), trainer(0))
    assert Electorate(view(3, 1), (), (server(1),)).to_ask([server(0)]) == tuple(
        map(server, range(3))
    )
