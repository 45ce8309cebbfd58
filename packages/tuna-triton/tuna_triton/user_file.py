"""Files with a kernel of one's own: the kernel, its axes, and the functions that describe it, taken
out by the syntax tree. Nothing of a file is run here.

A file has one `@triton.jit` function that no other one calls, and at its top level

    AXES = {"BLOCK": [256, 512], "num_warps": [4, 8]}   # arguments of the kernel or of its launch
    DEFAULT = {"BLOCK": 256, "num_warps": 4}            # optional: else the first point
    TOLERANCE = 1e-3                                    # optional
    def arguments(shape): ...                           # {name: value or (role, element, shape)}
    def grid(shape, tile): ...                          # one to three numbers
    def reference(shape, inputs): ...                   # the right answer, by NumPy
    def valid(shape, tile): ...                         # optional: False for what cannot run

`user_kernel` runs the functions, in a child of the sandbox alone.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import math
import symtable
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuna.errors import BadInput
from tuna_triton import kernel_file
from tuna_triton.kernel_file import KernelFile
from tuna_triton.tiles import OPTIONS, Tile

_REQUIRED, _OPTIONAL = ("arguments", "grid", "reference"), ("valid",)
_LITERALS = ("AXES", "DEFAULT", "TOLERANCE")
_MODULES = ("numpy", "math")
#: Attributes of Triton that functions beside the kernel may use: `user_kernel` provides them.
PROVIDED: Mapping[str, tuple[str, ...]] = {
    "triton": ("cdiv", "next_power_of_2"),
    "tl": ("constexpr",),
}
_ONLY = "the functions beside a kernel may use numpy, math, triton.cdiv and triton.next_power_of_2"
_MAX_AXES, _MAX_POINTS = 16, 100_000
_MAX_WARPS = 32


@dataclass(frozen=True)
class UserFile:
    """The parts of a file that matter."""

    name: str  #: the file's name, for messages
    kernel: KernelFile
    axes: tuple[tuple[str, tuple[int, ...]], ...]
    default: tuple[tuple[str, int], ...] | None
    #: Largest error relative to the answer's largest magnitude; None: the default of its type.
    tolerance: float | None
    functions: str  #: a Python file of the functions beside the kernel and what they use
    text: str  #: a Python file of all parts: the body of the configs

    @property
    def digest(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def tile_names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(name for name, _ in self.axes)


def parse(text: str, name: str) -> UserFile:
    """Return the parts of a file's text; raises BadInput that names what is wrong with it.

    The text of the result is parsed into an equal result, which workers do.
    """
    try:
        found = _parse(_parse(text, name).text, name)
        if _parse(found.text, name) == found:
            return found
    except RecursionError:
        raise BadInput(f"{name} is nested too deeply.") from None
    raise BadInput(
        f"{name} cannot be taken apart: write each constant, function and import in lines of its"
        " own."
    )


def _parse(text: str, name: str) -> UserFile:
    try:
        tree = ast.parse(text, name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadInput(f"{name} cannot be read as Python: {error}") from None
    top = dict(_defined(tree))
    kernel = kernel_file.extract(text, tree, _kernel_name(tree, name), name)
    missing = [word for word in (*_REQUIRED, "AXES") if word not in top]
    if missing:
        raise BadInput(
            f"{name} defines no {missing[0]}.",
            hint="it needs AXES, arguments, grid and reference: see docs/gpu.md",
        )
    axes = _axes(_literal(top, "AXES", name), kernel, name)
    default = _default(_literal(top, "DEFAULT", name), axes, name) if "DEFAULT" in top else None
    tolerance = _literal(top, "TOLERANCE", name) if "TOLERANCE" in top else None
    if tolerance is not None and not (isinstance(tolerance, int | float) and 0 <= tolerance < 1):
        raise BadInput(f"TOLERANCE in {name} is not a number from 0 to 1.")
    roots = [word for word in (*_REQUIRED, *_OPTIONAL) if word in top]
    nodes = _reached(top, roots, set(kernel_file.jit_functions(tree)), name)
    literals = [top[word] for word in _LITERALS if word in top]
    kept = sorted({*nodes, *literals}, key=lambda node: node.lineno)
    sources = {node: _source(text, node, nodes.get(node, ())) for node in kept}
    # constants that the kernel reads too are there already
    rest = [source for source in sources.values() if f"\n\n{source}\n" not in kernel.text]
    return UserFile(
        name=name,
        kernel=kernel,
        axes=tuple(axes.items()),
        default=default,
        tolerance=None if tolerance is None else float(tolerance),
        functions="\n\n".join(["from __future__ import annotations", *sources.values()]) + "\n",
        text="\n\n".join([kernel.text.rstrip("\n"), *rest]) + "\n",
    )


def _kernel_name(tree: ast.Module, name: str) -> str:
    """Return the name of the jit function that no other one uses."""
    functions = kernel_file.jit_functions(tree)
    nodes = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name in functions
    }
    used = {
        word
        for caller, node in nodes.items()
        for word in _global_names(node)
        if word in nodes and word != caller
    }
    kernels = [word for word in nodes if word not in used]
    if not kernels:
        raise BadInput(f"{name} has no kernel: no function with the decorator @triton.jit.")
    if len(kernels) > 1:
        raise BadInput(
            f"{name} has {len(kernels)} kernels, {', '.join(kernels)}: a file to tune has one"
            " @triton.jit that no other calls."
        )
    return kernels[0]


def _defined(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Names of the top level with the statements that give them their values."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for one in (part for target in targets for part in ast.walk(target)):
                if isinstance(one, ast.Name):
                    yield one.id, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield _bound(alias), node


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _reached(
    top: Mapping[str, ast.stmt], roots: Sequence[str], kernels: set[str], name: str
) -> dict[ast.stmt, list[str]]:
    """The statements that functions need, themselves included, each with the names that they need
    of it."""
    statements: dict[ast.stmt, list[str]] = {}
    todo, done = [(root, root) for root in roots], set[str]()
    while todo:
        word, user = todo.pop()
        if word in done or _is_given(word, top.get(word)):
            continue
        done.add(word)
        if word not in top:
            raise BadInput(
                f"{user} in {name} uses {word}, which is not a function, constant or import of the"
                " file's top level."
            )
        node = top[word]
        _check(word, node, user, kernels, name)
        statements.setdefault(node, []).append(word)
        if not isinstance(node, ast.Import | ast.ImportFrom):
            todo += [(other, word) for other in sorted(_global_names(node))]
    return statements


def _is_given(word: str, node: ast.stmt | None) -> bool:
    """True for names of Python and Triton that the file does not define otherwise."""
    if word in PROVIDED:
        return node is None or isinstance(node, ast.Import | ast.ImportFrom)
    return node is None and hasattr(builtins, word)


def _check(word: str, node: ast.stmt, user: str, kernels: set[str], name: str) -> None:
    """Raise BadInput for a statement that cannot be run where the kernel is built."""
    if word in kernels:
        raise BadInput(f"{user} in {name} calls {word}, which is a @triton.jit function.")
    if isinstance(node, ast.FunctionDef) and node.decorator_list:
        raise BadInput(
            f"{word} in {name} has a decorator, and functions beside a kernel have none."
        )
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            foreign = [alias.name for alias in part.names if not _is_known(alias.name)]
            if isinstance(node, ast.Import):
                foreign = [alias for alias in foreign if alias in _imported(node, word)]
        elif isinstance(part, ast.ImportFrom):
            module = "." * part.level + (part.module or "")
            foreign = [] if _is_known(module) else [module]
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            provided = PROVIDED.get(part.value.id)
            foreign = [ast.unparse(part)] if provided and part.attr not in provided else []
        else:
            continue
        if foreign:
            raise BadInput(f"{user} in {name} uses {foreign[0]}, and {_ONLY}.")


def _imported(node: ast.Import, word: str) -> list[str]:
    return [alias.name for alias in node.names if _bound(alias) == word]


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _MODULES


class _Bare(ast.NodeTransformer):
    """Takes annotations away: nothing of them is needed."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        return self.generic_visit(ast.Assign([node.target], node.value, lineno=node.lineno))


