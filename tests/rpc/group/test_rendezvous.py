"""Bring-up of static groups over stores in this process: threads stand for workers."""

import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore, Store, TCPStore

from rpc.errors import BringUpError
from rpc.group import rendezvous
from rpc.group.records import Record
from rpc.group.tcp_store import TcpStoreClient
from tests.rpc.stores import SECONDS, SOON, CountingStore, begun, in_turns, outcome, record, signed
from tests.signals import functions_of_the_main_thread, heeding_interrupts
from tests.waiting import until


def round_of(store: Store) -> rendezvous.Round:
    """The first round that was held at a store."""
    return rendezvous.Round(signed(store), 1)


def meet_all(
    store: Store | Callable[[], Store], records: list[Record], timeout: float = SOON
) -> list[Any]:
    """Lets all meet; returns what each worker got, or the error it saw."""

    def meet(me: Record) -> list[Record]:
        return rendezvous.meet(signed(store if isinstance(store, Store) else store()), me, timeout)

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
        assert rendezvous.meet(signed(HashStore()), record(0, 1), SOON) == [record(0, 1)]

    def test_a_store_serves_one_group_after_the_other(self) -> None:
        store = HashStore()
        for life in (1, 2, 3):
            records = [record(rank, incarnation=life) for rank in range(2)]
            assert meet_all(store, records) == [records] * 2

    def test_a_hundred_workers_meet(self) -> None:
        records = [record(rank, 100) for rank in range(100)]
        assert all(seen == records for seen in meet_all(HashStore(), records))

    def test_requests_to_the_store_do_not_grow_with_the_group(self) -> None:
        """But for rank 0, which reads all records, so that the others need not."""

        def requests(size: int) -> int:
            store = HashStore()
            counting = CountingStore(store)
            others = [record(rank, size) for rank in range(size - 1)]
            with ThreadPoolExecutor(size) as pool:
                for me in others:
                    pool.submit(rendezvous.meet, signed(store), me, SOON)
                until(lambda: None not in round_of(store).records(range(size - 1)))
                rendezvous.meet(signed(counting), record(size - 1, size), SOON)
            return counting.requests

        assert requests(20) == requests(2)

    def test_a_worker_is_in_the_group_that_it_meets(self) -> None:
        """Somebody may have kept the verdict of an earlier group with the same key."""
        store, later = HashStore(), HashStore()
        meet_all(store, [record(rank) for rank in range(2)])
        old = round_of(store).verdict()
        assert old is not None
        with ThreadPoolExecutor(1) as pool:
            me = record(1, address=b"new")
            meeting = pool.submit(outcome, lambda: rendezvous.meet(signed(later), me, SOON))
            until(lambda: round_of(later).records([1]) == [me])
            round_of(later).conclude(old)
            assert "another group's workers" in errors([meeting.result()])[0]


