"""Makes mutants of decision modules: each differs from the module in one place.

For every function of a module: negates and skips branches, leaves out operands,
statements, effects and cases, moves comparisons and numbers by one, turns
choices around. A mutant is put into the running process by exchanging the code
of one function, so that everybody who imported it meets the mutant.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import inspect
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
_SILENT = ("__repr__", "__str__", "__post_init__")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change to one function.

    Args:
        module: the name of the module.
        function: the qualified name of the function in it.
        change: what is different, in words; unique within the function.
        shape: the function without its names, as a number, and which change of it this is; the
            same after the function, or anything in it, was renamed.
        code: the function's code, changed.
    """

    module: str
    function: str
    change: str
    shape: str
    code: CodeType

    @property
    def key(self) -> str:
        """Names the mutant, also after other lines of the file changed."""
        return f"{self.module.rsplit('.', 1)[-1]}.{self.function}: {self.change}"


Edit = tuple[str, Callable[[], None]]
"""The name of an edit of the tree, and what makes it."""


def mutants_of(module_name: str, only: str | None = None) -> list[Mutant]:
    """All mutants of a module, or of those functions whose names begin with ``only``."""
    module = importlib.import_module(module_name)
    tree = ast.parse(inspect.getsource(module))
    found: list[Mutant] = []
    for name, function in _functions(tree):
        if name.rsplit(".", 1)[-1] in _SILENT or (only and not name.startswith(only)):
            continue
        if isinstance(_lookup(module, name), FunctionType):
            found += _mutants_of_function(module_name, tree, name, function)
    return found


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Puts a mutant in place of the original for the length of a ``with`` block."""
    function = _lookup(importlib.import_module(mutant.module), mutant.function)
    assert function is not None
    original = function.__code__
    function.__code__ = mutant.code
    try:
        yield
    finally:
        function.__code__ = original


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    yield f"{node.name}.{part.name}", part


def _lookup(module: ModuleType, name: str) -> FunctionType | None:
    found: object = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    return found if isinstance(found, FunctionType) else None


def _mutants_of_function(
    module_name: str, tree: ast.Module, name: str, function: ast.FunctionDef
) -> Iterator[Mutant]:
    seen: Counter[str] = Counter()
    count = len(list(_edits(copy.deepcopy(function))))
    shape = shape_of(function)
    for number in range(count):
        changed = copy.deepcopy(function)
        change, make = list(_edits(changed))[number]
        make()
        code = _compile(tree, name, function, changed)
        if code is None:
            continue
        seen[change] += 1
        suffix = f" ({seen[change]})" if seen[change] > 1 else ""
        yield Mutant(module_name, name, change + suffix, f"{shape}-{number}", code)


def shape_of(function: ast.FunctionDef) -> str:
    """A number that depends on what a function does, and on no name or text in it."""
    bare = copy.deepcopy(function)
    for node in ast.walk(bare):
        for field in ("name", "id", "attr", "arg"):
            if getattr(node, field, None) is not None:
                setattr(node, field, "_")
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                setattr(node, field, None)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    bare.decorator_list = []
    if isinstance(bare.body[0], ast.Expr) and isinstance(bare.body[0].value, ast.Constant):
        del bare.body[0]  # its docstring
    return f"{zlib.crc32(ast.dump(bare).encode()):08x}"


def _compile(
    tree: ast.Module, name: str, function: ast.FunctionDef, changed: ast.FunctionDef
) -> CodeType | None:
    """The changed function's code, as a method of the same module would have it."""
    future = ast.parse("from __future__ import annotations").body
    changed.decorator_list = []
    lone = ast.Module([*future, changed], [])
    compiled = compile(ast.fix_missing_locations(lone), f"<mutant of {name}>", "exec")
    codes = [each for each in compiled.co_consts if isinstance(each, CodeType)]
    [code] = [each for each in codes if each.co_name == function.name]
    return None if code.co_freevars else code


# --- What is changed ----------------------------------------------------------


def _edits(function: ast.FunctionDef) -> Iterator[Edit]:
    returns_list = function.returns is not None and "list[" in ast.unparse(function.returns)
    whole = {id(node.test) for node in ast.walk(function) if isinstance(node, ast.If | ast.IfExp)}
    unread = _annotations(function)
    for node in ast.walk(function):
        if id(node) in unread:
            continue
        if isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.While | ast.With):
            yield from _statements(node.body)
            yield from _statements(getattr(node, "orelse", []))
        if isinstance(node, ast.match_case):
            yield from _statements(node.body)
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield from _conditions(node)
        elif isinstance(node, ast.comprehension):
            yield from _filters(node)
        elif isinstance(node, ast.BoolOp):
            yield from _operands(node)
        elif isinstance(node, ast.Compare):
            yield from _comparisons(node, skip=_OPPOSITES if id(node) in whole else ())
        elif isinstance(node, ast.Constant):
            yield from _constants(node)
        elif isinstance(node, ast.BinOp):
            yield from _sums(node)
        elif isinstance(node, ast.List):
            yield from _elements(node)
        elif isinstance(node, ast.Call):
            yield from _choices(node)
        elif isinstance(node, ast.Return) and returns_list and node.value is not None:
            yield from _returned(node)


