"""The TVM installation, found without importing it: versions from package metadata, the CPU from
the kernel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from tuna.errors import LibraryMissing
from tuna.libraries.base import Environment
from tuna.libraries.cached_probe import cached_probe
from tuna.libraries.tvm import kernels
from tuna.messages import install_extra
from tuna.sandbox.cores import eval_cpus
from tuna.sandbox.cpu import cpu_model
from tuna.sandbox.processes import Child, ChildFault

#: Newer 0.1.x releases of tvm-ffi make TVM 0.27 crash when a TuneContext is made (an ABI change is
#: the likely cause).
GOOD_FFI = "0.1.14.post1"
_HINT = install_extra("tvm")
_HOST_TIMEOUT_S = 120.0


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


def toolchain() -> str:
    """Any machine with these versions of TVM and of our kernels builds the same code for a
    target."""
    return toolchain_of(tvm_version())


def toolchain_of(tvm: str) -> str:
    """The toolchain of a version of TVM, with the kernels as they are now."""
    return f"tvm-{tvm}-kernels-{kernels.VERSION}"


def describe() -> Environment:
    """The environment of this machine: CPU, measuring cores, TVM."""
    found = tvm_version()
    cpu = cpu_model()
    mcpu = cached_probe("tvm-cpu", [found, cpu.name, cpu.digest], lambda: _host(found))["mcpu"]
    cores = len(eval_cpus())
    target = {"kind": "llvm", "mcpu": mcpu, "num-cores": cores}
    return Environment(
        library="tvm",
        library_version=found,
        arch=mcpu,
        num_cu=cores,
        toolchain=toolchain(),
        device=cpu.name,
        target=json.dumps(target, sort_keys=True),
        flags={"cpu_flags": cpu.digest},
    )


def host() -> Mapping[str, str]:
    """LLVM's name for this machine's CPU. It is run in the child.

    TVM's libraries answer without its Python package, whose import takes a second.
    """
    from tvm_ffi import get_global_func, libinfo

    package = find_spec("tvm")
    folders = [
        Path(folder) / "lib" for folder in (package and package.submodule_search_locations) or ()
    ]
    for name, mode in (("tvm_runtime", "RTLD_GLOBAL"), ("tvm_compiler", "RTLD_LOCAL")):
        libinfo.load_lib_ctypes("tvm", name, mode, extra_lib_paths=folders)
    return {"mcpu": str(get_global_func("target.llvm_get_system_cpu")())}


#: Handlers of the child that `describe` starts.
HANDLERS = {"host": host}


def _host(tvm: str) -> Mapping[str, str]:
    child = Child(__name__)
    try:
        return {"mcpu": str(child.call({"op": "host"}, _HOST_TIMEOUT_S)["mcpu"])}
    except ChildFault as error:
        raise LibraryMissing(f"TVM {tvm} cannot be used here: {error}.", hint=_HINT) from error
    finally:
        child.close()
