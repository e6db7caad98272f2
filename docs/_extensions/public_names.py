"""A directive that documents the public names of a module from their docstrings.

``{public-names} rpc`` takes the names to document from its body, or, if that is empty, those
of ``rpc.__all__`` that the page has not documented yet. So a new public name is on its page
as soon as ``__all__`` has it.

References to a name by the module that defines it, such as ``rpc.outcomes.futures.Future``,
lead to the public name, ``rpc.Future``. Names of Python, torch and our private modules that
signatures mention stay plain text: nothing is looked up in the network.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

_REFERENCE = Path(__file__).parents[1] / "reference"
_OURS = re.compile(r"(rpc|autograd_dist|optim_dist|remote_module|tensorwire)(\.|$)")


class PublicNames(SphinxDirective):
    """Documents the names in its body, or all that the page has not documented yet."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Parses one autodoc directive per name."""
        module = importlib.import_module(self.arguments[0])
        key = f"public_names:{module.__name__}"
        heading = [] if key in self.env.temp_data else [f".. py:module:: {module.__name__}", ""]
        listed = self.env.temp_data.setdefault(key, set())
        names = [name for line in self.content for name in line.split()]
        names = names or [name for name in names_of(module) if name not in listed]
        if unknown := sorted(set(names) - set(names_of(module))):
            raise self.error(f"{', '.join(unknown)}: no public name of {module.__name__}")
        listed.update(names)
        lines = [line for name in names for line in directive_of(module, name)]
        text = ["````{eval-rst}", *heading, *lines, "````"]
        node = nodes.container()
        self.state.nested_parse(
            StringList(text, self.get_source_info()[0]), self.content_offset, node
        )
        return node.children


def directive_of(module: ModuleType, name: str) -> list[str]:
    """Returns the autodoc directive for one public name."""
    value = getattr(module, name)
    full_name = f"{module.__name__}.{name}"
    if inspect.ismodule(value):
        if full_name in documented():
            return []
        return [f".. automodule:: {full_name}", "   :no-index:", ""]
    elsewhere = _documented_elsewhere(value, module)
    if elsewhere:
        return [f"``{name}``", f"   See :obj:`{elsewhere}`.", ""]
    if isinstance(value, type):
        if issubclass(value, BaseException):
            return [f".. autoexception:: {full_name}", "   :show-inheritance:", ""]
        return [f".. autoclass:: {full_name}", "   :members:", ""]
    if inspect.isroutine(value):
        return [f".. autofunction:: {full_name}", ""]
    told = textwrap.indent(docstring_of_data(module, name), "   ")
    return [f".. py:data:: {full_name}", "", *told.splitlines(), ""]


def docstring_of(module: ModuleType, name: str) -> str:
    """Returns what a public name says of itself; empty if it says nothing."""
    value = getattr(module, name)
    if inspect.ismodule(value) or inspect.isroutine(value) or isinstance(value, type):
        return inspect.getdoc(value) or ""
    return docstring_of_data(module, name)


def docstring_of_data(module: ModuleType, name: str) -> str:
    """Returns the string after the assignment of a name, wherever that is."""
    body = ast.parse(inspect.getsource(module)).body
    for statement, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.ImportFrom) and statement.module is not None:
            if name in {alias.asname or alias.name for alias in statement.names}:
                return docstring_of_data(importlib.import_module(statement.module), name)
        elif name in _assigned(statement) and isinstance(after, ast.Expr):
            return inspect.cleandoc(str(ast.literal_eval(after.value)))
    return ""


def _assigned(statement: ast.stmt) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def documented() -> list[str]:
    """Returns the modules that have a page in the reference, which is named after them."""
    return sorted(page.stem for page in _REFERENCE.glob("*.md") if page.stem != "index")


def _documented_elsewhere(value: object, module: ModuleType) -> str:
    """Returns the name under which the page of another module documents a value, or nothing."""
    if not (isinstance(value, type) or inspect.isroutine(value)):
        return ""
    public = definitions().get(f"{value.__module__}.{value.__qualname__}", "")
    return "" if public.rpartition(".")[0] == module.__name__ else public


def names_of(module: ModuleType) -> list[str]:
    """Returns ``__all__``, or what a module without one defines under a public name."""
    listed: list[str] | None = getattr(module, "__all__", None)
    if listed is not None:
        return listed
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (isinstance(value, type) or inspect.isroutine(value))
        and value.__module__ == module.__name__
    ]


def public_names() -> Iterator[tuple[str, object]]:
    """Yields the full name and the value of each public name."""
    for module_name in documented():
        module = importlib.import_module(module_name)
        for name in names_of(module):
            yield f"{module_name}.{name}", getattr(module, name)


@functools.cache
def definitions() -> dict[str, str]:
    """Maps the place where a public class or function is defined to its public name."""
    found: dict[str, str] = {}
    for public, value in public_names():
        if isinstance(value, type) or inspect.isroutine(value):
            found.setdefault(f"{value.__module__}.{value.__qualname__}", public)
    return found


def resolve(
    app: Sphinx, environment: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Node | None:
    """Leads to the public name behind a private one; lets the names of others be plain text."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    public = _public_name(environment.tensorwire_definitions, target)  # type: ignore[attr-defined]
    if public is not None:
        domain = environment.domains["py"]
        where = node.get("refdoc", "")
        found = domain.resolve_xref(environment, where, app.builder, "obj", public, node, content)
        return found or content
    is_annotation = "refwarn" not in node  # roles in text say whether to warn
    return content if is_annotation or _is_foreign(target) else None


def _public_name(definitions: dict[str, str], target: str) -> str | None:
    """Finds ``module.Class`` and ``module.Class.method``, or a bare name that is unambiguous."""
    if target in definitions:
        return definitions[target]
    owner, _, member = target.rpartition(".")
    if owner in definitions:
        return f"{definitions[owner]}.{member}"
    if not owner:
        found = {public for public in definitions.values() if public.endswith(f".{target}")}
        return found.pop() if len(found) == 1 else None
    return None


def _is_foreign(target: str) -> bool:
    """True for a name of Python or of another library, which has no page here."""
    return not _OURS.match(target) and ("." in target or hasattr(builtins, target))


def _remember_definitions(app: Sphinx, environment: BuildEnvironment, docs: list[str]) -> None:
    environment.tensorwire_definitions = definitions()  # type: ignore[attr-defined]


def setup(app: Sphinx) -> ExtensionMetadata:
    """Registers the directive and the resolver of names."""
    app.add_directive("public-names", PublicNames)
    app.connect("env-before-read-docs", _remember_definitions)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
