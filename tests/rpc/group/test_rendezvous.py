"""Bring-up of static groups over stores in this process: threads stand for workers."""

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
from torch.distributed import HashStore, Store, TCPStore

from rpc.errors import BringUpError
from rpc.group import rendezvous
from rpc.group import store as group_store
from rpc.group.store import KEY_MARK, Record, key_mark, our_part
from rpc.runtime.threads import running_frames
from tests.rpc.stores import SECONDS, SOON, CountingStore, begun, in_turns, outcome, record
from tests.signals import heeding_interrupts
from tests.waiting import until


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
    return rendezvous._Round(our_part(store), 1)


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

    @pytest.mark.skipif(not hasattr(Store, "clone"), reason="torch 2.6 cannot clone a store")
    def test_missing_ranks_are_named_in_the_log_while_they_are_waited_for(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(group_store, "_SECONDS_OF_SILENCE", 0.05)
        store = TCPStore("127.0.0.1", 0, None, True, SECONDS, wait_for_workers=False)
        told = "for ranks [1, 3] of 4 workers, and gives up after 60 s"
        records = [record(rank, 4) for rank in range(4)]
        with ThreadPoolExecutor(4) as pool:

            def come(rank: int) -> Future[list[Record]]:
                return pool.submit(rendezvous.meet, store.clone(), records[rank], 60.0)

            early = [come(0), come(2)]
            until(lambda: any(each.endswith(told) for each in caplog.messages))
            late = [come(1), come(3)]
            assert [each.result() for each in (*early, *late)] == [records] * 4

    def test_a_store_that_does_not_answer_the_first_request_is_named_in_the_log(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(group_store, "_SECONDS_OF_SILENCE", 0.01)
        frozen = threading.Event()
        monkeypatch.setattr(rendezvous, "set_mode", lambda *_: frozen.wait(SOON))
        with ThreadPoolExecutor(1) as pool:
            meeting = pool.submit(rendezvous.meet, HashStore(), record(0, 1), 60.0)
            told = "for an answer of the group's store, and gives up after 60 s"
            until(lambda: any(each.endswith(told) for each in caplog.messages))
            frozen.set()
            assert meeting.result() == [record(0, 1)]

    def test_few_requests_find_who_is_missing_where_most_or_few_came(self) -> None:
        store = HashStore()
        for rank in {*range(1000)} - {3, 700}:
            rounds_of(store)._store.set(f"record/{rank}", "")
        counting = CountingStore(store)
        assert list(rounds_of(counting).missing(range(1000))) == [3, 700]
        assert list(islice(rounds_of(counting).missing(range(1000, 2000)), 8)) == [
            *range(1000, 1008)
        ]
        assert counting.requests < 80

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

    def test_different_keys_are_an_error_for_all_and_told_to_nobody(self) -> None:
        workers = [
            record(rank, extras={KEY_MARK: key_mark(key)}) for rank, key in enumerate((b"a", b"b"))
        ]
        for text in errors(meet_all(HashStore(), workers, timeout=60.0)):
            assert "disagree about group_key: worker" in text
            assert not any(str(worker.extras[KEY_MARK]) in text for worker in workers)

    def test_two_processes_with_one_rank_are_told_apart(self) -> None:
        workers = [
            record(0, 3),
            record(0, 3, name="twin", host="host b", pid=7),
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
            # A signal that comes just before a thread blocks would be noticed only afterwards.
            until(lambda: running_frames()[main].f_code.co_name == "wait")
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with heeding_interrupts(), pytest.raises(KeyboardInterrupt):
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
