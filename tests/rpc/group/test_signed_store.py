"""Values that count only if somebody with the group's key wrote them."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, Store, TCPStore

from rpc.errors import BringUpError
from rpc.group.signed_store import SignedStore, key_mark
from rpc.group.store_values import HEAD_BYTES
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


class Exposed(HashStore):
    """A store of which a stranger sees every value that was ever there, and changes all."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[tuple[str, bytes]] = []

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        found = bytes(super().compare_set(key, expected, desired))
        if found == bytes(desired) != bytes(expected):
            self.history.append((key, found))
        return found

    def overwrite(self, key: str, value: bytes) -> None:
        raw: Any = value  # torch's stubs say str
        super().set(key, raw)


NAME = "tensorwire/key"


def version_of(store: Exposed) -> int:
    """The version of the value that lies in the store; 0 if no member wrote it."""
    begins = HEAD_BYTES + 16
    lies = bytes(store.get(NAME)) if store.check([NAME]) else b""
    return int(lies[begins : begins + 12], 16) if (NAME, lies) in store.history else 0


def put_back_first(store: Exposed) -> None:
    store.overwrite(NAME, next(value for name, value in store.history if name == NAME))


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (lambda store: store.overwrite(NAME, b"junk"), "somebody without the group's key"),
        (lambda store: store.overwrite(NAME, b"\xff\xfe" * 40), "somebody without the group's key"),
        (lambda store: store.delete_key(NAME), "it was there before, and was deleted"),
        (put_back_first, "it is older than what was there before, and was put back"),
    ],
)
def test_who_has_read_a_value_goes_on_with_it_whatever_is_put_there_and_writes_it_again(
    attack: Callable[[Exposed], object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Exposed()
    writer, reader = signed(store, KEY), signed(store, KEY)
    writer.set("key", b"old")
    writer.set("key", b"new")
    assert reader.get("key") == b"new"
    for _ in range(3):
        attack(store)
        assert reader.get("key") == b"new"
        assert signed(store, KEY).get("key") == b"new", "a newcomer finds what was written again"
        attack(store)
        assert writer.compare_and_set("key", b"new", b"newer") == b"newer"
        assert reader.compare_and_set("key", b"old", b"never") == b"newer"
        writer.set("key", b"new")
        assert reader.get("key") == b"new"
    assert why in caplog.text


def test_a_deleted_value_that_is_put_back_stays_deleted() -> None:
    store = Exposed()
    mine, other = signed(store, KEY), signed(store, KEY)
    mine.set("key", b"old")
    assert other.get("key") == b"old"
    mine.delete("key")
    assert other.get("key") is None
    put_back_first(store)
    assert other.get("key") is None
    assert signed(store, KEY).get("key") is None
    assert mine.compare_and_set("key", None, b"again") == b"again"
    assert other.get("key") == b"again"


def test_two_values_of_one_version_are_an_error_for_whoever_has_seen_the_other() -> None:
    """A stranger puts an old value back at the very moment at which somebody replaces it."""
    store = Exposed()
    one, other = signed(store, KEY), signed(store, KEY)
    one.set("key", b"old")
    assert other.get("key") == b"old"
    one.set("key", b"mine")
    put_back_first(store)
    other.set("key", b"another")
    for _ in range(2):
        with pytest.raises(BringUpError, match="holds another value of version 2 under"):
            one.get("key")
    with pytest.raises(BringUpError, match="nobody can know which"):
        one.compare_and_set("key", b"mine", b"more")
    assert other.get("key") == b"another"


@pytest.mark.parametrize("seed", range(200))
def test_under_no_attack_does_a_reader_see_a_lower_version_than_before(seed: int) -> None:
    """Members write on; a stranger deletes, forges and puts back what he likes in between."""
    draw, store = random.Random(seed), Exposed()
    members = [signed(store, KEY) for _ in range(3)]
    seen = [0] * len(members)
    for _ in range(60):
        who = draw.randrange(len(members))
        try:
            if draw.random() < 0.5:
                members[who].add("key")
            members[who].get("key")
            now = version_of(store)
        except BringUpError:  # two values of one version, on which nobody acts
            return
        assert now >= seen[who]
        seen[who] = now
        move = draw.randrange(5)
        if move == 0:
            store.delete_key(NAME)
        elif move == 1:
            store.overwrite(NAME, draw.randbytes(draw.randrange(1, 90)))
        elif move == 2 and store.history:
            store.overwrite(*draw.choice(store.history))


def test_the_key_is_in_no_value_and_no_name() -> None:
    written: list[object] = []

    class Noting(HashStore):
        def compare_set(self, key: str, expected: object, desired: Any) -> bytes:
            written.extend((key, expected, desired))
            return bytes(desired)

    signed(Noting(), KEY).set("key", b"value")
    assert b"value" in repr(written).encode()
    assert KEY not in repr(written).encode()


def test_many_keys_have_one_mark_so_that_it_confirms_no_guess() -> None:
    marks = {key_mark(b"key %d" % number) for number in range(2000)}
    assert 1900 < len(marks) < 2000
    assert all(len(mark) == 4 for mark in marks)
