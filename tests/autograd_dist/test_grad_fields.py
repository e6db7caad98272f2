"""Who shares a leaf waits for the other; who does not, does not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from autograd_dist.grad_fields import GradFields
from tests.waiting import until


@pytest.fixture
def fields() -> GradFields:
    return GradFields()


A, B, C = (torch.ones(1) for _ in range(3))


def test_who_shares_no_leaf_does_not_wait(fields: GradFields) -> None:
    with fields.used([A, B]), ThreadPoolExecutor(1) as other:
        other.submit(_use, fields, [C]).result(timeout=20)
        other.submit(_use, fields, []).result(timeout=20)


def test_who_shares_a_leaf_waits_until_it_is_free(fields: GradFields) -> None:
    order = []
    with ThreadPoolExecutor(1) as other:
        with fields.used([A, B]):
            waiting = other.submit(_use, fields, [B, C], lambda: order.append("second"))
            until(lambda: fields._waiting == 1)
            order.append("first")
        waiting.result(timeout=20)
    assert order == ["first", "second"]


def test_who_waits_for_one_leaf_keeps_none_from_others(fields: GradFields) -> None:
    with ThreadPoolExecutor(2) as others:
        with fields.used([A]):
            waiting = others.submit(_use, fields, [A, B])
            until(lambda: fields._waiting == 1)
            others.submit(_use, fields, [B]).result(timeout=20)
        waiting.result(timeout=20)


def test_blocks_nest_and_the_outermost_gives_back(fields: GradFields) -> None:
    with ThreadPoolExecutor(1) as other:
        with fields.used([A]):
            with fields.used([A, B]):
                pass
            other.submit(_use, fields, [B]).result(timeout=20)
            waiting = other.submit(_use, fields, [A])
            until(lambda: fields._waiting == 1)
        waiting.result(timeout=20)


def test_leaves_are_free_after_an_error(fields: GradFields) -> None:
    with pytest.raises(ValueError, match="inside"), fields.used([A]):
        raise ValueError("inside")
    with ThreadPoolExecutor(1) as other:
        other.submit(_use, fields, [A]).result(timeout=20)


def test_who_is_interrupted_while_it_waits_takes_nothing(fields: GradFields) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with fields.used([A]):
        fields._changed.wait = interrupted  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as other, pytest.raises(KeyboardInterrupt):
            other.submit(_use, fields, [A, B]).result(timeout=20)
    with ThreadPoolExecutor(1) as other:
        other.submit(_use, fields, [A, B]).result(timeout=20)


def _use(fields: GradFields, leaves: list[torch.Tensor], do=lambda: None) -> None:  # type: ignore[no-untyped-def]
    with fields.used(leaves):
        do()
