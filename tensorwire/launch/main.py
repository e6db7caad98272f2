"""``rpcrun``: from the command line to an agent that runs, and to an exit code.

Without roles it hands everything to torch's own launcher. Exit codes: 0 if the job succeeded,
1 if it failed, 2 for a mistake on the command line, 128 + N if signal N ended the agent.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rpc.errors import RpcError
from rpc.extend import KEY_FILE, prompt_signals
from tensorwire import dropin
from tensorwire.launch.agent import RoleAgent
from tensorwire.launch.dry_run import describe_start
from tensorwire.launch.endpoint import EndpointError, is_loopback
from tensorwire.launch.etcd_rendezvous import ETCD_BACKEND, create_etcd_handler
from tensorwire.launch.flags import Command, FlagError, Forking, Streams, parse
from tensorwire.launch.group_key import GroupKey, GroupKeyError, choose_key
from tensorwire.launch.job_file import JobFileError
from tensorwire.launch.logs import Output
from tensorwire.launch.plan_store import PlanStoreError
from tensorwire.launch.rendezvous import BACKEND, DEFAULT_PORT, create_handler
from tensorwire.launch.report import describe_dismissal, describe_failure
from tensorwire.launch.roles import RoleError, Share
from tensorwire.launch.standby import Standbys
from tensorwire.launch.template import Template
from tensorwire.launch.watched import Watching
from tensorwire.watching import terminal
from tensorwire.watching.watch import StallPolicy

_logger = logging.getLogger("rpcrun")

_MISTAKES = (FlagError, GroupKeyError, JobFileError, RoleError, ValueError, AssertionError)
_NO_RENDEZVOUS = (RendezvousConnectionError, RendezvousClosedError, RendezvousTimeoutError)
_BACKENDS_FOR_ROLES = ("static", "c10d", BACKEND, ETCD_BACKEND)
_STATIC_PORT = 29500
_THREADS = "OMP_NUM_THREADS"
_IMPORTED = ("rpc", "autograd_dist", "optim_dist", "remote_module")
_WARM = (*_IMPORTED, "tensorwire.pipeline", "torch._dynamo")
"""Modules that warm processes import; torch imports the last when a process makes its first
optimizer, which takes more than a second, and a successor is waited for."""
_PARAMETER_SERVER = "tensorwire.parameter_server"
_PREPARED = {_PARAMETER_SERVER: f"{_PARAMETER_SERVER}.server.loading:load_for_workers"}
"""Functions that the template calls, by the modules of servers that then begin sooner."""


class JobFailedError(Exception):
    """The job failed, but no worker of this agent was the first to."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs ``rpcrun`` with a command line, by default this process's; ends the process."""
    code = run(sys.argv[1:] if argv is None else argv)
    gc.freeze()  # as the process ends, Python would collect all of torch
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Runs ``rpcrun`` with a command line, and returns its exit code."""
    _log_to_stderr()
    if argv and argv[0] in terminal.COMMANDS and not os.path.exists(argv[0]):
        return terminal.run(argv)
    try:
        command = parse(argv)
        _check_page(command)
        settle_rendezvous(command)
        if command.arguments.dry_run:
            print(describe_start(command))
            return 0
        template = _template(command)
        key = _choose_key(command)
    except _MISTAKES as error:
        print(f"rpcrun: {error}", file=sys.stderr)
        return 2
    if command.arguments.dropin:
        os.environ.update(dropin.environment())
    try:
        return _launch(command, key, template)
    finally:
        if template is not None:
            template.close()
        if key.is_ours:
            Path(key.path).unlink(missing_ok=True)  # the orphan watch may have done so


def _check_page(command: Command) -> None:
    """Refuses a page that cannot be served, or that anybody could listen to.

    Raises:
        FlagError: says why.
    """
    said = command.arguments
    if not said.dashboard:
        return
    if not command.roles:
        raise FlagError("--dashboard shows jobs with roles; give --role NAME:COUNT")
    try:
        from tensorwire.watching.dashboard.server import is_loopback as is_here
        from tensorwire.watching.dashboard.server import parse_address
    except ImportError as error:
        raise FlagError(
            f"--dashboard needs pip install 'tensorwire[dashboard]' ({error})"
        ) from None
    host, _ = parse_address(said.dashboard)
    if not is_here(host) and not said.dashboard_tls and not said.insecure:
        raise FlagError(
            f"--dashboard={said.dashboard} can be listened to on the network: give --dashboard-tls "
            "CERTIFICATE,KEY, or --insecure"
        )


def _watching(command: Command) -> Watching:
    said = command.arguments
    least = said.stall_timeout
    policy = StallPolicy(120.0 if least is None else least, least is not None, said.restart_stalled)
    certificate, _, key = said.dashboard_tls.partition(",")
    return Watching(policy, said.dashboard, (certificate, key) if key else None)


def _log_to_stderr() -> None:
    if not _logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("rpcrun: %(message)s"))
        _logger.addHandler(handler)
        _logger.setLevel(logging.INFO)
        _logger.propagate = False


def _keep_torchs_failures_out_of_the_log() -> None:
    """Keeps torch from logging, for each failure, the launcher's traceback under rank 0."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.addFilter(lambda line: not str(line.msg).startswith("failed (exitcode"))


