"""Forbidden constructs in the source: execution of data as code, and SQL built from strings."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path

import pytest
from places import CORE, PACKAGES, ROOT

_FOLDERS = (CORE, *PACKAGES, *(ROOT / one for one in ("scripts", "examples", "benchmarks")))
#: Modules that deserialise objects or code, or run shell commands.
_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "shelve",
}
_MODULES |= {"tarfile", "zipfile", "code", "codeop", "commands", "pty", "xmlrpc", "telnetlib"}
_BUILTINS = {"eval", "exec", "compile", "__import__"}
_CALLS = {
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "yaml.load",
    "yaml.unsafe_load",
}
_CALLS |= {
    "numpy.load",
    "np.load",
    "pandas.read_pickle",
    "torch.load",
    "tempfile.mktemp",
    "ctypes.CDLL",
}
#: Uses ctypes only for the C library of the process (`CDLL(None)`); a test below checks that.
_OWN_LIBRARY = {
    "benchmarks/gpu_run.py",
    "benchmarks/tvm.py",
    "examples/run_model.py",
    "tuna/common/files.py",
    "tuna/common/lifetime.py",
    "tuna/libraries/probe.py",
    "tuna/libraries/tvm/large_pages.py",
    "tuna/sandbox/child.py",
}
_OWN_LIBRARY |= {f"tuna/sandbox/{name}.py" for name in ("landlock", "seccomp")}
#: Loads code that the artifact store has checked, in a child of the sandbox: what a library's
#: `Loader` is for; its own code; or a library that was installed as a package, in a child too; or
#: a library of the installed driver of a device, by its name alone.
_LOADERS = {
    "examples/plugin/tuna_cgemm/kernel.py",
    "benchmarks/contest.py",
    "packages/tuna-onednn/tuna_onednn/capi.py",
    "packages/tuna-triton/tuna_triton/driver.py",
    "packages/tuna-triton/tuna_triton/nvml.py",
}
#: Runs the functions of a kernel's file that its user gave, in a box.
_OWN_KERNELS = "packages/tuna-triton/tuna_triton/user_kernel.py"
_SQL = {
    "execute",
    "executemany",
    "executescript",
    "exec_driver_sql",
    "text",
    "literal_column",
    "DDL",
    "scalar",
    "scalars",
}
#: Allowed statements built from strings, each from names in the source only.
_JUSTIFIED = {
    ("tuna/db/engine.py", "_prepare"),  # pragmas from a tuple in the line above
    ("tuna/db/bulk.py", "_table"),  # numbers, and types that the module names
    ("tuna/libraries/miopen/formats/database_file.py", "create"),  # the same
    ("tuna/libraries/exporter.py", "sort_rows"),  # names that the module generates
}


#: Allowed readers and writers of archives; what any of them reads has tests of its own.
_ARCHIVES = {
    "benchmarks/drills/foreign.py",  # writes alone
    "benchmarks/quantised.py",  # reads a member of what Tuna has built
    "benchmarks/wheel_models.py",  # reads one member by its name, of pinned archives
    "scripts/gpu-wheels",  # takes two files out of a wheel, by their names
    "tuna/libraries/tvm/whole_models.py",  # reads members under names of its own, in the box
    "packages/tuna-models/tuna_models/reading/file_kinds.py",  # reads names of members alone
    # looks for names of operators in a bounded part of each member
    "packages/tuna-models/tuna_models/reading/torch_packages.py",
    "packages/tuna-serve/tuna_serve/requests/answers.py",  # writes alone
    # looks at stored members, none of which it unpacks into a file
    "packages/tuna-serve/tuna_serve/requests/uploads.py",
}


def _sources() -> list[Path]:
    files = [
        path
        for folder in _FOLDERS
        for path in sorted(folder.rglob("*.py"))
        if not {"build", "tests"} & {*path.relative_to(ROOT).parts}
    ]
    scripts = [
        path for path in sorted((ROOT / "scripts").iterdir()) if b"python" in path.read_bytes()[:40]
    ]
    return [*files, *scripts, *sorted({*ROOT.glob("*.py")} - {ROOT / "conftest.py"})]


def _name(node: ast.expr) -> str:
    """The dotted name of a called function, such as `os.system`; empty for other expressions."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else [""]), *reversed(parts)])


