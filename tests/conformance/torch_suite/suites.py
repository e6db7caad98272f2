"""Torch's test classes, made concrete: importing this module sets the process up as asked.

Every process of a run imports it first, spawned workers by unpickling a class
of it, so that all of them see the same names; see ``setup`` and ``redirect``.
"""

from __future__ import annotations

import unittest
from typing import Any

from torch_suite.setup import Sabotage, Setup, Subject

SETUP = Setup.of_process()


def _prepare() -> None:
    if SETUP.subject is Subject.TORCH:
        return
    from torch_suite import guard, redirect, sabotage

    redirection = redirect.redirect()
    guard.install(redirection.genuine)
    if SETUP.sabotage is not Sabotage.NOTHING:
        sabotage.commit(SETUP.sabotage, redirection.genuine)


_prepare()

# Only now: these modules take the redirected names.
import torch.distributed.rpc as rpc  # noqa: E402
from torch.testing._internal.distributed import rpc_utils  # noqa: E402
from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import (  # noqa: E402
    FaultyRpcAgentTestFixture,
)
from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import (  # noqa: E402
    RpcAgentTestFixture,
)
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (  # noqa: E402
    TensorPipeRpcAgentTestFixture,
)

from torch_suite.launch import Launch  # noqa: E402


class TensorWireRpcAgentTestFixture(RpcAgentTestFixture):
    """Runs torch's tests over our own transport."""

    @property
    def rpc_backend(self) -> Any:
        return rpc.backend_registry.BackendType["TENSORWIRE"]

    @property
    def rpc_backend_options(self) -> Any:
        return rpc.backend_registry.construct_rpc_backend_options(
            self.rpc_backend, init_method=self.init_method
        )

    def get_shutdown_error_regex(self) -> str:
        return ".*"

    def get_timeout_error_regex(self) -> str:
        return "RPC ran for more than"


def _classes() -> dict[str, type[unittest.TestCase]]:
    general: list[type] = [*rpc_utils.GENERIC_TESTS, *rpc_utils.GENERIC_CUDA_TESTS]
    pipe: list[type] = [*rpc_utils.TENSORPIPE_TESTS, *rpc_utils.TENSORPIPE_CUDA_TESTS]
    fixture: type = TensorPipeRpcAgentTestFixture
    if SETUP.subject is Subject.TENSORWIRE:
        fixture = TensorWireRpcAgentTestFixture
    bases = [(suite, fixture) for suite in (*general, *pipe)]
    if SETUP.subject is not Subject.TENSORWIRE:  # the faulty agent is one of TensorPipe's
        bases += [(suite, FaultyRpcAgentTestFixture) for suite in rpc_utils.FAULTY_AGENT_TESTS]
    return {suite.__name__: _concrete(suite, fixture) for suite, fixture in bases}


def _concrete(suite: type, fixture: type) -> type[unittest.TestCase]:
    name = suite.__name__
    return type(name, (Launch, suite, fixture, rpc_utils.SpawnHelper), {"__module__": __name__})


CLASSES = _classes()
globals().update(CLASSES)  # pickle finds them by name


def test_names() -> list[str]:
    """Every test there is, as ``Class.test``, in the order of torch's files."""
    loader = unittest.TestLoader()
    return [
        f"{name}.{test}" for name, kind in CLASSES.items() for test in loader.getTestCaseNames(kind)
    ]


def make(test: str) -> unittest.TestCase:
    """One test, ready to run."""
    name, _, method = test.partition(".")
    return CLASSES[name](method)
