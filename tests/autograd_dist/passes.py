"""Functions that workers call in tests of distributed autograd."""

from __future__ import annotations

from functools import partial

import torch

import rpc
from tests import waiting


def leaf(*values):
    return torch.tensor(values or (1.0, 2.0), requires_grad=True)


def square(x):
    return x * x


def echo(x):
    return x


SECONDS = 10.0


def debug(agent, key):
    return agent.debug_info().get(key, 0)


wait_until = partial(waiting.until, seconds=SECONDS)


def square_at(name, x):
    return rpc.rpc_sync(name, square, (x,)) + 1
