"""TIR functions as text, in which tasks of models are kept. Imports TVM.

The text is TVM's JSON of the function. Nothing is executed to read it, as TVMScript would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tvm
import tvm_ffi.serialization

from tuna.errors import BadInput


def to_text(function: Any) -> str:
    """The function, called `main`, as text that is the same in every process."""
    return str(tvm.ir.save_json(function.with_attr("global_symbol", "main")))


def from_json(text: str) -> Any:
    """Return the function or module that `tvm.ir.save_json` wrote.

    `tvm.ir.load_json` first writes the text again in the form of this version, in five times the
    time: a text that is of this version needs none.
    """
    if text.endswith(f'"metadata":{{"tvm_version":"{tvm.__version__}"}}}}'):
        return tvm_ffi.serialization.from_json_graph_str(text)
    return tvm.ir.load_json(text)


def module_of(text: str) -> tvm.IRModule:
    """A module with the function of a text; raises BadInput for an invalid text."""
    try:
        return tvm.IRModule({"main": from_json(text)})
    except Exception as error:  # TVM's reader has many ways to fail
        reason = str(error).strip().splitlines()[-1][:200]
        raise BadInput(f"A task's text cannot be read: {reason}") from error


def read(body: str) -> tvm.IRModule:
    """The module of a task from the file with its text."""
    return module_of(Path(body).read_text(encoding="utf-8"))
