"""Bring-up over stores in this process: threads stand for workers."""

import json
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from rpc import rendezvous
from rpc.errors import BringUpError
from rpc.rendezvous import Record
from tests.waiting import until

SOON = 5.0
"""A deadline that only a failing test reaches."""
SECONDS = timedelta(seconds=SOON)


def record(rank: int, world_size: int | None = 2, **fields: Any) -> Record:
    values = {
        "name": f"worker{rank}",
        "incarnation": 1,
        "backend": "TENSORPIPE",
        "address": b"\x00\xff:%d" % rank,
    }
    return Record(rank=rank, world_size=world_size, **(values | fields))


def begun(store: Store, rank: int, world_size: int | None = 2, **fields: Any) -> Record:
    """The record of a worker that begins its next life now."""
    name = fields.get("name", f"worker{rank}")
    incarnation = rendezvous.next_incarnation(store, name, rank)
    return record(rank, world_size, **fields, incarnation=incarnation)


class CountingStore(Store):
    """Counts the requests that one worker makes, of the kinds it needs."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.requests = 0
        self._store = store

    def _counted(self, name: str, *arguments: Any) -> Any:
        self.requests += 1
        return getattr(self._store, name)(*arguments)

    def add(self, *arguments: Any) -> Any:
        return self._counted("add", *arguments)

    def set(self, *arguments: Any) -> Any:
        return self._counted("set", *arguments)

    def get(self, *arguments: Any) -> Any:
        return self._counted("get", *arguments)

    def check(self, *arguments: Any) -> Any:
        return self._counted("check", *arguments)

    def wait(self, *arguments: Any) -> Any:
        return self._counted("wait", *arguments)

    def compare_set(self, *arguments: Any) -> Any:
        return self._counted("compare_set", *arguments)

    def multi_get(self, *arguments: Any) -> Any:
        return self._counted("multi_get", *arguments)


class TurnsStore(CountingStore):
    """Makes a request when it is its turn."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.turn = threading.Semaphore(0)
        self.made = threading.Semaphore(0)
        self.ended = False

    def _counted(self, name: str, *arguments: Any) -> Any:
        self.turn.acquire()
        try:
            return super()._counted(name, *arguments)
        finally:
            self.made.release()

    def wait(self, *arguments: Any) -> Any:
        self._needs_no_more_turns()
        return self._store.wait(*arguments)

    def take_turns(self, task: Callable[[Store], Any]) -> Any:
        """What became of a task."""
        try:
            return outcome(lambda: task(self))
        finally:
            self._needs_no_more_turns()

    def _needs_no_more_turns(self) -> None:
        self.ended = True
        self.turn.release(1000)
        self.made.release()


def in_turns(store: Store, tasks: list[Callable[[Store], Any]], seed: int) -> list[Any]:
    """What became of each, where their requests come in an order drawn from a seed."""
    draw = random.Random(seed)
    stores = [TurnsStore(store) for _ in tasks]
    with ThreadPoolExecutor(len(tasks)) as pool:
        calls = [
            pool.submit(each.take_turns, task) for each, task in zip(stores, tasks, strict=True)
        ]
        while active := [each for each in stores if not each.ended]:
            chosen = draw.choice(active)
            chosen.turn.release()
            assert chosen.made.acquire(timeout=SOON)
        return [call.result() for call in calls]


def join_in_turns(store: Store, workers: list[Record], seed: int) -> list[Record | None]:
    """Who joined."""

    def join(store: Store, me: Record) -> Record:
        rendezvous.join(store, me)
        return me

    outcomes = in_turns(store, [partial(join, me=me) for me in workers], seed)
    unexpected = [each for each in outcomes if not isinstance(each, Record | BringUpError)]
    assert not unexpected
    return [each if isinstance(each, Record) else None for each in outcomes]


