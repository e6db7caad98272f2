"""Trains a click-through model on parameter servers. This is the trainers' program.

    rpcrun --standalone --role ps:2,service=tensorwire.parameter_server --role trainer:2 \\
           -m tutorials.parameter_server.train

Servers need no program. Read this file first: all that is special about parameter servers is in
``make_model``, ``make_optimizer`` and the first and last lines of ``train``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader
from tqdm import tqdm

import rpc
from tensorwire import parameter_server as ps
from tutorials.arguments import positive
from tutorials.parameter_server import roles
from tutorials.parameter_server.clicks import SIZES, Batch, Log, LogFiles, World, area_under_curve
from tutorials.parameter_server.model import DLRM

_DIM = 16
_TESTS = 8
_SHOWN = 20
"""Steps after which the bar is brought up to date, as that is a question to a server."""


@dataclass
class History:
    """The notes of trainer 0 on the way.

    Args:
        losses: of each step.
        areas: by step, the area under the curve of impressions that nobody trained on.
        milliseconds: of each step, by stage: the next batch, the model, the servers.
        best: the area that the true chances have.
    """

    losses: list[float] = field(default_factory=list)
    areas: dict[int, float] = field(default_factory=dict)
    milliseconds: dict[str, list[float]] = field(
        default_factory=lambda: {"batch": [], "model": [], "servers": []}
    )
    best: float = 0.0


def make_model(cluster: ps.Cluster, seed: int) -> DLRM:
    """A model whose vectors are rows of tables on the servers."""
    tables = {
        name: cluster.table(name, _DIM, ps.Adagrad(lr=0.2), init=ps.Uniform(0.05, seed))
        for name in SIZES
    }
    torch.manual_seed(seed)  # what one trainer draws for the net is what all begin with
    return DLRM(ps.EmbeddingBagCollection(tables), len(tables), _DIM)


def make_optimizer(cluster: ps.Cluster, model: nn.Module) -> ps.Optimizer:
    """Has the servers move rows by the rules of their tables, and the net by Adam."""
    return ps.Optimizer(cluster, model, dense=torch.optim.Adam, lr=1e-2)


def ids_of(batch: Batch) -> dict[str, Tensor]:
    """The ids that the collection will be asked for."""
    return batch.ids


def read_log(
    options: argparse.Namespace, cluster: ps.Cluster, world: World, pages: int
) -> tuple[ps.Samples | ps.Files, ps.Tracked]:
    """Divides the log among the trainers, by pages or by files; returns this trainer's batches."""
    page = itemgetter(0)
    if options.files:
        begins = range(0, pages, options.files)
        files = cluster.samples(files=[(n, min(n + options.files, pages)) for n in begins])
        lines = LogFiles(world, files, options.batch_size)
        return files, files.track(DataLoader(lines, batch_size=1, collate_fn=page))
    data = cluster.samples(pages, batch_size=1)
    log = Log(world, pages, options.batch_size)
    return data, data.track(DataLoader(log, batch_sampler=data, collate_fn=page))


def train(options: argparse.Namespace, cluster: ps.Cluster, trainer: int, trainers: int) -> History:
    """Trains this trainer's share of the pages, and counts how often each page was trained."""
    model, pages = make_model(cluster, options.seed), options.steps * trainers
    counts = ps.Embedding(cluster.table("trained", 1, ps.SGD(lr=1.0)))
    optimizer = make_optimizer(cluster, nn.ModuleList([model, counts]))
    world, history = World(options.seed), History()
    data, mine = read_log(options, cluster, world, pages)
    batches = ps.prefetch(mine, model.bags, counts, ids=lambda b: (ids_of(b), b.page))
    test = world.batch(-1, options.test_size)
    history.best = area_under_curve(test.chance, test.clicked)
    unit = "file" if options.files else "page"
    bar = tqdm(total=data.progress.total, unit=unit, disable=None if trainer == 0 else True)
    moments = [time.perf_counter()]
    for step, batch in enumerate(batches, 1):
        moments.append(time.perf_counter())
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(batch.ids, batch.numbers), batch.clicked)
        torch.autograd.backward((loss, -counts(batch.page).sum()))  # adds 1 to the page's count
        moments.append(time.perf_counter())
        optimizer.step()  # pushes the gradients, and pulls what the next batch needs
        moments.append(time.perf_counter())
        _note(moments, history)
        history.losses.append(loss.item())
        if trainer == 0:
            _look(step, options, model, test, history, bar, data)
            _kill(step, options, trainers, bar)
        moments = [time.perf_counter()]
    if trainer == 0:
        _end(model, test, history, bar, data)
        print(_counted(cluster, pages))
    bar.close()
    cluster.finish()  # from here on nobody waits for pushes of this trainer
    return history


