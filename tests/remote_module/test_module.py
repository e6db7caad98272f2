"""RemoteModule, as users hold it, over the memory transport."""

from __future__ import annotations

import copy
import gc
import io
import operator
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autograd_dist
import remote_module
import rpc
from optim_dist import DistributedOptimizer
from remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES, RemoteModule, _RemoteModule
from rpc.agent import Agent
from rpc.errors import StaleRRefError
from rpc.testing import as_worker, local_group
from rpc.transports.base import Transport

NOT_PICKLABLE = (
    "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
)


class Echo(nn.Module):
    def __init__(self, first: int, second: int = -1) -> None:
        super().__init__()
        self.numbers = (first, second)
        self.weight = nn.Parameter(torch.ones(1))
        self.inner = nn.Linear(2, 3)

    def forward(self, tensor: Any, number: int, word: str = "default") -> Any:
        return word, number, tensor


class Failing(nn.Module):
    def forward(self) -> None:
        raise KeyError("no such key")


class Refusing(nn.Module):
    def __init__(self) -> None:
        raise OSError(28, "disk full")


class Doubling(nn.Linear):
    """Its hook changes what it returns."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_forward_hook(lambda module, args, output: 2 * args[0])


class Subclass(RemoteModule):
    pass


def read(module: rpc.RRef[Any], path: str) -> Any:
    return operator.attrgetter(path)(module.local_value())


def fill(parameter: rpc.RRef[nn.Parameter], value: float) -> None:
    nn.init.constant_(parameter.local_value(), value)


def attributes_of(module: RemoteModule) -> dict[str, Any]:
    return dict(vars(module))


def call(module: RemoteModule, *args: Any) -> Any:
    return module(*args)


def forward_later(module: RemoteModule, *args: Any) -> Any:
    return module.forward_async(*args).wait()


def train_and_report(module: RemoteModule) -> tuple[str, bool]:
    return repr(module.train(False)), "forward" in dir(module)


def same(module: RemoteModule) -> RemoteModule:
    return module


@pytest.fixture
def agents(make_transport: Callable[[], Transport] | None) -> Iterator[list[Agent]]:
    """Three workers; the test's thread belongs to the first, ``here``."""
    names = ("here", "there", "third")
    with local_group(*names, transport=make_transport) as agents, as_worker(agents[0]):
        yield agents


@pytest.fixture
def echo(agents: list[Agent]) -> RemoteModule:
    return RemoteModule("there/cpu", Echo, (1,), {"second": 2})


def test_the_public_names_are_these() -> None:
    assert remote_module.__all__ == [
        "_REMOTE_MODULE_PICKLED_ATTRIBUTES",
        "RemoteModule",
        "_RemoteModule",
    ]
    assert issubclass(RemoteModule, _RemoteModule)
    assert issubclass(_RemoteModule, nn.Module)


@pytest.mark.parametrize("place", ["there", "there/cpu", "rank:1", "rank:1/cpu"])
def test_the_module_is_made_where_the_string_says(agents: list[Agent], place: str) -> None:
    module = RemoteModule(place, Echo, [7], {"second": 8})
    rref = module.get_module_rref()
    assert rref is module.module_rref
    assert rref.owner_name() == "there"
    assert rpc.rpc_sync("there", read, (rref, "numbers")) == (7, 8)
    assert module.on in ("there", 1)
    assert module.device == "cpu"


def test_calls_return_what_the_module_returns(echo: RemoteModule) -> None:
    tensor = torch.ones(1)
    assert echo.forward(tensor, 2, "3") == ("3", 2, tensor)
    assert echo(tensor, 2, word="3") == ("3", 2, tensor)
    assert echo.forward_async(tensor, 2, word="3").wait() == ("3", 2, tensor)
    assert echo(None, number=4) == ("default", 4, None)


def test_forward_async_returns_a_future_of_torch(echo: RemoteModule) -> None:
    future = echo.forward_async(None, 1)
    assert isinstance(future, torch.futures.Future)
    assert future.then(lambda done: done.value()[1] + 1).wait() == 2


