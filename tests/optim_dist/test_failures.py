"""Asking every owner: answers in order, or one error that names all who failed."""

from __future__ import annotations

import pickle
import threading

import pytest

import rpc
from optim_dist.failures import from_each, from_one
from rpc.errors import WorkerLostError

ONE, TWO, THREE = (rpc.WorkerInfo(name, rank) for rank, name in enumerate(("one", "two", "three")))
OWNERS = (ONE, TWO, THREE)


class Strange(OSError):
    def __init__(self, code: int, where: str) -> None:
        super().__init__(code, where)
        self.code = code


def outcome(value: object) -> rpc.Future[object]:
    future: rpc.Future[object] = rpc.Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def test_answers_come_in_the_order_of_the_owners() -> None:
    assert from_each("it", OWNERS, lambda owner: outcome(owner.name)) == ["one", "two", "three"]


def test_all_are_asked_before_any_is_waited_for() -> None:
    futures: list[rpc.Future[int]] = []

    def ask(owner: rpc.WorkerInfo) -> rpc.Future[int]:
        futures.append(rpc.Future())
        if len(futures) == len(OWNERS):
            for number, future in enumerate(futures):
                future.set_result(number)
        return futures[-1]

    assert from_each("it", OWNERS, ask) == [0, 1, 2]


class _Interrupted(rpc.Future[object]):
    def wait(self) -> object:
        raise KeyboardInterrupt


def test_all_are_given_up_when_the_wait_is_interrupted() -> None:
    futures = {ONE: outcome(1), TWO: _Interrupted(), THREE: rpc.Future[object]()}
    given_up: list[rpc.WorkerInfo] = []
    for owner, future in futures.items():
        future.cancel = lambda owner=owner: given_up.append(owner) or True  # type: ignore
    with pytest.raises(KeyboardInterrupt):
        from_each("it", OWNERS, futures.__getitem__)
    assert given_up == [ONE, TWO, THREE]


def test_one_failure_is_of_its_type_and_names_its_owner() -> None:
    def ask(owner: rpc.WorkerInfo) -> rpc.Future[object]:
        return outcome(ValueError("bad lr") if owner is TWO else 1)

    with pytest.raises(ValueError, match=r"^the step failed on 'two'\ntwo: bad lr$") as caught:
        from_each("the step", OWNERS, ask)
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.__cause__ is not None


def test_several_failures_are_all_named_and_the_first_gives_the_type() -> None:
    errors = {ONE: outcome(1), TWO: outcome(KeyError("k")), THREE: outcome(OSError("disk"))}
    with pytest.raises(KeyError) as caught:
        from_each("it", OWNERS, errors.__getitem__)
    assert str(caught.value) == "it failed on 'two', 'three'\ntwo: 'k'\n\nthree: disk"


def test_the_others_are_waited_for_when_one_fails() -> None:
    slow: rpc.Future[object] = rpc.Future()
    release = threading.Timer(0.01, lambda: slow.set_result(1))
    futures = {ONE: outcome(ValueError("x")), TWO: slow, THREE: outcome(1)}
    release.start()
    with pytest.raises(ValueError, match="x"):
        from_each("it", OWNERS, futures.__getitem__)
    assert slow.done()
    release.join()


def test_an_error_in_asking_counts_as_the_owners() -> None:
    asked = []

    def ask(owner: rpc.WorkerInfo) -> rpc.Future[object]:
        asked.append(owner)
        if owner is ONE:
            raise TypeError("cannot be sent")
        return outcome(1)

    with pytest.raises(TypeError, match="it failed on 'one'\none: cannot be sent"):
        from_each("it", OWNERS, ask)
    assert asked == list(OWNERS)


def test_what_an_error_carries_is_kept() -> None:
    with pytest.raises(WorkerLostError) as lost:
        from_each("it", [ONE], lambda _: outcome(WorkerLostError("one", 3, "silence")))
    assert (lost.value.name, lost.value.incarnation) == ("one", 3)
    with pytest.raises(Strange) as strange:
        from_each("it", [ONE], lambda _: outcome(Strange(28, "there")))
    assert (strange.value.code, strange.value.errno) == (28, 28)


def test_the_error_travels_on_with_its_text() -> None:
    with pytest.raises(ValueError, match="it failed") as caught:
        from_each("it", [ONE], lambda _: outcome(ValueError("x")))
    copied = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copied, ValueError)
    assert str(copied) == str(caught.value)


def test_one_owner_needs_no_future() -> None:
    assert from_one("it", ONE, lambda owner: owner.name) == "one"

    def fail(owner: rpc.WorkerInfo) -> None:
        raise Strange(28, "there")

    with pytest.raises(Strange, match=r"the step failed on 'one'") as caught:
        from_one("the step", ONE, fail)
    assert caught.value.code == 28
    assert isinstance(caught.value.__cause__, Strange)