def settle_rendezvous(command: Command) -> None:
    """Says where the agents meet, as torchrun does; with roles always at our own backend.

    Raises:
        FlagError: roles cannot be with that backend.
    """
    said = command.arguments
    _, most = torchrun.parse_min_max_nnodes(said.nnodes)
    at_home = said.rdzv_backend == "static" and not said.rdzv_endpoint and said.master_port is None
    if said.standalone or (at_home and most == 1):
        said.rdzv_backend, said.rdzv_endpoint = "c10d", "localhost:0"
        said.rdzv_id = str(uuid.uuid4())
    if said.master_port is None:
        said.master_port = _STATIC_PORT
    if not command.roles:
        return
    if said.rdzv_backend not in _BACKENDS_FOR_ROLES:
        raise FlagError(
            f"--rdzv-backend={said.rdzv_backend}: roles are seated by the backends {BACKEND}, "
            f"which is the default, and {ETCD_BACKEND}"
        )
    if said.rdzv_backend == "static" and not said.rdzv_endpoint:
        said.rdzv_endpoint = f"{said.master_addr}:{said.master_port}"
        host = f"is_host={'true' if said.node_rank == 0 else 'false'}"
        said.rdzv_conf = ",".join(filter(None, [said.rdzv_conf, host]))
    if said.rdzv_backend != ETCD_BACKEND:
        said.rdzv_backend = BACKEND
    said.node_rank = 0
    own = (role.count for role in command.roles if role.share is Share.AGENT)
    said.nproc_per_node = str(max(1, sum(own) + said.spare))


def _template(command: Command) -> Template | None:
    """Forks the template off this process, which has neither threads nor connections yet."""
    if command.forking is Forking.NOBODY:
        return None
    return Template(_IMPORTED, _prepared(command))


def _prepared(command: Command) -> list[str]:
    """The functions to be called before servers, and those who talk to them, begin."""
    modules = {role.module for role in command.roles if role.is_of_tensorwire}
    return [_PREPARED[each] for each in sorted(filter(None, modules)) if each in _PREPARED]


def _choose_key(command: Command) -> GroupKey:
    said = command.arguments
    endpoint: str = torchrun.get_rdzv_endpoint(said)  # type: ignore[no-untyped-call]
    host, _ = parse_rendezvous_endpoint(endpoint.partition(",")[0], DEFAULT_PORT)
    file = said.group_key_file or os.environ.get(KEY_FILE)
    key = choose_key(file, f"{endpoint} {said.rdzv_id}", is_loopback(host), said.insecure)
    if key.path:
        os.environ[KEY_FILE] = key.path  # which the workers inherit
    return key


def _launch(command: Command, key: GroupKey, template: Template | None) -> int:
    try:
        with prompt_signals():
            _run(command, key, template)
    except ChildFailedError as error:
        if not command.roles:
            print(error, file=sys.stderr)
        return 1
    except JobFailedError:
        return 1
    except SignalException as error:
        print(f"rpcrun: left the job on {error.sigval.name}", file=sys.stderr)
        return 128 + int(error.sigval)
    except EndpointError as error:
        print(f"rpcrun: {error}", file=sys.stderr)
        return 2
    except _NO_RENDEZVOUS as error:
        print(f"rpcrun: {error}", file=sys.stderr)
        return 1
    except (PlanStoreError, RoleError) as error:
        print(f"rpcrun: {error}", file=sys.stderr)
        return 1
    except (DistError, RpcError, ConnectionError) as error:
        where = command.arguments.rdzv_endpoint
        print(
            f"rpcrun: the store of the rendezvous at {where} was lost, and with it the job: is "
            f"the agent there gone? ({_cause(error)})",
            file=sys.stderr,
        )
        return 1
    return 0


