"""The reference protocol when workers are lost, declared lost, or return in a new life."""

from __future__ import annotations

from rpc.ids import Life, Reference
from rpc.protocol.reference_terms import (
    Carrier,
    Failure,
    FailureKind,
    FailValue,
    FreeValue,
    HandleConfirmed,
    HandleFailed,
    Send,
)
from rpc.protocol.references import ReferenceTable
from rpc.wire.control import (
    Abandoned,
    Accepted,
    Delete,
    Passage,
    Passed,
    Register,
    Registered,
    Rejected,
)
from tests.rpc.protocol.reference_tables import (
    ALICE,
    BOB,
    CAROL,
    OWNER,
    id_of,
    receive,
    sent,
    share,
    table,
)


def test_forks_of_a_lost_worker_are_dropped() -> None:
    owner = table(OWNER)
    handle = owner.new_value()
    share(owner, handle, BOB)
    owner.dropped(handle)
    assert owner.worker_lost(BOB, "killed") == [FreeValue(handle.reference.rref)]
    assert owner.worker_lost(BOB, "killed") == []


def test_nothing_is_remembered_of_the_creations_of_a_lost_worker() -> None:
    alice, owner = table(ALICE), table(OWNER)
    _, from_alice = alice.create_remote(OWNER)
    owner.creation_arrived(from_alice, ALICE)
    owner.create_remote(ALICE)
    owner.create_remote(BOB)
    owner.worker_lost(ALICE, "killed")
    assert (*owner._creations_made,) == (BOB,)
    assert (*owner._creations_seen,) == ()


def test_parent_stops_holding_for_a_lost_child() -> None:
    alice = table(ALICE)
    handle, _ = alice.create_remote(OWNER)
    share(alice, handle, BOB)
    alice.dropped(handle)
    assert sent(alice.worker_lost(BOB, "killed")) == [Delete(handle.reference, handle.fork)]


def test_lost_parent_is_not_told_of_the_registration() -> None:
    alice, bob = table(ALICE), table(BOB)
    handle, _ = alice.create_remote(OWNER)
    received = receive(bob, share(alice, handle, BOB))
    bob.worker_lost(ALICE, "killed")
    confirmed = bob.message_arrived(OWNER, Registered(received.fork))
    assert confirmed == [HandleConfirmed(received.fork)]


def test_handles_of_a_lost_owner_fail_and_hold_nothing() -> None:
    alice = table(ALICE)
    handle, _ = alice.create_remote(OWNER)
    share(alice, handle, BOB)
    share(alice, handle, OWNER)
    failure = Failure(FailureKind.OWNER_LOST, "killed")
    assert alice.worker_lost(OWNER, "killed") == [HandleFailed(handle.fork, failure)]
    assert alice.failure(handle) == failure
    assert alice.dropped(handle) == []
    counts = alice.counts()
    assert (counts.num_user_rrefs, counts.num_pending_children, counts.num_borrows) == (0, 0, 0)


def test_parent_lets_go_when_only_the_child_lost_the_owner() -> None:
    alice, bob = table(ALICE), table(BOB)
    handle, _ = alice.create_remote(OWNER)
    child = receive(bob, share(alice, handle, BOB))
    [accepted] = sent(bob.worker_lost(OWNER, "the link broke"))
    assert accepted == Accepted(child.fork)
    alice.dropped(handle)
    assert sent(alice.message_arrived(BOB, accepted)) == [Delete(handle.reference, handle.fork)]


def test_waiters_are_told_when_the_creator_is_lost_before_its_request_came() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, _ = alice.create_remote(OWNER)
    child = share(alice, handle, BOB)
    owner.message_arrived(BOB, Register(child.reference, child.fork))
    [failed] = owner.worker_lost(ALICE, "killed")
    assert failed == FailValue(
        handle.reference.rref,
        "RRef creation failed: worker 1 (incarnation 0) was lost before its request came: killed",
    )
    delete = Delete(child.reference, child.fork)
    assert owner.message_arrived(BOB, delete) == [FreeValue(handle.reference.rref)]


def test_tombstone_goes_when_the_creator_is_lost() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, _ = alice.create_remote(OWNER)
    owner.message_arrived(ALICE, Delete(handle.reference, handle.fork))
    owner.worker_lost(ALICE, "killed")
    assert owner.counts().num_owner_rrefs == 0


def test_registration_is_rejected_when_the_creator_is_lost() -> None:
    alice, bob, owner = table(ALICE), table(BOB), table(OWNER)
    handle, _ = alice.create_remote(OWNER)
    received = receive(bob, share(alice, handle, BOB))
    owner.worker_lost(ALICE, "killed")
    [rejected] = sent(owner.message_arrived(BOB, Register(received.reference, received.fork)))
    assert isinstance(rejected, Rejected)
    assert bob.message_arrived(OWNER, rejected) == [
        HandleFailed(received.fork, Failure(FailureKind.STALE, rejected.reason)),
        Send(ALICE, Accepted(received.fork)),
    ]
    assert bob.dropped(received) == []
    assert bob.counts().num_user_rrefs == 0


