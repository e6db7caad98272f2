"""TensorPipe keeps the promises of every transport, and some of its own, between processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rpc.errors import BringUpError, DeviceMapError, WorkerLostError
from rpc.options import TensorPipeRpcBackendOptions, WhenFull
from rpc.transports.base import Frame, FrameKind, Peer
from rpc.transports.tensorpipe import scheduling
from rpc.transports.tensorpipe import transport as tensorpipe
from rpc.transports.tensorpipe.torch_agent import POOL_THREADS
from rpc.transports.tensorpipe.transport import TensorPipeTransport, available
from rpc.wire.messages import Reply, Status
from rpc.worker_info import WorkerInfo
from tests.programs import run_program
from tests.rpc.transports.conformance import (
    SECONDS,
    TransportConformance,
    Worker,
    check_that_requests_wait,
    introduce,
)
from tests.rpc.transports.tensorpipe.process import (
    RemoteTransport,
    Workplace,
    place_of,
    shares,
    workplaces,
)
from tests.signals import freeze
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("tensorpipe"),
    pytest.mark.skipif(not available(), reason="this torch has no TensorPipe"),
]

Maker = Callable[..., RemoteTransport]

LARGE = torch.arange(100_000.0)
LIMIT = 64 << 20


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Workplace]]:
    with workplaces(tmp_path_factory.mktemp("stderr"), 4) as made:
        yield made


@pytest.fixture(scope="module")
def victims(
    places: list[Workplace], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Workplace]]:
    """Processes to kill; a test that kills one takes it out of the list and ends it."""
    with workplaces(tmp_path_factory.mktemp("victims"), 2) as made:
        yield made


@pytest.fixture
def transports(places: list[Workplace]) -> Maker:
    """Makes transports, each in a process that has none."""

    def make(**options: object) -> RemoteTransport:
        free = next(place for place in places if not place.busy)
        return RemoteTransport(free, **options)

    return make


@pytest.fixture
def workers(transports: Maker) -> Iterator[Callable[..., list[Worker]]]:
    """Makes workers that know each other unless told otherwise; closes them afterwards."""
    made: list[Worker] = []

    def make(count: int, acquainted: bool = True, **options: object) -> list[Worker]:
        for number in range(count):
            made.append(Worker(transports(**options), WorkerInfo(f"worker{number}", number)))
            made[-1].start()
        if acquainted:
            introduce(made)
        return made

    yield make
    for worker in made:
        worker.close(0.5)


class TestTensorPipeConformance(TransportConformance):
    @pytest.fixture
    def transports(self, places: list[Workplace]) -> Callable[[], RemoteTransport]:
        def make() -> RemoteTransport:
            return RemoteTransport(next(place for place in places if not place.busy))

        return make


class TestLossOfAPeer:
    @pytest.mark.parametrize("transport", [None, ["uv"]], ids=["shm", "uv"])
    def test_a_killed_peer_is_lost_to_everyone_once(
        self,
        workers: Callable[..., list[Worker]],
        victims: list[Workplace],
        transport: list[str] | None,
    ) -> None:
        caller, called = workers(2, _transports=transport)
        place = victims.pop()
        victim = Worker(RemoteTransport(place, _transports=transport), WorkerInfo("victim", 7))
        victim.start()
        introduce([caller, called, victim])
        victim.answer = lambda *_: None
        # torch's shared-memory pipes that are opened only after a kill may stay silent.
        assert caller.call(called, b"h").header == b"h"
        caller.ask(victim, b"never answered")
        victim.call(called, b"which never calls back")
        victim.until(lambda: bool(victim.received))
        place.kill()
        for worker in (caller, called):
            worker.until(lambda worker=worker: bool(worker.lost))
            ((life, reason),) = worker.lost
            assert life.worker == 7
            assert "its connection broke" in reason
            with pytest.raises(WorkerLostError, match="victim"):
                worker.notify(victim, b"h")
        assert caller.call(called, b"h").header == b"h"
        place.end()

    def test_a_worker_whose_connection_breaks_while_it_lives_is_lost_at_once(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2, _transports=["uv"])
        for worker, other in ((a, b), (b, a)):
            assert worker.call(other, b"h").header == b"h"
        assert place_of(a).call("cut")
        for worker, other in ((a, b), (b, a)):
            worker.until(lambda worker=worker: bool(worker.lost))
            ((life, reason),) = worker.lost
            assert (life.worker, reason[:20]) == (other.info.id, "its connection broke")

    def test_a_peer_that_was_never_reached_is_lost_when_watched(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2)
        b.close()
        a.transport.watch(1)
        a.until(lambda: bool(a.lost))


class TestMembership:
    def test_frames_that_come_before_their_sender_is_known_wait(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2, acquainted=False)
        a.transport.add_peer(b.peer())
        asked = [a.ask(b, b"%d" % number) for number in range(3)]
        a.notify(b, b"notice")
        until(lambda: place_of(b).call("early_calls") == 5)  # and the lifeline
        b.transport.add_peer(a.peer())
        assert {a.reply(correlation).header for correlation in asked} == {b"0", b"1", b"2"}
        b.until(lambda: (0, b"notice") in [(s, frame.header) for s, frame in b.received])
        assert {b"0", b"1", b"2"} <= {*b.in_batch}, "a handler could block whoever adds peers"
        a.call(b, b"later")
        assert b"later" not in b.in_batch, "a thread of torch's is not used for its handler"

    def test_an_old_life_is_refused(self, workers: Callable[..., list[Worker]]) -> None:
        a, b = workers(2, acquainted=False)
        a.transport.add_peer(b.peer())
        b.transport.add_peer(Peer(a.info, a.incarnation + 1, a.address))
        a.notify(b, b"from the dead")
        a.until(lambda: bool(a.lost))
        assert "it knows a later life of this worker" in a.lost[0][1]
        assert b.received == []

    def test_a_removed_worker_learns_of_it(self, workers: Callable[..., list[Worker]]) -> None:
        a, b = workers(2)
        a.call(b, b"h")
        b.transport.remove_peer(0)
        a.until(lambda: bool(a.lost))
        assert "no longer counts this worker as a member" in a.lost[0][1]
        assert b.lost == []

    def test_torch_runs_one_agent_in_a_process(self, workers: Callable[..., list[Worker]]) -> None:
        (a,) = workers(1)
        with pytest.raises(BringUpError, match="one RPC agent per process"):
            a.transport.place.call("start_another")
        assert a.call(a, b"still here").header == b"still here"


class TestBackPressure:
    BOUND: ClassVar[dict[str, object]] = {"max_bytes_in_flight": 64 << 10}

    @pytest.fixture
    def pair(self, workers: Callable[..., list[Worker]]) -> tuple[Worker, Worker]:
        a, b = workers(2, **self.BOUND)
        b.answer = lambda *_: None
        return a, b

    def test_at_the_bound_a_request_is_refused_if_asked_for(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2, when_full=WhenFull.RAISE, **self.BOUND)
        b.answer = lambda *_: None
        sent, error = place_of(a).call("ask_until_it_fails", 1)
        assert sent == 16
        assert error == (
            "QueueFullError: 65536 bytes are in flight to worker 'worker1'; the bound is 65536 "
            "(max_bytes_in_flight)"
        )
        b.until(lambda: len(b.received) == 16)

    def test_at_the_bound_a_request_waits_for_replies(self, pair: tuple[Worker, Worker]) -> None:
        a, b = pair
        check_that_requests_wait(a, b, room=16)
        until(lambda: place_of(a).call("in_flight", 1) == 0)

    @pytest.mark.parametrize(
        ("who", "error"), [(1, "WorkerLostError: .*worker1"), (0, "AgentClosedError")]
    )
    def test_a_request_that_waits_learns_that_somebody_leaves(
        self, pair: tuple[Worker, Worker], who: int, error: str
    ) -> None:
        a, b = pair
        outcome: list[tuple[int, str]] = []
        asking = threading.Thread(
            target=lambda: outcome.append(place_of(a).call("ask_until_it_fails", 1))
        )
        asking.start()
        b.until(lambda: len(b.received) == 16)
        pair[who].close(0.5)
        asking.join()
        assert outcome[0][0] == 16
        assert re.match(error, outcome[0][1])

    @pytest.mark.parametrize("end", ["goes on", "is removed"])
    def test_at_the_bound_a_reply_waits_until_others_have_arrived(
        self, workers: Callable[..., list[Worker]], end: str
    ) -> None:
        a, b = workers(2, when_full=WhenFull.RAISE, shared_memory=0, **self.BOUND)
        b.answer = lambda *_: None
        place_of(a).call("ask_until_it_fails", 1)
        b.until(lambda: len(b.received) == 16)
        freeze(place_of(a).pid)
        answering = [
            threading.Thread(target=place_of(b).call, args=("reply", 0, frame.correlation, 40_000))
            for _, frame in b.received
        ]
        for thread in answering:
            thread.start()
        try:
            until(lambda: sum(thread.is_alive() for thread in answering) == 15)
            assert place_of(b).call("replies_in_flight", 0) == 40_000
            if end == "is removed":
                place_of(b).call("remove_peer", 0)
                for thread in answering:
                    thread.join(SECONDS)
        finally:
            os.kill(place_of(a).pid, signal.SIGCONT)
        if end == "goes on":
            a.until(lambda: len(a.replies) == 16)
            until(lambda: place_of(b).call("replies_in_flight", 0) == 0)
        for thread in answering:
            thread.join(SECONDS)
            assert not thread.is_alive()

    def test_a_request_that_cannot_be_sent_takes_no_room(self, pair: tuple[Worker, Worker]) -> None:
        a, b = pair
        with pytest.raises(DeviceMapError):
            a.ask(b, b"h", b"", torch.empty(3, device="meta"))
        assert place_of(a).call("in_flight", 1) == 0


class TestDevices:
    def test_a_request_with_a_tensor_that_has_no_place_is_not_sent(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2)
        with pytest.raises(DeviceMapError, match="only supports CPU tensors by default") as raised:
            a.ask(b, b"h", b"", torch.empty(3, device="meta"))
        assert "Request device mapping is not available for destination worker1" in str(
            raised.value
        )
        assert a.call(b, b"h").header == b"h"

    def test_a_reply_with_a_tensor_that_has_no_place_can_be_replaced(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2)
        seen: list[str] = []

        def answer(worker: Worker, sender: int, frame: Frame) -> None:
            reply = Frame(FrameKind.REPLY, frame.correlation, b"value")
            try:
                nowhere = torch.empty(3, device="meta")
                worker.transport.send(sender, reply._replace(tensors=(nowhere,)))
            except DeviceMapError as error:
                seen.append(str(error))
                worker.transport.send(sender, reply._replace(header=b"error"))

        b.answer = answer
        assert a.call(b, b"h").header == b"error"
        assert "Response device mapping is not available for destination worker0" in seen[0]

    def test_a_map_from_cpu_to_cpu_needs_no_gpu(self, workers: Callable[..., list[Worker]]) -> None:
        a, b = workers(2, device_maps={"worker0": {"cpu": "cpu"}, "worker1": {"cpu": "cpu"}})
        (found,) = a.call(b, b"h", b"", torch.ones(3)).tensors
        assert found.tolist() == [1.0] * 3

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_a_worker_without_a_map_takes_what_others_map_to_it_as_its_first(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2, acquainted=False, device_maps={"worker1": {0: 0}})
        a.transport.add_peer(b.peer())
        asked = a.ask(b, b"h", b"", torch.arange(5.0, device="cuda:0"))
        b.transport.add_peer(a.peer())
        (found,) = a.reply(asked).tensors
        assert (str(found.device), found.tolist()) == ("cuda:0", [0.0, 1.0, 2.0, 3.0, 4.0])

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_host_memory_goes_to_a_gpu_and_back_with_payloads_beside_it(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2, device_maps={"worker1": {"cpu": 0}})
        payload = bytes(1 << 20)
        found = a.call(b, b"h", payload, torch.arange(5.0))
        assert (str(found.tensors[0].device), bytes(found.payload)) == ("cpu", payload)

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_a_worker_sends_itself_tensors_on_a_gpu(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        (a,) = workers(1, device_maps={"worker0": {0: 0}})
        (found,) = a.call(a, b"h", b"", torch.arange(5.0, device="cuda:0")).tensors
        assert (str(found.device), found.tolist()) == ("cuda:0", [0.0, 1.0, 2.0, 3.0, 4.0])

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_tensors_go_from_gpu_to_gpu_and_back(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2, device_maps={"worker0": {0: 0}, "worker1": {0: 0}})
        (found,) = a.call(b, b"h", b"", torch.arange(5.0, device="cuda:0")).tensors
        assert (str(found.device), found.tolist()) == ("cuda:0", [0.0, 1.0, 2.0, 3.0, 4.0])


class TestDevicesOfPeers:
    """Host memory stands in for them."""

    MAPS: ClassVar[dict[str, object]] = {
        "device_maps": {"worker1": {"cpu": "cpu"}},
        "shared_memory": 0,
    }

    @pytest.fixture
    def pair(self, workers: Callable[..., list[Worker]]) -> tuple[Worker, Worker]:
        a, b = workers(2, acquainted=False, **self.MAPS)
        place_of(a).call("take_host_memory_for_devices")
        a.transport.add_peer(b.peer())
        return a, b

    def test_they_are_made_ready_even_by_one_that_does_not_know_who_asks(
        self, pair: tuple[Worker, Worker]
    ) -> None:
        a, b = pair
        asked = [a.ask(b, b"%d" % number, b"", LARGE) for number in range(3)]
        until(lambda: place_of(b).call("early_calls") == 5)  # the lifeline, the question, and they
        b.transport.add_peer(a.peer())
        assert all(torch.equal(a.reply(each).tensors[0], LARGE) for each in asked)

    def test_requests_to_one_that_has_none_fail_until_it_has_some(
        self, pair: tuple[Worker, Worker]
    ) -> None:
        a, b = pair
        place_of(b).call("have_no_devices", 2)
        b.transport.add_peer(a.peer())
        for _ in range(2):
            with pytest.raises(DeviceMapError, match="'worker1' cannot take these tensors: it has"):
                a.ask(b, b"h", b"", LARGE)
        assert a.call(b, b"without tensors").header == b"without tensors"
        for _ in range(2):  # as it has them, after all
            assert torch.equal(a.call(b, b"h", b"", LARGE).tensors[0], LARGE)


class TestErrorsThatTorchAnswersWith:
    def test_they_fail_the_call_alone_and_nobody_waits_for_it_in_the_end(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2)
        b.answer = lambda worker, sender, frame: worker.transport.send(
            sender, Frame(FrameKind.REPLY, frame.correlation, frame.payload[::-1])
        )
        place_of(b).call("choke_on", b"unreadable")
        for header, payload in ((b"unreadable", b""), (b"h", b"elbadaernu")):
            found = a.call(b, header, payload)
            assert b"worker 'worker1' answered with an error" in found.payload
            assert Reply.decode(found.header).status is Status.ERROR
        assert a.call(b, b"h", b"olleh").header == b"hello"
        assert place_of(a).call("in_flight", 1) == 0
        assert a.lost == b.lost == []
        began = time.monotonic()
        a.close(30.0)
        b.close(30.0)
        assert time.monotonic() - began < 20.0

    def test_replies_that_could_not_be_sent_do_not_use_up_what_may_be_under_way(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2, max_bytes_in_flight=200_000, shared_memory=0)

        def answer(worker: Worker, sender: int, frame: Frame) -> None:
            reply = Frame(FrameKind.REPLY, frame.correlation, b"", frame.payload[::-1] * 5_000)
            threading.Thread(target=worker.transport.send, args=(sender, reply)).start()

        b.answer = answer
        place_of(b).call("choke_on", b"unreadable")
        for _ in range(8):
            assert b"'worker1' answered with an error" in a.call(b, b"h", b"elbadaernu").payload
            assert a.call(b, b"h", b"elbadaer").payload[:8] == b"readable"


class TestSharedMemory:
    def test_large_tensors_and_payloads_take_it_both_ways(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2)
        until(lambda: echoes_large(a, b) and shares(a) == shares(b) == 2)
        for _ in range(50):
            assert echoes_large(a, b)
        assert shares(a) == shares(b) == 2, "one segment for each direction, in both"

    @pytest.mark.parametrize("without", [0, 1])
    def test_it_can_be_turned_off_for_both_directions_at_either_end(
        self, transports: Maker, without: int
    ) -> None:
        made = [
            Worker(transports(shared_memory=0 if number == without else LIMIT), info)
            for number, info in enumerate((WorkerInfo("a", 0), WorkerInfo("b", 1)))
        ]
        for worker in made:
            worker.start()
        introduce(made)
        for _ in range(3):
            assert echoes_large(*made)
        assert [shares(worker) for worker in made] == [0, 0]
        for worker in made:
            worker.close(0.5)

    def test_requests_that_could_not_be_read_give_theirs_back(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2)
        until(lambda: echoes_large(a, b) and shares(a) == shares(b) == 2)
        place_of(b).call("choke_on", b"unreadable")
        for _ in range(100):  # a segment has room for forty
            found = a.call(b, b"unreadable", b"", LARGE)
            assert b"answered with an error" in found.payload
            assert echoes_large(a, b)
        assert shares(a) == shares(b) == 2

    def test_it_is_gone_when_a_worker_has_left(self, workers: Callable[..., list[Worker]]) -> None:
        a, b = workers(2)
        until(lambda: echoes_large(a, b) and shares(a) == shares(b) == 2)
        a.close(2.0)
        assert shares(a) == 0
        b.close(2.0)
        assert shares(b) == 0

    def test_it_is_gone_when_a_worker_is_no_member_any_more(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2)
        until(lambda: echoes_large(a, b) and shares(a) == shares(b) == 2)
        b.transport.remove_peer(0)
        assert shares(b) == 0

    def test_a_tensor_that_is_not_where_it_should_be_ends_the_link(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        a, b = workers(2)
        until(lambda: echoes_large(a, b) and shares(a) == shares(b) == 2)
        b.transport.place.call("forget_shared_memory")
        a.ask(b, b"h", b"", LARGE)
        for worker, other in ((b, "what it sent"), (a, "it cannot read what this worker sent")):
            worker.until(lambda worker=worker: bool(worker.lost))
            ((_, reason),) = worker.lost
            assert reason.startswith(other)
            assert "which was never handed over" in reason


def echoes_large(a: Worker, b: Worker) -> bool:
    found = a.call(b, b"h", bytes(LARGE.nbytes), LARGE)
    return torch.equal(found.tensors[0], LARGE) and len(found.payload) == LARGE.nbytes


class TestThreads:
    def test_python_keeps_what_it_has_of_a_thread_until_the_end(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "tests.rpc.transports.thread_states_process"]
        root = str(Path(__file__).parents[4])
        ended = subprocess.run(
            [*command, str(tmp_path / "store")], cwd=root, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
        firsts, before, after = map(int, ended.stdout.split())
        assert firsts <= 2 * POOL_THREADS, "of 300 calls; as many as there are threads are"
        assert after == before


class TestStarting:
    def test_one_that_did_not_start_may_be_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[object] = []

        def refuse(*what: object) -> None:
            told.extend(what)
            raise DeviceMapError("it has no such device")

        monkeypatch.setattr(tensorpipe, "TorchAgent", refuse)
        maps = {"a": {0: 1}, "b": {2: 0}}
        transport = TensorPipeTransport(TensorPipeRpcBackendOptions(device_maps=maps))
        receiver: Any = None
        with pytest.raises(DeviceMapError):
            transport.start(WorkerInfo("a", 0), 1, receiver)
        transport.close(1.0)
        cuda = [torch.device("cuda", index) for index in range(3)]
        assert told[-2:] == [cuda, {cuda[1]: cuda[0]}], "its way back to itself is among them"

    def test_a_process_in_which_torchs_agent_did_not_start_may_try_again_and_end_without_closing(
        self, tmp_path: Path
    ) -> None:
        program = (
            "from rpc.errors import BringUpError\n"
            "from rpc.options import TensorPipeRpcBackendOptions as Options\n"
            "from rpc.transports.tensorpipe.transport import TensorPipeTransport\n"
            "from rpc.worker_info import WorkerInfo\n"
            "for transports in (['ibv'], None):\n"  # which needs hardware that few hosts have
            "    transport = TensorPipeTransport(Options(_transports=transports))\n"
            "    try:\n"
            "        transport.start(WorkerInfo('a', 0), 1, None)\n"
            "    except BringUpError as error:\n"
            "        assert \"_transports=['ibv']\" in str(error)\n"
            "    else:\n"
            "        print('started with', transports)\n"
        )
        ended = run_program(tmp_path, program)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout.endswith("started with None\n")


class TestLeaving:
    def test_nothing_is_written_to_stderr_when_everyone_leaves(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        group = workers(3)
        before = [worker.transport.place.errors.stat().st_size for worker in group]
        for worker in group:
            for other in group:
                worker.call(other, b"h")
        for worker in group:
            worker.close(5.0)
        after = [worker.transport.place.errors.stat().st_size for worker in group]
        assert after == before, group[0].transport.place.errors.read_text()

    def test_only_what_torch_keeps_is_left(self, workers: Callable[..., list[Worker]]) -> None:
        a, b = workers(2)
        a.call(b, b"h")
        a.close()
        threads = a.transport.place.call("native_threads")
        assert not [name for name in threads if name.startswith("TP_")]
        assert threads.count("pt_thread_pool") <= 1

    def test_torchs_reactor_runs_in_short_time_slices(
        self, workers: Callable[..., list[Worker]]
    ) -> None:
        if not scheduling.slice_seconds(threading.get_native_id()):
            pytest.skip("this kernel is older than 6.12 and knows no time slices of a thread's own")
        (a,) = workers(1)
        assert a.transport.place.call("time_slices_of_reactors") == [scheduling.SHORTEST_SECONDS]
