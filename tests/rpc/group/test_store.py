"""Records, and stores in this process: threads stand for workers."""

import errno
import json
import math
import socket
import threading
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch.distributed import HashStore, TCPStore

from rpc.errors import BringUpError
from rpc.group import rendezvous
from rpc.group import store as group_store
from rpc.group.store import Record
from tests.free_ports import free_port
from tests.rpc.stores import SECONDS, SOON, in_turns, record
from tests.waiting import until


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
        assert [group_store.next_incarnation(store, "a", 0) for _ in range(3)] == [1, 2, 3]
        assert group_store.next_incarnation(store, "b", 1) == 1

    def test_neither_a_name_nor_a_rank_has_two_lives_of_one_number(self) -> None:
        store = HashStore()
        lives = [("a", 3), ("b", 3), ("b", 4), ("a", 3), ("c", 4), ("c", 3), ("a", 4)]
        numbers = [group_store.next_incarnation(store, *life) for life in lives]
        for position in (0, 1):
            for key in {life[position] for life in lives}:
                mine = [n for n, life in zip(numbers, lives, strict=True) if life[position] == key]
                assert mine == sorted(set(mine))

    @pytest.mark.parametrize("seed", range(50))
    def test_two_that_begin_at_the_same_moment_have_two_numbers(self, seed: int) -> None:
        begin = partial(group_store.next_incarnation, name="a", rank=0)
        numbers = in_turns(HashStore(), [begin, begin], seed)
        assert len(set(numbers)) == 2


