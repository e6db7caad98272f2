"""Facts about an installation and its machine that bear on what TensorWire does and how fast.

Reads files of the kernel and the metadata of installed packages; starts nothing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

import rpc

_PACKAGE: Final = "tensorwire"
_DISTRIBUTION: Final = re.compile(r"[\w.-]+")
_EXTRA: Final = re.compile(r"""extra == ["']([\w-]+)["']""")
_OLDER_PYTHON: Final = re.compile(r"""python_version < ["'](\d+)\.(\d+)["']""")
_OWN_EXTRAS: Final = re.compile(rf"{_PACKAGE}\[([\w,-]+)\]")
_FOR_DEVELOPERS: Final = ("dev", "docs", "libraries", "tutorials")
_PACKAGES: Final = ("rpc", "autograd_dist", "optim_dist", "remote_module", _PACKAGE)

Installed = Callable[[str], "str | None"]
"""Tells the version of an installed distribution; None if there is none."""


@dataclass(frozen=True, slots=True)
class Extra:
    """An extra of this package.

    Args:
        name: as in ``pip install 'tensorwire[NAME]'``.
        versions: of the packages that it needs and that are there.
        missing: packages that it needs and that are not there.
    """

    name: str
    versions: Mapping[str, str]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, as far as it bears on a job.

    Args:
        system: kernel and processor.
        cores: that this process may use.
        all_cores: of the machine.
        core_limit: processors' worth of time that the control group allows; None for no limit.
        memory_bytes: of the machine.
        shared_memory_bytes: size of ``/dev/shm``, which torch's TensorPipe and loaders use; None
            if there is none.
        shared_memory_free: bytes of it that are free.
        locked_memory_bytes: limit of memory that a process may pin; None for no limit.
        open_files: limit of descriptors of a process.
        autogroups: True if the kernel divides cores among sessions first; None if it cannot.
        infiniband: adapters.
        gpus: names.
    """

    system: str
    cores: int
    all_cores: int
    core_limit: float | None
    memory_bytes: int
    shared_memory_bytes: int | None
    shared_memory_free: int | None
    locked_memory_bytes: int | None
    open_files: int
    autogroups: bool | None
    infiniband: tuple[str, ...]
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class About:
    """The versions and facts that ``python -m tensorwire`` prints.

    Args:
        version: of TensorWire.
        python: version.
        torch: version.
        modules: number of TensorWire's modules, compiled or not.
        compiled: names of those that run compiled; none in an ordinary installation.
        backends: by which workers may be connected; the default, ``RPC_BACKEND``'s or else
            TENSORWIRE, first.
        extras: of this package; none are known of a copy that is not installed.
        kernels: that the parameter server uses for rows: ``numba``, ``numba, not compiled yet``
            or ``torch``; or why it has none.
        machine: this one.
    """

    version: str
    python: str
    torch: str
    modules: int
    compiled: tuple[str, ...]
    backends: tuple[str, ...]
    extras: tuple[Extra, ...]
    kernels: str
    machine: Machine


def about() -> About:
    """Looks at this installation and this machine."""
    default = os.environ.get("RPC_BACKEND") or "TENSORWIRE"
    backends = [each.name for each in rpc.BackendType]
    return About(
        rpc.__version__,
        platform.python_version(),
        str(torch.__version__),
        *modules(Path(rpc.__file__).parents[1]),
        tuple(sorted(backends, key=lambda name: name != default)),
        extras(_requirements(), _installed),
        _kernels(),
        machine(),
    )


def modules(root: Path) -> tuple[int, tuple[str, ...]]:
    """The number of our modules below a folder, and the names of those that are compiled.

    Python imports a compiled module, if there is one, in place of the source beside it.
    """
    sources = [path for package in _PACKAGES for path in (root / package).rglob("*.py")]
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    compiled = [
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in sources
        if any(path.with_suffix(suffix).exists() for suffix in suffixes)
    ]
    return len(sources), tuple(sorted(compiled))


def extras(requirements: Iterable[str], installed: Installed) -> tuple[Extra, ...]:
    """The extras that requirements name, with what of each is there.

    Args:
        requirements: as in a package's metadata, such as ``numba>=0.60; extra == "ps"``.
        installed: tells the version of a distribution.
    """
    needs: dict[str, list[str]] = {}
    for each in requirements:
        extra, applies = _EXTRA.search(each), _OLDER_PYTHON.search(each)
        if extra is None or extra[1] in _FOR_DEVELOPERS:
            continue
        needed = needs.setdefault(extra[1], [])
        if applies is None or sys.version_info < (int(applies[1]), int(applies[2])):
            needed.append(each)
    return tuple(_extra(name, needs, installed) for name in sorted(needs))


def _extra(name: str, needs: Mapping[str, list[str]], installed: Installed) -> Extra:
    versions: dict[str, str] = {}
    missing: list[str] = []
    for distribution in sorted(set(_distributions(name, needs))):
        version = installed(distribution)
        if version is None:
            missing.append(distribution)
        else:
            versions[distribution] = version
    return Extra(name, versions, tuple(missing))


def _distributions(extra: str, needs: Mapping[str, list[str]]) -> Iterable[str]:
    """The packages that an extra needs, also through other extras of ours."""
    for requirement in needs.get(extra, ()):
        own = _OWN_EXTRAS.match(requirement)
        if own is not None:
            for other in own[1].split(","):
                yield from _distributions(other, needs)
        elif (match := _DISTRIBUTION.match(requirement)) is not None:
            yield match[0]


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernels() -> str:
    if importlib.util.find_spec("numba") is None:
        return "torch"
    try:
        from tensorwire.parameter_server.kernels.meanwhile import are_compiled
    except ImportError as error:
        return f"none: {error}"
    return "numba" if are_compiled() else "numba, not compiled yet"


def machine() -> Machine:
    """Looks at this machine."""
    size, free = _shared_memory(Path("/dev/shm"))
    return Machine(
        f"{platform.system()} {platform.release()} {platform.machine()}",
        len(os.sched_getaffinity(0)),
        os.cpu_count() or 0,
        core_limit(_text("/sys/fs/cgroup/cpu.max")),
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        size,
        free,
        _limit(resource.RLIMIT_MEMLOCK),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        {"1": True, "0": False}.get(_text("/proc/sys/kernel/sched_autogroup_enabled").strip()),
        tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
        tuple(torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())),
    )


def core_limit(text: str) -> float | None:
    """The processors that a control group's ``cpu.max`` allows; None for no limit."""
    quota, _, period = text.strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _shared_memory(folder: Path) -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None, None
    return usage.total, usage.free


def _limit(which: int) -> int | None:
    limit = resource.getrlimit(which)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
