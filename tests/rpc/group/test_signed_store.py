"""Values that count only if somebody with the group's key wrote them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, Store, TCPStore

from rpc.errors import BringUpError
from rpc.group.signed_store import SignedStore, key_mark
from rpc.group.tcp_store import TcpStoreClient
from tests.rpc.stores import SECONDS, SOON, signed

KEY = b"the group's key"


def test_every_kind_of_store_will_do(connect: Callable[[], Store]) -> None:
    store = SignedStore(connect(), KEY, "mine")
    assert store.get("key") is None
    assert store.get_all(["a", "b"]) == [None, None]
    store.set("key", b"\x00")
    assert store.compare_and_set("key", None, b"new") == b"\x00"
    assert store.compare_and_set("key", b"\x00", b"new") == b"new"
    assert store.compare_and_set("key", b"\x00", b"newer") == b"new"
    assert store.compare_and_set("other", b"old", b"new") is None
    assert store.get("other") is None
    assert store.compare_and_set("other", None, b"") == b""
    assert store.get_all(["key", "none", "other"]) == [b"new", None, b""]
    assert store.wait(["key", "other"], SOON)
    assert not store.wait(["none"], 0.01)
    store.delete("key")
    assert store.get("key") is None


def test_over_our_own_client_it_is_the_same() -> None:
    host = TCPStore("127.0.0.1", 0, None, True, SECONDS, wait_for_workers=False)
    test_every_kind_of_store_will_do(lambda: TcpStoreClient("127.0.0.1", host.port, SOON))


def test_a_counter_counts_every_addition_once() -> None:
    store = HashStore()

    def count(_: int) -> list[int]:
        mine = signed(store, KEY)
        return [mine.add("count") for _ in range(25)]

    with ThreadPoolExecutor(4) as pool:
        seen = sorted(number for numbers in pool.map(count, range(4)) for number in numbers)
    assert seen == [*range(1, 101)]
    assert signed(store, KEY).add("count", 0) == 100
    assert signed(store, KEY).add("count", -3) == 97


@pytest.mark.parametrize("value", [b"x", b"1", b"1" + b"0" * 36 + b"=forged"])
def test_a_value_of_a_stranger_counts_as_absent_and_is_named_once(
    value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = HashStore()
    mine = signed(store, KEY)
    store.set("tensorwire/key", value.decode())
    for _ in range(2):
        assert mine.get("key") is None
    assert caplog.text.count("ignored what the group's store holds under 'key'") == 1
    assert mine.compare_and_set("key", None, b"mine") == b"mine"
    assert mine.get("key") == b"mine"


def test_a_value_of_another_key_counts_as_absent_and_the_log_says_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = HashStore()
    signed(store, b"another").set("key", b"theirs")
    mine = signed(store, KEY)
    assert mine.get("key") is None
    assert mine.forgeries.have_another_key
    assert "it was written with another group_key; give every worker" in caplog.text


def test_a_value_cannot_be_moved_to_another_name() -> None:
    store = HashStore()
    mine = signed(store, KEY)
    mine.below("a").set("b", b"value")
    copied = store.get("tensorwire/a/b")
    store.set("tensorwire/a/c", copied)  # type: ignore[arg-type]
    assert mine.get("a/b") == b"value"
    assert mine.get("a/c") is None


def test_a_stranger_who_writes_all_the_time_does_not_keep_one_in_a_loop() -> None:
    class Contested(HashStore):
        def compare_set(self, key: str, expected: object, desired: object) -> bytes:
            del key, expected, desired
            Contested.count += 1
            return b"stranger's %d" % Contested.count

        count = 0

    with pytest.raises(BringUpError, match="somebody else writes to it"):
        signed(Contested(), KEY).compare_and_set("key", None, b"mine")


def test_the_key_is_in_no_value_and_no_name() -> None:
    written: list[object] = []

    class Noting(HashStore):
        def set(self, key: str, value: object) -> None:
            written.extend((key, value))

    signed(Noting(), KEY).set("key", b"value")
    assert KEY not in repr(written).encode()


def test_many_keys_have_one_mark_so_that_it_confirms_no_guess() -> None:
    marks = {key_mark(b"key %d" % number) for number in range(2000)}
    assert 1900 < len(marks) < 2000
    assert all(len(mark) == 4 for mark in marks)
