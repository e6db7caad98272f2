"""The plan in a job's store: read again when it may have changed."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from rpc.extend import KeyValueStore, key_values
from tensorwire.launch.plan_store import PlanStore
from tensorwire.launch.seats import Joined
from tests.rpc.stores import CountingStore
from tests.rpc.told_watch import StandingWatch
from tests.tensorwire.launch.plans import node, roles


def test_a_plan_that_is_watched_is_read_when_a_change_is_told_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rpc.group.store_watch.SECONDS_BETWEEN_READS", 600.0)
    monkeypatch.setattr("tensorwire.launch.plan_store._SECONDS_BETWEEN_READS", 600.0)
    shared, watch = HashStore(), StandingWatch(lambda: None)
    store = CountingStore(shared)
    other = PlanStore(key_values(shared, b"", "rpcrun"), 1)
    monkeypatch.setattr(KeyValueStore, "watch", lambda self, *keys: watch)
    plans = PlanStore(key_values(store, b"", "rpcrun"), 1)
    plans.read()
    before = store.requests
    trainers = roles("trainer:1")
    after = other.put([Joined(node(0, trainers), trainers)])
    assert plans.read() != after
    assert store.requests == before
    watch.tell()
    assert plans.read() == after
    assert store.requests > before
