"""Trains the click model and publishes it while it trains; a web service answers from it.

    rpcrun --standalone --role ps:2,service=tensorwire.parameter_server \\
           --role web:1,service=tutorials.serving.web --role trainer:1 \\
           -m tutorials.serving.train

The trainer asks the web service now and then, as a visitor would, and draws how good its answers
were. All that serving adds to training is the line with ``cluster.publish``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import rpc
from tensorwire import parameter_server as ps
from tutorials.arguments import positive
from tutorials.parameter_server import roles
from tutorials.parameter_server.clicks import Batch, World, area_under_curve
from tutorials.parameter_server.train import ids_of, make_model, make_optimizer
from tutorials.serving.picture import draw
from tutorials.serving.web import FOLDER, PORT

ROLES = (
    "--role ps:2,service=tensorwire.parameter_server "
    "--role web:1,service=tutorials.serving.web --role trainer:1"
)
_SECONDS_TO_BEGIN = 300.0


@dataclass(frozen=True, slots=True)
class Served:
    """An answer of the web service, as the trainer judges it.

    Args:
        step: that training was at.
        served: the step of the version that answered.
        version: its number.
        age: seconds since it was cut.
        area: under the curve of its chances, for impressions that nobody trained on.
    """

    step: int
    served: int
    version: int
    age: float
    area: float


class Visitor:
    """Asks the web service for the chances of some impressions.

    Args:
        port: at which it listens on this machine.
        test: the impressions.
    """

    def __init__(self, port: int, test: Batch) -> None:
        self._url = f"http://127.0.0.1:{port}/clicks"
        ids = {name: found.squeeze(1).tolist() for name, found in test.ids.items()}
        self._asked = json.dumps({"ids": ids, "numbers": test.numbers.tolist()}).encode()
        self._clicked = test.clicked

    def ask(self, step: int) -> Served:
        """Asks once."""
        request = urllib.request.Request(self._url, self._asked)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        area = area_under_curve(torch.tensor(found["chances"]), self._clicked)
        return Served(step, found["step"], found["version"], found["age"], area)

    def ask_for(self, version: int, step: int) -> Served:
        """Asks until a version answers, or a later one."""
        deadline = time.monotonic() + _SECONDS_TO_BEGIN
        while True:
            try:
                served = self.ask(step)
                if served.version >= version:
                    return served
            except urllib.error.URLError:  # it has not begun
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._url} does not answer with version {version}")
            time.sleep(0.05)


def train(options: argparse.Namespace, cluster: ps.Cluster, visitor: Visitor) -> list[Served]:
    """Trains, and publishes a version each second; returns what the web service answered."""
    model = make_model(cluster, options.seed)
    optimizer = make_optimizer(cluster, model)
    publishing = cluster.publish(options.model, every=ps.Seconds(options.every))
    publishing.wait()
    found = [visitor.ask_for(_number(publishing), 0)]
    batches = World(options.seed).batches(0, 1, options.steps, options.batch_size)
    for step, batch in enumerate(ps.prefetch(batches, model, ids=ids_of), 1):
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(batch.ids, batch.numbers), batch.clicked)
        torch.autograd.backward(loss)
        optimizer.step()
        if step % max(1, options.steps // options.visits) == 0:
            found.append(visitor.ask(step))
            _say(found[-1])
    publishing.take()  # what was trained since the last one
    publishing.wait()
    found.append(visitor.ask_for(_number(publishing), options.steps))
    publishing.stop()
    cluster.finish()
    return found


def _number(publishing: ps.Publishing) -> int:
    assert publishing.version is not None
    return publishing.version.number


def _say(served: Served) -> None:
    print(
        f"step {served.step}: version {served.version} of step {served.served} answers, "
        f"{served.age:.1f} s old, AUC {served.area:.4f}",
        flush=True,
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = roles.parser(__doc__, "tutorials.serving.train", "serving", ROLES)
    add = made.add_argument
    add("--steps", type=positive, default=600, help="(%(default)s)")
    add("--batch-size", type=positive, default=1024, help="(%(default)s)")
    add("--test-size", type=positive, default=5_000, help="impressions to ask for (%(default)s)")
    add("--visits", type=positive, default=30, help="how often to ask (%(default)s)")
    add("--every", type=float, default=1.0, help="seconds between versions (%(default)s)")
    add("--model", type=Path, default=Path(FOLDER), help="folder of versions (%(default)s)")
    return made


def main() -> None:
    """Joins the group, trains, and says what the web service answered."""
    made = parser()
    options = made.parse_args()
    roles.place(made)
    torch.set_num_threads(1)  # several processes share this machine's cores
    rpc.init_rpc()
    cluster = ps.connect("ps", trainers=1)
    test: Batch = World(options.seed).batch(-1, options.test_size)
    visitor = Visitor(int(os.environ.get("SERVING_PORT", PORT)), test)
    found = train(options, cluster, visitor)
    best = area_under_curve(test.chance, test.clicked)
    print(f"final AUC served: {found[-1].area:.6f} (at most {best:.6f})")
    draw(found, best, options.output / "served.png")
    rpc.shutdown()


if __name__ == "__main__":
    main()
