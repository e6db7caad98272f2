"""One coordinator: who is taken out of a view while it takes over, or while the cluster goes back.

Whole clusters are played in ``test_games``; here each vote comes when a test says so, and all else
is answered at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from tensorwire.parameter_server.decisions import beginnings, orders, view_changes, views
from tensorwire.parameter_server.decisions.coordination import Coordinator
from tensorwire.parameter_server.decisions.pushes import Cut, Status
from tensorwire.parameter_server.decisions.samples import Account
from tensorwire.parameter_server.decisions.tasks import (
    Alarm,
    Ask,
    Effect,
    Examine,
    Examined,
    Fail,
    Resign,
    Store,
    Tell,
    Undecided,
)
from tensorwire.parameter_server.decisions.views import Client, Server, Snapshot, Trainer, View

PS0, PS1, PS2, PS3, PS4 = SERVERS = [Server(f"ps{number}", 0) for number in range(5)]
TRAINER = Trainer(0, Client("trainer0", 0))


def view(servers: int, consistency: str = "BSP", trainers: tuple[Trainer, ...] = ()) -> View:
    """A cluster without backups that has a snapshot."""
    settings = {"consistency": [consistency], "servers": [each.name for each in SERVERS]}
    made = view_changes.first(SERVERS[:servers], 0, settings)
    counts = {each.number: 0 for each in trainers}
    return replace(
        made, trainers=trainers, joined=len(trainers), snapshot=Snapshot("folder", counts, 0)
    )


class Played:
    """A coordinator whose views are stored and whose orders are answered at once.

    Args:
        me: the server that coordinates.
        view: the view in which it begins.
        lost: servers of the view that it takes for lost.
        gone: trainers of the view, likewise.

    Attributes:
        failed: by request that was not granted, the reason.
        stores: views that are on their way to the store; None if each is stored at once.
        unheard: orders that no shard answers, by the number of what was asked; None if each is.
    """

    def __init__(
        self,
        me: Server,
        view: View,
        lost: tuple[Server, ...] = (),
        gone: tuple[Trainer, ...] = (),
    ) -> None:
        self.view = view
        self.polls: list[Ask] = []
        self.failed: dict[int, str] = {}
        self.given: list[orders.Order] = []
        self.stores: deque[View] | None = None
        self.unheard: dict[int, Tell] | None = None
        living = set(view.servers) - set(lost)
        here = [each.number for each in view.trainers if each not in gone]
        self.coordinator = Coordinator(me, view, living, (), here)
        self.do(self.coordinator.start())

    def do(self, effects: list[Effect]) -> None:
        """Does what is to be done, and what follows from it."""
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            if isinstance(effect, Store) and self.stores is not None:
                self.stores.append(effect.view)
            elif isinstance(effect, Store):
                self.view = effect.view
                queue.extend(self.coordinator.stored(effect.view, True))
            elif isinstance(effect, Tell) and self.unheard is not None:
                self.unheard[effect.ask] = effect
            elif isinstance(effect, Tell):
                answer = self.answer(effect.order)
                queue.extend(self.coordinator.answered(effect.ask, answer, effect.to))
            elif isinstance(effect, Examine):
                found = Examined(effect.snapshots[0])
                queue.extend(self.coordinator.answered(effect.ask, found))
            elif isinstance(effect, Alarm):
                queue.extend(self.coordinator.rang())
            elif isinstance(effect, Ask):
                self.polls.append(effect)
            elif isinstance(effect, Fail):
                self.failed[effect.request] = effect.reason

    def answer(self, order: orders.Order) -> Any:
        """The answer of a shard."""
        self.given.append(order)
        counts = {each.number: 0 for each in self.view.trainers}
        epoch, members = self.view.epoch, frozenset(counts)
        status = Status(counts, 0, epoch, None, None, True, frozenset(), members)
        return status if isinstance(order, orders.Query | orders.Hold) else None

    def store(self) -> None:
        """The view that is on its way to the store arrives."""
        assert self.stores is not None
        self.view = self.stores.popleft()
        self.do(self.coordinator.stored(self.view, True))

    def hear(self) -> None:
        """Shards hear of all orders, from now on at once."""
        unheard, self.unheard = self.unheard or {}, None
        self.do(list(unheard.values()))

    def vote(self, voter: Server, *suspects: Server) -> None:
        """Somebody agrees that these are lost, as it was asked."""
        poll = next(p for p in self.polls if (p.to, p.suspects) == (voter, frozenset(suspects)))
        self.polls.remove(poll)
        self.do(self.coordinator.answered(poll.ask, True))


def test_who_takes_over_takes_nobody_out_before_it_coordinates() -> None:
    played = Played(PS1, view(4), lost=(PS0,))
    played.do(played.coordinator.server_lost(PS2, is_proven=True))
    assert {poll.suspects for poll in played.polls} == {frozenset([PS0])}
    played.vote(PS3, PS0)
    assert played.view.coordinator == PS1
    assert played.view.term > 0


def test_servers_that_are_lost_during_a_takeover_are_taken_out_after_it() -> None:
    with_backups = replace(view(5), backups=1, shards=view_changes.first(SERVERS, 1, {}).shards)
    played = Played(PS1, with_backups, lost=(PS0,))
    played.do(played.coordinator.server_lost(PS3, is_proven=True))
    played.vote(PS2, PS0)
    played.vote(PS4, PS0)
    assert played.view.coordinator == PS1
    played.vote(PS2, PS3)
    assert set(played.view.servers) == {PS1, PS2, PS4}
    assert played.view.generation == 0


def test_servers_that_are_voted_on_when_the_cluster_goes_back_are_taken_out_after_it() -> None:
    played = Played(PS0, view(5))
    played.do(played.coordinator.server_lost(PS1))
    played.do(played.coordinator.server_lost(PS2))
    played.vote(PS3, PS2)
    played.vote(PS4, PS2)
    assert played.view.generation == 1
    assert PS1 in played.view.servers
    played.polls = [poll for poll in played.polls if poll.view.generation == 1]
    played.vote(PS3, PS1)
    played.vote(PS4, PS1)
    assert set(played.view.servers) == {PS0, PS3, PS4}


def test_trainers_that_are_voted_on_when_the_cluster_goes_back_are_dismissed_after_it() -> None:
    for consistency in ("BSP", "Async"):
        played = Played(PS0, view(3, consistency, (TRAINER,)))
        played.do(played.coordinator.worker_lost(TRAINER.client.name, 0))
        played.do(played.coordinator.server_lost(PS1, is_proven=True))
        played.vote(PS2, PS1)
        assert played.view.generation == 1
        assert played.view.trainers == (TRAINER,)
        played.polls = [poll for poll in played.polls if poll.view.generation == 1]
        played.vote(PS2, Server(TRAINER.client.name, 0))
        assert played.view.trainers == ()


def test_marks_end_once_for_the_chain_of_a_publisher_that_is_lost() -> None:
    publisher = views.Publisher(TRAINER.client, "folder", "chain")
    played = Played(PS0, replace(view(3), publisher=publisher))
    played.do(played.coordinator.worker_lost("another", 0))
    assert played.view.publisher == publisher
    played.do(played.coordinator.asked(1, orders.EndPublishing("an older chain")))
    assert played.view.publisher == publisher
    played.do(played.coordinator.worker_lost(TRAINER.client.name, TRAINER.client.incarnation))
    assert played.view.publisher is None
    ended = [each.cut.action for each in played.given if isinstance(each, orders.Go)]
    assert ended == [orders.EndMarks("chain")] * 3


def test_a_later_life_of_the_publisher_takes_its_place() -> None:
    publisher = views.Publisher(TRAINER.client, "folder", "chain")
    played = Played(PS0, replace(view(3, trainers=(TRAINER,)), publisher=publisher))
    later = replace(TRAINER.client, incarnation=TRAINER.client.incarnation + 1)
    version = orders.Version("chain 2", orders.Extent.ALL, False)
    played.do(played.coordinator.asked(1, orders.TakeVersion(version, "folder/draft", later)))
    assert played.view.publisher == views.Publisher(later, "folder", "chain 2")
    played.do(played.coordinator.worker_lost(TRAINER.client.name, TRAINER.client.incarnation))
    assert played.view.publisher is not None, "it was the former life that was lost"


def test_marks_end_for_a_publisher_that_is_lost_while_its_request_is_in_line() -> None:
    played = Played(PS0, view(3, trainers=(TRAINER,)))
    version = orders.Version("chain", orders.Extent.ALL, False)
    taken = orders.TakeVersion(version, "folder/draft", TRAINER.client)
    effects = played.coordinator.asked(1, taken)
    effects += played.coordinator.worker_lost(TRAINER.client.name, TRAINER.client.incarnation)
    assert played.view.publisher is None
    played.do(effects)
    played.vote(PS1, Server(TRAINER.client.name, TRAINER.client.incarnation))
    ended = [each.cut.action for each in played.given if isinstance(each, orders.Go)]
    assert orders.EndMarks("chain") in ended
    assert played.view.publisher is None


def test_a_cluster_that_nobody_has_joined_begins_anew_where_there_is_no_snapshot() -> None:
    played = Played(PS0, replace(view(3), snapshot=None))
    played.do(played.coordinator.server_lost(PS1, is_proven=True))
    played.vote(PS2, PS1)
    assert not played.view.broken
    assert played.view.generation == 1
    assert {shard.head for shard in played.view.shards} == {PS0, PS2}


def test_what_was_trained_is_not_begun_anew_without_a_snapshot() -> None:
    played = Played(PS0, replace(view(3), snapshot=None, joined=1))
    played.do(played.coordinator.server_lost(PS1, is_proven=True))
    played.vote(PS2, PS1)
    assert played.view.broken == (
        "all servers of shard 1 were lost, and there is no snapshot to go back to"
    )


def test_a_later_life_of_a_server_ends_the_one_before_of_whose_end_nobody_told() -> None:
    shards = view_changes.first(SERVERS[:3], 1, {}).shards
    played = Played(PS0, replace(view(3), backups=1, joined=1, shards=shards))
    played.do(played.coordinator.asked(1, orders.Arrive(Server("ps1", 1))))
    played.vote(PS2, PS1)
    assert PS1 not in views.servers_of(played.view)
    assert Server("ps1", 1) in played.view.servers


def test_what_can_be_asked_again_is_not_refused_as_the_cluster_goes_back() -> None:
    """A program would end with an error, only as it named its sampler at a bad moment."""
    requests: list[orders.Request] = [
        orders.CountSamples("a", "text"),
        orders.Announce("table", "text"),
        orders.TakeSnapshot("folder", "draft"),
    ]
    for request in requests:
        played = Played(PS0, view(3, trainers=(TRAINER,)))
        for effect in played.coordinator.asked(1, request):
            if isinstance(effect, Store):  # what follows from it, nobody does
                played.coordinator.stored(effect.view, True)
        played.view = played.coordinator.view
        played.do(played.coordinator.server_lost(PS1, is_proven=True))
        played.vote(PS2, PS1)
        assert played.view.generation == 1
        is_repeatable = not isinstance(request, orders.TakeSnapshot)
        why = "" if is_repeatable else "the cluster went back to its last snapshot"
        assert played.failed == {1: why}


def test_an_echo_of_a_request_to_join_ends_when_the_trainer_leaves() -> None:
    """It would join and be dismissed for ever, as nobody is left who could be told its number."""
    played = Played(PS0, view(2, "Async", (TRAINER,)))
    held = played.coordinator.asked(1, orders.TakeSnapshot("folder", "draft"))
    played.do(played.coordinator.asked(2, orders.Join(TRAINER.client)))
    assert played.failed == {}
    played.do(played.coordinator.asked(3, orders.Leave(TRAINER.number, 0, 0, 0)))
    assert played.failed == {2: "this trainer has left the cluster"}
    played.do(held)
    assert played.view.joined == 1


def test_samples_are_counted_from_the_start_in_a_snapshot_that_knows_none_of_them() -> None:
    """Trainers go on after the cluster went back, and do not name their samplers again."""
    played = Played(PS0, view(3, "Async", (TRAINER,)))
    played.do(played.coordinator.asked(1, orders.CountSamples("a", "text")))
    played.do(played.coordinator.server_lost(PS1, is_proven=True))
    played.vote(PS2, PS1)
    assert played.view.generation == 1
    assert beginnings.beginning(played.view).accounts == {"a": Account()}


def test_votes_are_counted_in_the_view_that_takes_somebody_out() -> None:
    """Here ps2 is named meanwhile: of three servers, one cannot take another out."""
    alone = replace(view_changes.first(SERVERS[:2], 1, {}), snapshot=Snapshot("folder", {}, 0))
    played = Played(PS0, alone)
    played.stores = deque()
    played.do(played.coordinator.asked(1, orders.Arrive(PS2)))
    played.do(played.coordinator.server_lost(PS1))
    played.store()
    assert played.view.servers == (PS0, PS1, PS2)
    assert not played.stores
    played.vote(PS2, PS1)
    played.store()
    assert played.view.servers == (PS0, PS2)


def test_a_voter_that_has_read_the_next_view_before_the_coordinator_is_asked_again() -> None:
    """The coordinator may sleep before it hears that the store has taken a view."""
    played = Played(PS0, view(3))
    played.stores = deque()
    played.do(played.coordinator.server_lost(PS2))
    played.do(played.coordinator.asked(1, orders.Arrive(PS3)))
    (poll,) = (each for each in played.polls if each.to == PS1)
    played.polls.clear()
    effects = played.coordinator.answered(poll.ask, False)
    assert not any(isinstance(each, Undecided) for each in effects)
    played.store()
    assert {each.to for each in played.polls} == {PS1, PS3}
    played.vote(PS1, PS2)
    played.vote(PS3, PS2)
    played.store()
    assert played.view.servers == (PS0, PS1, PS3)


def test_a_voter_that_ended_after_it_had_read_the_next_view_is_named_as_silent() -> None:
    played = Played(PS0, view(3))
    played.stores = deque()
    played.do(played.coordinator.server_lost(PS2))
    (poll,) = played.polls
    assert not played.coordinator.answered(poll.ask, False)
    assert Undecided((PS1, PS2)) in played.coordinator.server_lost(PS1)


def test_one_vote_takes_over_in_one_view() -> None:
    """Else a server that comes between two of them would be of a view that nobody voted in."""
    gone = Trainer(1, Client("trainer1", 0))
    played = Played(PS1, view(3, "BSP", (TRAINER, gone)), lost=(PS0,), gone=(gone,))
    played.stores = deque()
    played.vote(PS2, PS0, Server(gone.client.name, 0))
    played.do(played.coordinator.asked(1, orders.Arrive(PS3)))
    before, (after,) = played.view, played.stores
    assert (after.number, after.term) == (before.number + 1, before.number + 1)
    assert (after.coordinator, after.servers, after.trainers) == (PS1, (PS1, PS2), (TRAINER,))
    assert {shard.version for shard in after.shards if not shard.chain} == {after.number}


def test_who_finds_another_view_in_the_store_does_nothing_more_of_what_was_voted_on() -> None:
    played = Played(PS1, view(3), lost=(PS0,))
    played.stores = deque()
    played.vote(PS2, PS0)
    other = view_changes.with_server(played.view, PS3)
    (resigns,) = played.coordinator.stored(other, False)
    assert isinstance(resigns, Resign)
    assert not played.coordinator.server_lost(PS2, is_proven=True)
    assert played.coordinator.asked(2, orders.Arrive(PS4)) == [Fail(2, "")]


def test_a_server_that_is_lost_while_the_view_that_names_it_is_stored_is_voted_on() -> None:
    played = Played(PS0, view(3))
    played.stores = deque()
    played.do(played.coordinator.server_came(PS3))
    played.do(played.coordinator.asked(1, orders.Resize((PS0, PS1, PS2, PS3))))
    played.do(played.coordinator.server_lost(PS3))
    assert not played.polls
    played.store()
    assert PS3 in views.keepers(played.view)
    assert {poll.to for poll in played.polls} == {PS1, PS2}
    played.stores.clear()  # other views of the resize
    played.vote(PS1, PS3)
    assert not played.stores
    played.vote(PS2, PS3)
    assert PS3 not in views.servers_of(played.stores[0])


@pytest.mark.parametrize("is_server_first", [True, False])
def test_a_machine_with_a_server_and_a_trainer_is_lost_while_a_snapshot_waits_for_it(
    is_server_first: bool,
) -> None:
    """Of two servers and two trainers one each is left; the dismissal waits for the snapshot."""
    other = Trainer(1, Client("trainer1", 0))
    played = Played(PS0, view(2, "BSP", (TRAINER, other)))
    played.unheard = {}
    played.do(played.coordinator.asked(1, orders.TakeSnapshot("new", "draft")))
    assert played.unheard
    losses = [
        lambda: played.coordinator.server_lost(PS1),
        lambda: played.coordinator.worker_lost(other.client.name, 0),
    ]
    for lose in losses if is_server_first else reversed(losses):
        played.do(lose())
    played.polls = [poll for poll in played.polls if len(poll.suspects) == 2]
    played.vote(Server(TRAINER.client.name, 0), PS1, Server(other.client.name, 0))
    assert PS1 not in played.view.servers
    assert played.view.generation == 1


def test_a_server_that_no_view_names_is_forgotten_without_a_vote() -> None:
    played = Played(PS0, view(3))
    played.do(played.coordinator.server_came(PS3))
    played.do(played.coordinator.server_lost(PS3))
    assert not played.polls


def test_nothing_is_declared_while_rows_move() -> None:
    """A shard that knows it before it moves expects parts from one that knows it afterwards."""
    played = Played(PS0, view(3))
    played.unheard = {}
    played.do(played.coordinator.asked(1, orders.Resize((PS0, PS1))))
    played.do(played.coordinator.asked(2, orders.Announce("net", "a dense group")))
    told = {type(tell.order) for tell in played.unheard.values()}
    assert told == {orders.Query}
    assert "net" not in played.view.declared
    played.hear()
    assert played.view.declared == {"net": "a dense group"}


@pytest.mark.parametrize("was_told", [True, False])
def test_who_takes_over_finishes_a_cut_that_some_shard_was_told(was_told: bool) -> None:
    """That shard may have passed it. A cut that none was told is given up."""
    with_backups = replace(view(3), backups=1, shards=view_changes.first(SERVERS[:3], 1, {}).shards)
    played = Played(PS1, with_backups, lost=(PS0,))
    played.unheard = {}
    played.vote(PS2, PS0)
    cut = Cut(5, {})
    for ask, tell in list(played.unheard.items()):
        assert tell.order == orders.Query()
        passed = Status({}, 0, 0, None, cut, True, frozenset(), frozenset())
        holds = Status({}, 0, 0, cut.change, None, True, frozenset(), frozenset())
        answer = passed if was_told and tell.shard == 0 else holds
        played.do(played.coordinator.answered(ask, answer, tell.to))
    told = {each.shard: each.order for each in played.unheard.values() if each.ask > ask}
    follow = orders.Go(cut) if was_told else orders.Release(cut.change)
    assert told == dict.fromkeys([1, 2] if was_told else [0, 1, 2], follow)
