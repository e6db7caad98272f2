"""Jobs beside somebody without the key, who does with plain sockets whatever he can."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rpc.group.store_gate import HELLO
from tests.free_ports import free_port
from tests.processes import ready_made
from tests.tensorwire.launch.jobs import LIGHT, SECONDS, Job, job
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
]
_NOBODY = 65534
_ROUNDS = 3
SET, COMPARE_SET, GET, ADD, WAIT, DELETE, APPEND, LIST = 1, 2, 3, 4, 6, 8, 9, 17
_FAST = ("--monitor-interval", "0.02", "--rdzv-conf", "keep_alive_interval=0.2")


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path) as made:
        yield made


# --- The stranger


def packed(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def lies(run_id: str, evil: str) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values that would do harm, if anybody believed them."""
    role = {"name": "trainer", "count": 1, "share": "agent", "service": False, "module": evil}
    role |= {"arguments": [], "max_restarts": 99, "restart": "worker", "process_group": False}
    state = {"role": role, "attempt": 0, "gathers": False, "members": [], "meeting": ""}
    plan = {"min_nodes": 1, "phase": "running", "nodes": [], "roles": [state], "seats": []}
    plan |= {"gathers": False, "restarts": {"spent": 0, "in_a_row": 0}, "failure": None}
    values = [
        json.dumps(plan | {"phase": phase}).encode() for phase in ("running", "failed", "succeeded")
    ]
    values += [b"", b"\xff\xfe\x00", b"no number", b"[" * 5000, b"9" * 40]
    names = [
        "plan",
        "changes",
        "beat/0",
        "beat/1",
        "gone/0",
        "closed",
        "first",
        "nodes",
        "torchs",
        "store",
    ]
    below = [f"job/{run_id}/tensorwire/extend/rpcrun/{kind}" for kind in ("value", "count")]
    below += [f"tensorwire/extend/rpcrun/{kind}" for kind in ("value", "count")]
    below += [f"tensorwire-rdzv/{run_id}", f"job/{run_id}", "tensorwire"]
    for value, folder, name in itertools.product(values, below, names):
        yield f"/{folder}/{name}".encode(), value


def attack(port: int, run_id: str, evil: str, done: str) -> None:
    """Does everything that it can think of; writes a byte after each round."""
    told = os.open(done, os.O_WRONLY | os.O_APPEND)
    "localhost".encode("idna")  # loads what this user may not be able to read
    if os.geteuid() == 0:
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    draw, idle = random.Random(port), []
    while True:
        with contextlib.suppress(OSError), connected(port) as torchs:
            torchs.sendall(struct.pack("<BI", 0, 0x3C85F7CE))
            for key, value in lies(run_id, evil):
                torchs.sendall(bytes([DELETE]) + packed(key))
                torchs.sendall(bytes([SET]) + packed(key, value))
                torchs.sendall(bytes([COMPARE_SET]) + packed(key, value, value))
                torchs.sendall(bytes([APPEND]) + packed(key, value))
            torchs.sendall(bytes([LIST]) + bytes([SET]) + packed(b"/flood", bytes(1 << 20)))
            while torchs.recv(1 << 20):
                pass
        for junk in (HELLO + draw.randbytes(200), HELLO[:4], draw.randbytes(2000), b"\0" * 300):
            with contextlib.suppress(OSError), connected(port) as other:
                other.sendall(junk)
                other.recv(4096)
        with contextlib.suppress(OSError):
            idle.append(connected(port))
        os.write(told, b".")


def connected(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), 5)
    made.settimeout(0.5)
    return made


@contextlib.contextmanager
def a_stranger(work: Job, run_id: str, port: int) -> Iterator[Path]:
    """Attacks; gives the file that says how many rounds are over."""
    done = work.folder / "rounds"
    done.touch()
    evil = "tests.tensorwire.launch.programs.evil"
    process = ready_made().Process(target=attack, args=(port, run_id, evil, str(done)))
    process.start()
    try:
        yield done
    finally:
        process.kill()
        process.join()
        process.close()


def rounds(done: Path) -> int:
    return done.stat().st_size


def more_rounds(done: Path) -> None:
    """Returns when some more whole rounds of the attack are over."""
    before = rounds(done)
    until(lambda: rounds(done) >= before + _ROUNDS, SECONDS, 0.05)


