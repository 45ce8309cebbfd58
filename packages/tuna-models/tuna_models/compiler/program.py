"""Planned models as what crosses to workers: the functions to compile, and the program of TVM's
virtual machine that calls them, with the weights (`libraries/tvm/whole_models.py`). Imports TVM."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.relax import vm_build
from tvm.relax.backend.cpu_generic import pipeline
from tvm.runtime import _ffi_api

from tuna.libraries.tvm import toolchain
from tuna.libraries.tvm.kernels import machine, stages
from tuna.libraries.tvm.whole_models import MAIN, SEGMENTS, TENSORS, UNTUNED, ModelBody
from tuna_models.child_answers import BODY, PROGRAM
from tuna_models.compiler.blocked import opaque
from tuna_models.compiler.build import Planned
from tuna_models.compiler.fused import called
from tuna_models.compiler.graph import substitute

#: Clocks of clock_gettime(2) on Linux: wall time, and the CPU time of the calling thread.
_MONOTONIC, _THREAD_CPUTIME = 1, 3


@dataclass
class Program:
    """Planned models in one module, for one target."""

    target: Any
    #: names of the functions here, by that in the plan, of `main` and each timed function
    names: dict[str, dict[str, str]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)  #: Numbers of calls in `main`, by function

    def __post_init__(self) -> None:
        self._builder = relax.BlockBuilder()
        self._timed: dict[str, list[str]] = {}
        self._cuts: list[dict[str, Any]] = []
        clock = _MONOTONIC if machine.from_target(self.target).cores > 1 else _THREAD_CPUTIME
        # always there, as a program that calls nothing needs one function to be compiled
        self._stamp = self._builder.add_func(_clock(clock), "read_clock")

    @classmethod
    def of(
        cls,
        variants: Sequence[Planned],
        untuned: Planned | None,
        target: Any,
        checked: Sequence[Planned] = (),
    ) -> Program:
        """Return the program of which `main` is the first variant; all are timed in it.

        `checked` are that variant's plans in the forms `TENSORS` and `SEGMENTS`, where the model is
        quantised.
        """
        program = cls(target)
        program._add(MAIN, variants[0])
        for name, planned in zip((TENSORS, SEGMENTS), checked, strict=False):
            program._cuts = [cut.to_json() for cut in planned.cuts]
            program._add(name, planned)
        for number, planned in enumerate(variants):
            program._add(f"timed_{number}", planned, timed=True)
        if untuned is not None:
            program._add(UNTUNED, untuned, timed=True)
        return program

    def write(self, folder: Path, choices: str) -> Any:
        """Write the body and the program into a folder; returns the program of `main` alone, for
        `link`."""
        with self.target:
            lowered = lowering(self.target)(self._builder.get())
        whole, functions = _coded(lowered)
        whole.write_to_file(str(folder / PROGRAM), "vm")
        mains = {
            variable: function
            for variable, function in lowered.functions.items()
            if isinstance(function, tirx.PrimFunc) or variable.name_hint == MAIN
        }
        own = set(self.names[MAIN].values())
        used = {name for names in self.names.values() for name in names.values()}
        others = {*used, str(self._stamp.name_hint)} - own
        parts: list[dict[Any, Any]] = [{}, {}]
        for variable, function in functions.items():
            parts[str(variable.name_hint) in others][variable] = function
        model, beside = (str(tvm.ir.save_json(tvm.IRModule(part))) for part in parts)
        body = ModelBody(choices, self._timed, model, beside, self._cuts)
        (folder / BODY).write_bytes(gzip.compress(body.to_bytes(), 6, mtime=0))
        main, _ = _coded(tvm.IRModule(mains))
        return main

    def _add(self, name: str, planned: Planned, *, timed: bool = False) -> None:
        """Add the function `main` of a planned model under a name."""
        builder, main = self._builder, planned.module[MAIN]
        added = {
            var: builder.add_func(function, var.name_hint)
            for var, function in planned.module.functions.items()
            if isinstance(function, tirx.PrimFunc)
        }
        names = {str(var.name_hint): str(now.name_hint) for var, now in added.items()}
        self.names[name] = {function: names[function] for function in planned.functions}
        params = [relax.Var(param.name, param.ty) for param in main.params]
        known: dict[Any, Any] = dict(zip(main.params, params, strict=True))
        stamps: list[Any] = []

        def find(leaf: Any) -> Any:
            return known.get(leaf, leaf)

        with builder.function(name, params, attrs=dict(main.attrs or {}) | {"global_symbol": name}):
            with builder.dataflow():
                for binding in (bound for block in main.body.blocks for bound in block.bindings):
                    value, variable = substitute(binding.value, find), called(binding.value)
                    function = "" if variable is None else str(variable.name_hint)
                    if function:
                        args = [added[variable], *value.args[1:]]
                        value = tvm.ir.Call(value.op, args, value.attrs, value.ty_args)
                    if function and timed:
                        stamps.append(self._stamped())
                    if isinstance(binding, relax.MatchCast):
                        known[binding.var] = builder.match_cast(value, binding.ty)
                    else:
                        known[binding.var] = builder.emit(value)
                    if function and timed:
                        stamps.append(self._stamped())
                        self._timed.setdefault(name, []).append(names[function])
                    if function and name == MAIN:
                        self.calls[names[function]] += 1
                result = substitute(main.body.body, find)
                output = builder.emit_output(relax.Tuple([result, *stamps]) if timed else result)
            builder.emit_func_output(output)
        if timed:
            self._timed.setdefault(name, [])

    def _stamped(self) -> Any:
        """Emit a reading of the clock: seconds and nanoseconds."""
        return self._builder.emit(relax.call_tir(self._stamp, [], relax.TensorType((2,), "int64")))


def lowering(target: Any) -> Any:
    """The passes of TVM from a planned model to its virtual machine's calls."""
    return tvm.transform.Sequential(
        [*pipeline.dataflow_lower_passes(target), *pipeline.finalize_passes(target)], name="lower"
    )