class FreezingStore(CountingStore):
    """Answers until somebody waits."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.thaw = threading.Event()

    def wait(self, *arguments: Any) -> Any:
        self.thaw.wait(SOON)
        raise RuntimeError("too late")


def rounds_of(store: Store) -> Any:
    """The first round that was held at a store."""
    return rendezvous._Round(rendezvous._ours(store), 1)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def meet_all(
    store: Store | Callable[[], Store], records: list[Record], timeout: float = SOON
) -> list[Any]:
    """What each worker got, or the error it saw."""

    def meet(me: Record) -> list[Record]:
        return rendezvous.meet(store if isinstance(store, Store) else store(), me, timeout)

    with ThreadPoolExecutor(len(records)) as pool:
        calls = [pool.submit(outcome, lambda me=me: meet(me)) for me in records]
        return [call.result() for call in calls]


def errors(outcomes: list[Any]) -> list[str]:
    assert all(isinstance(each, BringUpError) for each in outcomes), outcomes
    return [str(each) for each in outcomes]


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens one worker's end of a store; each kind of store in turn."""
    stores: list[Store] = []
    if request.param == "file":
        yield lambda: FileStore(str(tmp_path / "store"), -1)
    elif request.param == "tcp":
        host = TCPStore("127.0.0.1", 0, None, True, SECONDS)
        stores.append(host)
        port = host.port
        del host
        yield lambda: TCPStore("127.0.0.1", port, None, False, SECONDS)
    else:
        stores.append(HashStore())
        yield lambda: stores[0] if request.param == "hash" else PrefixStore("mine", stores[0])
    stores.clear()


class TestRecord:
    def test_survives_encoding(self) -> None:
        original = record(3, extras={"cores": 2})
        assert Record.decode(original.encode()) == original

    def test_is_json(self) -> None:
        assert json.loads(record(1).encode())["name"] == "worker1"

    @pytest.mark.parametrize("data", [b"", b"{}", b"\x80\x04N.", b'{"name": "x"}', b"[]"])
    def test_anything_else_in_its_place_is_named(self, data: bytes) -> None:
        with pytest.raises(BringUpError, match="something else than a record"):
            Record.decode(data)


class TestStaticGroup:
    def test_everyone_sees_everyone_in_the_order_of_ranks(
        self, connect: Callable[[], Store]
    ) -> None:
        records = [record(rank, 3) for rank in range(3)]
        assert meet_all(connect, records) == [records] * 3

    def test_a_group_of_one_needs_nobody(self) -> None:
        assert rendezvous.meet(HashStore(), record(0, 1), SOON) == [record(0, 1)]

    def test_a_store_serves_one_group_after_the_other(self) -> None:
        store = HashStore()
        for life in (1, 2, 3):
            records = [record(rank, incarnation=life) for rank in range(2)]
            assert meet_all(store, records) == [records] * 2

    def test_a_hundred_workers_meet(self) -> None:
        records = [record(rank, 100) for rank in range(100)]
        assert all(seen == records for seen in meet_all(HashStore(), records))

    def test_requests_to_the_store_do_not_grow_with_the_group(self) -> None:
        def requests(size: int) -> int:
            store = HashStore()
            counting = CountingStore(store)
            others = [record(rank, size) for rank in range(1, size)]
            with ThreadPoolExecutor(size) as pool:
                for me in others:
                    pool.submit(rendezvous.meet, store, me, SOON)
                rendezvous.meet(counting, record(0, size), SOON)
            return counting.requests

        assert abs(requests(20) - requests(2)) <= 1  # who comes last writes the verdict


