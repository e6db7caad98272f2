"""Backends that programs register: what they are made of, and what they must return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rpc
from rpc.backend_registry import _Members
from rpc.current import current_agent, find_agent, set_process_agent
from rpc.outcomes import collecting
from rpc.runtime import torch_contexts
from rpc.testing import connect

Options = Callable[..., rpc.RpcBackendOptions]


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    """Forgets after a test what it registered."""
    before = dict(rpc.BackendType.__members__)
    yield
    _Members._members.clear()
    _Members._members.update(before)


@pytest.fixture
def options(tmp_path: Path) -> Iterator[Options]:
    """A handler written as the original's are, which always get both arguments."""

    def construct(rpc_timeout: float, init_method: str) -> rpc.RpcBackendOptions:
        assert init_method == "env://"
        return rpc.RpcBackendOptions(rpc_timeout=rpc_timeout, init_method=f"file://{tmp_path}/here")

    yield construct
    if find_agent() is not None:  # not every test starts one, nor need an earlier one have
        rpc.shutdown(graceful=False)


def agent(**_: Any) -> rpc.RpcAgent:
    return connect("alone")[0]


def nothing(**_: Any) -> Any:
    return None


def test_a_registered_backend_forms_a_group(options: Options) -> None:
    backend = rpc.register_backend("OWN", options, agent)
    rpc.init_rpc("alone", backend=backend, rank=0, world_size=1)
    assert rpc.rpc_sync("alone", abs, (-1,)) == 1


class Stub:
    """An agent of a program's own, with what torch asks of one."""

    def get_worker_infos(self) -> list[rpc.WorkerInfo]:
        return [rpc.WorkerInfo("alone", 0)]


def test_a_backend_may_bring_an_agent_of_its_own(options: Options) -> None:
    backend = rpc.register_backend("OWN", options, lambda **_: Stub())
    try:
        rpc.init_rpc("alone", backend=backend, rank=0, world_size=1)
        assert isinstance(current_agent(), Stub)
    finally:  # all that ``rpc.shutdown`` does but to end the agent, which this one cannot
        set_process_agent(None)
        collecting.stop_using()
        torch_contexts.stop_using()


def test_a_backend_that_returns_no_agent_is_refused_and_named(options: Options) -> None:
    backend = rpc.register_backend("OWN", options, nothing)
    with pytest.raises(TypeError, match=r"BackendType.OWN .* instance of rpc.RpcAgent.* None"):
        rpc.init_rpc("alone", backend=backend, rank=0, world_size=1)
    with pytest.raises(rpc.NotInitializedError):
        rpc.rpc_sync("alone", abs, (-1,))


def test_a_backend_that_makes_no_options_is_refused_and_named() -> None:
    backend = rpc.register_backend("OWN", nothing, agent)
    with pytest.raises(TypeError, match=r"BackendType.OWN .* RpcBackendOptions.* None"):
        rpc.init_rpc("alone", backend=backend, rank=0, world_size=1)


def test_what_cannot_be_a_backend_is_not_registered(options: Options) -> None:
    wrong: Any = 5
    with pytest.raises(TypeError, match="backend_name=5 is a int, not a str"):
        rpc.register_backend(wrong, options, agent)
    with pytest.raises(ValueError, match="backend_name is empty"):
        rpc.register_backend("", options, agent)
    with pytest.raises(TypeError, match="construct_rpc_backend_options_handler=5 cannot be called"):
        rpc.register_backend("OWN", wrong, agent)
    with pytest.raises(TypeError, match="init_backend_handler=5 cannot be called"):
        rpc.register_backend("OWN", options, wrong)
    assert not rpc.backend_registered("OWN")


def test_a_name_is_given_once(options: Options) -> None:
    rpc.register_backend("OWN", options, agent)
    with pytest.raises(RuntimeError, match="OWN: already registered"):
        rpc.register_backend("OWN", options, agent)