def test_registration_is_rejected_after_the_value_came_and_went_though_its_parent_lives() -> None:
    """The trap that creations are numbered for: nobody lost is in sight of the owner's table.

    Alice creates; Bob gets a fork, registers it, and Alice lets go. Bob passes to
    Carol, who has yet to register when she passes on to Alice. Bob is lost, the
    value is freed, and then Alice's registration overtakes Carol's: Alice's parent
    lives, the creator lives, and still nothing will ever come.
    """
    alice, bob, carol, owner = table(ALICE), table(BOB), table(CAROL), table(OWNER)
    handle, creation = alice.create_remote(OWNER)
    owner.creation_arrived(creation, ALICE)
    at_bob = receive(bob, share(alice, handle, BOB))
    owner.message_arrived(BOB, Register(at_bob.reference, at_bob.fork))
    owner.message_arrived(ALICE, Delete(handle.reference, handle.fork))
    at_carol = receive(carol, share(bob, at_bob, CAROL))
    at_alice = receive(alice, share(carol, at_carol, ALICE))
    assert owner.worker_lost(BOB, "killed") == [FreeValue(handle.reference.rref)]
    for user, received in ((ALICE, at_alice), (CAROL, at_carol)):
        register = Register(received.reference, received.fork)
        [answer] = sent(owner.message_arrived(user, register))
        assert isinstance(answer, Rejected)
    assert owner.counts().num_owner_rrefs == 0


def test_registration_is_rejected_when_the_owner_made_the_value_itself_and_freed_it() -> None:
    owner = table(OWNER)
    handle = owner.new_value()
    reference = handle.reference
    share(owner, handle, ALICE)
    assert owner.dropped(handle) == []
    assert owner.worker_lost(ALICE, "it died") == [FreeValue(reference.rref)]
    child = id_of(ALICE, 3)  # which she had passed on
    (answer,) = sent(owner.message_arrived(BOB, Register(reference, child)))
    assert isinstance(answer, Rejected)
    assert not owner.is_kept(reference.rref)


def test_reference_that_arrives_at_an_owner_without_its_value_is_stale() -> None:
    alice, bob, owner = table(ALICE), table(BOB), table(OWNER)
    handle, _ = alice.create_remote(OWNER)
    received = receive(bob, share(alice, handle, BOB))
    returned = share(bob, received, OWNER, Carrier.REPLY)
    owner.worker_lost(ALICE, "killed")
    stale, effects = owner.receive(returned)
    failure = owner.failure(stale)
    assert failure is not None
    assert failure.kind is FailureKind.STALE
    assert Send(BOB, Accepted(returned.fork)) in effects


def test_reference_to_an_owner_known_to_be_lost_is_stale_on_arrival() -> None:
    alice, bob = table(ALICE), table(BOB)
    handle, _ = alice.create_remote(OWNER)
    bob.worker_lost(OWNER, "killed")
    child = share(alice, handle, BOB)
    received, effects = bob.receive(child)
    failure = bob.failure(received)
    assert failure is not None
    assert effects == [HandleFailed(child.fork, failure), Send(ALICE, Accepted(child.fork))]


def test_handles_of_an_earlier_life_fail_when_the_owner_returns() -> None:
    alice = table(ALICE)
    handle, _ = alice.create_remote(OWNER)
    [failed] = alice.worker_joined(Life(OWNER.worker, 1))
    assert isinstance(failed, HandleFailed)
    assert failed.failure.reason == "it was replaced by incarnation 1"
    assert alice.failure(handle) == failed.failure


def test_who_is_declared_lost_waits_for_no_owner_that_it_never_met() -> None:
    bob, stranger = table(BOB), Life(7, 3)
    passed = Passed(Reference(id_of(stranger, 0), stranger, 0), id_of(ALICE, 4), Passage.CHILD)
    handle = receive(bob, passed)
    held = share(bob, handle, CAROL)
    (failed,) = bob.expelled("it was silent")
    assert failed == HandleFailed(handle.fork, Failure(FailureKind.OWNER_LOST, "it was silent"))
    assert bob.counts().num_pending_users == bob.counts().num_pending_children == 0
    assert bob.worker_lost(stranger, "told later") == bob.not_sent(held, "nobody is there") == []
    assert bob.dropped(handle) == []
    assert bob.users() == []


def test_who_is_declared_lost_frees_what_only_others_used_and_takes_nothing_for_there() -> None:
    owner = table(OWNER)
    value, own = owner.new_value(), owner.create_here()
    share(owner, value, Life(7, 3))
    assert owner.dropped(value) == []
    assert owner.expelled("it was silent") == [FreeValue(value.reference.rref)]
    assert owner.is_kept(own.reference.rref)
    late = Passed(Reference(id_of(BOB, 0), BOB, 0), id_of(OWNER, 9), Passage.CHILD)
    stale, effects = owner.receive(late)
    assert owner.failure(stale) is not None
    assert sent(effects) == []


def test_joining_for_the_first_time_changes_nothing() -> None:
    alice = table(ALICE)
    handle, _ = alice.create_remote(OWNER)
    assert alice.worker_joined(OWNER) == []
    assert alice.failure(handle) is None


def test_new_life_of_an_owner_rejects_references_to_the_old_one() -> None:
    alice, reborn = table(ALICE), ReferenceTable(OWNER.worker, 1)
    handle, _ = alice.create_remote(OWNER)
    child = share(alice, handle, BOB)
    [answer] = sent(reborn.message_arrived(BOB, Register(child.reference, child.fork)))
    assert isinstance(answer, Rejected)
    assert reborn.message_arrived(ALICE, Delete(handle.reference, handle.fork)) == []
    stale, _ = reborn.receive(share(alice, handle, OWNER, Carrier.REPLY))
    assert reborn.failure(stale) is not None


def test_what_a_lost_worker_still_says_is_ignored() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, creation = alice.create_remote(OWNER)
    owner.worker_lost(ALICE, "killed")
    assert owner.creation_arrived(creation, ALICE) == []
    for message in (
        Register(handle.reference, handle.fork),
        Delete(handle.reference, handle.fork),
        Abandoned(handle.reference, handle.fork, "no route"),
    ):
        assert owner.message_arrived(ALICE, message) == []
    assert owner.counts().num_owner_rrefs == 0