class TestWhatKeepsAStaticGroupFromForming:
    def test_missing_ranks_are_named_and_so_are_those_who_came(self) -> None:
        seen = errors(meet_all(HashStore(), [record(0, 4), record(2, 4)], timeout=0.5))
        for text in seen:
            assert "2 of 4 workers did not come" in text
            assert "missing ranks [1, 3]" in text
            assert "'worker0' (rank 0" in text
            assert "'worker2' (rank 2" in text

    def test_whoever_comes_too_late_meets_the_others_in_the_next_round(self) -> None:
        store = HashStore()
        errors(meet_all(store, [record(0)], timeout=0.01))
        again = [record(0, incarnation=2), record(1)]
        assert meet_all(store, again) == [again] * 2

    def test_a_name_given_twice_is_an_error_for_all_at_once(self) -> None:
        workers = [record(0, 3), record(1, 3), record(2, 3, name="worker1")]
        for text in errors(meet_all(HashStore(), workers)):
            assert "worker1 is not unique" in text
            assert "rank 1" in text
            assert "rank 2" in text

    def test_whoever_comes_after_a_disagreement_hears_of_it_and_not_of_missing_ranks(self) -> None:
        store = HashStore()
        errors(meet_all(store, [record(1, 3), record(2, 3, name="worker1")]))
        (text,) = errors(meet_all(store, [record(0, 3)], timeout=60.0))
        assert "worker1 is not unique" in text
        again = [record(rank, 3, incarnation=2) for rank in range(3)]
        assert meet_all(store, again) == [again] * 3

    @pytest.mark.parametrize(
        ("what", "one", "other"),
        [("world_size", 2, 3), ("backend", "TENSORPIPE", "TENSORWIRE"), ("protocol", 1, 2)],
    )
    def test_a_disagreement_reaches_everyone_long_before_the_deadline(
        self, what: str, one: object, other: object
    ) -> None:
        workers = [replace(record(0), **{what: one}), replace(record(1), **{what: other})]
        started = time.monotonic()
        for text in errors(meet_all(HashStore(), workers, timeout=60.0)):
            assert f"disagree about {what}" in text
            assert f"worker0 says {one}" in text
            assert f"worker1 says {other}" in text
        assert time.monotonic() - started < SOON

    def test_two_processes_with_one_rank_are_told_apart(self) -> None:
        workers = [
            record(0, 3),
            record(0, 3, name="twin", process="process 7 on host b"),
        ]
        seen = errors(meet_all(HashStore(), workers, timeout=60.0))
        for text in seen:
            assert "rank 0 is claimed by two processes" in text
        assert any("process 7 on host b" in text for text in seen)

    def test_ranks_in_step_after_two_processes_claimed_one(self) -> None:
        store = HashStore()
        errors(meet_all(store, [begun(store, 0), begun(store, 0, name="twin")], timeout=60.0))
        again = [begun(store, 0), begun(store, 1)]
        assert meet_all(store, again) == [again] * 2

    @pytest.mark.parametrize("number", [2, 3])
    @pytest.mark.parametrize("rounds_before", [0, 1])
    def test_all_processes_with_one_rank_hear_so_at_once(
        self, number: int, rounds_before: int
    ) -> None:
        """Their requests come in every kind of order; in 100 orders the races are found."""
        for seed in range(100):
            store = HashStore()
            for _ in range(rounds_before):
                rendezvous.meet(store, begun(store, 0, 1), SOON)
            claimers = [begun(store, 0, name=f"twin{i}") for i in range(number)]
            meetings = [partial(rendezvous.meet, me=me, timeout=SOON) for me in claimers]
            for text in errors(in_turns(store, meetings, seed)):
                assert "rank 0 is claimed by two processes" in text, seed
                assert sum(str(me) in text for me in claimers) == 2, seed

    def test_one_with_a_rank_that_two_claimed_before_it_was_begun_may_meet(self) -> None:
        store = HashStore()
        early = [begun(store, 0, name=f"twin{i}") for i in range(3)]
        errors(meet_all(store, early[:2], timeout=60.0))
        (text,) = errors(meet_all(store, early[2:], timeout=60.0))
        assert "'twin2'" in text
        late = begun(store, 0, 1)
        assert rendezvous.meet(store, late, SOON) == [late]

    def test_a_store_that_freezes_meanwhile_is_not_waited_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rendezvous, "_SECONDS_TO_CONCLUDE", 0.1)
        frozen = FreezingStore(HashStore())
        with pytest.raises(BringUpError, match="did not answer within"):
            rendezvous.meet(frozen, record(0), 0.1)
        frozen.thaw.set()

    @pytest.mark.skipif(not hasattr(Store, "clone"), reason="torch 2.6 cannot clone a store")
    def test_who_is_interrupted_says_so_and_may_meet_again(self) -> None:
        store = TCPStore("127.0.0.1", 0, None, True, SECONDS, wait_for_workers=False)
        main = threading.main_thread().ident
        assert main is not None
        looking = store.clone()

        def interrupt() -> None:
            until(lambda: len(rounds_of(looking).records([0])) == 1)
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            rendezvous.meet(store, record(0, 3), SOON)
        thread.join()
        verdict = rounds_of(store).verdict()
        assert verdict is not None
        assert "'worker0'" in verdict
        assert "was interrupted while it waited" in verdict
        again = [record(0, incarnation=2), record(1)]
        assert meet_all(store.clone, again) == [again] * 2

    def test_the_loss_of_the_store_is_named(self) -> None:
        host = TCPStore("127.0.0.1", 0, None, True, SECONDS)
        client = TCPStore("127.0.0.1", host.port, None, False, SECONDS)
        seen: list[Any] = []
        waiting = threading.Thread(
            target=lambda: seen.append(outcome(lambda: rendezvous.meet(client, record(0), SOON)))
        )
        waiting.start()
        host.wait(["tensorwire/1/arrived"], SECONDS)
        del host
        waiting.join()
        assert "the store was lost" in errors(seen)[0]

    def test_a_dynamic_worker_cannot_meet(self) -> None:
        with pytest.raises(ValueError, match="use join"):
            rendezvous.meet(HashStore(), record(0, None), SOON)