def _annotations(function: ast.FunctionDef) -> set[int]:
    """The ids of all nodes that nobody evaluates."""
    found: set[int] = set()
    for node in ast.walk(function):
        for name in ("annotation", "returns"):
            annotation = getattr(node, name, None)
            if annotation is not None:
                found.update(map(id, ast.walk(annotation)))
    return found


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 70 else text[:67] + "..."


def _statements(body: list[ast.stmt]) -> Iterator[Edit]:
    for number, statement in enumerate(body):
        if _matters(statement):
            yield (
                f"without `{_short(statement)}`",
                lambda number=number: body.__setitem__(number, ast.Pass()),
            )


def _matters(statement: ast.stmt) -> bool:
    """Statements that can be left out without making a name unknown."""
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in statement.targets)
    if isinstance(statement, ast.Return):
        return statement.value is None
    return isinstance(statement, ast.AugAssign | ast.Delete | ast.Continue | ast.Raise | ast.For)


def _conditions(node: ast.If | ast.IfExp | ast.While) -> Iterator[Edit]:
    test = node.test

    def put(new: ast.expr) -> Callable[[], None]:
        return lambda: setattr(node, "test", new)

    yield f"negated `{_short(test)}`", put(ast.UnaryOp(ast.Not(), test))
    yield f"never `{_short(test)}`", put(ast.Constant(False))
    if not isinstance(node, ast.While):
        yield f"always `{_short(test)}`", put(ast.Constant(True))


def _filters(node: ast.comprehension) -> Iterator[Edit]:
    for number, test in enumerate(node.ifs):
        yield (
            f"negated filter `{_short(test)}`",
            lambda number=number, test=test: node.ifs.__setitem__(
                number, ast.UnaryOp(ast.Not(), test)
            ),
        )
        yield f"without filter `{_short(test)}`", lambda number=number: node.ifs.pop(number)


def _operands(node: ast.BoolOp) -> Iterator[Edit]:
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    neutral = ast.Constant(isinstance(node.op, ast.And))
    yield f"turned `{_short(node)}`", lambda: setattr(node, "op", other)
    for number, operand in enumerate(node.values):
        yield (
            f"without operand `{_short(operand)}` of `{_short(node)}`",
            lambda number=number: node.values.__setitem__(number, neutral),
        )


def _comparisons(node: ast.Compare, skip: tuple[type[ast.cmpop], ...]) -> Iterator[Edit]:
    """Those in ``skip`` would be what negating the condition gives."""
    for number, operator in enumerate(node.ops):
        if isinstance(operator, skip):
            continue
        changed = _COMPARISONS[type(operator)]
        yield (
            f"{changed.__name__} in `{_short(node)}`",
            lambda number=number, changed=changed: node.ops.__setitem__(number, changed()),
        )


def _constants(node: ast.Constant) -> Iterator[Edit]:
    value = node.value
    if isinstance(value, bool):
        yield f"`{not value}` for `{value}`", lambda: setattr(node, "value", not value)
    elif isinstance(value, int):
        yield f"`{value + 1}` for `{value}`", lambda: setattr(node, "value", value + 1)


def _sums(node: ast.BinOp) -> Iterator[Edit]:
    def become(kept: ast.expr) -> Callable[[], None]:
        empty = ast.BinOp(kept, ast.Add(), ast.List([], ast.Load()))
        return lambda: (setattr(node, "left", empty.left), setattr(node, "right", empty.right))[0]

    if isinstance(node.op, ast.Add) and not isinstance(node.right, ast.Constant):
        yield f"without the left of `{_short(node)}`", become(node.right)
        yield f"without the right of `{_short(node)}`", become(node.left)
    elif isinstance(node.op, ast.Add):
        yield f"minus in `{_short(node)}`", lambda: setattr(node, "op", ast.Sub())
    elif isinstance(node.op, ast.Sub):
        yield f"plus in `{_short(node)}`", lambda: setattr(node, "op", ast.Add())


def _elements(node: ast.List) -> Iterator[Edit]:
    for number, element in enumerate(node.elts):
        yield f"without element `{_short(element)}`", lambda number=number: node.elts.pop(number)


def _choices(node: ast.Call) -> Iterator[Edit]:
    if isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        name = node.func
        other = _CALLS[name.id]
        yield f"`{other}` for `{name.id}` in `{_short(node)}`", lambda: setattr(name, "id", other)


def _returned(node: ast.Return) -> Iterator[Edit]:
    value = node.value
    if value is None or (isinstance(value, ast.List) and not value.elts):
        return
    done = ast.Subscript(
        ast.Tuple([value, ast.List([], ast.Load())], ast.Load()), ast.Constant(1), ast.Load()
    )
    yield f"returns nothing of `{_short(value)}`", lambda: setattr(node, "value", done)
