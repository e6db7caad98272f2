"""The tree of errors: as drawn, catchable as promised, and able to travel."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from rpc import errors
from rpc.errors import RpcError, RpcTimeoutError, WorkerLostError

ALL = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and kind.__module__ == errors.__name__
}
ARGUMENTS = {
    "NotInitializedError": ("w1",),
    "WorkerLostError": ("w1", 3, "it crashed"),
    "WorkerLeftError": ("w1", 3, "it left the group"),
}


def drawn() -> dict[str, str]:
    """Each error of the drawing and the one it hangs on."""
    parents: dict[str, str] = {}
    stack: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^(    [ │├└─]*)(\w+(?:Error))\b", line)
        if found is None:
            continue
        depth, name = len(found[1]), found[2]
        while stack and stack[-1][0] >= depth:
            stack.pop()
        if stack:
            parents[name] = stack[-1][1]
        stack.append((depth, name))
    return parents


def test_the_drawing_shows_the_tree():
    assert drawn() == {name: kind.__bases__[0].__name__ for name, kind in ALL.items()}


@pytest.mark.parametrize("name", ALL)
def test_every_error_is_documented_and_a_runtime_error(name: str):
    assert issubclass(ALL[name], RuntimeError)
    assert issubclass(ALL[name], RpcError)
    assert ALL[name].__doc__


@pytest.mark.parametrize(
    ("name", "python"), [("RpcTimeoutError", TimeoutError), ("EncodeError", TypeError)]
)
def test_some_are_also_what_python_would_raise(name: str, python: type[Exception]):
    assert issubclass(ALL[name], python)


@pytest.mark.parametrize("name", ALL)
def test_every_error_can_be_pickled(name: str):
    error = ALL[name](*ARGUMENTS.get(name, ("what happened",)))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_a_lost_worker_is_named_with_its_life_and_the_reason():
    error = WorkerLostError("w1", 3, "it crashed")
    assert str(error) == "worker 'w1' (incarnation 3) was lost: it crashed"
    assert (error.name, error.incarnation, error.reason) == ("w1", 3, "it crashed")


@pytest.mark.parametrize(
    ("reason", "has_ended"),
    [
        ("the connection broke, and nobody listens at its address any more", True),
        (
            "worker 'a' declared it lost: it hung up, and nobody listens at its address any more",
            True,
        ),
        ("it gave no sign of life for 3.0 s", False),
        ("what answers at its address says: nobody listens at its address any more", False),
    ],
)
def test_a_worker_has_certainly_ended_if_nobody_listens_at_its_address(
    reason: str, has_ended: bool
):
    assert WorkerLostError("w1", 3, reason).has_ended is has_ended


def test_a_timeout_says_only_what_it_was_given():
    assert str(RpcTimeoutError("RPC ran for more than")) == "RPC ran for more than"
