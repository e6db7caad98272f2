"""Errors that are kept: raised as copies, and without what their frames held."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest

from rpc.errors import RpcTimeoutError, WorkerLostError
from rpc.testing import local_group
from rpc.wire.kept_errors import again, bare_copy, keep
from rpc.wire.remote_errors import decode_error, encode_error
from rpc.worker_info import WorkerInfo
from tests.waiting import until


class Unusual(Exception):
    """Its constructor takes something else than its arguments."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}", code)
        self.code = code


class Held:
    """An object of nobody else's."""


class Slotted(ValueError):
    __slots__ = ("place",)


class Lost(Unusual, FileNotFoundError):
    """Nor can it be copied: its layout is that of an ``OSError``."""


def slotted() -> Slotted:
    error = Slotted("x")
    error.place = 5
    return error


def told() -> BaseException:
    return decode_error(encode_error(Unusual(code=3), WorkerInfo("bob", 1)))


def undecodable() -> UnicodeDecodeError:
    with pytest.raises(UnicodeDecodeError) as caught:
        b"\xff".decode()
    return caught.value


MAKERS: list[Callable[[], BaseException]] = [
    lambda: ValueError("x", 1),
    lambda: KeyError("x"),
    lambda: FileNotFoundError(2, "No such file", "name"),
    lambda: SystemExit(3),
    lambda: StopIteration(4),
    lambda: ImportError("x", name="module"),
    lambda: Unusual(code=7),
    lambda: RpcTimeoutError("too late"),
    lambda: WorkerLostError("bob", 2, "it left"),
    slotted,
    told,
    undecodable,
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_copy_is_like_the_error(make: Callable[[], BaseException]) -> None:
    error = make()
    error.__cause__ = KeyError("cause")
    error.note = "kept"  # type: ignore[attr-defined]
    twin = again(error)
    assert twin is not error
    assert type(twin) is type(error)
    assert (str(twin), repr(twin), twin.args) == (str(error), repr(error), error.args)
    assert twin.__dict__ == error.__dict__
    assert twin.__cause__ is error.__cause__
    for name in ("code", "place", "filename", "errno", "value", "name", "start", "reason"):
        assert getattr(twin, name, None) == getattr(error, name, None)


def test_what_cannot_be_copied_is_raised_itself() -> None:
    error = Lost(code=5)
    assert again(error) is error


class Guarded(ValueError):
    """Its class lets nobody set anything, and tells nothing of its past."""

    __slots__ = ("place",)

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError(name)

    @property
    def __cause__(self) -> BaseException | None:  # type: ignore[override]
        raise AssertionError("__cause__")

    def with_traceback(self, traceback: object) -> Guarded:
        raise AssertionError("__traceback__")


def test_a_copy_asks_the_class_for_nothing() -> None:
    error, cause = Guarded("x"), KeyError("why")
    BaseException.__setattr__(error, "place", 5)
    vars(BaseException)["__cause__"].__set__(error, cause)
    twin = again(error)
    assert twin is not error
    assert isinstance(twin, Guarded)
    assert (twin.args, twin.place) == (("x",), 5)
    assert vars(BaseException)["__cause__"].__get__(twin) is cause
    assert BaseException.__getattribute__(twin, "__suppress_context__")


def test_a_kept_error_does_not_remember_where_it_was_raised_again() -> None:
    error = ValueError("x")

    def fail() -> None:
        raise again(error)

    with pytest.raises(ValueError, match="x"):
        fail()
    assert error.__traceback__ is None


class Large:
    """Something that is not to be kept."""


def test_a_kept_error_lets_go_of_what_its_frames_held() -> None:
    held: list[weakref.ref[Large]] = []

    def fail() -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise KeyError("first")

    def fail_again() -> None:
        large = Large()
        held.append(weakref.ref(large))
        try:
            fail()
        except KeyError as error:
            raise ValueError("second") from error

    try:
        fail_again()
    except ValueError as error:
        kept = keep(error)
    assert isinstance(kept.__cause__, KeyError)
    assert kept.__traceback__ is not None
    gc.collect()
    assert [each() for each in held] == [None, None]


def test_an_error_that_answers_for_no_attribute_can_be_kept() -> None:
    class Silent(Exception):
        def __getattribute__(self, name: str) -> object:
            raise RuntimeError(f"nobody asks for {name}")

    error = Silent("x")
    assert keep(error) is error


def fail_once_more(error: BaseException) -> None:
    raise error


def test_a_generator_that_caught_the_error_and_went_on_goes_on_after_it_was_kept() -> None:
    caught: list[BaseException] = []

    def generate() -> Iterator[int]:
        for number in range(3):
            try:
                raise ValueError(number)
            except ValueError as error:
                caught.append(error)
                yield number

    async def wait(steps: Iterator[int]) -> int:
        for step in steps:
            try:
                raise KeyError(step)
            except KeyError as error:
                caught.append(error)
                await asyncio.sleep(0)
        return 7

    steps, coroutine = generate(), wait(iter([1, 2]))
    next(steps)
    coroutine.send(None)
    for error in [*caught]:
        with pytest.raises(type(error)):
            fail_once_more(error)
        keep(error)
    assert [*steps] == [1, 2]
    coroutine.send(None)
    with pytest.raises(StopIteration, match="7"):
        coroutine.send(None)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older frames do not tell they are over")
def test_a_coroutine_that_failed_forgets_its_variables() -> None:
    held = []

    async def fail() -> None:
        variable = Held()
        held.append(weakref.ref(variable))
        raise ValueError("x")

    async def fail_within() -> None:
        await fail()

    with pytest.raises(ValueError, match="x") as caught:
        fail_within().send(None)
    keep(caught.value)
    gc.collect()
    assert held[0]() is None


def refuse() -> None:
    raise TimeoutError("not today")


def use_what_was_not_made(make: Callable[[], object]) -> None:
    """Fails with the reference among its variables."""
    reference = make()
    reference.to_here()  # type: ignore[attr-defined]


@pytest.mark.parametrize("owner", ["alice", "bob"])
def test_a_reference_whose_value_failed_is_freed_after_its_error_was_raised(owner: str) -> None:
    with local_group("alice", "bob") as agents:
        alice = agents[0]
        for _ in range(2):
            with pytest.raises(TimeoutError, match="not today"):
                use_what_was_not_made(lambda: alice.remote(owner, refuse))
        gc.collect()
        until(lambda: not any(agent.debug_info()["num_owner_rrefs"] for agent in agents))


@pytest.mark.parametrize(
    "error",
    [ValueError("x", 1), RpcTimeoutError("late"), WorkerLostError("bob", 1, "gone")],
    ids=repr,
)
def test_a_bare_copy_is_of_the_same_type_whatever_that_derives_from(error: BaseException) -> None:
    twin = bare_copy(error)
    assert type(twin) is type(error)
    assert (twin.args, str(twin), vars(twin)) == (error.args, str(error), vars(error))