def _cause(error: BaseException) -> str:
    """The error behind an error, without where in C++ it arose."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).partition("Exception raised")[0].strip()


@record
def _run(command: Command, key: GroupKey, template: Template | None) -> None:
    config, program, arguments = _config(command)
    if command.roles:
        _run_roles(_agent(command, key, template, config, program, arguments), command, config)
    else:
        elastic_launch(config=config, entrypoint=program)(*arguments)


def _config(command: Command) -> tuple[LaunchConfig, Any, list[Any]]:
    """Torchrun's configuration; its maps of streams take one-digit ranks only, ours do not."""
    said = argparse.Namespace(**vars(command.arguments))
    said.redirects = said.tee = "0"
    said.local_ranks_filter = ""
    if command.roles and int(said.nproc_per_node) > 1:
        os.environ.setdefault(_THREADS, "1")  # torchrun does so, too, and warns of it at length
    config, program, arguments = torchrun.config_from_args(said)
    specs: Any = config.logs_specs
    if command.roles and said.log_dir is None:
        with contextlib.suppress(OSError):
            os.rmdir(specs.root_log_dir)  # torch has made it for itself; our logs have their own
    if not command.roles:
        specs._redirects, specs._tee = _of_torch(command.redirects), _of_torch(command.tee)
        specs._local_ranks_filter = set(command.shown.ranks) or None
    return config, program, arguments


def _of_torch(streams: Streams) -> Any:
    return dict(streams.by_rank) or streams.everyone


def _run_roles(agent: RoleAgent, command: Command, config: LaunchConfig) -> None:
    said = command.arguments
    _keep_torchs_failures_out_of_the_log()
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = getattr(
        config, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    )
    handler = agent.get_worker_group().spec.rdzv_handler
    try:
        metrics.initialize_metrics()
        result = agent.run()
        events.record(agent.get_event_succeeded(), config.event_log_handler)
    except Exception:
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    finally:
        handler.shutdown()
    if result is not None and result.is_failed():
        if agent.failure is not None:
            describe = describe_dismissal if agent.is_dismissed else describe_failure
            print(f"rpcrun: {describe(agent.failure)}", file=sys.stderr, flush=True)
        if result.failures:
            raise ChildFailedError(said.training_script, result.failures)
        raise JobFailedError(f"{said.training_script} failed")
    agent.delete_temporary_logs()


def _program_as_told(command: Command) -> list[str]:
    """The program and its arguments; where its file lies may differ from machine to machine."""
    said = command.arguments
    name = said.training_script if said.module else os.path.basename(said.training_script)
    how = "module" if said.module else "command" if said.no_python else "file"
    return [how, name, *said.training_script_args]


def _agent(
    command: Command,
    key: GroupKey,
    template: Template | None,
    config: LaunchConfig,
    program: Any,
    arguments: list[Any],
) -> RoleAgent:
    said = command.arguments
    rendezvous_handler_registry.register(BACKEND, create_handler)
    rendezvous_handler_registry.register(ETCD_BACKEND, create_etcd_handler)
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
    )
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        args=tuple(arguments),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=getattr(config, "event_log_handler", "null"),
    )
    for name in ("numa_options", "virtual_local_rank"):
        if hasattr(spec, name):
            setattr(spec, name, getattr(config, name))
    output = Output(
        said.log_dir,
        command.redirects,
        command.tee,
        command.shown,
        config.log_line_prefix_template,
        tuple(getattr(config, "duplicate_stdout_filters", None) or ()),
        tuple(getattr(config, "duplicate_stderr_filters", None) or ()),
    )
    return RoleAgent(
        spec,
        command.roles,
        spare=said.spare,
        min_nodes=config.min_nodes,
        output=output,
        start_method=config.start_method,
        template=template,
        standbys=Standbys(said.warm, _WARM, _prepared(command)) if said.warm else None,
        exit_codes=command.exit_codes,
        shutdown_timeout=getattr(config, "shutdown_timeout", None) or 30,
        program=_program_as_told(command),
        key_file=key.path if key.is_ours else "",
        watching=_watching(command),
    )
