"""Signs of life between two workers of this process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from chaos.worker import cut_off
from rpc.group.answerer import start_process
from rpc.group.local_processes import LocalProcess, ProcessId
from rpc.group.probes import Answer, DatagramProber
from rpc.ids import Life
from tests.waiting import until

SO_MEMINFO = 55

ALICE, BOB = Life(0, 1), Life(1, 1)


class Pair:
    def __init__(self) -> None:
        elsewhere = [ProcessId(f"a host of {name}", 1, "0") for name in ("alice", "bob")]
        self.alice, self.bob = (DatagramProber(process=process) for process in elsewhere)
        self.addresses = self.alice.start(ALICE), self.bob.start(BOB)

    def answers(self, address: str, wanted: int = 1) -> list[Answer]:
        """The answers of bob to alice, who asks until she has enough."""
        found: list[Answer] = []
        deadline = time.monotonic() + 20
        while len(found) < wanted:
            assert time.monotonic() < deadline
            self.bob.collect()  # which starts the process that answers, or starts it again
            self.alice.ask(BOB, address)
            found += self.alice.collect()
            time.sleep(0.002)
        return found

    def is_answered(self) -> bool:
        """Asks bob, who does nothing himself; True if an answer comes soon."""
        self.alice.ask(BOB, self.addresses[1])
        time.sleep(0.005)
        return bool(self.alice.collect())

    def end_process_of_bob(self) -> None:
        answerer = self.bob._answerer
        assert answerer is not None
        until(lambda: bool(self.answers(self.addresses[1]) and answerer.process))
        assert answerer.process is not None
        answerer.process.kill()
        answerer.process.wait()


def waiting_bytes(prober: DatagramProber) -> int:
    """The bytes that lie in the kernel's buffer, unread."""
    answerer = prober._answerer
    assert answerer is not None
    room = answerer.datagrams.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 36)
    return int.from_bytes(room[:4], sys.byteorder)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.alice.close()
    made.bob.close()


def test_one_that_is_there_answers_each_question(pair: Pair) -> None:
    assert pair.answers(pair.addresses[1], 5) == [Answer(BOB, expelled=False)] * 5


def test_it_is_asked_once_at_a_time(pair: Pair) -> None:
    for _ in range(100):
        pair.alice.ask(BOB, pair.addresses[1])
    until(lambda: len(pair.bob.collect() + pair.alice.collect()) == 1)
    time.sleep(0.05)
    assert pair.alice.collect() == []


def test_one_that_ended_does_not_answer(pair: Pair) -> None:
    pair.answers(pair.addresses[1])
    pair.bob.close()
    deadline = time.monotonic() + 0.3
    late: list[Answer] = []
    while time.monotonic() < deadline:
        pair.alice.ask(BOB, pair.addresses[1])
        late = pair.alice.collect()
    assert late == []


def test_another_process_at_its_address_does_not_count(pair: Pair) -> None:
    host, port, _, *process = json.loads(pair.addresses[1])
    elsewhere = json.dumps([host, port, "00" * 16, *process])
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        pair.alice.ask(BOB, elsewhere)
        assert pair.alice.collect() == []


def test_it_answers_again_after_it_was_forgotten(pair: Pair) -> None:
    pair.answers(pair.addresses[1])
    pair.alice.forget(BOB)
    assert pair.answers(pair.addresses[1])


def test_one_that_is_declared_lost_finds_a_note(pair: Pair) -> None:
    assert pair.bob.verdict() is None
    pair.alice.expel(pair.addresses[1], "too silent")
    until(lambda: pair.bob.verdict() == "too silent")
    assert pair.alice.verdict() is None


def test_it_also_hears_it_from_those_it_asks(pair: Pair) -> None:
    pair.bob.expel(pair.addresses[0], "too silent")
    assert pair.answers(pair.addresses[1], 3)[-1] == Answer(BOB, expelled=True)


def test_a_note_is_sent_until_its_receipt_comes(pair: Pair) -> None:
    pair.alice.expel(pair.addresses[1], "too silent")
    until(lambda: pair.bob.verdict() == "too silent")
    until(lambda: not (pair.alice.collect() or pair.alice._notes))


def test_a_note_for_one_that_is_gone_holds_nothing_up(pair: Pair) -> None:
    pair.bob.close()
    pair.alice.expel(pair.addresses[1], "too silent")
    for _ in range(100):
        pair.alice.collect()
    assert not pair.alice._notes


