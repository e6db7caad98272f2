"""A record is safe when the whole chain has it, and who was replaced gets nothing acknowledged."""

from __future__ import annotations

from tensorwire.parameter_server.decisions.replication import (
    Append,
    Durable,
    Fenced,
    Forward,
    Replication,
)
from tensorwire.parameter_server.decisions.views import Server

A, B, C = (Server(f"ps{k}", 0) for k in range(3))


def log(me: Server, *chain: Server, version: int = 1) -> Replication:
    made = Replication(me)
    made.rechained(version, chain)
    return made


def test_alone_a_record_is_safe_at_once() -> None:
    assert log(A, A).append("x") == (0, [Durable(1)])


def test_with_a_backup_a_record_is_safe_when_the_backup_says_so() -> None:
    head = log(A, A, B)
    assert head.append("x") == (0, [Forward(B, 1, 0, "x")])
    assert head.durable == 0
    assert head.acknowledged(B, 1, 1) == [Durable(1)]


def test_records_that_overtook_each_other_are_appended_in_order() -> None:
    tail = log(B, A, B)
    assert tail.receive(1, 1, "y") == []
    assert tail.receive(1, 0, "x") == [Append(0, "x"), Durable(1), Append(1, "y"), Durable(2)]


def test_a_head_that_was_replaced_is_fenced() -> None:
    tail = log(B, A, B)
    tail.rechained(2, (B,))
    assert tail.receive(1, 0, "x") == [Fenced(2)]
    assert tail.position == 0


def test_a_head_whose_backup_is_gone_goes_on_alone_once_the_view_says_so() -> None:
    head = log(A, A, B)
    head.append("x")
    assert head.rechained(2, (A,)) == [Durable(1)]


def test_what_the_middle_of_a_chain_did_not_hand_on_reaches_the_tail() -> None:
    head = log(A, A, B, C)
    head.append("x")
    assert head.rechained(2, (A, C)) == [Forward(C, 2, 0, "x")]
    assert head.acknowledged(C, 1, 2) == [Durable(1)]


def test_a_new_backup_counts_from_when_it_has_the_copy_and_all_that_followed() -> None:
    head = log(A, A)
    head.append("before")
    assert head.adopt(B) == 1
    assert head.append("x") == (1, [Forward(B, 1, 1, "x"), Durable(2)])
    assert head.bind(B) == [Forward(B, 1, 1, "x")]
    assert head.append("y") == (2, [Forward(B, 1, 2, "y")])
    assert not head.heir_is_whole
    assert head.acknowledged(B, 2, 1) == []
    assert head.heir_is_whole
    assert head.acknowledged(B, 3, 1) == [Durable(3)]
    assert head.rechained(2, (A, B)) == []


def test_a_bound_backup_that_dies_is_not_waited_for() -> None:
    head = log(A, A)
    head.adopt(B)
    head.bind(B)
    head.append("x")
    assert head.disown(B) == [Durable(1)]


def test_a_bound_backup_stays_when_the_chain_before_it_changes() -> None:
    tail = log(B, A, B)
    tail.adopt(C)
    tail.bind(C)
    assert tail.rechained(2, (B,)) == []
    assert tail.append("x") == (0, [Forward(C, 2, 0, "x")])


def test_what_a_replaced_head_sent_too_early_is_not_taken_for_what_another_sends() -> None:
    middle = log(B, A, B, C)
    middle.receive(1, 1, "of A")
    middle.rechained(2, (B, C))
    middle.append("x")
    assert middle.receive(2, 9, "later") == []
    assert middle.position == 1


def test_an_acknowledgement_of_what_was_sent_in_an_earlier_chain_counts_for_nothing() -> None:
    head = log(A, A, B, C)
    head.append("x")
    head.rechained(2, (A, C))
    assert head.acknowledged(C, 1, 1) == []
    assert head.acknowledged(C, 1, 2) == [Durable(1)]


def test_whoever_hears_of_a_later_chain_from_its_head_refuses_what_the_former_one_sends() -> None:
    tail = log(C, A, B, C)
    assert tail.receive(2, 0, "of B") == [Append(0, "of B"), Durable(1)]
    assert tail.receive(1, 1, "of A") == [Fenced(2)]
