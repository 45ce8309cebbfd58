"""Kernel files: the `@triton.jit` functions of a Python file, taken out by its syntax tree.

A consumer such as vLLM keeps its kernels in modules that import torch and look for a GPU. Nothing
of it is imported here: the wanted function, the functions that it calls and the constants that it
reads are copied, as they are written, behind the two imports that they need.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuna.common.files import read_text
from tuna.errors import BadInput

_HEAD = "import triton\nimport triton.language as tl\n"
_BUILTIN = frozenset({"triton", "tl", *dir(builtins)})
_MAX_BYTES = 4 << 20
#: A definition of a file's top level that a kernel may use.
_Definition = ast.FunctionDef | ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class KernelFile:
    """The source of one kernel with everything that it needs."""

    function: str  #: the kernel's name in `text`
    arguments: tuple[str, ...]  #: names in the kernel's order
    constants: frozenset[str]  #: names of the arguments that are `tl.constexpr`
    unspecialised: frozenset[str]  #: names of the arguments in `do_not_specialize`
    defaults: tuple[tuple[str, int | float | None], ...]  #: plain default values of arguments
    text: str  #: content of a Python file that imports Triton alone

    @property
    def digest(self) -> str:
        """SHA-256 of the text: the version of the kernel."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def installed(package: str, path: str) -> Path | None:
    """Return a file of an installed package, without importing it; None if it is not there."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    places = spec.submodule_search_locations if spec is not None else None
    found = (Path(place) / path for place in places or ())
    return next((file for file in found if file.is_file()), None)


def read(path: Path, function: str) -> KernelFile:
    """Return the kernel `function` of the Python file at `path`; raises BadInput that names what is
    wrong."""
    text = read_text(path, _MAX_BYTES)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as Python: {error}") from None
    return extract(text, tree, function, str(path))


def jit_functions(tree: ast.Module) -> Sequence[str]:
    """Return the names of the functions with the decorator `triton.jit`, in their order."""
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list))
    ]


def extract(text: str, tree: ast.Module, function: str, where: str) -> KernelFile:
    """Return the kernel `function` of a file's text and syntax tree; `where` names it in errors."""
    defined = _definitions(tree)
    wanted = defined.get(function)
    if not isinstance(wanted, ast.FunctionDef) or not any(map(_is_jit, wanted.decorator_list)):
        names = ", ".join(jit_functions(tree)) or "none"
        raise BadInput(
            f"{where} has no @triton.jit function {function}.", hint=f"functions there: {names}"
        )
    parts = [_source(text, node) for node in _needed(function, defined, where)]
    arguments = [*wanted.args.posonlyargs, *wanted.args.args, *wanted.args.kwonlyargs]
    if wanted.args.vararg or wanted.args.kwarg:
        raise BadInput(f"{function} in {where} has arguments without a name.")
    constant = {argument.arg for argument in arguments if _is_constexpr(argument.annotation)}
    return KernelFile(
        function=function,
        arguments=tuple(argument.arg for argument in arguments),
        constants=frozenset(constant),
        unspecialised=frozenset(_unspecialised(wanted, [argument.arg for argument in arguments])),
        defaults=_defaults(wanted.args),
        text="\n\n".join([_HEAD, *parts]) + "\n",
    )


def _definitions(tree: ast.Module) -> dict[str, _Definition]:
    """Functions, assigned names and imports from Triton itself, of the file's top level."""
    found: dict[str, _Definition] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {one.id: node for one in node.targets if isinstance(one, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "triton":
            found |= {one.asname or one.name: node for one in node.names}
    return {name: node for name, node in found.items() if name not in ("triton", "tl")}


def _needed(function: str, defined: dict[str, _Definition], where: str) -> list[_Definition]:
    """The definitions that a function uses, directly or not, itself included, in the file's
    order."""
    found: dict[str, _Definition] = {}
    todo = [function]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        if name not in defined:
            raise BadInput(f"{function} in {where} uses {name}, which is defined elsewhere.")
        node = found[name] = defined[name]
        _check_portable(name, node, where)
        todo += sorted(_used(node) - _BUILTIN)
    return sorted(set(found.values()), key=lambda node: node.lineno)


def _check_portable(name: str, node: _Definition, where: str) -> None:
    """Raise BadInput for a definition that is not the same in another file."""
    if isinstance(node, ast.FunctionDef):
        others = [ast.unparse(one) for one in node.decorator_list if not _is_jit(one)]
        foreign = [one for one in others if not one.startswith("triton.autotune")]
        if foreign:
            raise BadInput(
                f"{name} in {where} has a decorator that is not known: {foreign[0][:80]}"
            )
        if not any(map(_is_jit, node.decorator_list)):
            raise BadInput(f"{name} in {where}, which a kernel calls, is not a @triton.jit.")
    elif isinstance(node, ast.Assign | ast.AnnAssign) and not _is_plain(node.value):
        raise BadInput(f"{name} in {where}, which a kernel reads, is not a plain constant.")


def _used(node: _Definition) -> set[str]:
    """Names that a definition reads and does not bind itself."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return set()
    parts = [*node.body, node.args] if isinstance(node, ast.FunctionDef) else [node]
    names = [one for part in parts for one in ast.walk(part) if isinstance(one, ast.Name)]
    bound = {one.id for one in names if isinstance(one.ctx, ast.Store)}
    if isinstance(node, ast.FunctionDef):
        bound |= {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
    return {one.id for one in names if isinstance(one.ctx, ast.Load)} - bound


def _source(text: str, node: _Definition) -> str:
    """The node's own text, a function with a decorator of the arguments that matter."""
    written = ast.get_source_segment(text, node)
    assert written is not None
    if not isinstance(node, ast.FunctionDef):
        return written
    kept = [
        ast.unparse(keyword)
        for one in node.decorator_list
        if isinstance(one, ast.Call) and _is_jit(one)
        for keyword in one.keywords
        if keyword.arg in ("do_not_specialize", "do_not_specialize_on_alignment", "noinline")
    ]
    return f"@triton.jit{'(' + ', '.join(kept) + ')' if kept else ''}\n{written}"


def _defaults(arguments: ast.arguments) -> tuple[tuple[str, int | float | None], ...]:
    """Names and values of arguments whose default is a number, true, false or None."""
    placed = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(placed[len(placed) - len(arguments.defaults) :], arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return tuple(
        (one.arg, value.value)
        for one, value in pairs
        if isinstance(value, ast.Constant) and isinstance(value.value, int | float | None)
    )


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in ("triton.jit", "jit")


def _is_constexpr(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).strip("'\"").endswith("constexpr")


def _is_plain(value: ast.expr | None) -> bool:
    """True for a literal, or `tl.constexpr` of one."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in (
        "tl.constexpr",
        "constexpr",
    ):
        return len(value.args) == 1 and not value.keywords and _is_plain(value.args[0])
    try:
        ast.literal_eval(value) if value is not None else None
    except ValueError:
        return False
    return value is not None


def _unspecialised(node: ast.FunctionDef, arguments: Sequence[str]) -> set[str]:
    """Arguments of `do_not_specialize`, given by name or position."""
    for one in node.decorator_list:
        for keyword in one.keywords if isinstance(one, ast.Call) and _is_jit(one) else ():
            if keyword.arg == "do_not_specialize":
                given = ast.literal_eval(keyword.value)
                return {arguments[name] if isinstance(name, int) else str(name) for name in given}
    return set()
