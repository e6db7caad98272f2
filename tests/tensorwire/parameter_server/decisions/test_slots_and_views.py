"""Slots move as little as can be, and a view is the same after a journey through the store."""

from __future__ import annotations

import random
from collections import Counter

from tensorwire.parameter_server.decisions import view_changes, views
from tensorwire.parameter_server.decisions.slots import SLOTS, evenly, moved, slot_of
from tensorwire.parameter_server.decisions.views import Client, Server, Snapshot, View

A, B, C, D = (Server(f"ps{k}", 0) for k in range(4))


def test_a_first_map_gives_each_shard_its_share() -> None:
    for count in (1, 2, 3, 7):
        shares = Counter(evenly(range(count)))
        assert max(shares.values()) - min(shares.values()) <= 1


def test_a_new_map_moves_only_what_a_new_shard_needs() -> None:
    old = evenly((0, 1))
    new = moved(old, (0, 1, 2))
    changed = [slot for slot in range(SLOTS) if old[slot] != new[slot]]
    assert all(new[slot] == 2 for slot in changed)
    assert SLOTS // 3 <= len(changed) <= SLOTS // 3 + 1


def test_maps_stay_fair_and_frugal_over_random_changes() -> None:
    r = random.Random(1)
    old = evenly((0,))
    for _ in range(200):
        shards = r.sample(range(8), r.randint(1, 8))
        new = moved(old, shards)
        shares = Counter(new)
        assert set(shares) == set(shards)
        assert max(shares.values()) - min(shares.values()) <= 1
        least = sum(max(0, count - SLOTS // len(shards) - 1) for count in Counter(old).values())
        gone = sum(count for shard, count in Counter(old).items() if shard not in shards)
        changed = sum(a != b for a, b in zip(old, new, strict=True))
        assert changed <= least + gone + len(shards)
        old = new


def test_ids_fall_evenly_into_slots() -> None:
    counts = Counter(slot_of(identity) for identity in range(100_000))
    assert len(counts) == SLOTS
    assert max(counts.values()) < 2 * 100_000 / SLOTS


def test_a_view_survives_the_store() -> None:
    view = view_changes.first([A, B, C], 1, {"servers": ["ps0"], "trainers": 2})
    view = view_changes.with_trainers(view, [Client("t1", 0), Client("t0", 3)])
    view = view_changes.without(view, {B})
    assert View.decode(view.encode()) == view
    with_all = view_changes.coordinated(view, D)
    with_all = views.replace(with_all, snapshot=Snapshot("f", {0: 3}, 4), declared={"a": "x"})
    with_all = view_changes.with_left(with_all, views.Left(0, "t1", None, 7))
    assert View.decode(with_all.encode()) == with_all


def test_trainers_are_numbered_by_their_names() -> None:
    view = view_changes.with_trainers(
        view_changes.first([A], 0, {}), [Client("t1", 0), Client("t0", 3)]
    )
    assert [(t.number, t.client.name) for t in view.trainers] == [(0, "t0"), (1, "t1")]
    later = view_changes.with_trainers(view_changes.without_trainers(view, {0}), [Client("t0", 4)])
    assert [(t.number, t.client.name) for t in later.trainers] == [(1, "t1"), (2, "t0")]


def test_a_backup_takes_over_and_a_server_that_came_is_asked_to_be_one() -> None:
    view = view_changes.without(view_changes.first([A, B], 1, {}), {A})
    assert [shard.chain for shard in view.shards] == [(B,), (B,)]
    assert views.wanting(view, {B}) is None
    back = Server("ps0", 1)
    view = view_changes.with_server(view, back)
    assert views.wanting(view, {B, back}) == (0, back)
    assert view_changes.backed_up(view, 0, back).shards[0].chain == (B, back)


def test_a_cluster_that_shrinks_keeps_what_only_leaving_servers_have() -> None:
    view = view_changes.resized(view_changes.first([A, B], 0, {}), [A])
    assert view.active == (0,)
    assert [shard.number for shard in view_changes.trimmed(view).shards] == [0]
    orphaned = view_changes.without(
        view_changes.resized(view_changes.first([A, B], 1, {}), [B]), {B}
    )
    trimmed = view_changes.trimmed(orphaned)
    assert [shard.chain for shard in trimmed.shards] == [(A,)]
    assert trimmed.servers == (A,)


def test_the_first_living_server_coordinates() -> None:
    view = view_changes.first([A, B, C], 1, {})
    assert not views.is_next_coordinator(view, B, {A, B, C})
    assert views.is_next_coordinator(view, B, {B, C})
    assert not views.is_next_coordinator(view, C, {B, C})
    assert views.is_next_coordinator(view, D, {D})
