"""``RemoteModule``: an ``nn.Module`` that lives on another worker.

Owns the handle: which worker and device, the reference, what of it travels over
RPC. What happens at the module's owner is in ``handlers``; which methods of
``nn.Module`` make no sense from afar, in ``local_only``.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

import rpc
from remote_module import backups, handlers
from remote_module.local_only import LocalOnlyMethodsRefused
from remote_module.randomness import require_seed
from remote_module.remote_device import parse_remote_device
from remote_module.scripting import scriptable_class
from rpc import extend
from rpc.extend import import_remedy, require_arguments

SECONDS_TO_HEAR: Final = 5.0
"""Seconds for the loss of a worker to become known, of which a call has failed already."""

if TYPE_CHECKING:
    from typing_extensions import Self

_REMOTE_MODULE_PICKLED_ATTRIBUTES: Final = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
"""The attributes of a remote module that travel over RPC, in this order."""


@dataclass(frozen=True, slots=True)
class _Caller:
    """Calls one module. Apart from ``RemoteModule``, so that its bound methods, which
    are attributes there, do not keep the handle alive in a cycle.
    """

    module_rref: rpc.RRef[nn.Module]
    device: str
    is_device_map_set: bool

    def forward_async(self, *args: Any, **kwargs: Any) -> rpc.Future[Any]:
        """Calls the module on its worker; returns a future of the result at once."""
        return rpc.rpc_async(
            self.module_rref.owner(), handlers.run_forward, self._call(args, kwargs)
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module on its worker and returns the result."""
        return rpc.rpc_sync(
            self.module_rref.owner(), handlers.run_forward, self._call(args, kwargs)
        )

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        return self.module_rref, self.device, self.is_device_map_set, args, kwargs


@dataclass(frozen=True, slots=True)
class _Backup:
    """The backup of a module.

    Args:
        worker: its name.
        key: names the copy there.
        owner: the life of the module's owner.
    """

    worker: str
    key: str
    owner: extend.Life


_FORWARD_METHODS: Final = (_Caller.forward_async, _Caller.forward)
_NOT_WORTH_A_NOTE: Final = frozenset(
    [
        *vars(nn.Module()),
        *(method.__name__ for method in _FORWARD_METHODS),
        "_recipe",
        "_seed",
        "_backup",
    ]
)


