"""The TVM installation, found without importing it, and the targets that it compiles and links for.

Versions come from package metadata, the CPU from TVM's libraries. A target is TVM's dictionary from
JSON, or from the text of older releases, `llvm -mtriple=aarch64-linux-gnu -mattr=+neon -num-cores
4`. Both forms of one target get the same JSON: names sorted, lists of features too.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog

from tuna.common.cpu import cpu_model
from tuna.common.messages import choices, install_extra
from tuna.errors import BadInput, LibraryMissing
from tuna.libraries.base import Environment
from tuna.libraries.boards import board_settings
from tuna.libraries.cached_probe import cached_probe
from tuna.libraries.tvm import kernels
from tuna.sandbox.cores import eval_cpus
from tuna.sandbox.processes import Child, ChildFault, run

log = structlog.get_logger(__name__)

#: Newest release of tvm-ffi that works: later 0.1.x releases make TVM 0.27 crash when a TuneContext
#: is made (an ABI change is the likely cause)
GOOD_FFI = "0.1.14.post1"
_HINT = install_extra("tvm")
_HOST_TIMEOUT_S = 120.0
#: Types of the attributes of TVM's target `llvm`
_ATTRIBUTES: Mapping[str, type] = {
    **dict.fromkeys(
        ("mcpu", "mtriple", "mabi", "mfloat-abi", "device", "model", "jit", "tag"), str
    ),
    **dict.fromkeys(("num-cores", "opt-level", "vector-width"), int),
    **dict.fromkeys(("keys", "libs", "mattr", "cl-opt"), list),
    **dict.fromkeys(
        ("fast-math", *(f"fast-math-{name}" for name in ("nnan", "ninf", "nsz", "arcp"))), bool
    ),
    **dict.fromkeys(("fast-math-contract", "fast-math-reassoc"), bool),
}
#: Names of lists whose order has no meaning
_SETS = ("mattr", "libs")
#: Architectures that imply a `device`, which then says no more
_IMPLIED_DEVICES = {"arm_cpu": ("aarch64", "arm")}
#: Present names of architectures by their older ones
_ARCHITECTURES = {"arm64": "aarch64", "amd64": "x86_64"}
_DEFAULT_SYSTEM = "linux-gnu"
#: LLVM's options for code of MetaSchedule's space. Scheduling instructions once more after
#: registers were allocated takes up to half of the time of a large candidate, and a core that
#: reorders instructions itself gains nothing by it.
_CODE_OPTIONS = {"x86_64": ("-disable-post-ra",)}
EXAMPLE = 'such as "llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72 -num-cores=4"'
_LINKER_TIMEOUT_S = 30.0


def tvm_version() -> str:
    """The version of the installed TVM; raises LibraryMissing when there is none, or one that is
    known to crash."""
    try:
        found, ffi = version("apache-tvm"), version("apache-tvm-ffi")
    except PackageNotFoundError:
        raise LibraryMissing("TVM is not installed.", hint=_HINT) from None
    if ffi != GOOD_FFI:
        raise LibraryMissing(
            f"TVM {found} crashes with apache-tvm-ffi {ffi}; it needs {GOOD_FFI}.", hint=_HINT
        )
    return found


def toolchain_of(tvm: str = "") -> str:
    """The toolchain of a version of TVM (default: the installed one) with the kernels as they are
    now: any machine that has it builds the same code for a target."""
    return f"tvm-{tvm or tvm_version()}-kernels-{kernels.VERSION}"


def host_environment() -> Environment:
    """The environment of this machine: CPU, measuring cores, TVM."""
    found = tvm_version()
    cpu = cpu_model()
    key = [found, cpu.name, cpu.digest]
    mcpu = cached_probe("tvm-cpu", key, lambda: _ask(found, {"op": "host"}))["mcpu"]
    cores = len(eval_cpus())
    target = {"kind": "llvm", "mcpu": mcpu, "num-cores": cores}
    return Environment(
        library="tvm",
        library_version=found,
        arch=mcpu,
        num_cu=cores,
        toolchain=toolchain_of(found),
        device=cpu.name,
        target=json.dumps(target, sort_keys=True),
        flags={"cpu_flags": cpu.digest},
    )


def target_environment(text: str) -> Environment:
    """The environment that a target alone describes, whichever device measures for it; raises
    BadInput, LibraryMissing."""
    target = parse(text)
    return Environment(
        library="tvm",
        library_version=tvm_version(),
        arch=str(target.get("mcpu") or architecture(target)),
        num_cu=int(target.get("num-cores") or 1),
        toolchain=toolchain_of(),
        device=triple(target),
        target=to_text(target),
        flags={"device_key": "", "cpu": "", "runtime": "llvm-0"},
    )


def host() -> Mapping[str, str]:
    """LLVM's name for this machine's CPU. It is run in the child.

    TVM's libraries answer without its Python package, whose import takes a second.
    """
    return {"mcpu": str(_llvm("get_system_cpu")())}


def cpus(mtriple: str) -> Mapping[str, str]:
    """Return LLVM's names of the CPUs that it compiles for with a triple, in one text with spaces
    between. It is run in the child, which LLVM ends for a triple that it does not know."""
    from tvm_ffi import get_global_func

    names = _llvm("get_cpu_archlist")  # loads TVM
    target = get_global_func("target.Target")({"kind": "llvm", "mtriple": mtriple})
    return {"names": " ".join(map(str, names(target)))}


def words(target: str) -> Mapping[str, str]:
    """Return the names of the dot products (`instructions.DOTS`) of a target, given as JSON, in one
    text with spaces between. It is run in the child."""
    from tvm.target import Target

    from tuna.libraries.tvm.kernels import machine

    return {"names": " ".join(sorted(machine.from_target(Target(json.loads(target))).words))}


def words_of(target: str) -> Sequence[str]:
    """Return the same; raises LibraryMissing without TVM."""
    found = tvm_version()
    request = {"op": "words", "target": target}
    key = [found, str(kernels.VERSION), target]
    return cached_probe("tvm-words", key, lambda: _ask(found, request))["names"].split()


def _llvm(question: str) -> Any:
    """Return a function of TVM that asks LLVM."""
    from tvm_ffi import get_global_func, libinfo

    package = find_spec("tvm")
    folders = [
        Path(folder) / "lib" for folder in (package and package.submodule_search_locations) or ()
    ]
    for name, mode in (("tvm_runtime", "RTLD_GLOBAL"), ("tvm_compiler", "RTLD_LOCAL")):
        libinfo.load_lib_ctypes("tvm", name, mode, extra_lib_paths=folders)
    return get_global_func(f"target.llvm_{question}")


#: Handlers of the child that asks LLVM
HANDLERS = {"cpus": cpus, "host": host, "words": words}


def _ask(tvm: str, request: Mapping[str, str]) -> Mapping[str, str]:
    child = Child(__name__)
    try:
        return {name: str(value) for name, value in child.call(request, _HOST_TIMEOUT_S).items()}
    except ChildFault as error:
        raise LibraryMissing(f"TVM {tvm} cannot be used here: {error}.", hint=_HINT) from error
    finally:
        child.close()


def parse(text: str) -> dict[str, Any]:
    """The dictionary of a target in either form; raises BadInput for what TVM's `llvm` does not
    know."""
    attributes = _from_json(text) if text.lstrip().startswith("{") else _from_words(text)
    kind = attributes.pop("kind", "")
    if kind == "lvm":
        log.warning("the target lvm is taken for llvm")
        kind = "llvm"
    if kind != "llvm":
        raise BadInput(
            f"Boards are tuned on their CPU, for a target of kind llvm, not {kind!r}.", hint=EXAMPLE
        )
    target: dict[str, Any] = {"kind": kind}
    for name, value in attributes.items():
        if name not in _ATTRIBUTES:
            raise BadInput(
                f"A target llvm has no {name!r}.", hint=choices(name, _ATTRIBUTES, "it has")
            )
        target[name] = _typed(name, value)
    if architecture(target) in _IMPLIED_DEVICES.get(target.get("device", ""), ()):
        del target["device"]
    return dict(sorted(target.items()))


def to_text(target: Mapping[str, Any]) -> str:
    """The JSON of a target: equal targets have equal texts."""
    return json.dumps(target, sort_keys=True)


def to_words(target: Mapping[str, Any]) -> str:
    """Return a target as text in the form of older releases: `llvm -mcpu=znver4 -num-cores=2`."""
    words = [str(target["kind"])]
    for name, value in sorted(target.items()):
        if name != "kind":
            words.append(f"-{name}={','.join(value) if isinstance(value, list) else value}")
    return " ".join(words)


def is_own(target: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether a target leaves open, or says as `own` does, all that this machine's own target
    says."""
    named = target.keys() - {"kind", "mtriple", "keys"}
    return not is_foreign(target) and all(target[name] == own.get(name) for name in named)


