"""Raises errors that are kept, as copies.

An exception that is raised remembers the frames that it passed, and with them
all their variables. If it is kept at a place that one of these variables keeps
alive, nothing of that is ever freed: not by counting, nor, where the place is
reached from a table, by collecting cycles. So what is kept is never raised
itself, and what was raised is kept without the variables.
"""

from __future__ import annotations

import copy
import gc
import inspect
import sys
from contextlib import suppress
from types import FrameType, FunctionType, TracebackType

from rpc.wire.remote_errors import slots_of

_HEAP_TYPE_FLAG = 1 << 9
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_VERSION = sys.version_info[:2]
_PLAIN_SIZE = Exception.__basicsize__

# An error's class may answer for its attributes as it likes, or raise.
_traceback_of = vars(BaseException)["__traceback__"].__get__
_cause_of = vars(BaseException)["__cause__"].__get__
_context_of = vars(BaseException)["__context__"].__get__
_set_args = vars(BaseException)["args"].__set__
# Whether the context is suppressed comes last, as a cause that is set says so, too.
_PAST = tuple(
    vars(BaseException)[f"__{name}__"] for name in ("cause", "context", "suppress_context")
)


def again(error: BaseException) -> BaseException:
    """A copy of a kept error, to be raised; of one that cannot be copied, the error itself."""
    try:
        twin = _twin(error)
    except Exception:
        return error
    for part in _PAST:
        part.__set__(twin, part.__get__(error))
    return BaseException.with_traceback(twin, _traceback_of(error))


def _twin(error: BaseException) -> BaseException:
    if _builtin_of(type(error)).__basicsize__ > _PLAIN_SIZE:  # more than arguments and attributes
        twin = copy.copy(error)
        _set_args(twin, error.args)
        return twin
    twin = bare_copy(error)
    for name, value in slots_of(error):
        BaseException.__setattr__(twin, name, value)
    return twin


def _builtin_of(kind: type[BaseException]) -> type[BaseException]:
    """The class of Python's own whose layout errors of a class have."""
    builtin: type = kind
    while builtin.__flags__ & _HEAP_TYPE_FLAG:
        assert builtin.__base__ is not None
        builtin = builtin.__base__
    return builtin


def bare_copy(error: BaseException) -> BaseException:
    """An error with the same arguments and attributes; its constructor does not run."""
    kind = type(error)
    twin = _blank(kind, error.args)
    _set_args(twin, error.args)
    twin.__dict__.update(error.__dict__)
    return twin


def _blank(kind: type[BaseException], args: tuple[object, ...]) -> BaseException:
    try:
        return kind.__new__(kind, *args)  # no constructor need take these
    except TypeError:
        if isinstance(kind.__new__, FunctionType):
            raise
        # What is first a RuntimeError and then an OSError has the layout of the latter, and Python
        # refuses to have it made by the former.
        return _builtin_of(kind).__new__(kind)


def keep(error: BaseException) -> BaseException:
    """The error, whose frames forget their variables, except those that still run or may."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        _forget_variables(_traceback_of(each))
        cause = _cause_of(each)
        each = _context_of(each) if cause is None else cause
    return error


def _forget_variables(passed: TracebackType | None) -> None:
    while passed is not None:
        if _is_over(passed.tb_frame):
            with suppress(RuntimeError):  # it still runs
                passed.tb_frame.clear()
        passed = passed.tb_next


def _is_over(frame: FrameType) -> bool:
    """False if it may be that of a suspended generator or coroutine, which clearing would end.

    It may have caught the error and gone on. While suspended, such a frame is its
    generator's, and refers to nothing itself, not even to its code.
    """
    if not frame.f_code.co_flags & _SUSPENDABLE or _VERSION >= (3, 13):
        return True  # from 3.13 on, clearing refuses
    return _VERSION >= (3, 11) and any(each is frame.f_code for each in gc.get_referents(frame))
