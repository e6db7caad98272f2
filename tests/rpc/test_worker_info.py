"""Names and ids of workers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from rpc.worker_info import WorkerInfo


@pytest.mark.parametrize("name", ["w", "worker1", "a-b_c:d", "-", "0", "x" * 127])
def test_good_names(name: str):
    assert WorkerInfo(name, 0).name == name


@pytest.mark.parametrize("name", ["", "x" * 128, "a b", "a/b", "ä", "w1\n", "a.b", " w"])
def test_a_bad_name_is_refused_as_torch_refuses_it(name: str):
    with pytest.raises(RuntimeError, match=r"Worker name must match \^\[A-Za-z0-9-_:\]\*\$, and"):
        WorkerInfo(name, 0)


@pytest.mark.parametrize(
    ("name", "number", "shown"),
    [
        (5, 0, "name=5, which is a int"),
        ("a", "0", "id='0', which is a str"),
        ("a", 1.5, "id=1.5, which is a float"),
        ("a", True, "id=True, which is a bool"),
    ],
)
def test_what_is_no_name_or_no_number_is_refused(name: Any, number: Any, shown: str):
    with pytest.raises(TypeError, match=shown):
        WorkerInfo(name, number)


def test_it_shows_itself_as_torchs_does():
    assert repr(WorkerInfo("w1", 1)) == str(WorkerInfo("w1", 1)) == "WorkerInfo(id=1, name=w1)"


def test_equal_infos_are_interchangeable():
    assert WorkerInfo("a", 1) == WorkerInfo("a", 1)
    assert len({WorkerInfo("a", 1), WorkerInfo("a", 1), WorkerInfo("a", 2)}) == 2
    assert WorkerInfo("a", 1) != WorkerInfo("b", 1)


def test_it_cannot_be_changed():
    with pytest.raises(AttributeError):
        WorkerInfo("a", 1).id = 2  # type: ignore[misc]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_can_be_pickled_and_copied(protocol: int):
    info = WorkerInfo("a", 1)
    assert pickle.loads(pickle.dumps(info, protocol)) == info
    assert copy.deepcopy(info) == info
