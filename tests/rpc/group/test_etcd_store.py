"""The store of a group in etcd: torch's operations, apart for each job, beside dying members."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.util import find_spec

import pytest

import rpc
from rpc.group.etcd_store import EtcdLostError, EtcdPlace, EtcdStoreClient, members_of
from rpc.group.opening import open_store
from rpc.group.signed_store import SignedStore
from rpc.group.store_watch import StoreWatch, ToldWatch
from tests.etcd import ETCD, SECONDS, EtcdCluster, etcd_cluster
from tests.free_ports import free_port
from tests.waiting import until

needs_etcd = pytest.mark.skipif(ETCD is None, reason="needs etcd (Debian's etcd-server)")

needs_client = pytest.mark.skipif(find_spec("etcd3gw") is None, reason="needs tensorwire[etcd]")


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as made:
        yield made


def _client(cluster: EtcdCluster, job: str = "j") -> EtcdStoreClient:
    return EtcdStoreClient(EtcdPlace(members_of(cluster.endpoint, ""), job), 60)


def test_a_place_comes_back_from_its_url() -> None:
    place = EtcdPlace((("etcd1", 2379), ("::1", 7)), "a job/1", ca="/x/ca.pem", user="u",
                      password_file="/x/p")  # fmt: skip
    assert EtcdPlace.parse(place.url()) == place
    assert EtcdPlace.parse("etcd://e1,e2:5?job=j").members == (("e1", 2379), ("e2", 5))


@pytest.mark.parametrize("text", ["", ",", "host:port", "host:99999999", ":2379"])
def test_an_endpoint_that_names_no_member_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--rdzv-endpoint="):
        members_of(text, f"--rdzv-endpoint={text}")


@needs_client
def test_nobody_at_the_address_is_an_error_that_names_it() -> None:
    port = free_port()
    with pytest.raises(rpc.BringUpError, match=rf"no member of etcd at 127.0.0.1:{port} answered"):
        open_store(f"etcd://127.0.0.1:{port}?job=j", 0, None, 1.0)
    with pytest.raises(ValueError, match="rank parameter missing"):
        open_store(f"etcd://127.0.0.1:{port}?job=j", -1, None, 1.0)


class _ToldStore(EtcdStoreClient):
    """A store without etcd: each key is there once a watch has been told of it so many times."""

    def __init__(self, changes: int) -> None:
        super().__init__(EtcdPlace((("127.0.0.1", free_port()),), "j"), SECONDS)
        self._left, self.reads = changes, 0
        self.watches: list[_Told] = []

    def check(self, keys: Sequence[str]) -> bool:
        self.reads += 1
        return self._left == 0

    def watch(self, keys: Sequence[str], told: Callable[[], None]) -> StoreWatch:
        self.watches.append(_Told(told, self._change))
        return self.watches[-1]

    def _change(self) -> bool:
        self._left -= 1
        return self._left >= 0


class _Told(ToldWatch):
    """A watch that stands, and has a change each time whoever waits is about to rest."""

    def __init__(self, told: Callable[[], None], change: Callable[[], bool]) -> None:
        super().__init__(told)
        self._change, self.closed = change, False

    @property
    def stands(self) -> bool:
        if self._change():
            self.tell()
        return True

    def close(self) -> None:
        self.closed = True


@needs_client
def test_who_waits_for_a_key_reads_it_when_a_watch_is_told_of_a_change() -> None:
    store = _ToldStore(changes=3)
    store.wait(["late"])
    assert store.reads == 2 + 3  # before there is a watch, as it stands, and after each change
    assert [watch.closed for watch in store.watches] == [True]


@needs_client
def test_a_key_that_is_there_is_not_watched_and_one_that_never_comes_ends_the_wait() -> None:
    store = _ToldStore(changes=0)
    store.wait(["there"])
    assert (store.reads, store.watches) == (1, [])
    store = _ToldStore(changes=10**9)
    with pytest.raises(TimeoutError, match=r"\['absent'\] were not there within 0.05 s"):
        store.wait(["absent"], timedelta(seconds=0.05))
    assert [watch.closed for watch in store.watches] == [True]


@needs_etcd
@needs_client
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_group_uses_etcd_as_any_store_and_a_killed_member_changes_nothing(
    cluster: EtcdCluster,
) -> None:
    store, other = _client(cluster), _client(cluster)
    assert store.compare_set("a", "", "1") == b"1"
    assert other.compare_set("a", "", "2") == b"1"
    assert other.compare_set("a", b"1", b"\xff\x00") == b"\xff\x00"
    assert store.get("a") == b"\xff\x00"
    assert store.compare_set("absent", "x", "y") == b"x"
    assert not store.check(["a", "absent"])
    assert _client(cluster, "another").check(["a"]) is False
    with pytest.raises(TimeoutError, match="were not there within"):
        store.wait(["absent"], timedelta(seconds=0.1))
    assert store.run == other.run != _client(cluster, "another").run

    def count() -> None:
        mine = _client(cluster)
        for _ in range(20):
            mine.add("count", 1)

    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    news = threading.Event()
    watch = other.watch(["watched"], news.set)
    until(lambda: watch.stands, SECONDS)
    cluster.kill(0)  # the one that is asked first, and tells of changes
    for thread in threads:
        thread.join()
    until(lambda: watch.stands, SECONDS)
    news.clear()
    store.set("watched", "x")
    assert news.wait(SECONDS)
    watch.close()
    assert store.add("count", 0) >= 40  # an answer that was lost is asked for again

    signed, stranger = (SignedStore(_client(cluster), key, "p") for key in (b"key", b"another"))
    signed.set("view", b"1")
    stranger.set("view", b"forged")
    assert signed.get("view") == b"1"

    store.delete_job()
    with pytest.raises(EtcdLostError, match="the keys of the job 'j' are gone"):
        store.keep_alive()
    assert _client(cluster).check(["a"]) is False
