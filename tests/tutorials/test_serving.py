"""A web service answers from the newest version of the click model, one version for each answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorwire import parameter_server as ps
from tensorwire.parameter_server.declarations.dense_spec import Spread, describe
from tensorwire.parameter_server.declarations.spec import TableSpec
from tests.tensorwire.parameter_server.following.chains import Published, random_rows
from tutorials.parameter_server.clicks import SIZES, World, area_under_curve
from tutorials.parameter_server.model import DLRM
from tutorials.serving.train import Visitor
from tutorials.serving.web import Clicks, make_app

uvicorn = pytest.importorskip("uvicorn")

_DIM = 4
_TABLES = [TableSpec(name, _DIM, ps.SGD(lr=0.1), ps.Constant(0.0)) for name in SIZES]


@contextmanager
def _served(model: ps.FollowedModel) -> Iterator[int]:
    """The web service, in a thread; its port."""
    config = uvicorn.Config(make_app(Clicks(model)), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


class _Zeros(nn.Module):
    """Stands for tables that have no rows."""

    def forward(self, ids: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        raise NotImplementedError


def _net(seed: int) -> DLRM:
    torch.manual_seed(seed)
    return DLRM(_Zeros(), len(SIZES), _DIM)


def test_answers_are_of_the_newest_version(tmp_path: Path) -> None:
    test = World(0).batch(-1, 200)
    spec = describe("model", torch.optim.SGD(_net(0).parameters(), lr=0.1), Spread.ELEMENTS)
    with Published(tmp_path / "model", _TABLES, net=spec) as published:
        published.weights = [each.detach() for each in _net(1).parameters()]
        published.base(7)
        with ps.follow(tmp_path / "model", interval=0.01) as model, _served(model) as port:
            visitor = Visitor(port, test)
            found = [visitor.ask(10)]
            rows = {
                name: random_rows(5, ids[:, 0].tolist(), _DIM) for name, ids in test.ids.items()
            }
            published.weights = [each.detach() for each in _net(2).parameters()]
            version = published.delta(20, rows)
            found.append(visitor.ask_for(version.number, 21))
            expected = _net(2)
            bags = ps.EmbeddingBagCollection({name: model.table(name) for name in SIZES})
            expected.bags = bags
            with torch.inference_mode():
                area = area_under_curve(expected(test.ids, test.numbers), test.clicked)
    assert [(each.step, each.served, each.version) for each in found] == [(10, 7, 0), (21, 20, 1)]
    assert found[1].area == area != found[0].area
    assert all(0 <= each.age < 3600 for each in found)
