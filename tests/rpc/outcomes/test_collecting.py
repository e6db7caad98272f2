"""Torch's ``wait_all`` and ``collect_all`` with futures of ours while this is a worker."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from rpc.outcomes import collecting
from rpc.outcomes.futures import Completion, Future

SECONDS = 10.0


@pytest.fixture(autouse=True)
def in_use() -> Iterator[None]:
    collecting.use()
    yield
    collecting.stop_using()


def test_wait_all_raises_the_first_error_although_another_call_is_pending() -> None:
    pending: Future[int] = Future()
    failing: Future[int] = Future()
    error = ValueError("no")
    failer = threading.Thread(target=failing.set_exception, args=(error,))
    failer.start()
    with pytest.raises(ValueError, match="no") as raised:
        torch.futures.wait_all([pending, failing])
    failer.join()
    assert raised.value is error
    assert not pending.done()


def test_an_error_that_was_there_before_is_raised_at_once() -> None:
    failed: Future[int] = Future()
    failed.set_exception(KeyError("k"))
    together = torch.futures.collect_all([Future(), failed])
    assert together.done()
    with pytest.raises(KeyError):
        together.wait()


def test_a_second_error_changes_nothing() -> None:
    first: Future[int] = Future()
    second: Future[int] = Future()
    together = torch.futures.collect_all([first, second])
    second.set_exception(ValueError("first"))
    first.set_exception(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        together.wait()


def test_all_results_come_in_order_and_as_the_futures_that_were_given() -> None:
    given: list[Future[int]] = [Future(), Future()]
    together = torch.futures.collect_all(given)
    assert isinstance(together, Future)
    given[1].set_result(1)
    assert not together.done()
    given[0].set_result(0)
    assert [mine is theirs for mine, theirs in zip(given, together.wait(), strict=True)] == [1, 1]
    assert torch.futures.wait_all(given) == [0, 1]


def test_who_collects_a_failed_call_runs_no_callbacks_of_others_who_do() -> None:
    failing: Future[int] = Future()
    called: list[object] = []
    theirs = torch.futures.collect_all([Future(), failing])
    theirs.add_done_callback(called.append)

    def collect(_: object) -> None:  # before the failing thread tells others who collect
        mine = torch.futures.collect_all([Future(), failing])
        assert mine.done()
        called.append("collected")

    failing.add_done_callback(collect)
    failing.set_exception(ValueError("no"))
    assert called == ["collected", theirs]


@pytest.mark.parametrize("kind", [Future, torch.futures.Future])
def test_a_generator_of_futures_is_waited_for(kind: type[torch.futures.Future[int]]) -> None:
    given = [kind(), kind()]
    together = torch.futures.collect_all(each for each in given)  # type: ignore[arg-type]
    assert not together.done()
    for number, each in enumerate(given):
        each.set_result(number)
    assert [each.value() for each in together.wait()] == [0, 1]
    assert torch.futures.wait_all(iter(given)) == [0, 1]  # type: ignore[arg-type]


def test_the_error_of_a_call_in_a_generator_is_raised() -> None:
    failed: Future[int] = Future()
    failed.set_exception(KeyError("k"))
    with pytest.raises(KeyError):
        torch.futures.wait_all(each for each in [failed])  # type: ignore[arg-type]


def test_futures_of_torch_may_be_among_them_and_fail() -> None:
    mine: Future[int] = Future()
    theirs: torch.futures.Future[int] = torch.futures.Future()

    def refuse(_: object) -> int:
        raise ValueError("no")

    together = torch.futures.collect_all([mine, theirs.then(refuse)])
    theirs.set_result(1)
    with pytest.raises(RuntimeError, match="ValueError: no"):
        together.wait()
    assert not mine.done()


def test_futures_of_torch_alone_are_left_to_torch() -> None:
    theirs: list[torch.futures.Future[int]] = [torch.futures.Future()]
    together = torch.futures.collect_all(theirs)
    assert not isinstance(together, Future)
    theirs[0].set_result(3)
    assert torch.futures.wait_all(theirs) == [3]
    assert torch.futures.wait_all([]) == []


def test_all_who_wait_for_a_future_are_told_of_its_error_and_nobody_else() -> None:
    shared: Future[int] = Future()
    told = [torch.futures.collect_all([Future(), shared]) for _ in range(2)]
    others = torch.futures.collect_all([Future()])
    shared.set_exception(ValueError("no"))
    assert [together.done() for together in told] == [True, True]
    assert not others.done()


def test_an_error_that_was_set_where_replies_are_delivered_is_raised_for_all() -> None:
    failed: Future[int] = Future()
    left: list[Completion] = []
    assert failed.complete_unless_watched(None, ValueError("no"), left.append)
    assert left == []
    together = torch.futures.collect_all([Future(), failed])
    with pytest.raises(ValueError, match="no"):
        together.wait()


def test_a_callback_is_called_although_nobody_keeps_the_future_of_all() -> None:
    called = threading.Event()
    given: Future[int] = Future()
    torch.futures.collect_all([given]).add_done_callback(lambda _: called.set())
    gc.collect()
    given.set_result(1)
    assert called.is_set()


def test_an_error_that_somebody_is_told_of_is_not_set_where_replies_are_delivered() -> None:
    given: Future[int] = Future()
    together = torch.futures.collect_all([given])
    left: list[Completion] = []
    assert not given.complete_unless_watched(None, ValueError("no"), left.append)
    assert given.complete_unless_watched(1, None, left.append)
    assert together.done()
    assert left == []


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_callbacks_of_all_are_not_run_where_replies_are_delivered(depth: int) -> None:
    given: Future[int] = Future()
    levels: list[torch.futures.Future] = [given]
    for _ in range(depth):
        levels.append(torch.futures.collect_all(levels[-1:]))
    called: list[object] = []
    levels[-1].add_done_callback(called.append)
    left: list[Completion] = []
    assert given.complete_unless_watched(1, None, left.append)
    assert [level.done() for level in levels] == [True] * depth + [False]
    assert called == []
    for completion in left:
        completion()
    assert called == levels[-1:]
    assert len(levels[-1].wait()) == 1


def test_an_error_of_torchs_ends_all_where_callbacks_may_run() -> None:
    given, theirs = Future[int](), torch.futures.Future[int]()
    together = torch.futures.collect_all([given, theirs.then(lambda _: 1 // 0)])
    outer = torch.futures.collect_all([together])
    called: list[object] = []
    outer.add_done_callback(called.append)
    theirs.set_result(1)
    assert called == [outer]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        outer.wait()


def test_callbacks_of_all_hold_nobody_up_who_adds_one_to_a_call() -> None:
    given: Future[int] = Future()
    waited: list[bool] = []

    def add_another(_: object) -> None:
        adding = threading.Thread(
            target=given.add_done_callback, args=(lambda _: None,), daemon=True
        )
        adding.start()
        adding.join(SECONDS)
        waited.append(adding.is_alive())

    torch.futures.collect_all([given]).add_done_callback(add_another)
    left: list[Completion] = []
    assert given.complete_unless_watched(1, None, left.append)
    for completion in left:
        completion()
    assert waited == [False]


def test_an_error_that_was_raised_for_all_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    given: Future[int] = Future(description="the call of f")
    together = torch.futures.collect_all([given])
    given.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        together.wait()
    del given, together
    gc.collect()
    assert caplog.text == ""


def test_the_errors_of_the_others_are_not_logged_and_stay_where_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, kept, dropped = Future[int](), Future[int](), Future[int]()
    first.set_exception(ValueError("first"))
    with pytest.raises(ValueError, match="first"):
        torch.futures.wait_all([first, kept, dropped])
    kept.set_exception(ValueError("kept"))
    dropped.set_exception(ValueError("dropped"))
    with pytest.raises(ValueError, match="kept"):
        kept.wait()
    del first, dropped
    gc.collect()
    assert caplog.text == ""


def test_an_error_of_all_that_nobody_looked_at_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = [Future[int](description="the call of f") for _ in range(2)]
    torch.futures.collect_all(given)
    for future in given:
        future.set_exception(ValueError("no"))
    del future, given
    gc.collect()
    (record,) = caplog.records
    assert record.getMessage() == "a list of calls failed and nobody looked: ValueError: no"


def test_all_is_freed_when_nobody_needs_it_any_more() -> None:
    given: Future[int] = Future()
    together = torch.futures.collect_all([given])
    given.set_result(1)
    together.wait()
    freed = [weakref.ref(given), weakref.ref(together)]
    del given, together
    assert [reference() for reference in freed] == [None, None]


def test_torchs_function_is_back_afterwards() -> None:
    ours = torch._C._collect_all
    collecting.stop_using()
    assert torch._C._collect_all is not ours
    assert not isinstance(torch.futures.collect_all([Future()]), Future)