class _RemoteModule(LocalOnlyMethodsRefused):
    """:class:`RemoteModule` with one more argument.

    Args:
        remote_device: as for :class:`RemoteModule`, like those up to ``kwargs``.
        module_cls: makes the module.
        args: its positional arguments.
        kwargs: its keyword arguments.
        seed: of the random numbers that ``module_cls`` draws.
        backup: a worker that keeps a copy of the module's state.
        _module_interface_cls: a TorchScript interface; if given, the module is
            compiled with TorchScript where it lives, ``is_scriptable`` is True, the
            handle may be compiled as well (``torch.jit.script``), and cannot be sent: send
            its ``module_rref`` instead.

    Raises:
        TypeError: ``module_cls`` cannot be called, or not with ``args`` and ``kwargs``.
        ValueError: there is no such place, or the interface is none.
    """

    on: str | int
    device: str
    is_device_map_set: bool
    is_scriptable: bool
    generated_methods: list[Callable[..., Any]]
    module_rref: rpc.RRef[nn.Module]
    forward_async: Callable[..., rpc.Future[Any]]
    _interface: Any
    _recipe: tuple[Callable[..., nn.Module], Sequence[Any], dict[str, Any]]
    _seed: int | None
    _backup: _Backup | None

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: Any = None,
        *,
        seed: int | None = None,
        backup: str | None = None,
    ) -> None:
        super().__init__()
        if not callable(module_cls):
            raise TypeError(f"module_cls must be a class of modules, but got {module_cls!r}")
        require_arguments(args, kwargs)
        require_seed(seed)
        self._place(remote_device, _module_interface_cls)
        self._recipe = (module_cls, args or (), kwargs or {})
        self._seed = seed
        self._attach(self._create())
        self._backup = None
        if backup is not None:
            self._back_up(backup)

    @staticmethod
    def init_from_module_rref(
        remote_device: str,
        module_rref: rpc.RRef[nn.Module],
        _module_interface_cls: Any = None,
    ) -> RemoteModule:
        """Makes a handle for a module that exists, so that several share it.

        Args:
            remote_device: where the module is, as for :class:`RemoteModule`.
            module_rref: refers to it; calls go to this reference's owner.
            _module_interface_cls: its TorchScript interface, if it is a script module.

        Example::

            encoder = RemoteModule.init_from_module_rref("server", other.get_module_rref())
        """
        if not isinstance(module_rref, rpc.RRef):
            raise TypeError(
                f"module_rref must be an RRef, but got {type(module_rref).__name__}"
                f"{import_remedy(module_rref)}"
            )
        remote_module = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(remote_module)
        remote_module._place(remote_device, _module_interface_cls)
        remote_module._attach(module_rref)
        return remote_module

    def remote_parameters(self, recurse: bool = True) -> list[rpc.RRef[nn.Parameter]]:
        """References to the module's parameters, for a ``DistributedOptimizer`` for instance.

        Args:
            recurse: also those of its submodules.
        """
        return rpc.rpc_sync(
            self.module_rref.owner(), handlers.parameter_rrefs, (self.module_rref, recurse)
        )

    def get_module_rref(self) -> rpc.RRef[nn.Module]:
        """The reference to the module."""
        return self.module_rref

    def recreate(self, remote_device: str | None = None) -> None:
        """Makes the module anew, as at the beginning, for example when its worker came back.

        Only this handle follows; other handles keep referring to the former module.

        Args:
            remote_device: where, as for :class:`RemoteModule`; default where it was.

        Raises:
            ValueError: the handle came from elsewhere, and does not know how the module was made.
        """
        if not hasattr(self, "_recipe"):
            raise ValueError(
                "recreate() works on the handle with which the module was made, "
                "not on one that was received or made of a reference"
            )
        if remote_device is not None:
            self._place(remote_device, getattr(self, "_interface", None))
        self._attach(self._create())

    def recover(self, backup: str | None = None) -> None:
        """Makes the module from its backup, at the backup's worker, after its owner was lost.

        It is as after the last step of a ``DistributedOptimizer`` that returned, or of the one
        that failed, and so is what ``DistributedOptimizer.recover`` takes over for it. Only this
        handle follows.

        Args:
            backup: another worker that backs it up from now on. Default none.

        Raises:
            RuntimeError: the owner is living, or the copy is lost too.
            ValueError: the module has no backup, or the new one cannot be.
        """
        former = getattr(self, "_backup", None)
        if former is None:
            raise ValueError("the module has no backup: make it with RemoteModule(..., backup=...)")
        if _lives_on(former.owner):
            raise RuntimeError(f"worker {self.on!r} is living, so its module is where it was")
        if backup is not None:
            _require_backup(backup, former.worker)
        if not rpc.rpc_sync(former.worker, backups.is_kept, (former.key,)):
            raise RuntimeError(f"worker {former.worker!r} has no copy of the module any more")
        device = self.device
        self._place(f"{former.worker}/{device}", None)
        arguments = (*self._recipe, device, former.key, backup)
        self._attach(rpc.remote(self.on, backups.create_of_copy, arguments))
        mode = self.module_rref, self.training
        rpc.rpc_sync(self.module_rref.owner(), handlers.set_training, mode)
        owner = extend.life_of(former.worker)
        self._backup = None if backup is None else _Backup(backup, former.key, owner)

    def _back_up(self, backup: str) -> None:
        owner = self.module_rref.owner_name()
        _require_backup(backup, owner)
        if self.is_scriptable:
            raise ValueError(f"backup={backup!r}: a script module cannot be made again elsewhere")
        made = _Backup(backup, uuid.uuid4().hex, extend.life_of(owner))
        arguments = (self.module_rref, made.key, backup)
        rpc.rpc_sync(self.module_rref.owner(), backups.back_up, arguments)
        self._backup = made

    @property
    def can_be_made_anew(self) -> bool:
        """True if :meth:`recreate` works on this handle: the module was made with it."""
        return hasattr(self, "_recipe")

    def state_dict(self, *, prefix: str = "") -> dict[str, Any]:  # type: ignore[override]
        """Fetches the module's parameters and buffers, by name.

        Args:
            prefix: put before every name.
        """
        return rpc.rpc_sync(
            self.module_rref.owner(),
            handlers.read_state,
            (self.module_rref, prefix, self.is_device_map_set),
        )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Sends parameters and buffers to the module, which copies them into its own.

        Args:
            state_dict: as :meth:`state_dict` returns it.
            strict: names must be the module's, no more and no fewer.
            assign: take the tensors that arrive in place of copying them.

        Returns:
            The names that were missing and those that were unexpected.

        Raises:
            RuntimeError: names or shapes do not fit.
        """
        arguments = (self.module_rref, state_dict, strict, assign)
        return _IncompatibleKeys(
            *rpc.rpc_sync(self.module_rref.owner(), handlers.load_state, arguments)
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Moves the module to a device of its worker, or changes its dtype; as ``nn.Module.to``.

        Other handles do not learn of a new device and must be made again.
        """
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        place = None if device is None else str(device)
        arguments = (self.module_rref, place, dtype, non_blocking, memory_format)
        rpc.rpc_sync(self.module_rref.owner(), handlers.convert, arguments)
        if place is not None:
            self.device = place
            self._attach(self.module_rref)
        return self

    def half(self) -> Self:
        """Converts floating-point parameters and buffers to ``torch.float16``."""
        return self.to(torch.float16)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Says whether autograd records operations on the module's parameters."""
        rpc.rpc_sync(
            self.module_rref.owner(), handlers.set_requires_grad, (self.module_rref, requires_grad)
        )
        return self

    def train(self, mode: bool = True) -> Self:
        """Puts the module into training mode, or with ``mode=False`` into evaluation mode.

        Raises:
            ValueError: ``mode`` is no bool.
        """
        if not isinstance(mode, bool):
            raise ValueError("training mode is expected to be boolean")
        rpc.rpc_sync(self.module_rref.owner(), handlers.set_training, (self.module_rref, mode))
        self.training = mode
        return self

    def eval(self) -> Self:
        """Puts the module into evaluation mode."""
        return self.train(False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, as ``forward`` does."""
        if "_forward_hooks" in vars(self):
            return super().__call__(*args, **kwargs)
        # A handle that came over RPC has no state of a local module, and so no hooks.
        return self.forward(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on={self.on!r}, device={self.device!r})"

    def __dir__(self) -> Iterable[str]:
        return object.__dir__(self)

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when "
            "using RPC"
        )

    def __setstate__(self, state: object) -> NoReturn:
        raise RuntimeError(
            "Cannot unpickle RemoteModule in python pickler. RemoteModule can only be unpickled "
            "when using RPC"
        )

    def __prepare_scriptable__(self) -> nn.Module:
        """The module that ``torch.jit.script`` compiles in place of this handle.

        Raises:
            RuntimeError: nothing says which types the module takes and returns.
        """
        if not self.is_scriptable:
            raise RuntimeError(
                "A RemoteModule can be compiled with TorchScript, or be part of a module that is, "
                "only if it was made with its TorchScript interface: "
                "_RemoteModule(..., _module_interface_cls=...)"
            )
        return scriptable_class(self._interface)(self)

    def __rpc_reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The form in which a handle travels in calls: see ``rpc.wire.codec``."""
        if self.is_scriptable:
            raise RuntimeError(
                "Passing a script RemoteModule over RPC is not supported. Send its `module_rref` "
                "and give that to `RemoteModule.init_from_module_rref` at the receiver."
            )
        state = vars(self)
        for name in state.keys() - {*_REMOTE_MODULE_PICKLED_ATTRIBUTES, *_NOT_WORTH_A_NOTE}:
            print(_dropped(name), file=sys.stderr)
        carried = tuple(state[name] for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES)
        return _arrive, (type(self), *carried)

    def _create(self) -> rpc.RRef[nn.Module]:
        arguments = (*self._recipe, self.device, self.is_scriptable, self._seed)
        return rpc.remote(self.on, handlers.create_module, arguments)

    def _place(self, remote_device: str, interface: Any) -> None:
        place = parse_remote_device(remote_device)
        self.on = place.worker
        self.device = str(place.device)
        self.is_device_map_set = bool(extend.worker().device_map(place.worker))
        self.is_scriptable = interface is not None
        if self.is_scriptable:
            if not hasattr(interface, "__torch_script_interface__"):
                raise ValueError(
                    f"module_interface_cls {interface!r} must be a type object decorated by "
                    "@torch.jit.interface"
                )
            self._interface = interface
        self.generated_methods = list(_FORWARD_METHODS)

    def _attach(self, module_rref: rpc.RRef[nn.Module]) -> None:
        self.module_rref = module_rref
        calls = _Caller(module_rref, self.device, self.is_device_map_set)
        self.forward_async = calls.forward_async
        self.forward = calls.forward


class RemoteModule(_RemoteModule):
    """A handle on a module that is made, and runs, on another worker.

    It is called like the module itself. Within a distributed autograd context
    gradients flow through it to the module's parameters, which stay where they
    are; ``remote_parameters`` gives an optimizer access to them. Handles can be
    sent to other workers in calls: all share the one module.

    If the module is on a device other than the CPU, tensors in its arguments are
    moved there, and those in its results back to the CPU, unless this worker has
    a device map for the module's worker.

    Args:
        remote_device: ``"worker/device"``, ``"worker"``, ``"rank:N/device"`` or
            ``"rank:N"``; without a device, the CPU.
        module_cls: the module's class, or a function that makes it; runs remotely.
            An error that it raises is raised by every use of the handle.
        args: its positional arguments.
        kwargs: its keyword arguments.
        seed: of the random numbers that ``module_cls`` draws there, such as initial weights, which
            then depend on it alone. Default none: they come as they do on that worker, and
            ``torch.manual_seed`` here has no effect on them.
        backup: the name of another worker that keeps a copy of the module's state in memory. It
            has each step of a ``DistributedOptimizer`` before that returns; after the owner's
            death ``recover()`` makes the module of it. Default none.

    Raises:
        TypeError: ``module_cls`` cannot be called, or ``seed`` is no whole number.
        ValueError: ``remote_device`` cannot be parsed.
        RuntimeError: there is no such worker, or RPC is not initialized.

    Example::

        encoder = RemoteModule("server/cuda:0", nn.Linear, args=(20, 30))
        y = encoder(torch.randn(128, 20))
        future = encoder.forward_async(torch.randn(128, 20))
        optimizer = DistributedOptimizer(torch.optim.SGD, encoder.remote_parameters(), lr=0.05)
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        *,
        seed: int | None = None,
        backup: str | None = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs, seed=seed, backup=backup)


def _arrive(kind: type[_RemoteModule], *carried: Any) -> _RemoteModule:
    """Makes a handle of what travelled; it has none of a local module's state."""
    remote_module = kind.__new__(kind)
    vars(remote_module).update(zip(_REMOTE_MODULE_PICKLED_ATTRIBUTES, carried, strict=True))
    remote_module._attach(remote_module.module_rref)
    return remote_module


def _require_backup(backup: object, owner: str) -> None:
    if not isinstance(backup, str):
        raise TypeError(f"backup={backup!r} is a {type(backup).__name__}, not a worker's name")
    if backup == owner:
        raise ValueError(f"backup={backup!r} is the module's own worker, and would die with it")
    try:
        extend.life_of(backup)
    except (rpc.UnknownWorkerError, rpc.WorkerLostError) as error:
        raise ValueError(f"backup={backup!r}: no such worker is in the group") from error


def _dropped(name: str) -> str:
    return (
        f"The new attribute ``{name}`` of RemoteModule is ignored during RPC pickling: only "
        f"{', '.join(_REMOTE_MODULE_PICKLED_ATTRIBUTES)} travel."
    )


def _lives_on(life: extend.Life) -> bool:
    """False once a life is known to be over: a call may fail shortly before that."""
    deadline, heard = time.monotonic() + SECONDS_TO_HEAR, threading.Event()
    forget = extend.on_membership(lambda _: heard.set())
    try:
        while extend.is_living(life) and (left := deadline - time.monotonic()) > 0:
            heard.wait(left)
            heard.clear()
    finally:
        forget()
    return extend.is_living(life)