def test_a_linear_layer_computes_what_it_computes_locally(agents: list[Agent]) -> None:
    module = RemoteModule("there", nn.Linear, (3, 2))
    weight, bias = (parameter.to_here() for parameter in module.remote_parameters())
    x = torch.arange(6.0).reshape(2, 3)
    torch.testing.assert_close(module(x), nn.functional.linear(x, weight, bias))


def test_the_module_may_be_on_this_worker(agents: list[Agent]) -> None:
    module = RemoteModule("here", Echo, (1,))
    assert module(None, 5) == ("default", 5, None)
    assert module.module_rref.is_owner()


def test_hooks_of_the_module_run(agents: list[Agent]) -> None:
    assert RemoteModule("there", Doubling)(torch.ones(1, 1)).item() == 2


def test_what_is_no_module_is_reported_at_the_first_use(agents: list[Agent]) -> None:
    module = RemoteModule("there", dict)  # type: ignore[arg-type]
    for use in (module.forward, module.remote_parameters, module.train):
        with pytest.raises(
            ValueError,
            match=r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of "
            r"<class nn.Module>, but it returns an instance of <class 'dict'>\.",
        ):
            use()


def test_an_error_of_the_constructor_comes_back_as_its_type(agents: list[Agent]) -> None:
    with pytest.raises(OSError, match="disk full") as caught:
        RemoteModule("there", Refusing)()
    assert caught.value.errno == 28


def test_an_error_of_forward_comes_back_as_its_type(agents: list[Agent]) -> None:
    module = RemoteModule("there", Failing)
    with pytest.raises(KeyError, match="no such key"):
        module()
    future = module.forward_async()
    with pytest.raises(KeyError, match="no such key"):
        future.wait()


def test_bad_arguments_fail_at_once(agents: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match="nowhere"):
        RemoteModule("nowhere", Echo)
    with pytest.raises(ValueError, match="Could not parse remote_device: there/cpu/cpu"):
        RemoteModule("there/cpu/cpu", Echo)
    with pytest.raises(TypeError, match="module_cls must be a class of modules, but got 3"):
        RemoteModule("there", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="args=5 is a int, not a tuple"):
        RemoteModule("there", Echo, 5)  # type: ignore[arg-type]


def test_a_module_of_an_earlier_session_is_stale_in_the_next() -> None:
    with local_group("here", "there") as agents, as_worker(agents[0]):
        old = RemoteModule("there", Echo, (1,))
    with local_group("here", "there") as agents, as_worker(agents[0]):
        new = RemoteModule("there", Echo, (2,))
        for use in (
            lambda: old(None, 5),
            lambda: old.forward_async(None, 5).wait(),
            lambda: old.remote_parameters(),
            lambda: old.train(False),
            lambda: rpc.rpc_sync("there", call, (old, None, 5)),
        ):
            with pytest.raises(StaleRRefError, match=r"'here' .* which shut down"):
                use()
        assert new(None, 5) == ("default", 5, None)


def test_without_rpc_there_is_one_clear_error() -> None:
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        RemoteModule("there", Echo)


def test_remote_parameters_refer_to_the_very_parameters(echo: RemoteModule) -> None:
    parameters = echo.remote_parameters()
    assert [p.owner_name() for p in parameters] == ["there"] * 3
    assert [tuple(p.to_here().shape) for p in parameters] == [(1,), (3, 2), (3,)]
    assert [tuple(p.to_here().shape) for p in echo.remote_parameters(recurse=False)] == [(1,)]
    rpc.rpc_sync("there", fill, (parameters[0], 5))
    assert echo.module_rref.to_here().weight.item() == 5


def test_train_and_eval_reach_the_module_and_return_the_handle(echo: RemoteModule) -> None:
    for change, expected in ((echo.eval, False), (echo.train, True)):
        assert change() is echo
        assert echo.training is expected
        assert rpc.rpc_sync("there", read, (echo.module_rref, "inner.training")) is expected
    echo.train(False)
    assert rpc.rpc_sync("there", read, (echo.module_rref, "training")) is False
    with pytest.raises(ValueError, match="training mode is expected to be boolean"):
        echo.train("yes")  # type: ignore[arg-type]


