"""The tests of torch's that need not pass, with one honest reason for each.

A test that fails without a reason here fails the run. Tests that torch itself skips,
and those that need more GPUs than there are, say so when they run and are not listed.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """The kinds of reasons why a test need not pass."""

    LIFTED = "pins a limitation that ours lifts"
    SCRIPT = "TorchScript's C++ front end"
    INTERNALS = "private internals"


@dataclass(frozen=True, slots=True)
class Exemption:
    """Tests that need not pass.

    Args:
        tests: a regular expression for the whole of ``Class.test``.
        kind: see :class:`Kind`.
        why: what the tests do and what ours does instead.
        shown_by: a test of ours, which is a small program that shows why.
        backends: where; everywhere if empty.
        hangs: the test would wait for its timeout, and is not run.
    """

    tests: str
    kind: Kind
    why: str
    shown_by: str
    backends: Sequence[str] = ()
    hangs: bool = False

    def covers(self, test: str, backend: str) -> bool:
        """True if ``test`` need not pass over ``backend``."""
        here = not self.backends or backend in self.backends
        return here and re.fullmatch(self.tests, test) is not None


_ARGUMENT = (
    "passes an RRef to TorchScript code, which knows torch's C++ RRef only; take the value with "
    "to_here() or local_value() before the call"
)
_FREED = (
    "expects that a value whose creation timed out stays at its owner, where nobody can reach it, "
    "until shutdown; ours frees it at once"
)
_FREED_BY = (
    "tests/rpc/rrefs/test_rref_failures.py::"
    "test_a_reference_whose_creation_timed_out_raises_on_every_use_and_is_freed"
)
_INSIDE = (
    "calls rpc_async inside TorchScript, which torch's C++ carries out with torch's own agent; "
    "over TENSORPIPE ours has one and such calls work, over TENSORWIRE there is none"
)
_OWN_GRADIENTS = "tests/autograd_dist/test_local_engine_memory.py::"
_REASONS = "tests/conformance/test_reasons.py::"
_NO_REFERENCE = _REASONS + "test_torchscript_does_not_take_our_references_but_takes_their_values"
_TORCHS_AGENT = _REASONS + "test_calls_inside_torchscript_go_to_torchs_own_agent"

EXEMPTIONS: Sequence[Exemption] = (
    # --- Ours does more
    Exemption(
        r"DistAutogradTest\.test_backward_unused_send_function",
        Kind.LIFTED,
        "expects a backward pass to hang when the result of a call does not lead to the loss; "
        "ours ends",
        "tests/autograd_dist/test_extension.py::"
        "test_unused_results_neither_hang_nor_change_anything",
    ),
    Exemption(
        r"RpcTest\.test_custom_exception_throw_during_reconstruction",
        Kind.LIFTED,
        "expects that an exception whose constructor takes other arguments cannot be rebuilt; ours "
        "comes back as its own type, with its attributes",
        "tests/rpc/test_agent.py::"
        "test_an_exception_with_an_unusual_constructor_keeps_its_attributes",
    ),
    Exemption(
        r"RpcTest\.test_py_raise_in_user_func",
        Kind.LIFTED,
        "expects the traceback of a function that fails on the worker's standard error as well; of "
        "ours the caller has it, as the exception's cause, and the worker logs one line",
        "tests/rpc/calls/test_service.py::"
        "test_a_traceback_is_the_callers_and_the_worker_it_is_from_says_one_line",
    ),
    Exemption(
        r"RpcTest\.test_non_cont_tensors",
        Kind.LIFTED,
        "expects a view to arrive with the strides of the storage it was cut from, which therefore "
        "travels whole; ours sends only the elements the view shows",
        "tests/rpc/test_agent.py::test_a_sent_view_does_not_drag_its_storage",
    ),
    Exemption(
        r"RpcTest\.test_rref_timeout"
        r"|FaultyAgentRpcTest\.test_(udf_remote_message|remote_message_(builtin|script))"
        r"_delay_timeout",
        Kind.LIFTED,
        _FREED,
        _FREED_BY,
    ),
    Exemption(
        r"RpcTest\.test_profiler_with_async_rpc_udf(_single_threaded)?",
        Kind.LIFTED,
        "expects torch.profiler to show nothing of calls; ours shows them",
        "tests/rpc/observe/test_spans.py::test_every_way_of_calling_has_its_span",
    ),
    Exemption(
        r"DistAutogradTest\.test_no_grad_copy",
        Kind.LIFTED,
        "expects that a gradient which two leaves share is copied for both; ours copies it for "
        "one and lets the other have it",
        _OWN_GRADIENTS + "test_of_two_leaves_that_share_a_gradient_only_one_gets_a_copy",
    ),
    Exemption(
        r"DistAutogradTest\.test_grad_copy_sparse_indices_extra_ref",
        Kind.LIFTED,
        "expects that memory which the program still holds a view of becomes a gradient, and "
        "changes with it; ours copies it",
        _OWN_GRADIENTS + "test_the_values_of_a_sparse_gradient_that_something_else_sees_are_copied",
    ),
    Exemption(
        r"Faulty(AgentRpc|AgentDistAutograd)Test\.test_verify_backend_options",
        Kind.LIFTED,
        "expects the backend whose messages fail to be TENSORPIPE's, the only one there is; ours "
        "has one for TENSORWIRE, which the tests run over",
        "tests/rpc/test_faulty_transport.py::test_a_call_whose_sending_fails_says_so",
        backends=("TENSORWIRE",),
    ),
    Exemption(
        r"RemoteModuleTest\.test_unsupported_methods",
        Kind.LIFTED,
        "expects every method of nn.Module that touches parameters to be refused; of a remote "
        "module of ours state_dict, load_state_dict, to, half and requires_grad_ work across the "
        "wire, and all others are refused in torch's words",
        _REASONS + "test_a_remote_module_refuses_what_torchs_does_but_five_methods",
    ),
    # --- What torch's shutdown and profiler are made of
    Exemption(
        r"RpcTest\.test_shutdown_errors",
        Kind.INTERNALS,
        "replaces private functions of torch's shutdown by some that raise; ours has no such steps",
        _REASONS + "test_shutdown_has_other_steps_and_there_is_no_private_server_profiler",
    ),
    Exemption(
        r"RpcTest\.test_server_process_global_profiler",
        Kind.INTERNALS,
        "uses rpc._server_process_global_profile, which is private and undocumented; "
        "rpc.tracing.trace records everything that runs on every worker",
        _REASONS + "test_shutdown_has_other_steps_and_there_is_no_private_server_profiler",
    ),
    # --- TorchScript
    Exemption(
        r"JitRpcTest\.test_(local_rref_local_value|remote_script_module|rref_as_arg_and_return"
        r"|return_local_script_(class|module)_rref_in_py_and_use_in_script|rref_is_owner"
        r"|rref_list_mutate|rref_jit_pickle_not_supported|rref_local_value|rref_python_annotation"
        r"|user_rrefs_confirmed(_remote)?|load_script_module_with_pickled_rref"
        r"|my_script_module_with_rrefs)",
        Kind.SCRIPT,
        _ARGUMENT,
        _NO_REFERENCE,
    ),
    Exemption(
        r"JitFaultyAgentRpcTest\.test_(remote_timeout_to_here_in_jit|rref_timeout_pickle_in_jit"
        r"|rref_to_here_timeout_in_jit)",
        Kind.SCRIPT,
        _ARGUMENT,
        _NO_REFERENCE,
    ),
    Exemption(
        r"DistAutogradTest\.test_trainer_ps_torchscript_functions",
        Kind.SCRIPT,
        _ARGUMENT,
        _NO_REFERENCE,
        hangs=True,
    ),
    Exemption(
        r"JitDistAutogradTest\.test_(dist_backward|get_gradients|jit_fork_within_context)",
        Kind.SCRIPT,
        "calls distributed autograd inside TorchScript, whose C++ knows torch's contexts only",
        _REASONS + "test_torchscript_looks_for_contexts_in_torchs_own_table",
    ),
    Exemption(
        r"JitFaultyAgentRpcTest\.test_timeout_in_(python|torchscript_function)",
        Kind.SCRIPT,
        "makes calls inside TorchScript, which torch's own agent carries, and expects them to be "
        "delayed as ours are",
        _TORCHS_AGENT,
    ),
    Exemption(
        r"JitRpcTest\.test_rpc_async_jit_profiled",
        Kind.SCRIPT,
        "profiles calls made inside TorchScript; rpc.profiling follows those made in Python",
        _TORCHS_AGENT,
    ),
    Exemption(
        r"JitRpcTest\.test_(all_kwargs_are_populated_by_defaults|args_and_kwargs_contain_different_types"
        r"|args_kwargs_are_neither_passed|async_function_(remote|remote_multi|simple)"
        r"|call_python_function_remotely_from_script_not_supported|call_rpc_with_profiling"
        r"|call_script_function_that_(not_exists|raises)_remotely_from_script"
        r"|future_passed_between_python_and_jit"
        r"|kwargs_(in_the_front_can_be_specified_by_extra_args|not_passed)"
        r"|no_kwargs_are_populated_by_defaults|record_function_on_caller_rpc_async"
        r"|rpc_torchscript_record_function|some_kwargs_are_populated_by_defaults)"
        r"|JitDistAutogradTest\.test_restore_context_after_swtich_to_jit_thread",
        Kind.SCRIPT,
        _INSIDE,
        _TORCHS_AGENT,
        backends=("TENSORWIRE",),
    ),
)

UNSTEADY: Sequence[tuple[str, str]] = (
    (
        r"DdpComparisonTest\.test_ddp_comparison.*",
        "drops gloo's process group with its DDP module; the destructor joins a thread of gloo's "
        "while it holds the interpreter lock, and sometimes waits for ever: 3 of 120 runs of "
        "torch's own on a loaded machine, about one of ten over TENSORWIRE, which ends sooner",
    ),
)
"""Tests that fail now and then with genuine torch too, and why; they are not in CI's part."""


def unsteady(test: str) -> str | None:
    """The reason why ``test`` fails now and then whoever it tests; None if it should not."""
    return next((why for tests, why in UNSTEADY if re.fullmatch(tests, test)), None)


def exemption(test: str, backend: str) -> Exemption | None:
    """The reason why ``test`` need not pass over ``backend``; None if it must."""
    return next((each for each in EXEMPTIONS if each.covers(test, backend)), None)
