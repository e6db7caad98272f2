"""Torch's names stand for ours while the drop-in is installed, and for torch's afterwards."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import autograd_dist
import optim_dist
import remote_module
import rpc
from tensorwire import dropin
from tensorwire.dropin.environment import environment, environment_without
from tests.rpc.worker_processes import WorkerProcess

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[3]
Maker = Callable[[], WorkerProcess]


def _imports() -> dict[str, object]:
    """The things that a library that is imported now would get."""
    torch = importlib.import_module("torch")
    return {
        "package": torch.distributed.rpc,
        "imported": importlib.import_module("torch.distributed.rpc.api"),
        "autograd": importlib.import_module("torch.distributed.autograd"),
        "optimizer": torch.distributed.optim.DistributedOptimizer,
        "module": torch.distributed.nn.RemoteModule,
        "reference": torch._C._distributed_rpc.PyRRef,
        "is_set": torch._C._distributed_rpc._is_current_rpc_agent_set,
        "in_torch": torch._jit_internal.RRef,
    }


def _library(name: str) -> types.ModuleType:
    """One that was imported before, and took names from torch in several ways."""
    library = types.ModuleType(name)
    sys.modules[name] = library
    code = (
        "import torch.distributed.rpc as whole\n"
        "from torch.distributed.rpc import RRef, rpc_sync as call\n"
        "from torch._C import _distributed_rpc as in_c\n"
        "from torch._C._distributed_rpc import _is_current_rpc_agent_set\n"
    )
    exec(code, library.__dict__)
    return library


def _install_and_compare() -> None:
    library = _library("imported_before")
    before = _imports(), dict(vars(library))
    dropin.install()
    assert dropin.is_installed()
    assert _imports() == {
        "package": rpc,
        "imported": rpc.api,
        "autograd": autograd_dist,
        "optimizer": optim_dist.DistributedOptimizer,
        "module": remote_module.RemoteModule,
        "reference": rpc.RRef,
        "is_set": rpc._is_current_rpc_agent_set,
        "in_torch": rpc.RRef,
    }
    assert (library.whole, library.RRef, library.call) == (rpc, rpc.RRef, rpc.rpc_sync)
    assert library._is_current_rpc_agent_set is rpc._is_current_rpc_agent_set
    assert library.in_c.PyRRef is rpc.RRef
    assert dropin.install() is dropin.install(), "a second time does nothing"
    dropin.uninstall()
    assert not dropin.is_installed()
    assert (_imports(), dict(vars(library))) == before
    assert "TENSORWIRE_DROPIN" not in os.environ


def test_all_names_change_wherever_they_are_known_and_come_back(make_process: Maker) -> None:
    make_process().do(_install_and_compare)


def _import_no_counterpart() -> str:
    dropin.install()
    try:
        importlib.import_module("torch.distributed.rpc.calls")
    except ModuleNotFoundError as error:
        return str(error)
    return "imported"


def test_a_module_without_counterpart_is_refused_by_name(make_process: Maker) -> None:
    told = make_process().do(_import_no_counterpart)
    assert told == "TensorWire has no counterpart of torch.distributed.rpc.calls"


def _install_beside_torch() -> str:
    from torch.distributed import rpc as torchs

    options = torchs.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:0")
    torchs.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        dropin.install()
    except dropin.DropinError as error:
        return str(error)
    finally:
        torchs.shutdown()
    return "installed"


def test_torchs_own_rpc_must_not_run(make_process: Maker) -> None:
    assert "torch's own RPC is running in this process" in make_process().do(_install_beside_torch)


def _uninstall_while_running() -> str:
    dropin.install()
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=_ALONE)
    try:
        dropin.uninstall()
    except dropin.DropinError as error:
        return str(error)
    finally:
        rpc.shutdown()
    return "uninstalled"


_ALONE = rpc.TensorWireRpcBackendOptions(init_method="tcp://127.0.0.1:0")


def test_names_are_not_taken_from_a_running_group(make_process: Maker) -> None:
    assert "call rpc.shutdown() before" in make_process().do(_uninstall_while_running)


def _install_two_backends() -> tuple[str, str]:
    told = []
    for backend in ("CARRIER_PIGEON", "TENSORPIPE"):
        try:
            dropin.install(backend)
        except (ValueError, dropin.DropinError) as error:
            told.append(str(error))
        dropin.install("TENSORWIRE")
    return told[0], told[1]


def test_a_backend_must_exist_and_stays(make_process: Maker) -> None:
    unknown, another = make_process().do(_install_two_backends)
    assert "backend='CARRIER_PIGEON' does not exist" in unknown
    assert "installed already, with backend=BackendType.TENSORWIRE" in another


def test_the_environment_of_children_is_added_once_and_removed_again() -> None:
    once = environment({"PYTHONPATH": "mine", "HOME": "home"}, backend="TENSORWIRE")
    assert environment(once, backend="TENSORWIRE") == once
    assert once["PYTHONPATH"].endswith("startup:mine")
    assert environment_without(once) == {"PYTHONPATH": "mine", "HOME": "home"}
    assert environment_without(environment({})) == {}


_SHOW = "import torch.distributed.rpc as r; print(r.__name__, r.init_rpc.__qualname__)"


def _run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tensorwire.dropin", *arguments]
    variables = os.environ | {"PYTHONPATH": str(_ROOT)}
    return subprocess.run(
        words, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


def test_a_program_and_the_processes_it_starts_use_ours(tmp_path: Path) -> None:
    """The script hides a sitecustomize of its own, as some environments have one."""
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['HIDDEN'] = 'ran'")
    (tmp_path / "script.py").write_text(
        "import os, subprocess, sys\n"
        "import helper\n"
        f"code = {_SHOW!r}\n"
        "exec(code)\n"
        "variables = {**os.environ, 'PYTHONPATH': os.environ['PYTHONPATH'] + ':' + sys.path[0]}\n"
        "code += '; import os; print(os.environ.get(\"HIDDEN\"))'\n"
        "sys.stdout.flush()\n"
        "subprocess.run([sys.executable, '-c', code], env=variables, check=True)\n"
        "print(__name__, sys.argv[1:])\n"
    )
    (tmp_path / "helper.py").write_text("")
    done = _run("--backend", "TENSORWIRE", "script.py", "--steps", "3", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "rpc _RpcModule._init_rpc",
        "rpc _RpcModule._init_rpc",
        "ran",
        "__main__ ['--steps', '3']",
    ]


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--backend"], ["--nonsense", "x.py"]])
def test_without_a_program_the_usage_is_told(arguments: list[str], tmp_path: Path) -> None:
    from tensorwire.dropin.__main__ import main

    with pytest.raises(SystemExit, match=r"usage: python -m tensorwire\.dropin"):
        main(arguments)