class TestWhatKeepsAStaticGroupFromForming:
    def test_missing_ranks_are_named_and_so_are_those_who_came(self) -> None:
        seen = errors(meet_all(HashStore(), [record(0, 4), record(2, 4)], timeout=0.5))
        for text in seen:
            assert "2 of 4 workers did not come" in text
            assert "missing ranks [1, 3]" in text
            assert "'worker0' (rank 0" in text
            assert "'worker2' (rank 2" in text

    def test_missing_ranks_are_named_in_the_log_while_they_are_waited_for(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(rendezvous, "SECONDS_OF_SILENCE", 0.05)
        store = HashStore()
        told = "for ranks [1, 3] of 4 workers, and gives up after 60 s"
        records = [record(rank, 4) for rank in range(4)]
        with ThreadPoolExecutor(4) as pool:

            def come(rank: int) -> Future[list[Record]]:
                return pool.submit(rendezvous.meet, signed(store), records[rank], 60.0)

            early = [come(0), come(2)]
            until(lambda: any(each.endswith(told) for each in caplog.messages))
            late = [come(1), come(3)]
            assert [each.result() for each in (*early, *late)] == [records] * 4

    def test_few_requests_find_the_first_who_are_missing(self) -> None:
        store = HashStore()
        for rank in {*range(200)} - {3, 170}:
            round_of(store).arrive(record(rank, 200))
        counting = CountingStore(store)
        assert next(round_of(counting).missing(200)) == 3
        assert counting.requests < 80
        assert [*round_of(store).missing(200)] == [3, 170]

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

    def test_one_that_was_given_another_key_is_missing_and_the_log_says_why(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = HashStore()
        workers = [(record(0), b"one key"), (record(1), b"another")]
        with ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(outcome, partial(rendezvous.meet, signed(store, key), me, 0.3))
                for me, key in workers
            ]
            seen = errors([call.result() for call in calls])
        assert any("some were given another group_key, see the log" in text for text in seen)
        assert "it was written with another group_key; give every worker" in caplog.text
        assert "key'" not in caplog.text

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
                rendezvous.meet(signed(store), begun(store, 0, 1), SOON)
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
        assert rendezvous.meet(signed(store), late, SOON) == [late]

    def test_a_frozen_store_is_waited_for_until_the_deadline_and_no_longer(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as frozen:
            client = TcpStoreClient("127.0.0.1", frozen.getsockname()[1], 60)
            client.until = time.monotonic() + 0.3
            with pytest.raises(BringUpError, match="did not answer in time"):
                rendezvous.meet(signed(client), record(1), 0.1)

    def test_rank_0_stays_until_all_who_came_know_what_is_wrong(self) -> None:
        store = HashStore()
        records = [record(rank, 3) for rank in range(2)]
        errors(meet_all(store, records, timeout=0.2))
        signed(store).below("1").wait(["heard/0", "heard/1"], 0)

    def test_who_is_interrupted_says_so_and_may_meet_again(self) -> None:
        store = HashStore()
        main = threading.main_thread().ident
        assert main is not None

        def interrupt() -> None:
            until(lambda: None not in round_of(store).records([0]))
            # A signal that comes just before a thread blocks would be noticed only afterwards.
            until(lambda: functions_of_the_main_thread()[:1] == ["wait"])
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with heeding_interrupts(), pytest.raises(KeyboardInterrupt):
            rendezvous.meet(signed(store), record(0, 3), SOON)
        thread.join()
        verdict = round_of(store).verdict()
        assert verdict is not None
        assert b"'worker0'" in verdict
        assert b"was interrupted while it waited" in verdict
        again = [record(0, incarnation=2), record(1)]
        assert meet_all(store, again) == [again] * 2

    def test_the_loss_of_the_store_is_named(self) -> None:
        host = TCPStore("127.0.0.1", 0, None, True, SECONDS, wait_for_workers=False)
        client = TcpStoreClient("127.0.0.1", host.port, SOON)
        seen: list[Any] = []
        waiting = threading.Thread(
            target=lambda: seen.append(
                outcome(lambda: rendezvous.meet(signed(client), record(1), SOON))
            )
        )
        waiting.start()
        host.wait(["tensorwire/1/record/1"], SECONDS)
        del host
        waiting.join()
        assert "the store was lost" in errors(seen)[0]

    def test_a_dynamic_worker_cannot_meet(self) -> None:
        with pytest.raises(ValueError, match="use join"):
            rendezvous.meet(signed(HashStore()), record(0, None), SOON)


class TestAStranger:
    """Somebody who can write to the store, and does not have the group's key."""

    def test_forges_neither_verdict_nor_record(self, caplog: pytest.LogCaptureFixture) -> None:
        store = HashStore()
        forger = signed(store, b"guessed").below("1")
        records = [record(rank) for rank in range(2)]
        forger.set("verdict", b"!go home")
        forger.set("record/1", record(1, address=b"the stranger's").encode())
        store.set("tensorwire/1/disagreement", "there is one")
        store.set("tensorwire/round/0", "1 x")
        with ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(rendezvous.meet, signed(store, b"key"), me, SOON) for me in records
            ]
            assert [call.result() for call in calls] == [records] * 2
        assert "ignored what the group's store holds under '" in caplog.text