class TestDynamicGroup:
    def test_members_are_those_who_joined_and_did_not_leave(
        self, connect: Callable[[], Store]
    ) -> None:
        store = connect()
        workers = [record(rank, None) for rank in range(3)]
        for worker in workers:
            rendezvous.join(store, worker)
        assert rendezvous.members(store) == workers
        rendezvous.leave(store, workers[1])
        assert rendezvous.members(store) == [workers[0], workers[2]]

    def test_members_are_found_by_name_and_by_rank(self) -> None:
        store = HashStore()
        rendezvous.join(store, record(5, None))
        assert rendezvous.lookup(store, "worker5") == record(5, None)
        assert rendezvous.lookup(store, 5) == record(5, None)
        assert rendezvous.lookup(store, "worker6") is None
        assert rendezvous.lookup(store, 6) is None

    def test_who_left_is_not_found(self) -> None:
        store = HashStore()
        rendezvous.join(store, record(5, None))
        rendezvous.leave(store, record(5, None))
        assert rendezvous.lookup(store, "worker5") is None
        assert rendezvous.lookup(store, 5) is None

    def test_it_is_known_who_left_and_who_was_struck_off(self) -> None:
        store = HashStore()
        assert not rendezvous.has_left(store, record(5, None))
        for number in (5, 6):
            rendezvous.join(store, record(number, None))
        assert not rendezvous.has_left(store, record(5, None))
        rendezvous.leave(store, record(5, None))
        rendezvous.strike_off(store, record(6, None))
        assert rendezvous.members(store) == []
        assert rendezvous.has_left(store, record(5, None))
        assert not rendezvous.has_left(store, record(5, None, incarnation=2))
        assert not rendezvous.has_left(store, record(6, None))
        rendezvous.join(store, record(6, None, incarnation=2))
        assert rendezvous.lookup(store, "worker6") == record(6, None, incarnation=2)

    def test_a_worker_that_died_comes_back_in_its_place(self) -> None:
        store = HashStore()
        first, second = record(1, None), record(1, None, incarnation=2, address=b"new")
        rendezvous.join(store, record(0, None))
        rendezvous.join(store, first)
        rendezvous.join(store, second)
        assert rendezvous.members(store) == [record(0, None), second]
        rendezvous.leave(store, first)
        assert rendezvous.lookup(store, 1) == second

    def test_name_and_rank_of_one_who_left_can_be_taken(self) -> None:
        store = HashStore()
        rendezvous.join(store, record(1, None))
        rendezvous.leave(store, record(1, None))
        successor = record(1, None, name="successor")
        namesake = record(2, None, name="worker1", incarnation=2)
        rendezvous.join(store, successor)
        rendezvous.join(store, namesake)
        assert rendezvous.lookup(store, 1) == successor
        assert rendezvous.lookup(store, "worker1") == namesake

    def test_a_name_belongs_to_one_rank(self) -> None:
        store = HashStore()
        rendezvous.join(store, record(0, None))
        with pytest.raises(BringUpError, match="worker0 is not unique"):
            rendezvous.join(store, record(1, None, name="worker0"))
        assert rendezvous.lookup(store, 1) is None

    @pytest.mark.parametrize("name", ["worker0", "-"])
    def test_a_rank_belongs_to_one_name(self, name: str) -> None:
        store = HashStore()
        rendezvous.join(store, record(0, None, name=name))
        with pytest.raises(BringUpError, match="rank 0 is claimed by two workers"):
            rendezvous.join(store, record(0, None, name="other"))
        assert rendezvous.members(store) == [record(0, None, name=name)]

    def test_a_life_does_not_take_the_place_of_a_later_one(self) -> None:
        store = HashStore()
        first, second = record(1, None), record(1, None, incarnation=2)
        rendezvous.join(store, second)
        with pytest.raises(BringUpError, match="rank 1 is claimed by two workers"):
            rendezvous.join(store, first)
        assert rendezvous.members(store) == [second]
        assert rendezvous.lookup(store, 1) == second

    def test_a_life_does_not_come_after_a_later_one_left(self) -> None:
        store = HashStore()
        rendezvous.join(store, record(1, None, incarnation=2))
        rendezvous.leave(store, record(1, None, incarnation=2))
        with pytest.raises(BringUpError, match="worker1 is not unique"):
            rendezvous.join(store, record(1, None))
        assert rendezvous.members(store) == []
        rendezvous.join(store, record(1, None, name="other", incarnation=3))

    @pytest.mark.parametrize("names", [("alice", "bob"), ("twin", "twin")])
    def test_of_two_that_claim_a_rank_at_once_one_is_a_member(self, names: tuple[str, str]) -> None:
        """Their requests come in every kind of order; in 100 orders the races are found."""
        lives = [record(1, None, name=name, incarnation=i) for i, name in enumerate(names, 1)]
        for seed in range(100):
            store = HashStore()
            joined = [each for each in join_in_turns(store, lives, seed) if each is not None]
            assert rendezvous.members(store) == joined[-1:], seed
            assert rendezvous.lookup(store, 1) == (joined[-1] if joined else None), seed
            assert len(joined) < 2 or names[0] == names[1], seed

    def test_backends_must_agree(self) -> None:
        store = HashStore()
        rendezvous.join(store, record(0, None))
        with pytest.raises(BringUpError, match="worker0 says TENSORPIPE, worker1 says OTHER"):
            rendezvous.join(store, record(1, None, backend="OTHER"))

    def test_changes_tells_whether_to_look_again(self) -> None:
        store = HashStore()
        counts = [rendezvous.changes(store)]
        rendezvous.join(store, record(0, None))
        counts.append(rendezvous.changes(store))
        rendezvous.leave(store, record(0, None))
        counts.append(rendezvous.changes(store))
        rendezvous.leave(store, record(0, None))
        assert counts == [0, 1, 2]
        assert rendezvous.changes(store) == 2

    def test_many_may_join_at_once(self) -> None:
        store = HashStore()
        workers = [record(rank, None) for rank in range(32)]
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(lambda me: rendezvous.join(store, me), workers))
        found = rendezvous.members(store)
        assert sorted(found, key=lambda member: member.rank) == workers

    def test_static_and_dynamic_members_do_not_mix(self) -> None:
        mixes = "RPC group mixes statically and dynamically initialized members"
        store = HashStore()
        rendezvous.join(store, record(0, None))
        with pytest.raises(RuntimeError, match=mixes):
            rendezvous.meet(store, record(1), SOON)
        store = HashStore()
        rendezvous.meet(store, record(0, 1), SOON)
        with pytest.raises(RuntimeError, match=mixes):
            rendezvous.join(store, record(1, None))


