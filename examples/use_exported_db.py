#!/usr/bin/env python3
"""Uses a tuning database that Tuna exported, with TVM alone: `python examples/use_exported_db.py DIR`.

DIR is what `tuna export --form tvm` wrote: TVM's `database_workload.json` and `database_tuning_record.json`, and
`layers.json`, which says which layer each workload is. For each layer TVM's own JSONDatabase gives the best schedule, TVM
builds it, the answer is compared with NumPy, and the time is set beside that of the same layer without a schedule.
Nothing here imports Tuna.
"""

import importlib
import itertools
import json
import os
import sys
import types
from pathlib import Path

os.environ.setdefault("TVM_NUM_THREADS", "1")  # TVM takes half the cores otherwise; the records are for one

import numpy as np
import tvm
import tvm.s_tir

LIMIT = {"FP32": 1e-4, "FP16": 2e-3, "BF16": 1.6e-2, "INT8": 0.0}


def skip_foreign_intrinsics():
    """Keep TVM from parsing the tensor intrinsics of every device (20 s); only x86's are imported."""
    package = types.ModuleType("tvm.s_tir.tensor_intrin")
    package.__path__ = [str(Path(tvm.s_tir.__file__).parent / "tensor_intrin")]
    sys.modules["tvm.s_tir.tensor_intrin"] = tvm.s_tir.tensor_intrin = package
    importlib.import_module("tvm.s_tir.tensor_intrin.x86")


def parse(driver):
    """The flags of a driver command: names and values."""
    words = driver.split()
    return words[1], dict(zip((word.lstrip("-") for word in words[2::2]), words[3::2], strict=True))


def convolve(flags, x, w):
    """The layer's definition in double precision, tap by tap."""
    ints = {name: int(value) for name, value in flags.items() if value.lstrip("-").isdigit()}
    x, w = x.astype(np.float64), w.astype(np.float64)
    if flags["in_layout"].endswith("C"):
        x, w = np.moveaxis(x, -1, 1), np.moveaxis(w, -1, 1)
    axes = "dhw" if ints["spatial_dim"] == 3 else "hw"
    pads, strides, dilations = (
        [ints[f"{name}_{axis}"] for axis in axes] for name in ("pad", "conv_stride", "dilation")
    )
    x = np.pad(x, [(0, 0), (0, 0), *((pad, pad) for pad in pads)])
    sizes = [(x.shape[2 + i] - dilations[i] * (w.shape[2 + i] - 1) - 1) // strides[i] + 1 for i in range(len(axes))]
    groups = ints["group_count"]
    k = w.shape[0] // groups
    y = np.zeros((x.shape[0], w.shape[0], *sizes))
    for tap in itertools.product(*map(range, w.shape[2:])):
        window = tuple(
            slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in zip(tap, dilations, sizes, strides, strict=True)
        )
        part = x[(slice(None), slice(None), *window)].reshape(x.shape[0], groups, w.shape[1], -1)
        for g in range(groups):
            weight = w[(slice(g * k, (g + 1) * k), slice(None), *tap)]
            y[:, g * k : (g + 1) * k] += (weight @ part[:, g]).reshape(x.shape[0], k, *sizes)
    return np.moveaxis(y, 1, -1) if flags["out_layout"].endswith("C") else y


def multiply(flags, a, b):
    """The matrix product in double precision."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    a = np.swapaxes(a, -1, -2) if flags.get("transA") == "1" else a
    b = np.swapaxes(b, -1, -2) if flags.get("transB") == "1" else b
    return a @ b


def random(shape, kind):
    """Numbers of the argument's type."""
    generator = np.random.default_rng(1)
    if kind == "int8":
        return generator.integers(-8, 8, size=shape, dtype=np.int8)
    if kind == "bfloat16":
        import ml_dtypes

        return generator.uniform(-1, 1, size=shape).astype(ml_dtypes.bfloat16)
    return generator.uniform(-1, 1, size=shape).astype(kind)


def run(module, target, inputs, output):
    """Build the module, run it, and return its answer and its time in ms."""
    built = tvm.tirx.build(module, target=target)
    arguments = [tvm.runtime.tensor(array) for array in (*inputs, output)]
    built["main"](*arguments)
    timer = built.time_evaluator("main", tvm.cpu(), number=1, repeat=5, min_repeat_ms=10)
    return arguments[-1].numpy(), float(np.median(timer(*arguments).results)) * 1e3


def main(directory):
    """Compile every layer from the database; exit code 1 if an answer is wrong."""
    skip_foreign_intrinsics()
    from tvm.s_tir import meta_schedule as ms

    folder = Path(directory)
    database = ms.database.JSONDatabase(work_dir=str(folder))
    workloads = [json.loads(line) for line in (folder / "database_workload.json").read_text().splitlines()]
    records = [json.loads(line) for line in (folder / "database_tuning_record.json").read_text().splitlines()]
    best = {}
    for layer in json.loads((folder / "layers.json").read_text())["layers"]:
        if layer["key"] not in best or layer["time_ms"] < best[layer["key"]]["time_ms"]:
            best[layer["key"]] = layer
    print(f"{'layer':<58} {'solver':<20} {'untuned ms':>10} {'tuned ms':>9} {'faster':>7} {'error':>8}")
    wrong = 0
    for layer in best.values():
        command, flags = parse(layer["driver"])
        module = ms.database.Workload.from_json(workloads[layer["workload"]]).mod
        record = records[layer["records"][0]][1]
        target = tvm.target.Target(record[2])
        schedule = database.query_schedule(module, target, "main")
        if schedule is None:
            raise SystemExit(f"the database has no schedule for {layer['driver']}")
        tuned = tvm.s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(schedule.mod)
        *given, answer = [(tuple(shape), kind) for _, kind, shape in record[3]]
        inputs = [random(shape, kind) for shape, kind in given]
        kind = np.dtype(answer[1]) if answer[1] != "bfloat16" else inputs[0].dtype
        blank = np.full(answer[0], np.iinfo(kind).min if kind.kind == "i" else np.nan, dtype=kind)
        expected = (multiply if "gemm" in command else convolve)(flags, *inputs)
        _, untuned_ms = run(module, target, inputs, blank)
        found, tuned_ms = run(tuned, target, inputs, blank)
        error = float(np.max(np.abs(found.astype(np.float64) - expected)) / np.max(np.abs(expected)))
        data_type = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16", "int8": "INT8"}[given[0][1]]
        right = error <= LIMIT[data_type]  # false for NaN: an output that was not written
        wrong += not right
        sizes = "x".join(flags.get(n, "?") for n in ("batchsize", "in_channels", "in_h", "in_w"))
        shape = (
            f"{command} {sizes} k{flags.get('out_channels', '?')} {flags.get('fil_h', '?')}x{flags.get('fil_w', '?')}"
        )
        name = f"{shape} s{flags.get('conv_stride_h', '?')}" if "gemm" not in command else layer["driver"][18:76]
        print(
            f"{name:<58} {layer['solver']:<20} {untuned_ms:>10.3f} {tuned_ms:>9.3f} {untuned_ms / tuned_ms:>6.1f}x "
            f"{error:>8.1e}{'' if right else '  WRONG'}"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    raise SystemExit(main(sys.argv[1]))
