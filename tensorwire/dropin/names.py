"""The names of torch, and what of ours stands for each. Data only."""

from __future__ import annotations

from collections.abc import Mapping

MODULES: Mapping[str, str] = {
    "torch.distributed.rpc": "rpc",
    "torch.distributed.rpc.api": "rpc.api",
    "torch.distributed.rpc.functions": "rpc.functions",
    "torch.distributed.rpc.backend_registry": "rpc.backend_registry",
    "torch.distributed.rpc.constants": "rpc.constants",
    "torch.distributed.rpc.internal": "rpc.internal",
    "torch.distributed.rpc.options": "rpc.options",
    "torch.distributed.rpc.rref_proxy": "rpc.rref_proxy",
    "torch.distributed.rpc._testing": "rpc._testing",
    "torch.distributed.autograd": "autograd_dist",
    "torch.distributed.nn.api.remote_module": "remote_module",
}
"""Modules of torch, and those that stand for them."""

ROOTS = ("torch.distributed.rpc", "torch.distributed.autograd")
"""Packages of torch of which nothing else may be imported."""

NAMES: Mapping[tuple[str, str], str] = {
    ("torch.distributed.optim", "DistributedOptimizer"): "optim_dist",
    ("torch.distributed.optim.optimizer", "DistributedOptimizer"): "optim_dist",
    ("torch.distributed.nn", "RemoteModule"): "remote_module",
    ("torch.autograd.profiler_legacy", "profile"): "rpc.profiling",
    # Asked by functions that a library decorated with torch's _require_initialized.
    ("torch.distributed.rpc.api", "_is_current_rpc_agent_set"): "rpc",
}
"""Single names in modules of torch that otherwise stay, and the modules that have ours."""

C_MODULE = "torch._C._distributed_rpc"
"""The part of torch that is written in C++. Names that are not listed here stay torch's."""

C_NAMES: Mapping[str, str] = {
    "PyRRef": "rpc",
    "RpcAgent": "rpc",
    "RpcBackendOptions": "rpc",
    "TensorPipeAgent": "rpc",
    "WorkerInfo": "rpc",
    "_DEFAULT_INIT_METHOD": "rpc.constants:DEFAULT_INIT_METHOD",
    "_DEFAULT_NUM_WORKER_THREADS": "rpc.constants:DEFAULT_NUM_WORKER_THREADS",
    "_DEFAULT_RPC_TIMEOUT_SEC": "rpc.constants:DEFAULT_RPC_TIMEOUT_SEC",
    "_TensorPipeRpcBackendOptionsBase": "rpc:TensorPipeRpcBackendOptions",
    "_UNSET_RPC_TIMEOUT": "rpc.constants:UNSET_RPC_TIMEOUT",
    "_delete_all_user_and_unforked_owner_rrefs": "rpc.api",
    "_get_current_rpc_agent": "rpc",
    "_is_current_rpc_agent_set": "rpc",
    "_rref_context_get_debug_info": "rpc",
    "_set_rpc_timeout": "rpc",
    "enable_gil_profiling": "rpc",
    "get_rpc_timeout": "rpc",
}
"""Its names, and where ours are, as ``module`` or ``module:name``."""

DEFINED_IN = (*MODULES, *ROOTS, C_MODULE, "torch.distributed.optim.optimizer")
"""The modules in which torch defines what others show under their own name."""