# --- Jobs beside it


def flags_of(kind: str, work: Job) -> Sequence[str]:
    if kind == "standalone":
        return ("--standalone",)
    key = work.folder / "key"
    key.write_text("a secret of the group")
    key.chmod(0o600)
    meets = ("--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "j", "--nnodes", "1:2")
    return (*meets, "--group-key-file", str(key))


@pytest.mark.parametrize("kind", ["standalone", "key-file"])
def test_a_stranger_neither_runs_anything_nor_stops_a_job_nor_has_it_notice(
    kind: str, work: Job
) -> None:
    flags = (*flags_of(kind, work), *_FAST, "--role", "trainer:2,max_restarts=1")
    program = (LIGHT, str(work.folder))
    agent = work.start(*flags, *program)
    first = work.life("trainer:0")
    run_id = first.environment["TORCHELASTIC_RUN_ID"]
    port = urlsplit(first.environment["RPC_INIT_METHOD"]).port
    assert port is not None
    with a_stranger(work, run_id, port) as done:
        more_rounds(done)
        os.kill(first.pid, signal.SIGKILL)
        work.life("trainer:0", 2)
        if kind == "key-file":
            second = work.start(*flags, *program)
            work.life("trainer:3")
        more_rounds(done)
        work.end()
        assert agent.wait() == 0, work.said
    if kind == "key-file":
        assert second.wait() == 0, work.said
    names = ["trainer:0#1", "trainer:0#2", "trainer:1#1"]
    more = ["trainer:2#1", "trainer:3#1"] if kind == "key-file" else []
    assert work.names == names + more
    assert "Traceback" not in work.said


def test_torchruns_agent_with_our_rendezvous_and_a_key_is_as_safe(work: Job) -> None:
    key = work.folder / "key"
    key.write_text("a secret of the group")
    key.chmod(0o600)
    port = free_port()
    agent = work.start(
        *("--rdzv-backend", "tensorwire", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "j"),
        *("--rdzv-conf", f"key_file={key}", "--nproc-per-node", "2", "--role", "trainer"),
        *("--monitor-interval", "0.05", LIGHT, str(work.folder)),
        main="torchrun",
    )
    seen = work.life("trainer:0").environment
    assert seen["RPC_GROUP_KEY_FILE"] == str(key)
    assert seen["MASTER_PORT"] == str(port)
    with a_stranger(work, "j", port) as done:
        more_rounds(done)
        work.end()
        assert agent.wait() == 0, work.said
    assert work.names == ["trainer:0#1", "trainer:1#1"]


def test_under_torchruns_own_store_a_group_with_a_key_goes_on(work: Job) -> None:
    """Rank 0 hosts the group's store beside it; the stranger replaces what says where that is."""
    key = work.folder / "key"
    key.write_text("a secret of the group")
    key.chmod(0o600)
    port, names = free_port(), ("trainer:0", "trainer:1")
    agent = work.start(
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "j"),
        *("--nproc-per-node", "2", "--role", "trainer", "--monitor-interval", "0.05"),
        *(str(Path(LIGHT).with_name("member.py")), str(work.folder), *names),
        main="torchrun",
        RPC_GROUP_KEY_FILE=str(key),
    )

    def steps() -> list[int]:
        files = [work.folder / f"{name}.progress" for name in names]
        return [json.loads(each.read_text())["steps"] for each in files if each.exists()]

    until(lambda: len(steps()) == 2, SECONDS, 0.05)
    with a_stranger(work, "j", port) as done:
        before = steps()
        more_rounds(done)
        until(lambda: all(now > then for now, then in zip(steps(), before, strict=True)), SECONDS)
        work.end()
        assert agent.wait() == 0, work.said


# --- Jobs that are told the same


