"""The last complete checkpoint loads, whichever process is killed while one is saved."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import rpc
from remote_module import RemoteModule
from rpc import extend
from tensorwire import checkpoint
from tensorwire.checkpoint.remote.keys import write_reader_key
from tests import waiting
from tests.rpc.worker_processes import WorkerProcess, join, leave

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("checkpoint"),
]

_NAMES = ("coordinator", "first", "second")


class _Filled(nn.Module):
    """Holds one number many times, in several tensors."""

    def __init__(self, tensors: int, size: int) -> None:
        super().__init__()
        for number in range(tensors):
            self.register_buffer(f"x{number}", torch.zeros(size))


def _save_for_ever(folder: str) -> None:
    """Saves one checkpoint after the other; all tensors of each hold its number."""
    modules = [RemoteModule(name, _Filled, (4, 50_000)) for name in _NAMES[1:]]
    for step in itertools.count(1):
        for module in modules:
            state = module.state_dict()
            module.load_state_dict({name: each.fill_(step) for name, each in state.items()})
        save = checkpoint.save if step % 2 else _save_in_background
        save(f"{folder}/{step}", {"modules": modules, "step": step}, keep=2)


def _save_in_background(path: str, state: dict[str, object], keep: int) -> object:
    return checkpoint.save_in_background(path, state, keep).wait()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[WorkerProcess]]:
    processes = [WorkerProcess() for _ in _NAMES]
    for rank, (name, process) in enumerate(zip(_NAMES, processes, strict=True)):
        process.begin(join, "TENSORWIRE", f"file://{tmp_path}/meeting", name, rank, len(_NAMES))
    for process in processes:
        process.result()
    yield processes
    for process in processes:
        process.end()


@pytest.mark.kills
def test_a_process_that_is_killed_while_saving_never_harms_the_last_checkpoint(
    workers: list[WorkerProcess], tmp_path: Path, kill_seed: int
) -> None:
    dice = random.Random(kill_seed)
    folder = tmp_path / "checkpoints"
    workers[0].begin(_save_for_ever, str(folder))
    waiting.until(lambda: folder.exists() and checkpoint.latest(folder) is not None)
    first = _number(folder)
    waiting.until(lambda: _number(folder) >= first + 1)
    time.sleep(dice.uniform(0, 0.1))  # no synchronisation: the moment is to be any

    victim = dice.choice(workers)
    victim.send_signal(signal.SIGKILL)
    victim.process.join()
    if victim is not workers[0]:
        with pytest.raises(rpc.WorkerLostError):
            workers[0].result()
        assert not list(folder.glob("*.tmp-*"))  # the coordinator cleared up

    found = checkpoint.complete(folder)
    assert found
    for saved in found:
        step = checkpoint.load(saved, {})["step"]
        assert saved.path.name == str(step)
        tensors = [each for part in saved.parts for _, each in saved.tensors(part)]
        assert len(tensors) == 2 * 4
        assert all(bool((each == step).all()) for each in tensors)
    checkpoint.retain(folder, last=1)
    assert [each.name for each in folder.iterdir()] == [found[-1].path.name]


def _follow_for_ever(url: str, folder: Path) -> None:
    """Notes the newest version; all tensors of each hold its number."""
    key, cache = folder / "reader.key", folder / "cache"
    with checkpoint.follow(url, key_file=key, cache=cache, interval=0.001) as weights:
        while True:
            with weights.pinned() as state:
                tensors = state.value("model").values()
                assert all(bool((each == state.version).all()) for each in tensors)
            (folder / "new").write_text(str(state.version))
            (folder / "new").rename(folder / "seen")
            weights.wait_for(version=state.version + 1, timeout=60)


@pytest.mark.kills(30, usual=1)
def test_a_follower_that_is_killed_goes_on_with_what_it_had_fetched(
    tmp_path: Path, kill_seed: int
) -> None:
    dice, model = random.Random(kill_seed), _Filled(4, 50_000)
    key = checkpoint.reader_key(b"the key of the group")
    write_reader_key(tmp_path / "reader.key", key)

    def update() -> None:
        for each in model.buffers():
            each += 1
        publishing.update()

    def seen() -> int:
        return int((tmp_path / "seen").read_text()) if (tmp_path / "seen").exists() else -1

    with (
        checkpoint.publish({"model": model}, tmp_path / "chain", base_every=3) as publishing,
        checkpoint.ChainServer(tmp_path / "chain", key) as server,
    ):
        told = f"tensorwire://127.0.0.1:{server.port}", tmp_path
        follower = WorkerProcess()
        follower.begin(_follow_for_ever, *told)
        waiting.until(lambda: seen() >= 2, 60, meanwhile=update)
        time.sleep(dice.uniform(0, 0.05))  # no synchronisation: the moment is to be any
        update()
        follower.send_signal(signal.SIGKILL)
        follower.process.join()
        before = seen()
        follower.end()
        follower = WorkerProcess()
        try:
            follower.begin(_follow_for_ever, *told)
            waiting.until(lambda: seen() >= before + 3, 60, meanwhile=update)
        finally:
            follower.send_signal(signal.SIGKILL)
            follower.end()


def _number(folder: Path) -> int:
    found = checkpoint.latest(folder)
    return 0 if found is None else found.manifest.sequence


def _hold(megabytes: int) -> None:
    """Makes a module that is as large, and writes it all, so that its memory is there."""
    module = extend.worker_state("test", dict)["module"] = _Filled(8, megabytes * (1 << 20) // 32)
    for each in module.buffers():
        each.fill_(1)


def _module() -> nn.Module:
    module: nn.Module = extend.worker_state("test", dict)["module"]
    return module


def _begin_to_measure() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _grown_megabytes(before: int) -> int:
    return _peak() - before


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = (each for each in status.splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) >> 10


def _save(path: str, background: bool) -> None:
    modules = [RemoteModule(name, _module) for name in _NAMES[1:]]
    if background:
        checkpoint.save_in_background(path, {"modules": modules}).wait()
    else:
        checkpoint.save(path, {"modules": modules})


def test_no_process_grows_by_more_than_its_own_part(
    workers: list[WorkerProcess], tmp_path: Path
) -> None:
    megabytes = 96
    for worker in workers[1:]:
        worker.do(_hold, megabytes)
    for background, most in ((False, 24), (True, megabytes + 64)):
        for worker in workers:
            worker.do(_begin_to_measure)
        before = [worker.do(_peak) for worker in workers]
        workers[0].do(_save, str(tmp_path / f"{background}"), background)
        grown = [w.do(_grown_megabytes, b) for w, b in zip(workers, before, strict=True)]
        assert grown[0] <= 24
        assert max(grown[1:]) <= most
    for worker in workers:
        worker.begin(leave)
    for worker in workers:
        worker.result()
