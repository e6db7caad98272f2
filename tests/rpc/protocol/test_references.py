"""The reference protocol, one exchange at a time; random schedules are in the simulation."""

from __future__ import annotations

import pytest

from rpc.ids import GlobalId, Reference
from rpc.protocol.reference_terms import (
    Carrier,
    Failure,
    FailureKind,
    FailValue,
    FreeValue,
    HandleConfirmed,
    HandleFailed,
    Leak,
    OwnerHandle,
    Send,
    UserHandle,
)
from rpc.protocol.references import ReferenceTable
from rpc.wire.control import (
    Abandoned,
    Accepted,
    ControlMessage,
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

# --- Ids ----------------------------------------------------------------------


def test_ids_print_like_the_originals() -> None:
    assert str(GlobalId(2, 7, 5)) == "GloballyUniqueId(created_on=2, local_id=5)"


def test_rrefs_and_forks_share_one_counter_from_zero() -> None:
    alice = table(ALICE)
    assert alice.new_value().reference.rref == id_of(ALICE, 0)
    handle, _ = alice.create_remote(OWNER)
    assert handle.reference.rref == id_of(ALICE, 1)
    assert handle.fork == id_of(ALICE, 2)


def test_ids_of_two_lives_differ() -> None:
    first, second = ReferenceTable(1, 0), ReferenceTable(1, 1)
    assert first.new_value().reference.rref != second.new_value().reference.rref


# --- Creating -----------------------------------------------------------------


def test_remote_from_creation_to_deletion() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, passed = alice.create_remote(OWNER)
    rref, fork = id_of(ALICE, 0), id_of(ALICE, 1)
    assert passed == Passed(Reference(rref, OWNER, 0), fork, Passage.CREATION)
    assert alice.failure(handle) is None
    assert not alice.is_confirmed(fork)
    assert owner.creation_arrived(passed, ALICE) == []
    assert owner.is_kept(rref)
    assert alice.creation_confirmed(fork) == [HandleConfirmed(fork)]
    delete = Delete(handle.reference, fork)
    assert alice.dropped(handle) == [Send(OWNER, delete)]
    assert owner.message_arrived(ALICE, delete) == [FreeValue(rref)]


def test_creations_are_numbered_per_owner() -> None:
    alice = table(ALICE)
    numbers = [alice.create_remote(to)[0].reference.creation for to in (OWNER, BOB, OWNER)]
    assert numbers == [0, 0, 1]


def test_remote_to_oneself_lives_as_long_as_its_handle() -> None:
    owner = table(OWNER)
    handle = owner.create_here()
    assert owner.is_kept(handle.reference.rref)
    assert owner.dropped(handle) == [FreeValue(handle.reference.rref)]


def test_delete_that_overtakes_the_creation_frees_it_on_arrival() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, passed = alice.create_remote(OWNER)
    [delete] = sent(alice.dropped(handle))
    assert owner.message_arrived(ALICE, delete) == []
    assert owner.creation_arrived(passed, ALICE) == [FreeValue(handle.reference.rref)]
    assert not owner.is_kept(handle.reference.rref)


def test_late_confirmation_of_a_dropped_creation_is_ignored() -> None:
    alice = table(ALICE)
    handle, _ = alice.create_remote(OWNER)
    alice.dropped(handle)
    assert alice.creation_confirmed(handle.fork) == []


def test_timed_out_creation_is_deleted_at_once_and_stays_failed() -> None:
    alice = table(ALICE)
    handle, _ = alice.create_remote(OWNER)
    failure = Failure(FailureKind.CREATION, "RRef creation failed: timed out")
    assert alice.creation_failed(handle.fork, "timed out") == [
        HandleFailed(handle.fork, failure),
        Send(OWNER, Delete(handle.reference, handle.fork)),
    ]
    assert alice.creation_confirmed(handle.fork) == []
    assert alice.failure(handle) == failure
    assert alice.share(handle, BOB, Carrier.REQUEST) == failure
    assert alice.dropped(handle) == []


def test_timed_out_creation_is_kept_for_the_child_it_was_passed_to() -> None:
    alice = table(ALICE)
    handle, _ = alice.create_remote(OWNER)
    child = share(alice, handle, BOB)
    assert sent(alice.creation_failed(handle.fork, "timed out")) == []
    deleted = alice.message_arrived(BOB, Accepted(child.fork))
    assert deleted == [Send(OWNER, Delete(handle.reference, handle.fork))]


def test_unsent_creation_fails_for_those_who_wait_for_it() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, passed = alice.create_remote(OWNER)
    child = share(alice, handle, BOB)
    assert sent(owner.message_arrived(BOB, Register(child.reference, child.fork))) == [
        Registered(child.fork)
    ]
    [abandoned] = sent(alice.not_sent(passed, "no route"))
    assert abandoned == Abandoned(handle.reference, handle.fork, "no route")
    assert owner.message_arrived(ALICE, abandoned) == [
        FailValue(handle.reference.rref, "RRef creation failed: no route")
    ]


def test_unsent_creation_of_a_dropped_handle_leaves_nothing_at_the_owner() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, passed = alice.create_remote(OWNER)
    [delete] = sent(alice.dropped(handle))
    owner.message_arrived(ALICE, delete)
    [abandoned] = sent(alice.not_sent(passed, "no route"))
    assert owner.message_arrived(ALICE, abandoned) == [FreeValue(handle.reference.rref)]


def test_creation_that_comes_twice_is_noticed() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, passed = alice.create_remote(OWNER)
    owner.creation_arrived(passed, ALICE)
    owner.message_arrived(ALICE, Delete(handle.reference, handle.fork))
    assert owner.creation_arrived(passed, ALICE) == []
    assert not owner.is_kept(handle.reference.rref)


# --- User to user -------------------------------------------------------------


def test_user_passes_to_user() -> None:
    alice, bob, owner = table(ALICE), table(BOB), table(OWNER)
    handle, creation = alice.create_remote(OWNER)
    owner.creation_arrived(creation, ALICE)
    child = share(alice, handle, BOB)
    assert child == Passed(handle.reference, id_of(ALICE, 2), Passage.CHILD)
    assert alice.dropped(handle) == []  # held for the child

    received, effects = bob.receive(child)
    assert received == UserHandle(handle.reference, child.fork)
    assert effects == [Send(OWNER, Register(handle.reference, child.fork))]
    registered = owner.message_arrived(BOB, Register(handle.reference, child.fork))
    assert registered == [Send(BOB, Registered(child.fork))]
    assert bob.message_arrived(OWNER, Registered(child.fork)) == [
        HandleConfirmed(child.fork),
        Send(ALICE, Accepted(child.fork)),
    ]
    assert alice.message_arrived(BOB, Accepted(child.fork)) == [
        Send(OWNER, Delete(handle.reference, handle.fork))
    ]
    owner.message_arrived(ALICE, Delete(handle.reference, handle.fork))
    assert owner.is_kept(handle.reference.rref)
    [delete] = sent(bob.dropped(received))
    assert owner.message_arrived(BOB, delete) == [FreeValue(handle.reference.rref)]


def test_handle_dropped_while_it_registers_is_deleted_after_the_answer() -> None:
    alice, bob = table(ALICE), table(BOB)
    handle, _ = alice.create_remote(OWNER)
    received = receive(bob, share(alice, handle, BOB))
    assert bob.dropped(received) == []
    assert sent(bob.message_arrived(OWNER, Registered(received.fork))) == [
        Accepted(received.fork),
        Delete(received.reference, received.fork),
    ]
    assert bob.counts().num_user_rrefs == 0


def test_child_that_was_not_sent_is_not_waited_for() -> None:
    alice = table(ALICE)
    handle, _ = alice.create_remote(OWNER)
    child = share(alice, handle, BOB)
    assert alice.not_sent(child, "no route") == []
    assert sent(alice.dropped(handle)) == [Delete(handle.reference, handle.fork)]


def test_a_dropped_handle_cannot_be_shared() -> None:
    alice = table(ALICE)
    handle, _ = alice.create_remote(OWNER)
    alice.dropped(handle)
    refused = alice.share(handle, BOB, Carrier.REQUEST)
    assert refused == Failure(FailureKind.DELETED, "the handle was dropped")


def test_acceptance_that_comes_twice_is_ignored() -> None:
    alice = table(ALICE)
    handle, _ = alice.create_remote(OWNER)
    child = share(alice, handle, BOB)
    alice.dropped(handle)
    assert len(alice.message_arrived(BOB, Accepted(child.fork))) == 1
    assert alice.message_arrived(BOB, Accepted(child.fork)) == []


def test_register_that_overtakes_the_creation_keeps_a_place_for_the_value() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, creation = alice.create_remote(OWNER)
    child = share(alice, handle, BOB)
    registered = owner.message_arrived(BOB, Register(child.reference, child.fork))
    assert registered == [Send(BOB, Registered(child.fork))]
    assert owner.creation_arrived(creation, ALICE) == []
    assert owner.counts().num_forks == 2


def test_creation_and_registration_may_both_be_overtaken_by_the_parents_delete() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, creation = alice.create_remote(OWNER)
    child = share(alice, handle, BOB)
    owner.message_arrived(BOB, Register(child.reference, child.fork))
    assert owner.message_arrived(ALICE, Delete(handle.reference, handle.fork)) == []
    assert owner.creation_arrived(creation, ALICE) == []
    assert owner.leaks() == [Leak(handle.reference.rref, (BOB,))]


def test_every_arrival_of_one_rref_has_a_fork_of_its_own() -> None:
    alice, bob = table(ALICE), table(BOB)
    handle, _ = alice.create_remote(OWNER)
    first, second = (receive(bob, share(alice, handle, BOB)) for _ in range(2))
    assert first.fork != second.fork
    bob.message_arrived(OWNER, Registered(first.fork))
    assert sent(bob.dropped(first)) == [Delete(first.reference, first.fork)]
    assert bob.failure(second) is None


def test_user_may_pass_to_itself_and_accepts_without_a_message() -> None:
    alice = table(ALICE)
    handle, _ = alice.create_remote(OWNER)
    received, effects = alice.receive(share(alice, handle, ALICE))
    assert isinstance(received, UserHandle)
    assert effects == [Send(OWNER, Register(received.reference, received.fork))]
    assert alice.dropped(handle) == []
    assert alice.message_arrived(OWNER, Registered(received.fork)) == [
        HandleConfirmed(received.fork),
        Send(OWNER, Delete(handle.reference, handle.fork)),
    ]


# --- With the owner -----------------------------------------------------------


def test_hand_made_value_is_kept_only_once_it_is_shared() -> None:
    owner = table(OWNER)
    handle = owner.new_value()
    assert not owner.is_kept(handle.reference.rref)
    share(owner, handle, BOB)
    assert owner.is_kept(handle.reference.rref)


def test_value_never_shared_is_dropped_without_effects() -> None:
    owner = table(OWNER)
    assert owner.dropped(owner.new_value()) == []


def test_owner_passes_to_user_without_messages() -> None:
    owner, bob = table(OWNER), table(BOB)
    handle = owner.new_value()
    granted = share(owner, handle, BOB)
    assert granted.passage is Passage.GRANT
    received, effects = bob.receive(granted)
    assert effects == [HandleConfirmed(granted.fork)]
    assert owner.dropped(handle) == []
    [delete] = sent(bob.dropped(received))
    assert owner.message_arrived(BOB, delete) == [FreeValue(handle.reference.rref)]


def test_grant_that_was_not_sent_is_taken_back() -> None:
    owner = table(OWNER)
    handle = owner.new_value()
    granted = share(owner, handle, BOB)
    owner.dropped(handle)
    assert owner.not_sent(granted, "no route") == [FreeValue(handle.reference.rref)]


def test_grant_that_was_not_sent_because_its_receiver_was_lost_is_gone_already() -> None:
    owner = table(OWNER)
    handle = owner.new_value()
    granted = share(owner, handle, ALICE)
    owner.dropped(handle)
    assert owner.worker_lost(ALICE, "killed") == [FreeValue(handle.reference.rref)]
    assert owner.not_sent(granted, "there was no way to send it") == []


def test_owner_passes_to_itself() -> None:
    owner = table(OWNER)
    handle = owner.new_value()
    passed = share(owner, handle, OWNER)
    assert owner.dropped(handle) == []
    received, effects = owner.receive(passed)
    assert (received, effects) == (OwnerHandle(handle.reference), [])
    assert owner.dropped(received) == [FreeValue(handle.reference.rref)]


def test_borrowed_reference_is_kept_until_the_call_is_over() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, creation = alice.create_remote(OWNER)
    owner.creation_arrived(creation, ALICE)
    borrowed = share(alice, handle, OWNER)
    assert borrowed.passage is Passage.BORROW
    assert owner.receive(borrowed) == (OwnerHandle(handle.reference), [])
    assert alice.dropped(handle) == []
    assert sent(alice.borrow_ended(borrowed.fork)) == [Delete(handle.reference, handle.fork)]
    assert alice.borrow_ended(borrowed.fork) == []


def test_a_value_that_a_request_is_made_through_is_looked_up_without_a_handle() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, creation = alice.create_remote(OWNER)
    owner.creation_arrived(creation, ALICE)
    before = owner.counts()
    assert owner.look_up(handle.reference) is None
    assert owner.counts() == before
    assert owner.message_arrived(ALICE, Delete(handle.reference, handle.fork)) == [
        FreeValue(handle.reference.rref)
    ]
    gone = owner.look_up(handle.reference)
    assert gone is not None
    assert "its value was freed" in gone


def test_a_request_through_a_reference_may_overtake_the_creation() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, creation = alice.create_remote(OWNER)
    rref = handle.reference.rref
    assert owner.look_up(handle.reference) is None
    assert owner.is_kept(rref)
    assert owner.creation_arrived(creation, ALICE) == []
    assert owner.message_arrived(ALICE, Delete(handle.reference, handle.fork)) == [FreeValue(rref)]


def test_owner_may_keep_what_it_borrowed() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, creation = alice.create_remote(OWNER)
    owner.creation_arrived(creation, ALICE)
    kept, _ = owner.receive(share(alice, handle, OWNER))
    assert owner.message_arrived(ALICE, Delete(handle.reference, handle.fork)) == []
    assert owner.dropped(kept) == [FreeValue(handle.reference.rref)]


def test_borrow_that_overtakes_the_creation_waits_for_it() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, creation = alice.create_remote(OWNER)
    received, effects = owner.receive(share(alice, handle, OWNER))
    assert (received, effects) == (OwnerHandle(handle.reference), [])
    assert owner.dropped(received) == []  # still to come
    assert owner.creation_arrived(creation, ALICE) == []
    assert owner.is_kept(handle.reference.rref)


def test_reference_returned_to_its_owner_is_accepted_at_once() -> None:
    alice, owner = table(ALICE), table(OWNER)
    handle, creation = alice.create_remote(OWNER)
    owner.creation_arrived(creation, ALICE)
    returned = share(alice, handle, OWNER, Carrier.REPLY)
    assert returned.passage is Passage.RETURN
    received, effects = owner.receive(returned)
    assert (received, effects) == (
        OwnerHandle(handle.reference),
        [Send(ALICE, Accepted(returned.fork))],
    )
    alice.dropped(handle)
    assert len(sent(alice.message_arrived(OWNER, Accepted(returned.fork)))) == 1


# --- Shutdown and counts ------------------------------------------------------


def test_release_all_users_deletes_even_what_somebody_still_has() -> None:
    alice = table(ALICE)
    handle, _ = alice.create_remote(OWNER)
    alice.creation_confirmed(handle.fork)
    failure = Failure(FailureKind.DELETED, "this worker shut down")
    assert alice.release_all_users() == [
        HandleFailed(handle.fork, failure),
        Send(OWNER, Delete(handle.reference, handle.fork)),
    ]
    assert alice.failure(handle) == failure
    assert alice.counts().num_user_rrefs == 0
    assert alice.dropped(handle) == []
    assert alice.release_all_users() == []


def test_release_all_users_waits_for_a_registration_under_way() -> None:
    alice, bob = table(ALICE), table(BOB)
    handle, _ = alice.create_remote(OWNER)
    received = receive(bob, share(alice, handle, BOB))
    assert sent(bob.release_all_users()) == []
    assert bob.counts().num_user_rrefs == 1
    assert len(sent(bob.message_arrived(OWNER, Registered(received.fork)))) == 2
    assert bob.counts().num_user_rrefs == 0


def test_leaks_name_the_users_that_still_hold_a_value() -> None:
    owner = table(OWNER)
    handle = owner.new_value()
    assert owner.leaks() == []
    for user in (CAROL, BOB, BOB):
        share(owner, handle, user)
    assert owner.leaks() == [Leak(handle.reference.rref, (BOB, CAROL))]


def test_counts_show_what_is_under_way() -> None:
    alice, bob = table(ALICE), table(BOB)
    handle, _ = alice.create_remote(OWNER)
    alice.create_here()
    child = share(alice, handle, BOB)
    share(alice, handle, OWNER)
    receive(bob, child)
    counts = alice.counts()
    assert (counts.num_user_rrefs, counts.num_owner_rrefs) == (1, 1)
    assert (counts.num_pending_users, counts.num_pending_children, counts.num_borrows) == (1, 1, 1)
    assert bob.counts().num_pending_users == 1
    alice.creation_failed(handle.fork, "timed out")
    assert alice.counts().num_pending_users == 0


def test_messages_about_other_things_are_left_alone() -> None:
    class Other(ControlMessage):
        pass

    assert table(OWNER).message_arrived(ALICE, Other()) == []


@pytest.mark.parametrize("message", [Registered(id_of(BOB, 9)), Rejected(id_of(BOB, 9), "gone")])
def test_answers_about_unknown_forks_are_ignored(message: ControlMessage) -> None:
    assert table(ALICE).message_arrived(OWNER, message) == []
