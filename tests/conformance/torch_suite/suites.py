"""Torch's test classes, made concrete: importing this module sets the process up as asked.

Every process of a run imports it first, spawned workers by unpickling a class
of it, so that all of them see the same names; see ``setup`` and the library's ``dropin``.
"""

from __future__ import annotations

import functools
import unittest
from typing import Any

from torch_suite.setup import Sabotage, Setup, Subject

SETUP = Setup.of_process()


def _prepare() -> None:
    if SETUP.subject is Subject.TORCH:
        return
    from tensorwire import dropin
    from torch_suite import guard, sabotage

    redirection = dropin.install()
    guard.install(redirection.genuine)
    if SETUP.sabotage is not Sabotage.NOTHING:
        sabotage.commit(SETUP.sabotage, redirection.genuine)


_prepare()

# Only now: these modules take the redirected names.
import torch.distributed.rpc as rpc  # noqa: E402
from torch.testing._internal.distributed import rpc_utils  # noqa: E402
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


def _faulty_fixture() -> type:
    """To import it changes torch's table of backends, so other tests must come before."""
    from torch.testing._internal.distributed.rpc import faulty_rpc_agent_test_fixture

    torchs: type = faulty_rpc_agent_test_fixture.FaultyRpcAgentTestFixture
    if SETUP.subject is not Subject.TENSORWIRE:
        return torchs
    backend = property(lambda self: rpc.backend_registry.BackendType["FAULTY_TENSORWIRE"])
    return type("FaultyTensorWireRpcAgentTestFixture", (torchs,), {"rpc_backend": backend})


def _plain_fixture() -> type:
    if SETUP.subject is Subject.TENSORWIRE:
        return TensorWireRpcAgentTestFixture
    return TensorPipeRpcAgentTestFixture


_PLAIN: list[type] = [
    *(*rpc_utils.GENERIC_TESTS, *rpc_utils.GENERIC_CUDA_TESTS),
    *(*rpc_utils.TENSORPIPE_TESTS, *rpc_utils.TENSORPIPE_CUDA_TESTS),
]
_FAULTY: list[type] = rpc_utils.FAULTY_AGENT_TESTS


@functools.cache
def _class(name: str) -> type[unittest.TestCase]:
    for suites, fixture in ((_PLAIN, _plain_fixture), (_FAULTY, _faulty_fixture)):
        for suite in suites:
            if suite.__name__ == name:
                bases = (Launch, suite, fixture(), rpc_utils.SpawnHelper)
                return type(name, bases, {"__module__": __name__})
    raise AttributeError(f"torch has no tests called {name!r}")


def __getattr__(name: str) -> Any:
    """Lets pickle find the classes by name."""
    return _class(name)


def test_names() -> list[str]:
    """Every test there is, as ``Class.test``, in the order of torch's files."""
    loader = unittest.TestLoader()
    return [
        f"{suite.__name__}.{test}"
        for suite in (*_PLAIN, *_FAULTY)
        for test in loader.getTestCaseNames(suite)  # type: ignore[arg-type]
    ]


def make(test: str) -> unittest.TestCase:
    """One test, ready to run."""
    name, _, method = test.partition(".")
    return _class(name)(method)
