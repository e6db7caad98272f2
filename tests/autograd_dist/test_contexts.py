"""The contexts that exist on a worker, and for how long."""

from __future__ import annotations

import contextvars

import pytest
import torch

from autograd_dist.border import SentTensor
from autograd_dist.contexts import (
    ContextTable,
    creator_of,
    current_context_id,
    entered,
    highest_context_id,
    lives_after,
)
from autograd_dist.errors import UnknownContextError


def test_ids_name_their_creator_and_count_up():
    table = ContextTable(5)
    assert [table.create().context_id for _ in range(3)] == [5 << 48, (5 << 48) + 1, (5 << 48) + 2]
    assert creator_of((5 << 48) + 2) == 5


@pytest.mark.parametrize("incarnation", [1, 2, 65_535, 65_537])
def test_ids_of_another_life_are_others_and_name_the_same_creator(incarnation: int):
    ids = {ContextTable(5, life).create().context_id for life in (incarnation, incarnation + 1)}
    assert len(ids) == 2
    assert {creator_of(each) for each in ids} == {5}
    assert max(ids) <= highest_context_id(5)


def test_context_comes_into_being_when_it_is_mentioned():
    table = ContextTable(5)
    context = table.join(77)
    assert table.join(77) is context
    assert table.find(77) is context


def test_unknown_context_is_named():
    with pytest.raises(UnknownContextError, match="Could not find autograd context with id: 77"):
        ContextTable(5).find(77)


def test_released_context_does_not_come_back():
    table = ContextTable(5)
    context = table.create()
    assert table.release(context.context_id) is context
    assert table.release(context.context_id) is None
    assert table.join(context.context_id) is None


def test_release_may_overtake_the_first_mention():
    table = ContextTable(5)
    assert table.release(77) is None
    assert table.join(77) is None


def test_no_mention_brings_back_an_own_context_however_long_ago_it_was_released():
    table = ContextTable(5)
    first = table.create().context_id
    for _ in range(5000):
        table.release(table.create().context_id)
    table.release(first)
    for context_id in range(5000):
        table.release(context_id)
    assert table.join(first) is None


def test_contexts_of_a_life_that_is_over_do_not_come_into_being():
    gone = {(3 << 48) + 1}
    table = ContextTable(5, lives=lambda context_id: context_id not in gone)
    assert table.join((3 << 48) + 1) is None
    assert table.join((3 << 48) + 2) is not None
    assert [context.context_id for context in table.all()] == [(3 << 48) + 2]


@pytest.mark.parametrize(
    ("created_in", "latest", "after"),
    [(4, 4, 0), (5, 4, 1), (3, 4, -1), (65_536, 65_535, 1), (65_535, 65_536, -1), (0, 65_535, 1)],
)
def test_lives_are_counted_across_the_turn_of_their_numbers(
    created_in: int, latest: int, after: int
):
    context_id = ContextTable(5, created_in).create().context_id
    assert lives_after(context_id, latest) == after


def test_memory_of_released_contexts_is_bounded():
    table = ContextTable(5)
    for context_id in range(5000):
        table.release(context_id)
    assert table.join(4999) is None
    assert table.join(0) is not None


def test_messages_are_numbered_from_one():
    context = ContextTable(5).create()
    tensors = [SentTensor.of(torch.ones(1, requires_grad=True))]
    assert [context.add_send(tensors), context.add_send(tensors)] == [1, 2]
    assert list(context.sends()) == [1, 2]


def test_workers_are_known_once_and_forgotten():
    context = ContextTable(5).create()
    for worker in (3, 1, 3):
        context.add_worker(worker)
    assert context.workers() == [1, 3]
    assert context.remove_worker(3)
    assert not context.remove_worker(3)
    assert context.workers() == [1]


def test_running_code_belongs_to_a_context_and_so_do_copies_of_its_contextvars():
    with entered(9):
        assert current_context_id() == 9
        later = contextvars.copy_context()
    assert current_context_id() is None
    assert later.run(current_context_id) == 9