@functools.cache
def _trees() -> list[tuple[str, ast.Module]]:
    gc.disable()  # of half a million nodes none is garbage
    try:
        return [(str(path.relative_to(ROOT)), ast.parse(path.read_bytes())) for path in _sources()]
    finally:
        gc.enable()


@functools.cache
def _calls() -> list[tuple[str, str, ast.Call]]:
    """Every call, with its file and the name of the enclosing function."""
    calls = []
    todo: list[tuple[str, str, ast.AST]] = [(file, "", tree) for file, tree in _trees()]
    while todo:
        file, where, node = todo.pop()
        if isinstance(node, ast.Call):
            calls.append((file, where, node))
        if isinstance(node, ast.FunctionDef):
            where = node.name
        todo += ((file, where, child) for child in ast.iter_child_nodes(node))
    return calls


def test_the_search_sees_the_whole_project() -> None:
    assert len(_sources()) > 150


def test_no_module_that_makes_objects_of_bytes_is_imported() -> None:
    found = []
    for file, tree in _trees():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            )
            found += [
                (file, name) for name in names if name.partition(".")[0] in _MODULES | {"yaml"}
            ]
    assert {name for _, name in found} == {"tarfile", "zipfile"}
    assert {file for file, name in found if name == "tarfile"} == {
        "benchmarks/drills/foreign.py",
        "benchmarks/wheel_models.py",
    }
    assert {file for file, _ in found} == _ARCHIVES, (
        "a reader of tar or zip files needs tests of its own, and a reason here"
    )


def test_no_text_is_run_as_code_or_by_a_shell() -> None:
    found = []
    for file, _, call in _calls():
        name = _name(call.func)
        shell = [k for k in call.keywords if k.arg == "shell" and not _is(k.value, False)]
        if name == "ctypes.CDLL" and file in _OWN_LIBRARY and _is(call.args[0], None):
            continue
        if name == "ctypes.CDLL" and file in _LOADERS:
            continue
        if name == "np.load" and any(
            k.arg == "allow_pickle" and _is(k.value, False) for k in call.keywords
        ):
            continue
        if name in _BUILTINS | _CALLS or shell:
            found.append((file, name))
    assert sorted(found) == [(_OWN_KERNELS, "compile"), (_OWN_KERNELS, "exec")]


def test_yaml_is_read_without_making_objects() -> None:
    for file, _, call in _calls():
        if _name(call.func).endswith("YAML"):
            assert [k.value.value for k in call.keywords if k.arg == "typ"] == ["safe"], file  # type: ignore[attr-defined]


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _built(node: ast.expr) -> bool:
    """True if the expression builds a string."""
    if isinstance(node, ast.JoinedStr):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        return any(_texts(side) for side in (node.left, node.right))
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("format", "join")
    )


def _texts(node: ast.expr) -> bool:
    return (isinstance(node, ast.Constant) and isinstance(node.value, str)) or _built(node)


def test_no_statement_is_put_together_where_it_runs() -> None:
    found = {
        (file, where)
        for file, where, call in _calls()
        if _name(call.func).rpartition(".")[2] in _SQL and call.args and _built(call.args[0])
    }
    assert found == _JUSTIFIED


def test_statements_that_are_put_together_beforehand_are_made_of_constants_of_their_module() -> (
    None
):
    """`_SELECT = f"SELECT {', '.join(COLUMNS)} ..."` is fine where COLUMNS is a tuple of words."""
    words = ("SELECT ", "INSERT ", "UPDATE ", "DELETE ", "CREATE ", "DROP ", "PRAGMA ")
    found = set()
    for file, tree in _trees():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for function in functions if file.startswith("tuna/") else []:
            for node in ast.walk(function):
                first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else None
                if isinstance(first, ast.Constant) and str(first.value).startswith(words):
                    found.add((file, function.name))
    assert found <= {*_JUSTIFIED, ("tuna/db/engine.py", "_sqlite_engine")}  # encloses _prepare


@pytest.mark.parametrize(
    "text", ["f'SELECT {x}'", "'a' + b", "'%s' % b", "'{}'.format(b)", "','.join(b)"]
)
def test_the_search_knows_every_way_to_put_text_together(text: str) -> None:
    assert _built(ast.parse(text, mode="eval").body)