def architecture(target: Mapping[str, Any]) -> str:
    """Return the architecture of the CPU that a target compiles for, as `uname -m` prints it: by
    its triple, else this machine's."""
    name = str(target.get("mtriple", "")).partition("-")[0] or platform.machine().lower()
    return _ARCHITECTURES.get(name, name)


def for_code(target: Mapping[str, Any]) -> dict[str, Any]:
    """The target with which code is generated for MetaSchedule's space, and for models."""
    options = _CODE_OPTIONS.get(architecture(target), ())
    return {**target, "cl-opt": [*target.get("cl-opt", ()), *options]}


def triple(target: Mapping[str, Any]) -> str:
    """The target's triple as GNU's tools have it: `aarch64-linux-gnu`, without a vendor."""
    words = str(target.get("mtriple", "")).split("-")
    system = "-".join(words[-2:]) if len(words) > 2 else _DEFAULT_SYSTEM
    return f"{architecture(target)}-{system}"


def is_foreign(target: Mapping[str, Any]) -> bool:
    """Whether this machine's own linker cannot link for it."""
    return architecture(target) != architecture({})


def linker(target: Mapping[str, Any], given: str) -> str:
    """The program that links for a target: `given` (TUNA_CC), or Debian's cross compiler; empty for
    this machine's own.

    Raises LibraryMissing with the package to install.
    """
    if not given and not is_foreign(target):
        return ""
    name = given or f"{triple(target)}-g++"
    path = shutil.which(name)
    if path is None:
        text = f"The compiler {name}, which would link for {triple(target)}, is not installed."
        raise LibraryMissing(text, hint=_package(target))
    return path