class TestIncarnations:
    def test_each_life_of_a_name_has_its_number(self) -> None:
        store = HashStore()
        assert [rendezvous.next_incarnation(store, "a", 0) for _ in range(3)] == [1, 2, 3]
        assert rendezvous.next_incarnation(store, "b", 1) == 1

    def test_neither_a_name_nor_a_rank_has_two_lives_of_one_number(self) -> None:
        store = HashStore()
        lives = [("a", 3), ("b", 3), ("b", 4), ("a", 3), ("c", 4), ("c", 3), ("a", 4)]
        numbers = [rendezvous.next_incarnation(store, *life) for life in lives]
        for position in (0, 1):
            for key in {life[position] for life in lives}:
                mine = [n for n, life in zip(numbers, lives, strict=True) if life[position] == key]
                assert mine == sorted(set(mine))


class TestWithin:
    def test_returns_and_raises_what_was_asked_for(self) -> None:
        assert rendezvous.within(SOON, lambda: 3) == 3
        with pytest.raises(KeyError):
            rendezvous.within(SOON, lambda: {}["x"])

    def test_gives_up_waiting_for_a_store_that_does_not_answer(self) -> None:
        answer = threading.Event()
        with pytest.raises(BringUpError, match=r"did not answer within 0\.05 s"):
            rendezvous.within(0.05, lambda: answer.wait(SOON))
        answer.set()

    def test_what_nobody_waits_for_any_more_is_told_so_and_undone(self) -> None:
        answer, given_up, undone = threading.Event(), threading.Event(), threading.Event()
        with pytest.raises(BringUpError):
            rendezvous.within(0.05, lambda: answer.wait(SOON), given_up, undone.set)
        assert given_up.is_set()
        assert not undone.is_set()
        answer.set()
        assert undone.wait(SOON)

    def test_what_came_in_time_stands(self) -> None:
        given_up, undone = threading.Event(), threading.Event()
        assert rendezvous.within(SOON, lambda: 3, given_up, undone.set) == 3
        assert not given_up.is_set()
        assert not undone.is_set()


