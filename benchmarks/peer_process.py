"""A process in which one runtime runs one model, for benchmarks/peers.py; imports nothing of Tuna.

`python peer_process.py RUNTIME MODEL THREADS [INPUTS.npz]` prints a JSON object with version and
precision. Then each line on stdin is a number of seconds, answered by a JSON list: milliseconds of
each run, CPU time of the process with one thread, else wall time; or the path of an .npz file for
the answers of one run, answered by an empty list. Inputs that are not in INPUTS.npz by name are
drawn.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_EXAMPLE = Path(__file__).parents[1] / "examples" / "run_model.py"
#: version, precision, and what runs the model once
Runtime = tuple[str, str, Callable[[], object]]
#: Values of inputs by name
Inputs = Mapping[str, Any]


def drawn(shape: Sequence[int], dtype: Any) -> Any:
    """Random values for an input: ones where it is not of floating point, such as token ids."""
    if np.dtype(dtype).kind == "f":
        return np.random.default_rng(0).standard_normal(shape).astype(dtype)
    return np.ones(shape, dtype)


def value(inputs: Inputs, names: Iterable[str], shape: Sequence[int], dtype: Any) -> Any:
    """The value that an input with these names is given, else random ones."""
    given = [inputs[name] for name in names if name in inputs]
    return given[0] if given else drawn(shape, dtype)


def arrays(found: Any) -> list[Any]:
    """The answers of a run of Tuna's, onnxruntime's or OpenVINO's."""
    found = found.values() if hasattr(found, "values") else found
    values = [found] if hasattr(found, "numpy") else list(found)
    return [each.numpy() if hasattr(each, "numpy") else np.asarray(each) for each in values]


def tuna(model: str, threads: int, inputs: Inputs) -> Runtime:
    """A library of `tuna model build`, with TVM's runtime, as the example runs it."""
    os.environ |= {"TVM_NUM_THREADS": str(threads), "TVM_BIND_THREADS": "0"}
    import tvm
    from tvm import relax

    facts = json.loads(Path(f"{model}.json").read_text())
    machine = relax.VirtualMachine(tvm.runtime.load_module(model), tvm.cpu())
    runpy.run_path(str(_EXAMPLE))["use_large_pages"]()
    tensors = [
        tvm.runtime.tensor(value(inputs, [entry["name"]], entry["shape"], entry["dtype"]))
        for entry in facts["inputs"]
    ]
    return tvm.__version__, "as the model", lambda: machine["main"](*tensors)


def onnxruntime(model: str, threads: int, inputs: Inputs) -> Runtime:
    """The wheel from PyPI, at its defaults but for the threads."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    kinds = {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(int32)": "int32"}
    values = {
        one.name: value(inputs, [one.name], one.shape, kinds[one.type])
        for one in session.get_inputs()
    }
    return ort.__version__, "as the model", lambda: session.run(None, values)


def openvino(model: str, threads: int, inputs: Inputs, **hints: str) -> Runtime:
    """The wheel from PyPI, at its defaults: bf16 where the CPU has it."""
    import openvino as ov

    core = ov.Core()
    config = {"NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": threads, **hints}
    compiled = core.compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    for index, port in enumerate(compiled.inputs):
        values = value(inputs, port.names, list(port.shape), port.element_type.to_dtype())
        request.set_input_tensor(index, ov.Tensor(values))
    precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    return ov.__version__.split("-")[0], precision, request.infer


def openvino_f32(model: str, threads: int, inputs: Inputs) -> Runtime:
    """The same, kept to fp32."""
    return openvino(model, threads, inputs, INFERENCE_PRECISION_HINT="f32")


def mnn(model: str, threads: int, inputs: Inputs) -> Runtime:
    """The wheel from PyPI, which converts the model itself, at high precision."""
    import MNN

    converted = f"{tempfile.mkdtemp()}/model.mnn"
    # Not MNN.tools.mnnconvert: that has pip install a log service's client, and reports the use.
    program = "import sys, MNN, _tools; _tools.mnnconvert(sys.argv)"
    words = ["-f", "ONNX", "--bizCode", "x", "--modelFile", model, "--MNNModel", converted]
    subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True)
    config = {"backend": "CPU", "numThread": threads, "precision": "high"}
    runtime = MNN.nn.create_runtime_manager((config,))
    net = MNN.nn.load_module_from_file(converted, [], [], runtime_manager=runtime)
    from onnx import load

    shapes = [
        [extent.dim_value for extent in value.type.tensor_type.shape.dim]
        for value in load(model, load_external_data=False).graph.input
    ]
    values = [
        MNN.expr.convert(
            MNN.expr.const(drawn(shape, "float32"), shape, MNN.expr.NCHW), MNN.expr.NC4HW4
        )
        for shape in shapes
    ]

    def run() -> None:
        for answer in net.forward(values):
            answer.read()

    return MNN.version(), "fp32", run


def ncnn(model: str, threads: int, inputs: Inputs) -> Runtime:
    """The wheel from PyPI, with a model that pnnx has converted beside it (MODEL.ncnn.param)."""
    import ncnn as library

    net = library.Net()
    net.opt.num_threads = threads
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    net.opt.use_bf16_storage = False
    stem = model.removesuffix(".onnx")
    net.load_param(f"{stem}.ncnn.param")
    net.load_model(f"{stem}.ncnn.bin")
    import onnx

    value = onnx.load(model, load_external_data=False).graph.input[0]
    shape = [extent.dim_value for extent in value.type.tensor_type.shape.dim]
    matrix = library.Mat(drawn(shape[1:], "float32"))

    def run() -> None:
        extractor = net.create_extractor()
        extractor.input(net.input_names()[0], matrix)
        extractor.extract(net.output_names()[0])

    return library.__version__, "fp32", run


RUNTIMES = {one.__name__: one for one in (tuna, onnxruntime, openvino, openvino_f32, mnn, ncnn)}


def main() -> None:
    """Serve turns until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a runtime prints is no answer
    runtime, model, threads, *files = sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:]
    inputs: dict[str, Any] = {}
    for file in files:
        with np.load(file, allow_pickle=False) as stored:
            inputs |= stored
    version, precision, run = RUNTIMES[runtime](model, threads, inputs)
    for _ in range(3):
        run()
    print(json.dumps({"version": version, "precision": precision}), file=answers, flush=True)
    clock = time.process_time if threads == 1 else time.perf_counter
    for line in sys.stdin:
        if line.strip().endswith(".npz"):
            np.savez(line.strip(), *arrays(run()))
            print("[]", file=answers, flush=True)
            continue
        times_ms, end = [], time.perf_counter() + float(line)
        while time.perf_counter() < end:
            started = clock()
            run()
            times_ms.append(1e3 * (clock() - started))
        print(json.dumps(times_ms), file=answers, flush=True)


if __name__ == "__main__":
    main()
