"""References of another session, or of another worker in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rpc
from rpc.agent import Agent
from rpc.errors import (
    AgentClosedError,
    RemoteError,
    RRefDeletedError,
    RRefError,
    StaleRRefError,
)
from rpc.rrefs.rref import RRef
from rpc.testing import as_worker, local_group
from tests.rpc.rrefs.references import (
    SECONDS,
    Counter,
    eventually,
    identity,
    kept,
    kept_references,
    make_here,
    owned,
    read,
)

SHUT_DOWN = r"is stale: it was made or received by worker 'alice' .* which shut down"


class Silent(Exception):
    """Answers for none of its attributes."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(f"nobody asks for {name}")


def fail_silently() -> None:
    raise Silent("x")


def test_a_creation_whose_error_answers_for_nothing_fails_at_once() -> None:
    with local_group("alice", "bob") as (alice, bob):
        with pytest.raises(RemoteError, match="Silent"):
            alice.remote("bob", fail_silently).to_here(SECONDS)
        assert eventually(lambda: not bob.debug_info()["serving"])


def test_what_was_lent_to_a_call_of_a_worker_that_closed_comes_back() -> None:
    with local_group("alice", "bob") as (alice, _):
        rref = alice.remote("bob", identity, (5,))
        assert rref.to_here() == 5
        before = alice.references.counts()
        alice.caller.close("this worker shut down")
        with pytest.raises(AgentClosedError, match="this worker shut down"):
            alice.rpc_sync("bob", identity, (rref,))
        assert alice.references.counts() == before


@pytest.fixture
def of_another_session() -> dict[str, RRef[Any]]:
    with local_group("alice", "bob") as (alice, _), as_worker(alice):
        own, user = RRef("old own"), alice.remote("bob", identity, ("old user",))
        adopted = alice.rpc_sync("bob", make_here, ("old adopted",))
        created_here = alice.remote("alice", identity, ("old created here",))
        assert user.to_here() == "old user"
        assert created_here.to_here() == "old created here"
    return {"own": own, "user": user, "adopted": adopted, "created here": created_here}


@pytest.fixture
def next_session(
    of_another_session: dict[str, RRef[Any]],
) -> Iterator[tuple[Agent, Agent]]:
    """A group of the same names, whose references have the same ids."""
    with local_group("alice", "bob") as (alice, bob), as_worker(alice):
        new = [RRef("new own"), *(alice.remote("bob", identity, ("new",)) for _ in range(4))]
        assert alice.rpc_sync("bob", read, (new[0],)) == "new own"
        assert str(of_another_session["own"]) == str(new[0])
        yield alice, bob
        del new
        assert eventually(lambda: owned(alice) == owned(bob) == 0)
        assert alice.references.counts() == bob.references.counts()


class Carrier:
    def __init__(self, rref: RRef[Any]) -> None:
        self.inside = [{"it": rref}]


@pytest.mark.parametrize("which", ["own", "user", "adopted", "created here"])
@pytest.mark.parametrize(
    "send",
    [
        lambda rref: rpc.rpc_sync("bob", read, (rref,)),
        lambda rref: rpc.rpc_sync("alice", read, (rref,)),
        lambda rref: rpc.rpc_async("bob", read, (rref,)).wait(),
        lambda rref: rpc.remote("bob", read, (rref,)).to_here(),
        lambda rref: rpc.rpc_sync("bob", identity, kwargs={"value": [Carrier(rref)]}),
        lambda rref: rpc.rpc_sync("bob", lambda: rref.to_here()),
        lambda rref: rpc.remote("bob", Counter).rpc_sync().add(rref),
        lambda rref: rpc.remote("alice", identity, (rref,)),
        lambda rref: rpc.rpc_sync("bob", read, (RRef(0), rref)),
    ],
    ids=["sync", "self", "async", "remote", "inside", "cloud", "proxy", "own remote", "second"],
)
def test_a_reference_of_an_earlier_session_is_stale_before_anything_is_sent(
    which: str,
    send: Callable[[RRef[Any]], object],
    of_another_session: dict[str, RRef[Any]],
    next_session: tuple[Agent, Agent],
) -> None:
    with pytest.raises(StaleRRefError, match=SHUT_DOWN):
        send(of_another_session[which])


@pytest.mark.usefixtures("next_session")
def test_a_reply_with_a_reference_of_an_earlier_session_is_an_error(
    of_another_session: dict[str, RRef[Any]],
) -> None:
    kept_references["old"] = of_another_session["own"]
    try:
        with pytest.raises(StaleRRefError, match=SHUT_DOWN):
            rpc.rpc_sync("bob", kept, ("old",))
        with pytest.raises(StaleRRefError, match=SHUT_DOWN):
            rpc.remote("bob", kept, ("old",)).to_here()
    finally:
        del kept_references["old"]


@pytest.mark.usefixtures("next_session")
def test_what_a_reference_of_an_earlier_session_answers_is_of_that_session(
    of_another_session: dict[str, RRef[Any]],
) -> None:
    own, user = of_another_session["own"], of_another_session["adopted"]
    assert (own.local_value(), own.owner_name(), user.owner_name()) == ("old own", "alice", "bob")
    for use in (
        user.to_here,
        lambda: user.rpc_sync().upper(),
        lambda: user.rpc_async().upper().wait(),
        lambda: user.remote().upper(),
        lambda: own.rpc_sync().upper(),
        lambda: own.rpc_async().upper().wait(),
        lambda: own.remote().upper().to_here(),
    ):
        with pytest.raises((AgentClosedError, RRefDeletedError), match="this worker shut down"):
            use()


def test_a_reference_of_another_worker_of_the_process_is_refused(pair: list[Agent]) -> None:
    alice, bob = pair
    with as_worker(alice):
        rref = RRef("alice's")
    told = r"by worker 'alice' .*, and cannot be sent by worker 'bob'"
    for to in ("alice", "bob"):
        with pytest.raises(RRefError, match=told):
            bob.rpc_sync(to, read, (rref,))
    assert alice.rpc_sync("bob", read, (rref,)) == "alice's"
