"""Every method of nn.Module that a remote module refuses, and the exact words."""

from __future__ import annotations

import re

import pytest
from torch import nn

from remote_module.local_only import LocalOnlyMethodsRefused

REFUSED = [
    "register_buffer",
    "register_parameter",
    "add_module",
    "apply",
    "cuda",
    "ipu",
    "xpu",
    "cpu",
    "type",
    "float",
    "double",
    "bfloat16",
    "register_backward_hook",
    "register_forward_pre_hook",
    "register_forward_hook",
    "parameters",
    "named_parameters",
    "buffers",
    "named_buffers",
    "children",
    "named_children",
    "modules",
    "named_modules",
    "zero_grad",
    "share_memory",
    "extra_repr",
]


@pytest.mark.parametrize("name", REFUSED)
def test_the_method_is_refused_by_name_whatever_the_arguments(name: str) -> None:
    words = re.escape(f"Method ``{name}`` not supported for RemoteModule")
    for args in ((), ("cpu", 1)):
        with pytest.raises(ValueError, match=words):
            getattr(LocalOnlyMethodsRefused(), name)(*args)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_stands_for_a_method_of_the_base_class(name: str) -> None:
    assert callable(getattr(nn.Module, name))
    assert getattr(LocalOnlyMethodsRefused, name).__name__ == name


def test_what_makes_sense_across_the_wire_is_not_refused() -> None:
    for name in ("half", "to", "state_dict", "load_state_dict", "requires_grad_"):
        assert name not in vars(LocalOnlyMethodsRefused)


def test_the_refusal_of_parameters_says_what_to_use() -> None:
    with pytest.raises(ValueError, match=r"Please use ``remote_parameters`` instead\.$"):
        LocalOnlyMethodsRefused().parameters()
