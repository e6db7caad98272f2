"""The place where a group meets: what a URL and the environment say, and who hosts the store."""

import errno
import os
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch.distributed
from torch.distributed import TCPStore

from rpc.errors import BringUpError
from rpc.group import opening, rendezvous, store_host
from rpc.group.member_list import MemberTable
from rpc.group.opening import open_store
from tests.free_ports import free_port
from tests.rpc.stores import SECONDS, SOON, record, signed
from tests.waiting import until


class TestOpenStore:
    @pytest.fixture(autouse=True)
    def _no_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def test_a_file(self, tmp_path: Path) -> None:
        store, rank, size = open_store(f"file://{tmp_path}/s", 1, 2, SOON)
        store.set("key", "value")
        assert (rank, size, store.get("key")) == (1, 2, b"value")

    @pytest.mark.parametrize("mode", [0o664, 0o646])
    def test_a_file_that_others_can_write_is_refused_to_a_group_with_a_key(
        self, tmp_path: Path, mode: int
    ) -> None:
        path = tmp_path / "s"

        def open_with(mode: int, group_key: bytes) -> int:
            path.touch()  # the one before is gone with its store
            path.chmod(mode)
            return open_store(f"file://{path}", 0, 2, SOON, group_key=group_key).rank

        with pytest.raises(BringUpError, match=rf"can write \(mode 0{mode:o}, owner \d+\)"):
            open_with(mode, b"key")
        assert open_with(0o644, b"key") == open_with(mode, b"") == 0

    @pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user, which needs root")
    def test_a_file_of_another_user_is_refused_to_a_group_with_a_key(self, tmp_path: Path) -> None:
        path = tmp_path / "s"
        path.touch(0o600)
        os.chown(path, 12345, -1)
        with pytest.raises(BringUpError, match="owner 12345"):
            open_store(f"file://{path}", 0, 2, SOON, group_key=b"key")

    def test_tcp_hosts_at_rank_0_and_waits_for_nobody(self) -> None:
        port = free_port()
        host, *rest = open_store(f"tcp://127.0.0.1:{port}", 0, 2, SOON)
        assert rest == [0, 2]
        guest, *_ = open_store(f"tcp://127.0.0.1:{port}", 1, 2, SOON)
        host.set("key", "value")
        assert guest.get("key") == b"value"

    def test_tcp_port_still_serves_a_process_group(self) -> None:
        url = f"tcp://127.0.0.1:{free_port()}"
        store, *_ = open_store(url, 0, 1, SOON)
        torch.distributed.init_process_group("gloo", init_method=url, rank=0, world_size=1)
        try:
            assert rendezvous.meet(signed(store), record(0, 1), SOON) == [record(0, 1)]
        finally:
            torch.distributed.destroy_process_group()

    def test_env_takes_everything_from_the_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _launch(monkeypatch, RANK="0", WORLD_SIZE="3")
        _, rank, size = open_store("env://", -1, None, SOON)
        assert (rank, size) == (0, 3)

    def test_env_without_a_world_size_is_a_dynamic_group(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _launch(monkeypatch)
        _, rank, size = open_store("env://", 0, None, SOON)
        assert (rank, size) == (0, None)

    def test_arguments_win_over_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _launch(monkeypatch, RANK="5", WORLD_SIZE="6")
        _, rank, size = open_store("env://", 0, 2, SOON)
        assert (rank, size) == (0, 2)

    def test_the_launchers_own_store_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        launcher = TCPStore("127.0.0.1", 0, None, True, SECONDS)
        _launch(monkeypatch, RANK="0", WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
        monkeypatch.setenv("MASTER_PORT", str(launcher.port))
        store, *_ = open_store("env://", -1, None, SOON)
        launcher.set("key", "value")
        assert store.get("key") == b"value"

    @pytest.mark.parametrize("url", ["tcp://127.0.0.1:1", "file:///tmp/never-opened"])
    def test_a_missing_rank_is_named(self, url: str) -> None:
        with pytest.raises(ValueError, match="rank parameter missing"):
            open_store(url, -1, None, SOON)

    def test_a_missing_variable_is_named(self) -> None:
        with pytest.raises(ValueError, match="environment variable RANK expected"):
            open_store("env://", -1, None, SOON)

    def test_a_rank_outside_the_group_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="rank=2 must be from 0 to world_size - 1"):
            open_store(f"file://{tmp_path}/s", 2, 2, SOON)

    def test_a_host_that_does_not_answer_is_named(self) -> None:
        url = f"tcp://127.0.0.1:{free_port()}"
        with pytest.raises(BringUpError, match=f"{url}' names, could not be opened within 0.2 s"):
            open_store(url, 1, 2, 0.2)

    @pytest.mark.parametrize("scheme", ["tcp", "env"])
    def test_a_host_that_comes_late_is_found_and_named_in_the_log_before(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, scheme: str
    ) -> None:
        monkeypatch.setattr(opening, "SECONDS_OF_SILENCE", 0.05)
        port, hosts = free_port(), []
        told = f"for the group's store at 127.0.0.1:{port} ([Errno {errno.ECONNREFUSED}]"

        def come_when_called() -> None:
            until(lambda: any(told in each for each in caplog.messages))
            hosts.append(TCPStore("127.0.0.1", port, None, True, SECONDS, wait_for_workers=False))

        _launch(monkeypatch, MASTER_PORT=str(port))
        thread = threading.Thread(target=come_when_called)
        thread.start()
        url = "env://" if scheme == "env" else f"tcp://127.0.0.1:{port}"
        guest, *_ = open_store(url, 1, 2, 60.0)
        thread.join()
        assert ", and gives up after 60 s; this host's addresses are " in caplog.messages[-1]
        hosts[0].set("key", "value")
        assert guest.get("key") == b"value"

    def test_what_cannot_be_the_name_of_a_host_is_named(self) -> None:
        with pytest.raises(BringUpError, match=r"'a\.\.b' is no name of a host"):
            open_store("tcp://a..b:1", 1, 2, SOON)

    def test_a_host_whose_port_is_taken_says_so(self) -> None:
        with socket.create_server(("localhost", 0)) as listener:
            url = f"tcp://localhost:{listener.getsockname()[1]}"
            told = "its port is taken by another process, perhaps another worker with rank 0"
            with pytest.raises(BringUpError, match=told):
                open_store(url, 0, 2, 5.0)

    def test_a_host_that_is_frozen_is_not_waited_for_any_longer(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as frozen:
            url = f"tcp://127.0.0.1:{frozen.getsockname()[1]}"
            with pytest.raises(BringUpError, match=r"could not be opened within 0.5 s.*"):
                open_store(url, 1, 2, 0.5)

    def test_a_file_in_a_folder_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(BringUpError, match=f"does not exist: '{tmp_path}/none'"):
            open_store(f"file://{tmp_path}/none/s", 0, 1, SOON)

    @pytest.mark.parametrize("rank", [40000, 2**33])
    def test_a_rank_that_no_worker_can_have_is_refused_at_once(self, rank: int) -> None:
        with pytest.raises(ValueError, match=f"rank={rank} must be from 0 to 32767"):
            open_store("tcp://127.0.0.1:9", rank, None, SOON)

    @pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
    @pytest.mark.parametrize("value", ["two", "1.5"])
    def test_a_variable_that_is_no_number_is_named(
        self, monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        _launch(monkeypatch, **({"RANK": "0", "WORLD_SIZE": "1"} | {name: value}))
        with pytest.raises(ValueError, match=f"variable {name}='{value}' is no whole.*; give th"):
            open_store("env://", -1, None, SOON)

    @pytest.mark.parametrize("name", ["RANK", "MASTER_PORT"])
    def test_a_variable_that_is_empty_is_named(
        self, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        _launch(monkeypatch, **({"RANK": "0", "WORLD_SIZE": "1"} | {name: ""}))
        with pytest.raises(ValueError, match=f"variable {name}='' is no whole.*; give th"):
            open_store("env://", -1, None, SOON)

    @pytest.mark.parametrize("port", ["99999", "-1"])
    def test_a_variable_with_a_port_that_cannot_be_is_named(
        self, monkeypatch: pytest.MonkeyPatch, port: str
    ) -> None:
        _launch(monkeypatch, RANK="0", WORLD_SIZE="1", MASTER_PORT=port)
        with pytest.raises(ValueError, match=f"MASTER_PORT='{port}' must be from 0 to 65535"):
            open_store("env://", -1, None, SOON)

    def test_variables_that_do_not_count_may_be_anything(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _launch(monkeypatch, RANK="two", WORLD_SIZE="two")
        _, rank, size = open_store("env://", 0, 1, SOON)
        assert (rank, size) == (0, 1)

    @pytest.mark.parametrize("rank", ["-7", "99999"])
    def test_a_variable_with_a_rank_that_cannot_be_is_refused_at_once(
        self, monkeypatch: pytest.MonkeyPatch, rank: str
    ) -> None:
        _launch(monkeypatch, RANK=rank)
        with pytest.raises(ValueError, match=f"rank={rank} must be from 0 to 32767"):
            open_store("env://", -1, None, SOON)

    @pytest.mark.parametrize("name", ["rank", "world_size"])
    @pytest.mark.parametrize("place", ["env://", "tcp://127.0.0.1:9", "file:///tmp/never-opened"])
    def test_what_is_no_number_in_a_url_is_named(self, name: str, place: str) -> None:
        with pytest.raises(ValueError, match=f"{name}='x' is no whole number; give th") as caught:
            open_store(f"{place}?{name}=x", -1, None, SOON)
        assert f"init_method='{place}?{name}=x'" in str(caught.value)

    def test_a_port_that_is_no_number_is_named(self) -> None:
        with pytest.raises(ValueError, match="init_method='tcp://a:b' names no port"):
            open_store("tcp://a:b", 0, 1, SOON)

    def test_an_unknown_scheme_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"bogus.*use env://, tcp://host:port or file:///"):
            open_store("bogus://x", 0, 1, SOON)


class TestWhereTheHostListens:
    @staticmethod
    def listens_at(url: str, bind_address: str | None = None) -> list[str]:
        """Addresses at which somebody can connect to the store that this process hosts."""
        store, *_ = open_store(url, 0, 1, SOON, bind_address)
        try:
            return sorted(filter(partial(_accepts, store.port), _listening(store.port)))  # type: ignore[attr-defined]
        finally:
            del store

    def test_on_the_loopback_interface_only_if_the_group_meets_there(self) -> None:
        assert self.listens_at(f"tcp://127.0.0.1:{free_port()}") == ["127.0.0.1"]
        assert self.listens_at(f"tcp://localhost:{free_port()}") == ["127.0.0.1"]

    def test_at_the_bind_address_if_a_name_or_another_address_says_nothing(self) -> None:
        port = free_port()
        assert self.listens_at(f"tcp://192.0.2.200:{port}", "127.0.0.1") == ["127.0.0.1"]

    def test_a_second_group_of_one_process_may_meet_at_the_same_host(self) -> None:
        url = f"tcp://127.0.0.1:{free_port()}"
        first, *_ = open_store(url, 0, 1, SOON)
        second, *_ = open_store(url, 0, 1, SOON)
        first.set("key", "value")
        assert second.get("key") == b"value"

    def test_nobody_waits_for_a_slow_resolver_and_the_log_names_it(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        resolved, looked_up = threading.Event(), threading.Event()

        def look_up_first(*arguments: object, **settings: object) -> TCPStore:
            made = TCPStore(*arguments, **settings)  # type: ignore[arg-type]
            resolved.wait(SOON)
            looked_up.set()
            return made

        monkeypatch.setattr(store_host, "TCPStore", look_up_first)
        monkeypatch.setattr(store_host, "SLOW_SECONDS", 0.0)
        store, *_ = open_store(f"tcp://127.0.0.1:{free_port()}", 0, 1, SOON)
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert not looked_up.is_set()
        resolved.set()
        until(lambda: "looking up 127.0.0.1 took" in caplog.text)


def _listening(port: int) -> frozenset[str]:
    """Local addresses of sockets that listen at a port over IPv4."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = {tuple(row[1].split(":")) for row in rows if row[3] == "0A"}
    return frozenset(
        socket.inet_ntoa(bytes.fromhex(address)[::-1])
        for address, number in found
        if int(number, 16) == port
    )


def _accepts(port: int, address: str) -> bool:
    """False of an address where the kernel drops what comes."""
    try:
        socket.create_connection((address, port), 0.2).close()
    except TimeoutError:
        return False
    return True


def _launch(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in (defaults | variables).items():
        monkeypatch.setenv(name, value)


class TestAStoreThatAsksForTheKey:
    """With a group key, at a store of ours, at torch's in both orders, and at a launcher's."""

    KEY = b"the key of the group that meets"

    @pytest.fixture(autouse=True)
    def _no_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
            monkeypatch.delenv(name, raising=False)

    def meet(self, url: str) -> object:
        """Two workers of a group meet; who has no key sees nothing of theirs."""
        host, *_ = open_store(url, 0, 2, SOON, None, self.KEY)
        guest, *_ = open_store(url, 1, 2, SOON, None, self.KEY)
        signed(host, self.KEY).set("key", b"value")
        assert signed(guest, self.KEY).get("key") == b"value"
        split = urlsplit(url)
        stranger = TCPStore(split.hostname or "", split.port or 0, None, False, SECONDS)
        assert not stranger.check(["tensorwire/key"])
        return host

    def test_rpc_first_and_a_process_group_at_the_same_url_after_it(self) -> None:
        url = f"tcp://127.0.0.1:{free_port()}"
        host = self.meet(url)
        torch.distributed.init_process_group("gloo", init_method=url, rank=0, world_size=1)
        torch.distributed.destroy_process_group()
        del host

    def test_a_process_group_first_and_rpc_after_it(self) -> None:
        url = f"tcp://127.0.0.1:{free_port()}"
        torch.distributed.init_process_group("gloo", init_method=url, rank=0, world_size=1)
        try:
            self.meet(url)
        finally:
            torch.distributed.destroy_process_group()

    def test_at_the_store_of_a_launcher_that_is_torchs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = TCPStore("127.0.0.1", 0, None, True, SECONDS, wait_for_workers=False)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        before = store.num_keys()
        self.meet(f"tcp://127.0.0.1:{store.port}")
        assert store.num_keys() == before + 1, "nothing but where the group's own store is"

    def test_where_the_group_meets_is_no_news_from_strangers_and_former_hosts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = TCPStore("127.0.0.1", 0, None, True, SECONDS, wait_for_workers=False)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        url = f"tcp://127.0.0.1:{store.port}"
        first, *_ = open_store(url, 0, 2, SOON, None, self.KEY)
        former = store.get("tensorwire/store")
        del first
        host, *_ = open_store(url, 0, 2, SOON, None, self.KEY)
        now = store.get("tensorwire/store")
        for told in (b"junk", b"\xff" * 100, former):
            raw: Any = told
            store.set("tensorwire/store", raw)
            with pytest.raises(BringUpError, match="could not be opened within 1 s"):
                open_store(url, 1, 2, 1.0, None, self.KEY)
        raw = now
        store.set("tensorwire/store", raw)
        guest, *_ = open_store(url, 1, 2, SOON, None, self.KEY)
        host.set("key", "value")
        assert guest.get("key") == b"value"

    @pytest.mark.parametrize("key", [b"", b"another key, which is no use"])
    def test_a_worker_without_the_key_is_told_at_once(self, key: bytes) -> None:
        url = f"tcp://127.0.0.1:{free_port()}"
        host, *_ = open_store(url, 0, 2, SOON, None, self.KEY)
        with pytest.raises(BringUpError, match="the workers disagree about group_key"):
            open_store(url, 1, 2, SOON, None, key)
        host.set("key", "value")

    def test_jobs_at_one_store_see_nothing_of_each_other(self) -> None:
        url = f"tcp://127.0.0.1:{free_port()}"
        one, *_ = open_store(f"{url}?job=a", 0, None, SOON, None, self.KEY)
        other, *_ = open_store(f"{url}?job=a%2Fb", 1, None, SOON, None, self.KEY)
        for store in (one, other):
            assert MemberTable(signed(store, self.KEY)).members() == []
            MemberTable(signed(store, self.KEY)).join(record(0, None))
        assert len(MemberTable(signed(one, self.KEY)).members()) == 1