def machine_of(planned: Planned, target: Any) -> Any:
    """A virtual machine of a planned model, compiled in this process."""
    made = tvm.compile(planned.module, target, relax_pipeline=lowering(target))
    return relax.VirtualMachine(made, tvm.cpu())


def link(program: Any, functions: Sequence[Path], target: Mapping[str, Any], output: Path) -> None:
    """Link the program of `main` and the object files with its functions into a shared library that
    TVM's Relax virtual machine loads."""
    for file in functions:
        program.import_module(tvm.runtime.load_static_library(str(file), []))

    def packed(module: Any, is_system: bool, prefix: str, workspace: str) -> str:
        text = json.dumps(toolchain.for_code(target))
        path = f"{workspace}/program.o"
        _ffi_api.ModulePackImportsToLLVM(module, is_system, text, prefix).write_to_file(path)
        return path

    linker = toolchain.linker(target, os.environ.get("TUNA_CC", ""))
    given = {"cc": linker} if linker else {}
    program.export_library(str(output), fpack_imports=packed, **given)


def _clock(clock: int) -> Any:
    """A function that reads a clock; its result is a `timespec` of a machine with 64 bits."""

    def read(_: Any, outs: Any) -> Any:
        return tirx.Evaluate(
            tirx.call_extern(
                "int32", "clock_gettime", tirx.const(clock, "int32"), outs[0].access_ptr("w")
            )
        )

    stamp = te.extern([(2,)], [], read, dtype="int64", name="stamp")
    return opaque(stages.module_of([stamp])["main"])


def _coded(lowered: Any) -> tuple[Any, dict[Any, Any]]:
    """The virtual machine's program of a lowered module, and the functions that it calls."""
    builder = relax.ExecBuilder()
    left = vm_build._vmcodegen(builder, lowered)
    program = vm_build._ffi_api.VMLink(builder, None, None, [], {})
    functions = {
        var: function
        for var, function in left.functions.items()
        if isinstance(function, tirx.PrimFunc)
    }
    return program, functions
