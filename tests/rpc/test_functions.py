"""Functions whose future's value is the result."""

from __future__ import annotations

import re
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import rpc
from rpc.functions import async_execution, is_async_execution
from rpc.testing import as_worker, local_group


def _plain() -> None: ...


@async_execution
def _marked(x: int) -> torch.futures.Future[int]:
    """Adds one."""
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(x + 1)
    return future


def _add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def _fork(x: Tensor) -> torch.futures.Future[Tensor]:
    return torch.jit.fork(_add, x, x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole
    _fork = async_execution(torch.jit.script(_fork))


def test_a_marked_function_keeps_its_names_and_can_be_called():
    assert (_marked.__name__, _marked.__doc__) == ("_marked", "Adds one.")
    assert is_async_execution(_marked)
    assert not is_async_execution(_plain)
    assert _marked(1).wait() == 2


_THREADS: list[int] = []


class _Noting:
    """Notes by which thread it is packed."""

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        _THREADS.append(threading.get_ident())
        return int, (7,)


@async_execution
def _done_at_once() -> torch.futures.Future[_Noting]:
    _THREADS[:] = [threading.get_ident()]
    future: torch.futures.Future[_Noting] = torch.futures.Future()
    future.set_result(_Noting())
    return future


def test_a_future_that_is_done_at_once_is_answered_by_the_thread_that_made_it() -> None:
    with local_group("alice", "bob") as (alice, _), as_worker(alice):
        assert rpc.rpc_sync("bob", _done_at_once) == 7
    assert len(_THREADS) == 2
    assert _THREADS[0] == _THREADS[1]


def test_anything_but_a_future_fails_the_call():
    @async_execution
    def wrong() -> int:
        return 3

    with (
        local_group("alice", "bob") as (alice, _),
        as_worker(alice),
        pytest.raises(RuntimeError, match=r"must return a torch.futures.Future object"),
    ):
        rpc.rpc_sync("bob", wrong)


@pytest.mark.parametrize("wrong", [5, None, classmethod(len)])
def test_what_cannot_be_called_cannot_be_marked_as_asynchronous(wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"{re.escape(repr(wrong))} cannot be marked"):
        async_execution(wrong)


def test_a_torchscript_function_can_be_marked_and_is_sent_by_name():
    with local_group("alice", "bob") as (alice, _), as_worker(alice):
        assert rpc.rpc_sync("bob", _fork, (torch.ones(2),)).tolist() == [2, 2]
        assert rpc.remote("bob", _fork, (torch.ones(2),)).to_here().tolist() == [2, 2]