def test_a_hybrid_model_switches_its_remote_part_too(echo: RemoteModule) -> None:
    class Hybrid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.remote = echo
            self.local = nn.Linear(1, 1)

    Hybrid().eval()
    assert rpc.rpc_sync("there", read, (echo.module_rref, "training")) is False


def test_the_handle_shows_where_the_module_is(echo: RemoteModule) -> None:
    assert repr(echo) == "RemoteModule(on='there', device='cpu')"


def test_a_remote_part_trains_like_a_local_one(agents: list[Agent]) -> None:
    module = RemoteModule("there", nn.Linear, (3, 2))
    local = nn.Linear(3, 2)
    local.load_state_dict(module.module_rref.to_here().state_dict())
    ours = DistributedOptimizer(torch.optim.Adam, module.remote_parameters(), lr=0.1)
    theirs = torch.optim.Adam(local.parameters(), lr=0.1)
    for x in torch.arange(12.0).reshape(2, 2, 3):
        theirs.zero_grad()
        local(x).pow(2).sum().backward()
        theirs.step()
        with autograd_dist.context() as context_id:
            loss = module.forward_async(x).wait().pow(2).sum()
            autograd_dist.backward(context_id, [loss])
            ours.step(context_id)
    trained = module.module_rref.to_here().state_dict()
    torch.testing.assert_close(trained, local.state_dict())