class TestWithin:
    def test_returns_and_raises_what_was_asked_for(self) -> None:
        assert group_store.within(SOON, lambda: 3) == 3
        with pytest.raises(KeyError):
            group_store.within(SOON, lambda: {}["x"])

    def test_gives_up_waiting_for_a_store_that_does_not_answer(self) -> None:
        answer = threading.Event()
        with pytest.raises(BringUpError, match=r"did not answer within 0\.05 s"):
            group_store.within(0.05, lambda: answer.wait(SOON))
        answer.set()

    def test_what_nobody_waits_for_any_more_is_told_so_and_undone(self) -> None:
        answer, given_up, undone = threading.Event(), threading.Event(), threading.Event()
        with pytest.raises(BringUpError):
            group_store.within(0.05, lambda: answer.wait(SOON), given_up, undone.set)
        assert given_up.is_set()
        assert not undone.is_set()
        answer.set()
        assert undone.wait(SOON)

    def test_what_came_in_time_stands(self) -> None:
        given_up, undone = threading.Event(), threading.Event()
        assert group_store.within(SOON, lambda: 3, given_up, undone.set) == 3
        assert not given_up.is_set()
        assert not undone.is_set()

    def test_says_ever_more_rarely_what_it_waits_for(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(group_store, "_SECONDS_OF_SILENCE", 0.01)
        answer, said = threading.Event(), count(1)

        def waits_for() -> str:
            if next(said) == 3:
                answer.set()
            return "somebody"

        assert group_store.within(SOON, lambda: answer.wait(SOON), waits_for=waits_for)
        waited = [f"init_rpc has waited {seconds} s for somebody" for seconds in (0.01, 0.02)]
        assert caplog.messages[:2] == waited

    def test_says_of_requests_to_the_store_that_it_waits_for_that(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(group_store, "_SECONDS_OF_SILENCE", 0.01)
        answer = threading.Event()
        with pytest.raises(BringUpError):
            group_store.within(0.05, lambda: answer.wait(SOON))
        answer.set()
        told = "init_rpc has waited 0.01 s for an answer of the group's store, and gives up after "
        assert caplog.messages[0] == told + "0.05 s"

    def test_says_nothing_of_what_comes_soon(self, caplog: pytest.LogCaptureFixture) -> None:
        assert group_store.within(SOON, lambda: 3, waits_for=lambda: "somebody") == 3
        assert not caplog.messages


class TestOpenStore:
    @pytest.fixture(autouse=True)
    def _no_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def test_a_file(self, tmp_path: Path) -> None:
        store, rank, size = group_store.open_store(f"file://{tmp_path}/s", 1, 2, SOON)
        store.set("key", "value")
        assert (rank, size, store.get("key")) == (1, 2, b"value")

    def test_tcp_hosts_at_rank_0_and_waits_for_nobody(self) -> None:
        port = free_port()
        host, *rest = group_store.open_store(f"tcp://127.0.0.1:{port}", 0, 2, SOON)
        assert rest == [0, 2]
        guest, *_ = group_store.open_store(f"tcp://127.0.0.1:{port}", 1, 2, SOON)
        host.set("key", "value")
        assert guest.get("key") == b"value"

    def test_tcp_port_still_serves_a_process_group(self) -> None:
        url = f"tcp://127.0.0.1:{free_port()}"
        store, *_ = group_store.open_store(url, 0, 1, SOON)
        torch.distributed.init_process_group("gloo", init_method=url, rank=0, world_size=1)
        try:
            assert rendezvous.meet(store, record(0, 1), SOON) == [record(0, 1)]
        finally:
            torch.distributed.destroy_process_group()

    def test_env_takes_everything_from_the_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _launch(monkeypatch, RANK="0", WORLD_SIZE="3")
        _, rank, size = group_store.open_store("env://", -1, None, SOON)
        assert (rank, size) == (0, 3)

    def test_env_without_a_world_size_is_a_dynamic_group(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _launch(monkeypatch)
        _, rank, size = group_store.open_store("env://", 0, None, SOON)
        assert (rank, size) == (0, None)

    def test_arguments_win_over_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _launch(monkeypatch, RANK="5", WORLD_SIZE="6")
        _, rank, size = group_store.open_store("env://", 0, 2, SOON)
        assert (rank, size) == (0, 2)

    def test_the_launchers_own_store_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        launcher = TCPStore("127.0.0.1", 0, None, True, SECONDS)
        _launch(monkeypatch, RANK="0", WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
        monkeypatch.setenv("MASTER_PORT", str(launcher.port))
        store, *_ = group_store.open_store("env://", -1, None, SOON)
        launcher.set("key", "value")
        assert store.get("key") == b"value"

    @pytest.mark.parametrize("url", ["tcp://127.0.0.1:1", "file:///tmp/never-opened"])
    def test_a_missing_rank_is_named(self, url: str) -> None:
        with pytest.raises(ValueError, match="rank parameter missing"):
            group_store.open_store(url, -1, None, SOON)

    def test_a_missing_variable_is_named(self) -> None:
        with pytest.raises(ValueError, match="environment variable RANK expected"):
            group_store.open_store("env://", -1, None, SOON)

    def test_a_rank_outside_the_group_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="rank=2 must be from 0 to world_size - 1"):
            group_store.open_store(f"file://{tmp_path}/s", 2, 2, SOON)

    def test_a_host_that_does_not_answer_is_named(self) -> None:
        url = f"tcp://127.0.0.1:{free_port()}"
        with pytest.raises(BringUpError, match=f"{url}.* could not be opened within 0.2 s"):
            group_store.open_store(url, 1, 2, 0.2)

    def test_torch_which_waits_beyond_its_time_is_not_asked_before_a_host_listens(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []
        monkeypatch.setattr(group_store, "rendezvous", lambda url, **_: asked.append(url))
        with pytest.raises(BringUpError, match=r"within 0\.2 s.* refused"):
            group_store.open_store(f"tcp://127.0.0.1:{free_port()}", 1, 2, 0.2)
        assert not asked

    @pytest.mark.parametrize("scheme", ["tcp", "env"])
    def test_a_host_that_comes_late_is_found(
        self, monkeypatch: pytest.MonkeyPatch, scheme: str
    ) -> None:
        port, hosts, connect = free_port(), [], socket.create_connection

        def come_late(*args: Any) -> socket.socket:
            try:
                return connect(*args)
            except ConnectionRefusedError:
                hosts.append(TCPStore("127.0.0.1", port, None, True, SECONDS))
                raise

        monkeypatch.setattr(socket, "create_connection", come_late)
        _launch(monkeypatch, MASTER_PORT=str(port))
        url = "env://" if scheme == "env" else f"tcp://127.0.0.1:{port}"
        guest, *_ = group_store.open_store(url, 1, 2, SOON)
        (host,) = hosts
        host.set("key", "value")
        assert guest.get("key") == b"value"

    def test_a_host_that_does_not_answer_is_named_in_the_log_while_it_is_waited_for(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(group_store, "_SECONDS_OF_SILENCE", 0.05)
        port, hosts = free_port(), []
        told = f"for the group's store at 127.0.0.1:{port} ([Errno {errno.ECONNREFUSED}]"

        def come_when_called() -> None:
            until(lambda: any(told in each for each in caplog.messages))
            hosts.append(TCPStore("127.0.0.1", port, None, True, SECONDS))

        thread = threading.Thread(target=come_when_called)
        thread.start()
        group_store.open_store(f"tcp://127.0.0.1:{port}", 1, 2, 60.0)
        thread.join()
        assert caplog.messages[-1].endswith(", and gives up after 60 s")

    def test_nobody_waits_for_a_host_that_nobody_waits_for(self) -> None:
        given_up = threading.Event()
        given_up.set()
        with pytest.raises(ConnectionRefusedError):
            group_store._await_host(("127.0.0.1", free_port()), math.inf, given_up, str)

    def test_what_cannot_be_the_name_of_a_host_is_named(self) -> None:
        with pytest.raises(BringUpError, match=r"'a\.\.b' is no name of a host"):
            group_store.open_store("tcp://a..b:1", 1, 2, SOON)

    def test_a_host_whose_port_is_taken_says_so(self) -> None:
        with socket.create_server(("localhost", 0)) as listener:
            url = f"tcp://localhost:{listener.getsockname()[1]}"
            told = "its port is taken by another process, perhaps another worker with rank 0"
            with pytest.raises(BringUpError, match=told):
                group_store.open_store(url, 0, 2, 5.0)

    def test_a_host_that_is_frozen_is_not_waited_for_any_longer(self) -> None:
        with socket.socket() as frozen:
            frozen.bind(("127.0.0.1", 0))
            frozen.listen()
            url = f"tcp://127.0.0.1:{frozen.getsockname()[1]}"
            with pytest.raises(BringUpError, match=r"could not be opened within 0.5 s.*"):
                group_store.open_store(url, 1, 2, 0.5)

    def test_a_file_in_a_folder_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(BringUpError, match=f"does not exist: '{tmp_path}/none'"):
            group_store.open_store(f"file://{tmp_path}/none/s", 0, 1, SOON)

    @pytest.mark.parametrize("rank", [40000, 2**33])
    def test_a_rank_that_no_worker_can_have_is_refused_at_once(self, rank: int) -> None:
        with pytest.raises(ValueError, match=f"rank={rank} must be from 0 to 32767"):
            group_store.open_store("tcp://127.0.0.1:9", rank, None, SOON)

    @pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
    @pytest.mark.parametrize("value", ["two", "1.5"])
    def test_a_variable_that_is_no_number_is_named(
        self, monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        _launch(monkeypatch, **({"RANK": "0", "WORLD_SIZE": "1"} | {name: value}))
        with pytest.raises(ValueError, match=f"variable {name}='{value}' is no whole.*; give th"):
            group_store.open_store("env://", -1, None, SOON)

    @pytest.mark.parametrize("name", ["RANK", "MASTER_PORT"])
    def test_a_variable_that_is_empty_is_named(
        self, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        _launch(monkeypatch, **({"RANK": "0", "WORLD_SIZE": "1"} | {name: ""}))
        with pytest.raises(ValueError, match=f"variable {name}='' is no whole.*; give th"):
            group_store.open_store("env://", -1, None, SOON)

    @pytest.mark.parametrize("port", ["99999", "-1"])
    def test_a_variable_with_a_port_that_cannot_be_is_named(
        self, monkeypatch: pytest.MonkeyPatch, port: str
    ) -> None:
        _launch(monkeypatch, RANK="0", WORLD_SIZE="1", MASTER_PORT=port)
        with pytest.raises(ValueError, match=f"MASTER_PORT='{port}' must be from 0 to 65535"):
            group_store.open_store("env://", -1, None, SOON)

    def test_variables_that_do_not_count_may_be_anything(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _launch(monkeypatch, RANK="two", WORLD_SIZE="two")
        _, rank, size = group_store.open_store("env://", 0, 1, SOON)
        assert (rank, size) == (0, 1)

    @pytest.mark.parametrize("rank", ["-7", "99999"])
    def test_a_variable_with_a_rank_that_cannot_be_is_refused_at_once(
        self, monkeypatch: pytest.MonkeyPatch, rank: str
    ) -> None:
        _launch(monkeypatch, RANK=rank)
        with pytest.raises(ValueError, match=f"rank={rank} must be from 0 to 32767"):
            group_store.open_store("env://", -1, None, SOON)

    @pytest.mark.parametrize("name", ["rank", "world_size"])
    @pytest.mark.parametrize("place", ["env://", "tcp://127.0.0.1:9", "file:///tmp/never-opened"])
    def test_what_is_no_number_in_a_url_is_named(self, name: str, place: str) -> None:
        with pytest.raises(ValueError, match=f"{name}='x' is no whole number; give th") as caught:
            group_store.open_store(f"{place}?{name}=x", -1, None, SOON)
        assert f"init_method='{place}?{name}=x'" in str(caught.value)

    def test_a_port_that_is_no_number_is_named(self) -> None:
        with pytest.raises(ValueError, match="init_method='tcp://a:b' names no port"):
            group_store.open_store("tcp://a:b", 0, 1, SOON)

    def test_an_unknown_scheme_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"bogus.*use env://, tcp://host:port or file:///"):
            group_store.open_store("bogus://x", 0, 1, SOON)


def test_many_keys_have_one_mark_so_that_it_confirms_no_guess() -> None:
    marks = {group_store.key_mark(b"key %d" % number) for number in range(2000)}
    assert 1900 < len(marks) < 2000
    assert all(len(mark) == 4 for mark in marks)


def _launch(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in (defaults | variables).items():
        monkeypatch.setenv(name, value)
