"""A newcomer asks the servers that may know more than it has read, and believes what one tells."""

from __future__ import annotations

from dataclasses import replace

from tensorwire.parameter_server.decisions import view_changes
from tensorwire.parameter_server.decisions.confirmation import Confirmation, named_in
from tensorwire.parameter_server.decisions.views import Server

PS0, PS1 = SERVERS = [Server("ps0", 0), Server("ps1", 0)]
READ = view_changes.first(SERVERS, 1, {"servers": ["ps0", "ps1"]})
LATER = replace(READ, number=5)


def test_the_latest_lives_of_those_that_are_named_are_asked_too() -> None:
    latest = {"ps0": 0, "ps1": 3}
    assert named_in(READ, latest.__getitem__) == {PS0, PS1, Server("ps1", 3)}


def test_one_that_knows_a_later_view_is_enough() -> None:
    newcomer = Confirmation(READ)
    assert newcomer.to_ask(SERVERS) == SERVERS
    newcomer.answered(PS1, LATER)
    assert newcomer.view == LATER
    assert newcomer.is_confirmed
    assert not newcomer.waiting
    assert newcomer.to_ask(SERVERS) == []


def test_what_was_read_stays_if_it_is_the_later_one() -> None:
    newcomer = Confirmation(LATER)
    newcomer.to_ask(SERVERS)
    newcomer.answered(PS0, READ)
    assert newcomer.view == LATER


def test_a_view_that_was_deleted_is_told_by_who_knows_it() -> None:
    newcomer = Confirmation(None)
    newcomer.to_ask(SERVERS)
    newcomer.answered(PS0, LATER)
    assert newcomer.view == LATER


def test_others_that_came_meanwhile_are_asked_when_nobody_knew_anything() -> None:
    newcomer = Confirmation(READ)
    newcomer.to_ask([PS0])
    newcomer.answered(PS0, None)
    assert newcomer.to_ask(SERVERS) == [PS1]
    newcomer.answered(PS1, None)
    assert newcomer.to_ask(SERVERS) == []
    assert newcomer.view == READ
    assert not newcomer.is_confirmed


def test_one_whose_former_life_was_met_is_asked_once_more() -> None:
    newcomer = Confirmation(READ)
    newcomer.to_ask(SERVERS)
    newcomer.answered(PS0, None)
    newcomer.missed(PS1)
    assert newcomer.unheard == {PS1}
    assert newcomer.to_ask(SERVERS) == [PS1]
    assert not newcomer.unheard