class Mapping:
    """A transport that maps devices for worker 1 alone."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.host_moves: frozenset[tuple[int, bool]] = frozenset()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def device_map(self, to: int) -> dict[torch.device, torch.device]:
        cpu = torch.device("cpu")
        return {cpu: cpu} if to == 1 else {}


def test_a_handle_knows_whether_its_makers_transport_maps_devices(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents[0], "transport", Mapping(agents[0].transport))
    mapped, unmapped = RemoteModule("rank:1", Echo, (1,)), RemoteModule("third", Echo, (1,))
    assert (mapped.is_device_map_set, unmapped.is_device_map_set) == (True, False)
    assert rpc.rpc_sync("third", same, (mapped,)).is_device_map_set is True


# --- Sending


def test_a_handle_that_travelled_has_exactly_the_documented_attributes(echo: RemoteModule) -> None:
    attributes = rpc.rpc_sync("third", attributes_of, (echo,))
    assert list(attributes) == [*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
    assert attributes["on"] == "there"
    assert attributes["device"] == "cpu"
    assert attributes["is_device_map_set"] is False
    assert attributes["is_scriptable"] is False
    assert [method.__name__ for method in attributes["generated_methods"]] == [
        "forward_async",
        "forward",
    ]
    assert attributes["forward"](None, 6) == ("default", 6, None)


def test_the_attributes_that_travel_are_in_their_order() -> None:
    assert _REMOTE_MODULE_PICKLED_ATTRIBUTES == (
        "on",
        "device",
        "is_device_map_set",
        "is_scriptable",
        "generated_methods",
        "module_rref",
    )


def test_a_handle_that_travelled_calls_the_module(echo: RemoteModule) -> None:
    for use in (call, forward_later):
        assert rpc.rpc_sync("third", use, (echo, None, 2, "3")) == ("3", 2, None)
    assert rpc.rpc_sync("there", call, (echo, None, 2)) == ("default", 2, None)


def test_a_handle_that_travelled_does_what_the_first_one_does(echo: RemoteModule) -> None:
    shown = rpc.rpc_sync("third", train_and_report, (echo,))
    assert shown == ("RemoteModule(on='there', device='cpu')", True)
    assert rpc.rpc_sync("there", read, (echo.module_rref, "training")) is False
    back = rpc.rpc_sync("third", same, (echo,))
    assert back(None, 1) == ("default", 1, None)
    assert len(back.remote_parameters()) == 3
    assert rpc.rpc_sync("third", same, (back,))(None, 1) == ("default", 1, None)


def test_a_handle_can_be_sent_before_its_module_exists(agents: list[Agent]) -> None:
    module = RemoteModule("there", Echo, (1,))
    assert rpc.rpc_sync("third", call, (module, None, 2)) == ("default", 2, None)


def test_a_handle_travels_inside_containers(echo: RemoteModule) -> None:
    back = rpc.rpc_sync("third", dict, ([("module", [echo])],))
    assert back["module"][0](None, 1) == ("default", 1, None)


def test_a_subclass_arrives_as_itself(agents: list[Agent]) -> None:
    back = rpc.rpc_sync("third", same, (Subclass("there", Echo, (1,)),))
    assert type(back) is Subclass
    assert back(None, 1) == ("default", 1, None)


def test_new_attributes_stay_behind_with_a_note(
    echo: RemoteModule, capfd: pytest.CaptureFixture[str]
) -> None:
    echo.new_attribute = 1
    assert "new_attribute" not in rpc.rpc_sync("third", attributes_of, (echo,))
    notes = [line for line in capfd.readouterr().err.splitlines() if "ignored" in line]
    assert len(notes) == 1
    assert notes[0].startswith(
        "The new attribute ``new_attribute`` of RemoteModule is ignored during RPC pickling"
    )


@pytest.mark.parametrize(
    "pickle_somehow",
    [pickle.dumps, copy.copy, copy.deepcopy, lambda module: torch.save(module, io.BytesIO())],
)
def test_python_pickle_is_refused(echo: RemoteModule, pickle_somehow: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        pickle_somehow(echo)
    assert str(caught.value) == NOT_PICKLABLE
    with pytest.raises(RuntimeError, match="Cannot unpickle RemoteModule in python pickler"):
        echo.__setstate__({})


def test_the_module_dies_with_its_last_handle(agents: list[Agent]) -> None:
    module = RemoteModule("there", Echo, (1,))
    module(None, 1)
    handle = weakref.ref(module)
    gc.disable()  # a handle is not part of a cycle
    try:
        del module
        assert handle() is None
    finally:
        gc.enable()


# --- Handles on modules that exist


def test_init_from_module_rref_shares_the_module(echo: RemoteModule) -> None:
    other = RemoteModule.init_from_module_rref("there/cpu", echo.get_module_rref())
    assert type(other) is RemoteModule
    other.eval()
    assert rpc.rpc_sync("there", read, (echo.module_rref, "training")) is False
    assert other(None, 3) == ("default", 3, None)
    assert other.is_scriptable is False
    assert other.generated_methods == echo.generated_methods


def test_init_from_module_rref_runs_at_another_worker_and_comes_back(echo: RemoteModule) -> None:
    args = ("third", echo.get_module_rref())
    other = rpc.rpc_sync("third", RemoteModule.init_from_module_rref, args)
    assert other.on == "third"
    assert rpc.rpc_sync("third", call, (other, None, 2)) == ("default", 2, None)
    assert len(other.remote_parameters()) == 3


def test_init_from_module_rref_takes_references_only(agents: list[Agent]) -> None:
    with pytest.raises(TypeError, match="module_rref must be an RRef, but got Linear"):
        RemoteModule.init_from_module_rref("there", nn.Linear(1, 1))  # type: ignore[arg-type]


# --- TorchScript


class TwiceInterface:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pass


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def scripted_twice() -> nn.Module:
    return torch.jit.script(Twice())


torchscript = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture
def twice(agents: list[Agent]) -> _RemoteModule:
    return _RemoteModule("there", Twice, _module_interface_cls=torch.jit.interface(TwiceInterface))


@torchscript
def test_with_an_interface_the_module_is_compiled_where_it_lives(twice: _RemoteModule) -> None:
    assert twice.is_scriptable is True
    assert twice(torch.ones(1)).item() == 2
    assert issubclass(twice.module_rref._get_type(), torch.jit.ScriptModule)


@torchscript
def test_a_script_module_handle_stays_but_its_reference_travels(twice: _RemoteModule) -> None:
    with pytest.raises(RuntimeError, match="Passing a script RemoteModule over RPC is not supp"):
        rpc.rpc_sync("third", call, (twice, torch.ones(1)))
    args = ("there", twice.module_rref, TwiceInterface)
    other = RemoteModule.init_from_module_rref(*args)
    assert other.is_scriptable is True
    assert other(torch.ones(1)).item() == 2


@torchscript
def test_a_function_may_make_a_script_module(agents: list[Agent]) -> None:
    module = RemoteModule("there", scripted_twice)
    assert module(torch.ones(1)).item() == 2
    assert rpc.rpc_sync("third", call, (module, torch.ones(1))).item() == 2


def test_the_state_of_a_module_crosses_the_wire_in_both_directions(agents: list[Agent]) -> None:
    module = RemoteModule("there", nn.Linear, (2, 3))
    other = nn.Linear(2, 3)

    found = module.load_state_dict(other.state_dict())

    assert not found.missing_keys
    assert not found.unexpected_keys
    state = module.state_dict(prefix="x.")
    assert set(state) == {"x.weight", "x.bias"}
    assert torch.equal(state["x.weight"], other.weight)
    assert not state["x.weight"].requires_grad
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({"weight": other.weight})
    assert module.load_state_dict({"y": other.bias}, strict=False).unexpected_keys == ["y"]


def test_a_module_is_converted_where_it_lives(agents: list[Agent]) -> None:
    module = RemoteModule("there", nn.Linear, (2, 3))
    assert module.half() is module
    assert module.state_dict()["weight"].dtype is torch.float16
    module.to("cpu", torch.float64)
    assert module.state_dict()["weight"].dtype is torch.float64
    assert module(torch.ones(1, 2, dtype=torch.float64)).dtype is torch.float64
    module.to("meta")
    assert module.device == "meta"
    with pytest.raises(TypeError, match="only accepts floating point"):
        module.to(torch.int64)


def test_parameters_are_frozen_where_they_live(agents: list[Agent]) -> None:
    module = RemoteModule("there", nn.Linear, (2, 3))
    rref = module.get_module_rref()
    assert module.requires_grad_(False) is module
    assert not rpc.rpc_sync("there", read, (rref, "weight.requires_grad"))
    module.requires_grad_()
    assert rpc.rpc_sync("there", read, (rref, "weight.requires_grad"))


def test_a_module_is_made_anew_by_the_handle_that_made_it(agents: list[Agent]) -> None:
    module = RemoteModule("there", Echo, (1,))
    former = module.get_module_rref()
    module.recreate()
    assert module.get_module_rref() is not former
    assert module(5, 6) == ("default", 6, 5)
    shared = RemoteModule.init_from_module_rref("there", module.get_module_rref())
    with pytest.raises(ValueError, match="on the handle with which the module was made"):
        shared.recreate()


def test_initial_weights_depend_on_the_seed_alone(agents: list[Agent]) -> None:
    def weight(**options: Any) -> torch.Tensor:
        module = RemoteModule("there", nn.Linear, (3, 3), **options)
        found: torch.Tensor = module.state_dict()["weight"]
        return found

    torch.manual_seed(5)
    expected, before = nn.Linear(3, 3).weight, torch.get_rng_state()
    assert torch.equal(weight(seed=5), expected)
    assert torch.equal(torch.get_rng_state(), before), "nobody else's numbers change"
    assert not torch.equal(weight(seed=6), expected)
    module = RemoteModule("there", nn.Linear, (3, 3), seed=5)
    module.recreate()
    assert torch.equal(module.state_dict()["weight"], expected)


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (1.5, TypeError, "seed=1.5 is a float, not a whole number"),
        (True, TypeError, "seed=True is a bool"),
        (-1, ValueError, "seed=-1 must be at least 0"),
    ],
)
def test_a_seed_that_is_none_is_refused(
    agents: list[Agent], seed: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RemoteModule("there", nn.Linear, (3, 3), seed=seed)