class TestOpenStore:
    @pytest.fixture(autouse=True)
    def _no_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def test_a_file(self, tmp_path: Path) -> None:
        store, rank, size = rendezvous.open_store(f"file://{tmp_path}/s", 1, 2, SOON)
        store.set("key", "value")
        assert (rank, size, store.get("key")) == (1, 2, b"value")

    def test_tcp_hosts_at_rank_0_and_waits_for_nobody(self) -> None:
        port = _free_port()
        host, *rest = rendezvous.open_store(f"tcp://127.0.0.1:{port}", 0, 2, SOON)
        assert rest == [0, 2]
        guest, *_ = rendezvous.open_store(f"tcp://127.0.0.1:{port}", 1, 2, SOON)
        host.set("key", "value")
        assert guest.get("key") == b"value"

    def test_tcp_port_still_serves_a_process_group(self) -> None:
        url = f"tcp://127.0.0.1:{_free_port()}"
        store, *_ = rendezvous.open_store(url, 0, 1, SOON)
        torch.distributed.init_process_group("gloo", init_method=url, rank=0, world_size=1)
        try:
            assert rendezvous.meet(store, record(0, 1), SOON) == [record(0, 1)]
        finally:
            torch.distributed.destroy_process_group()

    def test_env_takes_everything_from_the_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _launch(monkeypatch, RANK="0", WORLD_SIZE="3")
        _, rank, size = rendezvous.open_store("env://", -1, None, SOON)
        assert (rank, size) == (0, 3)

    def test_env_without_a_world_size_is_a_dynamic_group(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _launch(monkeypatch)
        _, rank, size = rendezvous.open_store("env://", 0, None, SOON)
        assert (rank, size) == (0, None)

    def test_arguments_win_over_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _launch(monkeypatch, RANK="5", WORLD_SIZE="6")
        _, rank, size = rendezvous.open_store("env://", 0, 2, SOON)
        assert (rank, size) == (0, 2)

    def test_the_launchers_own_store_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        launcher = TCPStore("127.0.0.1", 0, None, True, SECONDS)
        _launch(monkeypatch, RANK="0", WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
        monkeypatch.setenv("MASTER_PORT", str(launcher.port))
        store, *_ = rendezvous.open_store("env://", -1, None, SOON)
        launcher.set("key", "value")
        assert store.get("key") == b"value"

    @pytest.mark.parametrize("url", ["tcp://127.0.0.1:1", "file:///tmp/never-opened"])
    def test_a_missing_rank_is_named(self, url: str) -> None:
        with pytest.raises(ValueError, match="rank parameter missing"):
            rendezvous.open_store(url, -1, None, SOON)

    def test_a_missing_variable_is_named(self) -> None:
        with pytest.raises(ValueError, match="environment variable RANK expected"):
            rendezvous.open_store("env://", -1, None, SOON)

    def test_a_rank_outside_the_group_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="rank=2 must be from 0 to world_size - 1"):
            rendezvous.open_store(f"file://{tmp_path}/s", 2, 2, SOON)

    def test_a_host_that_does_not_answer_is_named(self) -> None:
        url = f"tcp://127.0.0.1:{_free_port()}"
        with pytest.raises(BringUpError, match=f"{url}.* could not be opened within 0.2 s"):
            rendezvous.open_store(url, 1, 2, 0.2)

    def test_a_host_that_is_frozen_is_not_waited_for_any_longer(self) -> None:
        with socket.socket() as frozen:
            frozen.bind(("127.0.0.1", 0))
            frozen.listen()
            url = f"tcp://127.0.0.1:{frozen.getsockname()[1]}"
            with pytest.raises(BringUpError, match=r"could not be opened within 0.5 s.*"):
                rendezvous.open_store(url, 1, 2, 0.5)

    def test_a_file_in_a_folder_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(BringUpError, match=f"does not exist: '{tmp_path}/none'"):
            rendezvous.open_store(f"file://{tmp_path}/none/s", 0, 1, SOON)

    @pytest.mark.parametrize("rank", [40000, 2**33])
    def test_a_rank_that_no_worker_can_have_is_refused_at_once(self, rank: int) -> None:
        with pytest.raises(ValueError, match=f"rank={rank} must be from 0 to 32767"):
            rendezvous.open_store("tcp://127.0.0.1:9", rank, None, SOON)

    def test_an_unknown_scheme_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"bogus.*use env://, tcp://host:port or file:///"):
            rendezvous.open_store("bogus://x", 0, 1, SOON)


def _launch(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    for name, value in (defaults | variables).items():
        monkeypatch.setenv(name, value)


def _free_port() -> int:
    return TCPStore("127.0.0.1", 0, None, True, SECONDS).port