def _note(moments: list[float], history: History) -> None:
    """Notes how long each stage took."""
    stages = history.milliseconds.values()
    for stage, begin, end in zip(stages, moments, moments[1:], strict=False):
        stage.append(1e3 * (end - begin))


def _look(
    step: int,
    options: argparse.Namespace,
    model: DLRM,
    test: Batch,
    history: History,
    bar: tqdm,
    data: ps.Samples | ps.Files,
) -> None:
    """Shows how far all trainers are."""
    if step % _SHOWN == 0:
        bar.set_postfix(loss=f"{history.losses[-1]:.3f}", refresh=False)
        bar.update(data.progress.trained - bar.n)
    if step % max(1, options.steps // _TESTS) == 0:
        _measure(step, model, test, history, bar)


def _measure(step: int, model: DLRM, test: Batch, history: History, bar: tqdm) -> None:
    history.areas[step] = _test(model, test)
    bar.write(f"step {step}: AUC {history.areas[step]:.4f} of at most {history.best:.4f}")


def _end(
    model: DLRM, test: Batch, history: History, bar: tqdm, data: ps.Samples | ps.Files
) -> None:
    """Measures the model that came out; with fewer trainers there were more steps."""
    last = len(history.losses)
    if last not in history.areas:
        _measure(last, model, test, history, bar)
    bar.update(data.progress.trained - bar.n)


def _kill(step: int, options: argparse.Namespace, trainers: int, bar: tqdm) -> None:
    """Kills another trainer after a third, and a server in the middle, if it is told to."""
    moments = {options.steps // 2: "ps:1"}
    if trainers > 1:
        moments[options.steps // 3] = "trainer:1"
    if options.kill and step in moments:
        victim = rpc.rpc_sync(moments[step], os.getpid)
        bar.write(f"step {step}: killing {moments[step]} (process {victim})")
        os.kill(victim, signal.SIGKILL)


def _counted(cluster: ps.Cluster, pages: int) -> str:
    """Says that each page was trained once.

    Raises:
        RuntimeError: some were not.
    """
    (trained,) = cluster.known("trained")
    counts = trained.pull(torch.arange(pages)).flatten()
    wrong = (counts != 1).nonzero().flatten().tolist()
    if wrong:
        raise RuntimeError(f"pages {wrong[:5]} were trained {counts[wrong[:5]].tolist()} times")
    return f"each of the {pages} pages was trained exactly once"


def _test(model: nn.Module, test: Batch) -> float:
    with torch.no_grad():  # rows are pulled; no clock moves
        return area_under_curve(model(test.ids, test.numbers), test.clicked)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = roles.parser(__doc__, "tutorials.parameter_server.train", "parameter_server")
    add = made.add_argument
    add("--steps", type=positive, default=600, help="of each trainer (%(default)s)")
    add("--batch-size", type=positive, default=1024, help="of each trainer (%(default)s)")
    add("--test-size", type=positive, default=20_000, help="impressions to test with (%(default)s)")
    add("--files", type=positive, help="pages in a file, of which a trainer reads whole ones; "
        "default none, so that each page is given out by itself")  # fmt: skip
    add("--kill", action="store_true", help="kill trainer:1 and ps:1 on the way")
    return made


def main() -> None:
    """Joins the group, trains, and leaves; trainer 0 says how it went."""
    made = parser()
    options, place = made.parse_args(), roles.place(made)
    torch.set_num_threads(1)  # several processes share this machine's cores
    rpc.init_rpc()  # rpcrun has said who we are, and where the others meet
    backups = 1 if options.kill else 0
    cluster = ps.connect(place.servers, backups=backups, consistency=ps.BSP(ps.Reduce.SUM))
    begin = time.monotonic()
    history = train(options, cluster, place.trainer, place.trainers)
    if place.trainer == 0:
        _report(options, cluster, history, time.monotonic() - begin)
    rpc.shutdown()


def _report(
    options: argparse.Namespace, cluster: ps.Cluster, history: History, seconds: float
) -> None:
    servers = cluster.stats()["servers"].values()
    rows = sum(
        table["rows"]
        for server in servers
        for shard in server["shards"].values()
        if shard["head"]
        for table in shard["tables"].values()
    )
    print(f"{len(history.losses)} steps in {seconds:.1f} s; servers: {len(servers)}, rows: {rows}")
    last = len(history.losses)
    print(f"final AUC: {history.areas[last]:.6f} (at most {history.best:.6f})")
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "history.json").write_text(json.dumps(asdict(history)))
    from tutorials.parameter_server.picture import draw

    draw(history, options.output / "clicks.png")


if __name__ == "__main__":
    main()
