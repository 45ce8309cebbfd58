"""Kernel files: the `@triton.jit` functions of a Python file, taken out by its syntax tree.

A consumer such as vLLM keeps its kernels in modules that import torch and look for a GPU. Nothing
of it is imported here: the wanted function, the functions that it calls and the constants that it
reads are copied, as they are written, behind the two imports that they need.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuna.errors import BadInput

_HEAD = "import triton\nimport triton.language as tl\n"
#: Names that a kernel file may use without defining them.
_KNOWN = {"triton", "tl", *dir(__builtins__ if not isinstance(__builtins__, dict) else object)}
_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class KernelFile:
    """The source of one kernel with everything that it needs."""

    function: str  #: its name in `text`
    arguments: tuple[str, ...]  #: in their order
    constants: frozenset[str]  #: arguments that are `tl.constexpr`
    unspecialised: frozenset[str]  #: arguments that are in `do_not_specialize`
    text: str  #: a Python file that imports Triton alone

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
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise BadInput(f"{path} is too large for a file of kernels.")
        text = path.read_text()
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
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
        there = ", ".join(jit_functions(tree)) or "none"
        raise BadInput(
            f"{where} has no @triton.jit function {function}.", hint=f"functions there: {there}"
        )
    needed = _needed(function, defined, where)
    parts = [
        _source(text, node)
        for node in sorted(set(needed.values()), key=lambda node: node.lineno)
    ]
    arguments = [*wanted.args.posonlyargs, *wanted.args.args, *wanted.args.kwonlyargs]
    if wanted.args.vararg or wanted.args.kwarg:
        raise BadInput(f"{function} in {where} has arguments without a name.")
    constant = {one.arg for one in arguments if _is_constexpr(one.annotation)}
    return KernelFile(
        function=function,
        arguments=tuple(one.arg for one in arguments),
        constants=frozenset(constant),
        unspecialised=frozenset(_unspecialised(wanted, [one.arg for one in arguments])),
        text="\n\n".join([_HEAD, *parts]) + "\n",
    )


def _definitions(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.Assign | ast.AnnAssign]:
    """Functions and assigned names of the file's top level."""
    found: dict[str, ast.FunctionDef | ast.Assign | ast.AnnAssign] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {one.id: node for one in node.targets if isinstance(one, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def _needed(
    function: str,
    defined: dict[str, ast.FunctionDef | ast.Assign | ast.AnnAssign],
    where: str,
) -> dict[str, ast.FunctionDef | ast.Assign | ast.AnnAssign]:
    """The definitions that a function uses, directly or not, itself included."""
    found: dict[str, ast.FunctionDef | ast.Assign | ast.AnnAssign] = {}
    todo = [function]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        node = found[name] = defined[name]
        if isinstance(node, ast.FunctionDef):
            others = [one for one in node.decorator_list if not _is_jit(one)]
            if any("autotune" not in ast.unparse(one) for one in others):
                raise BadInput(
                    f"{name} in {where} has a decorator that Tuna cannot take along:"
                    f" {ast.unparse(others[0])[:80]}"
                )
            if not any(map(_is_jit, node.decorator_list)):
                raise BadInput(f"{name} in {where} is called by {function} and is no @triton.jit.")
        elif not _is_plain(node.value):
            raise BadInput(f"{name} in {where}, which {function} reads, is no plain constant.")
        used = {
            one.id
            for part in _inner(node)
            for one in ast.walk(part)
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)
        }
        todo += sorted(used & defined.keys() - _local(node))
    return found


def _inner(node: ast.stmt) -> Iterable[ast.AST]:
    """Parts of a definition that are kept: of a function all but its decorators."""
    return [*node.body, node.args] if isinstance(node, ast.FunctionDef) else [node]


def _local(node: ast.stmt) -> set[str]:
    """Names that a function binds itself."""
    if not isinstance(node, ast.FunctionDef):
        return set()
    bound = {
        one.id
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
    return bound | {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}


def _source(text: str, node: ast.FunctionDef | ast.Assign | ast.AnnAssign) -> str:
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


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in ("triton.jit", "jit")


def _is_constexpr(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).strip("'\"").endswith("constexpr")


def _is_plain(value: ast.expr | None) -> bool:
    """True for a literal, or `tl.constexpr` of one."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("tl.constexpr", "constexpr"):
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