def test_a_second_job_of_the_same_id_is_refused_at_once(work: Job) -> None:
    meets = ("--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "j", *_FAST)
    command = (*meets, "--role", "trainer:1", LIGHT, str(work.folder))
    first = work.start(*command)
    work.life("trainer:0")
    second = work.start(*command)
    assert second.wait() == 1
    (said,) = second.said.splitlines()
    assert "the job 'j' runs at localhost:" in said
    assert "give this one another --rdzv-id" in said
    work.end()
    assert first.wait() == 0
    assert work.names == ["trainer:0#1"]


def test_jobs_of_other_ids_at_one_store_do_not_meet(work: Job) -> None:
    """With one key: the second sees neither agents, nor workers, nor values of the first."""
    key = work.folder / "key"
    key.write_text("a secret of the group")
    key.chmod(0o600)
    meets = ("--rdzv-endpoint", f"localhost:{free_port()}", *_FAST, "--group-key-file", str(key))
    one = work.start(*meets, "--rdzv-id", "a", "--role", "one:1", LIGHT, str(work.folder))
    first = work.life("one:0").environment
    other = work.start(
        *meets, "--rdzv-id", "b", "--role", "other:1,max_restarts=1", LIGHT, str(work.folder)
    )
    second = work.life("other:0").environment
    assert first["RPC_INIT_METHOD"].partition("?")[0] == second["RPC_INIT_METHOD"].partition("?")[0]
    assert first["RPC_INIT_METHOD"] != second["RPC_INIT_METHOD"]
    assert first["MASTER_PORT"] != second["MASTER_PORT"]
    assert (second["GROUP_RANK"], second["WORLD_SIZE"], second["RPC_WORKER_ID"]) == ("0", "1", "0")
    os.kill(work.life("other:0").pid, signal.SIGKILL)
    work.life("other:0", 2)
    work.end()
    assert [other.wait(), one.wait()] == [0, 0], work.said
    assert work.names == ["one:0#1", "other:0#1", "other:0#2"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ((LIGHT, "{folder}", "trainer:7=fail"), "the job's program or its arguments"),
        ((str(Path(LIGHT).with_name("member.py")), "{folder}"), "the job's program or its argum"),
    ],
)
def test_an_agent_that_was_told_another_program_is_refused_with_one_sentence(
    changed: Sequence[str], told: str, work: Job
) -> None:
    meets = ("--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "j", "--nnodes", "1:2")
    flags = (*meets, *_FAST, "--role", "trainer:1")
    first = work.start(*flags, LIGHT, str(work.folder))
    work.life("trainer:0")
    second = work.start(*flags, *(word.format(folder=work.folder) for word in changed))
    assert second.wait() == 1
    (said,) = second.said.splitlines()
    assert f"rpcrun: the agents disagree about {told}" in said
    work.end()
    assert first.wait() == 0
    assert work.names == ["trainer:0#1"]


# --- The store's end


def kill_store(port: int) -> None:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if b"127.0.0.1:%d" % port in command:
                os.kill(int(folder.name), signal.SIGKILL)
                return
    raise AssertionError("there is no such process")


@pytest.mark.parametrize("actions", [(), ("trainer=go", "ps=deaf")], ids=["works", "ends"])
def test_a_job_whose_store_is_killed_ends_with_one_sentence(
    actions: Sequence[str], work: Job
) -> None:
    """Also when training is done, and a server is slow to end."""
    flags = ("--standalone", *_FAST, "--shutdown-timeout", "2")
    agent = work.start(
        *(*flags, "--role", "trainer:1", "--role", "ps:1,service", LIGHT),
        *(str(work.folder), *actions),
    )
    trainer, server = work.life("trainer:0"), work.life("ps:0")
    (work.folder / "go").touch()
    if actions:
        until(lambda: not trainer.lives, SECONDS, 0.01)
    port = urlsplit(trainer.environment["RPC_INIT_METHOD"]).port
    kill_store(port or 0)
    began = time.monotonic()
    assert agent.wait() == 1
    assert time.monotonic() - began < SECONDS
    assert not server.lives
    assert "the store of the rendezvous at" in agent.said.splitlines()[-1]
    assert "frame #" not in agent.said
    assert "Traceback" not in agent.said


def test_nothing_is_left_in_the_folder_for_temporary_files(work: Job) -> None:
    temporary = work.folder / "temporary"
    temporary.mkdir()
    agent = work.start(
        *("--standalone", *_FAST, "--role", "trainer:1", LIGHT, str(work.folder), "trainer=done"),
        TMPDIR=str(temporary),
    )
    assert agent.wait() == 0
    assert [path.name for path in temporary.iterdir()] == []
