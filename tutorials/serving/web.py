"""A web service that says how likely clicks are, from a model that is still being trained.

``Clicks`` is all that is special here; ``make_app`` is Starlette's part. rpcrun starts this beside
the trainer, see ``train.py``. It may also run alone, on any machine that has the reader key:

    SERVING_MODEL=tensorwire://host:7000 SERVING_KEY=reader.key python -m tutorials.serving.web
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import torch

from tensorwire import parameter_server as ps
from tutorials.parameter_server.clicks import SIZES
from tutorials.parameter_server.model import DLRM

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse

FOLDER = "runs/serving/model"
PORT = 8000


class Clicks:
    """Answers from the newest version of a followed model.

    Args:
        model: that is followed.
    """

    def __init__(self, model: ps.FollowedModel) -> None:
        self._model = model
        tables = {name: model.table(name) for name in SIZES}
        dim = tables["user"].dim
        self._net = DLRM(ps.EmbeddingBagCollection(tables), len(tables), dim)
        self._loaded = -1

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The chance of a click for each impression, and the version that says so."""
        ids = {name: torch.tensor(asked["ids"][name]).unsqueeze(1) for name in SIZES}
        numbers = torch.tensor(asked["numbers"])
        with torch.inference_mode(), self._model.pinned() as view:  # one version for all of it
            if view.version != self._loaded:
                view.load_into(self._net)
                self._loaded = view.version
            chances = torch.sigmoid(self._net(ids, numbers))
        return {
            "chances": chances.tolist(),
            "version": view.version,
            "step": view.step,
            "age": self._model.age,
        }


def make_app(clicks: Clicks) -> Starlette:
    """The web service: ``POST /clicks``."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def ask(request: Request) -> JSONResponse:
        return JSONResponse(clicks.answer(await request.json()))

    return Starlette(routes=[Route("/clicks", ask, methods=["POST"])])


def main() -> None:
    """Follows the model that the environment names, and serves until SIGTERM."""
    import uvicorn

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # uvicorn raises it again in the end
    torch.set_num_threads(1)  # several processes share this machine's cores
    where = os.environ.get("SERVING_MODEL", FOLDER)
    with ps.follow(where, key_file=os.environ.get("SERVING_KEY"), timeout=300) as model:
        port = int(os.environ.get("SERVING_PORT", PORT))
        app = make_app(Clicks(model))
        uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning")).run()


if __name__ == "__main__":
    main()
