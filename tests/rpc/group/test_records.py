"""The record that a worker leaves for the others, and the numbers of its lives."""

import json
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore

from rpc.errors import BringUpError
from rpc.group.records import Record, next_incarnation
from tests.rpc.stores import in_turns, record, signed


class TestRecord:
    def test_survives_encoding(self) -> None:
        original = record(3, extras={"cores": 2})
        assert Record.decode(original.encode()) == original

    def test_is_json(self) -> None:
        assert json.loads(record(1).encode())["name"] == "worker1"

    @pytest.mark.parametrize("data", [b"", b"{}", b"\x80\x04N.", b'{"name": "x"}', b"[]", b"\xff"])
    def test_anything_else_in_its_place_is_named(self, data: bytes) -> None:
        with pytest.raises(BringUpError, match="something else than a record"):
            Record.decode(data)

    @pytest.mark.parametrize(
        "field", [{"name": 5}, {"rank": "0"}, {"incarnation": None}, {"extras": "x"}]
    )
    def test_a_value_of_another_type_is_named(self, field: dict[str, Any]) -> None:
        fields = json.loads(record(0).encode()) | field
        (named,) = field
        with pytest.raises(BringUpError, match=f"something else than a record.*{named}="):
            Record.decode(json.dumps(fields).encode())


class TestIncarnations:
    def test_each_life_of_a_name_has_its_number(self) -> None:
        store = HashStore()
        assert [next_incarnation(signed(store), "a", 0) for _ in range(3)] == [1, 2, 3]
        assert next_incarnation(signed(store), "b", 1) == 1

    def test_neither_a_name_nor_a_rank_has_two_lives_of_one_number(self) -> None:
        store = HashStore()
        lives = [("a", 3), ("b", 3), ("b", 4), ("a", 3), ("c", 4), ("c", 3), ("a", 4)]
        numbers = [next_incarnation(signed(store), *life) for life in lives]
        for position in (0, 1):
            for key in {life[position] for life in lives}:
                mine = [n for n, life in zip(numbers, lives, strict=True) if life[position] == key]
                assert mine == sorted(set(mine))

    @pytest.mark.parametrize("seed", range(50))
    def test_two_that_begin_at_the_same_moment_have_two_numbers(self, seed: int) -> None:
        begin = partial(next_incarnation, name="a", rank=0)
        numbers = in_turns(HashStore(), [begin, begin], seed)
        assert len(set(numbers)) == 2

    def test_a_stranger_does_not_take_a_number_back(self) -> None:
        store = HashStore()
        assert next_incarnation(signed(store, b"key"), "a", 0) == 1
        for key in ("incarnation/a", "incarnation-of-rank/0"):
            store.set(f"tensorwire/{key}", "0")
            assert next_incarnation(signed(store, b"key"), "a", 0) > 1