def check(target: Mapping[str, Any]) -> None:
    """Check that this machine can compile for a target.

    Raises LibraryMissing with the package to install, or BadInput for a CPU that LLVM does not
    know: it would generate code for the oldest CPU of the architecture.
    """
    found = tvm_version()
    path = linker(target, board_settings().cc)
    if path:
        _check_linker(target, path)
    if cpu := str(target.get("mcpu", "")):
        words = triple(target)
        request = {"op": "cpus", "mtriple": words}
        names = cached_probe("tvm-cpus", [found, words], lambda: _ask(found, request))["names"]
        if cpu not in names.split():
            raise BadInput(
                f"LLVM knows no CPU {cpu!r} of {architecture(target)}.",
                hint=choices(cpu, names.split(), "CPUs", most=200),
            )


def _check_linker(target: Mapping[str, Any], path: str) -> None:
    done = run([path, "-dumpmachine"], timeout_s=_LINKER_TIMEOUT_S)
    if done.returncode or architecture({"mtriple": done.output.strip()}) != architecture(target):
        says = (done.output.strip().splitlines() or ["nothing"])[-1]
        raise LibraryMissing(
            f"{path} does not link for {triple(target)}: asked for its machine, it says {says!r}.",
            hint=_package(target),
        )


def _package(target: Mapping[str, Any]) -> str:
    name = triple(target).replace("_", "-")
    return (
        f"apt-get install g++-{name}, or set TUNA_CC to a compiler that links for {triple(target)}"
    )


def _from_json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"The target is not a JSON object: {error}.", hint=EXAMPLE) from None
    if not isinstance(found, dict):
        raise BadInput("The target is not a JSON object.", hint=EXAMPLE)
    if "host" in found:
        raise BadInput("A target of a CPU has no host.", hint="leave it out")
    return found


def _from_words(text: str) -> dict[str, Any]:
    """`llvm -mcpu=X -num-cores 4`: a value may follow after a space."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"The target {text!r} cannot be read: {error}.", hint=EXAMPLE) from None
    if not words:
        raise BadInput("The target is empty.", hint=EXAMPLE)
    attributes: dict[str, Any] = {"kind": words[0]}
    rest = words[1:]
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        setting: str | bool = value
        if not name.startswith("-") or name.strip("-") == "":
            raise BadInput(f"{name!r} is not an attribute of a target.", hint=EXAMPLE)
        name = name.lstrip("-")
        if not equals:
            follows = bool(rest) and not rest[0].startswith("-")
            setting = rest.pop(0) if follows else True
        if name in attributes:
            raise BadInput(f"The target has {name!r} twice.")
        attributes[name] = setting
    return attributes


def _typed(name: str, value: Any) -> Any:
    kind = _ATTRIBUTES[name]
    if kind is list:
        return _listed(name, value)
    if kind is bool:
        if str(value).lower() in ("true", "1", "false", "0"):
            return str(value).lower() in ("true", "1")
    elif kind is int:
        if re.fullmatch("[0-9]{1,9}", str(value)):
            return int(value)
    elif isinstance(value, str) and value:
        return value
    raise BadInput(f"The target's {name} cannot be {value!r}.", hint=EXAMPLE)


def _listed(name: str, value: Any) -> Sequence[str]:
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise BadInput(f"The target's {name} is not a list of words.", hint=EXAMPLE)
    return sorted(set(words)) if name in _SETS else words