def _global_names(node: ast.stmt) -> set[str]:
    """Names of the file's top level or of Python that a statement reads."""
    bare = _Bare().visit(ast.parse(ast.unparse(node)))
    text = ast.unparse(ast.fix_missing_locations(bare))
    return set(_referenced(symtable.symtable(text, "file", "exec")))


def _referenced(table: symtable.SymbolTable) -> Iterator[str]:
    outside = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (outside or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _referenced(child)


def _source(text: str, node: ast.stmt, words: Sequence[str]) -> str:
    """A statement's own text; of an import the names that are used."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        kept = [alias for alias in node.names if _bound(alias) in words]
        if isinstance(node, ast.Import):
            return ast.unparse(ast.Import(kept))
        return ast.unparse(ast.ImportFrom(node.module, kept, node.level))
    written = ast.get_source_segment(text, node)
    assert written is not None
    return written


def _literal(top: Mapping[str, ast.stmt], word: str, name: str) -> object:
    node = top[word]
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    try:
        if value is None:
            raise ValueError(word)
        return ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise BadInput(
            f"{word} in {name} is not a literal: it is read, not run.",
            hint='such as AXES = {"BLOCK": [256, 512], "num_warps": [4, 8]}',
        ) from None


def _axes(literal: object, kernel: KernelFile, name: str) -> dict[str, tuple[int, ...]]:
    if not isinstance(literal, dict) or not 0 < len(literal) <= _MAX_AXES:
        raise BadInput(f"AXES in {name} is not a dictionary of 1 to {_MAX_AXES} axes.")
    axes: dict[str, tuple[int, ...]] = {}
    for axis, values in literal.items():
        if axis not in kernel.arguments and axis not in OPTIONS:
            raise BadInput(
                f"No argument of {kernel.function} in {name} takes the axis {axis}.",
                hint=f"its arguments are {', '.join(kernel.arguments)}; options of its launch are"
                f" {', '.join(OPTIONS)}",
            )
        if not isinstance(values, list | tuple) or not all(_is_whole(value) for value in values):
            raise BadInput(f"The axis {axis} in {name} is not a list of whole numbers.")
        if not values or len(set(values)) < len(values):
            raise BadInput(f"The axis {axis} in {name} needs a value or more, each of them once.")
        wrong = [value for value in values if axis == "num_warps" and not _is_warps(value)]
        if wrong:
            raise BadInput(f"num_warps {wrong[0]} in {name} is not a power of 2 up to {_MAX_WARPS}")
        axes[axis] = tuple(values)
    points = math.prod(map(len, axes.values()))
    if points > _MAX_POINTS:
        raise BadInput(f"AXES in {name} have {points} points, more than {_MAX_POINTS}.")
    return axes


def _is_whole(value: object) -> bool:
    return type(value) is int and -(2**31) <= value < 2**31


def _is_warps(value: int) -> bool:
    return 0 < value <= _MAX_WARPS and value & (value - 1) == 0


def _default(
    literal: object, axes: Mapping[str, Sequence[int]], name: str
) -> tuple[tuple[str, int], ...]:
    if not isinstance(literal, dict) or literal.keys() != axes.keys():
        raise BadInput(f"DEFAULT in {name} must have the axes of AXES: {', '.join(axes)}.")
    for axis, value in literal.items():
        if value not in axes[axis] or not _is_whole(value):
            raise BadInput(f"DEFAULT in {name} has the {axis} {value!r}, which AXES lacks.")
    return tuple((axis, literal[axis]) for axis in axes)


def default_tile(file: UserFile) -> Tile:
    """Return DEFAULT, else the first point of the axes."""
    return dict(file.default or ((axis, values[0]) for axis, values in file.axes))
