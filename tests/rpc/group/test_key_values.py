"""Keys and values for packages above, over every kind of store."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from rpc.errors import RpcError
from rpc.group.key_values import KeyValueStore
from tests.rpc.stores import signed

Connect = Callable[[], Store]


def test_a_key_that_nobody_set_has_no_value(connect: Connect) -> None:
    store = KeyValueStore(signed(connect()), "mine")
    assert store.get("key") is None
    store.delete("key")
    assert store.get("key") is None


@pytest.mark.parametrize("value", [b"", b"=", b"\xff\x00 not text", b"x" * 10_000])
def test_values_are_any_bytes(connect: Connect, value: bytes) -> None:
    store = KeyValueStore(signed(connect()), "mine")
    store.set("key", value)
    assert store.get("key") == value
    store.delete("key")
    assert store.get("key") is None
    assert store.compare_and_set("key", None, value) == value
    assert store.get("key") == value


def test_compare_and_set_changes_only_what_was_expected(connect: Connect) -> None:
    store = KeyValueStore(signed(connect()), "mine")
    assert store.compare_and_set("key", b"1", b"2") is None
    assert store.compare_and_set("key", b"1", b"1") is None
    assert store.get("key") is None
    assert store.compare_and_set("key", None, b"1") == b"1"
    assert store.compare_and_set("key", None, b"2") == b"1"
    assert store.compare_and_set("key", b"2", b"3") == b"1"
    assert store.compare_and_set("key", b"1", b"") == b""
    assert store.compare_and_set("key", b"", b"") == b""
    assert store.compare_and_set("key", None, b"4") == b""


def test_counters_begin_at_zero_and_do_not_meet_values(connect: Connect) -> None:
    store = KeyValueStore(signed(connect()), "mine")
    store.set("key", b"value")
    assert [store.add("key", 0), store.add("key"), store.add("key", -5)] == [0, 1, -4]
    assert store.get("key") == b"value"
    store.delete("key")
    assert (store.get("key"), store.add("key", 0)) == (None, 0)


def test_namespaces_do_not_meet_each_other_nor_what_else_is_in_the_store() -> None:
    whole = HashStore()
    one, other = KeyValueStore(signed(whole), "one"), KeyValueStore(signed(whole), "other")
    one.set("key", b"1")
    other.set("key", b"2")
    whole.set("key", b"3")
    assert (one.get("key"), other.get("key"), whole.get("key")) == (b"1", b"2", b"3")


@pytest.mark.parametrize("namespace", ["", "a/b", "a b", "x" * 201, None])
def test_a_namespace_is_a_plain_word(namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace="):
        KeyValueStore(signed(HashStore()), namespace)


def test_what_is_no_key_or_value_is_named(connect: Connect) -> None:
    store = KeyValueStore(signed(connect()), "mine")
    with pytest.raises(TypeError, match="key=1 is a int"):
        store.get(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="value='text' is a str"):
        store.set("key", "text")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected=0 is a int"):
        store.compare_and_set("key", 0, b"1")  # type: ignore[arg-type]


def test_a_store_that_is_gone_is_an_error_of_rpc() -> None:
    host = TCPStore("127.0.0.1", 0, is_master=True)
    store = KeyValueStore(signed(TCPStore("127.0.0.1", host.port)), "mine")
    store.set("key", b"1")
    del host
    with pytest.raises(RpcError, match="did not answer for 'key'"):
        store.get("key")