def test_it_finds_its_note_after_all_its_connections_broke(pair: Pair) -> None:
    pair.alice.expel(pair.addresses[1], "too silent")
    until(lambda: pair.bob.verdict() == "too silent")
    cut_off()
    assert pair.bob.verdict() == "too silent"
    assert pair.answers(pair.addresses[1])


def test_its_process_starts_again_and_knows_who_was_expelled(pair: Pair) -> None:
    pair.bob.expel(pair.addresses[0], "too silent")
    assert pair.answers(pair.addresses[1], 2)[-1].expelled
    pair.end_process_of_bob()
    assert pair.answers(pair.addresses[1], 2)[-1].expelled


def test_a_worker_without_an_interpreter_to_start_answers_itself(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    assert pair.answers(pair.addresses[1], 3)
    pair.alice.expel(pair.addresses[1], "too silent")
    pair.bob.collect()
    assert pair.bob.verdict() == "too silent"
    assert "if a call holds the interpreter lock" in caplog.text


def test_what_strangers_send_takes_no_room(pair: Pair) -> None:
    """Datagrams without the cookie of the one they are for are dropped by the kernel."""
    place = json.loads(pair.addresses[1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for _ in range(200):
            stranger.sendto(os.urandom(1400), (place[0], place[1]))
    assert waiting_bytes(pair.bob) == 0
    assert pair.answers(pair.addresses[1])


def test_a_group_with_another_key_is_not_answered(pair: Pair) -> None:
    stranger = DatagramProber(group_key=b"another key of another group")
    stranger.start(ALICE)
    stranger.expel(pair.addresses[1], "for no reason")
    try:
        for _ in range(30):
            stranger.ask(BOB, pair.addresses[1])
            assert pair.answers(pair.addresses[1])
            assert stranger.collect() == []
    finally:
        stranger.close()
    assert pair.bob.verdict() is None


def test_its_process_is_silent_while_the_worker_is_stopped_and_ends_with_it(pair: Pair) -> None:
    worker = subprocess.Popen(["sleep", "60"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bob = pair.bob._answerer
    assert bob is not None
    helper = start_process("bob", worker.pid, bob.datagrams, theirs)
    theirs.close()
    try:
        ours.send(pair.bob._key + pair.bob._token)
        until(pair.is_answered)
        worker.send_signal(signal.SIGSTOP)
        until(lambda: not pair.is_answered())
        assert not any(pair.is_answered() for _ in range(50))
        worker.send_signal(signal.SIGCONT)
        until(pair.is_answered)
    finally:
        worker.kill()
        worker.wait()
    assert helper.wait(20) == 0
    ours.close()


def test_workers_of_one_host_look_at_each_others_processes(pair: Pair) -> None:
    worker = subprocess.Popen(["sleep", "60"])
    host, port, token, *_ = json.loads(pair.addresses[1])
    seen = ProcessId.of(worker.pid)
    address = json.dumps([host, port, token, seen.place, seen.number, seen.started])
    watcher = DatagramProber()
    try:
        watcher.ask(BOB, address)
        assert watcher.collect() == [Answer(BOB, expelled=False)]
        worker.send_signal(signal.SIGSTOP)
        until(lambda: not runs(watcher, address))
        worker.send_signal(signal.SIGCONT)
        until(lambda: runs(watcher, address))
        worker.kill()
        worker.wait()
        assert not runs(watcher, address)
        with pytest.raises(FileNotFoundError):
            LocalProcess(seen)
    finally:
        worker.kill()
        watcher.close()


def test_one_that_shut_down_gives_no_sign_of_life_though_its_process_runs() -> None:
    watcher, watched = DatagramProber(), DatagramProber()
    address = watched.start(BOB)
    try:
        assert all(runs(watcher, address) for _ in range(3))
        watched.close()
        assert not runs(watcher, address)
        watcher.forget(BOB)
        watched = DatagramProber()
        address = watched.start(BOB)
        assert runs(watcher, address)
        cut_off()  # which says nothing of the other worker
        assert runs(watcher, address)
    finally:
        watched.close()
        watcher.close()


def test_a_number_that_another_process_has_now_is_not_taken_for_the_worker() -> None:
    mine = ProcessId.of(os.getpid())
    with pytest.raises(ProcessLookupError):
        LocalProcess(ProcessId(mine.place, mine.number, "1"))


def runs(watcher: DatagramProber, address: str) -> bool:
    watcher.ask(BOB, address)
    return bool(watcher.collect())
