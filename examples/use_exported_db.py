#!/usr/bin/env python3
"""Uses a tuning database that Tuna exported, with TVM alone: `python examples/use_exported_db.py
DIR`.

DIR is what `tuna export --form tvm` wrote, or a folder with one such folder, as `tuna tune -o DIR`
makes it: TVM's `database_workload.json` and `database_tuning_record.json`, and `layers.json`, which
says which layer each workload is and how its kernel wants the weights packed. For each layer TVM's
own JSONDatabase gives the best schedule, TVM builds it, the answer is compared with NumPy, and the
time is set beside that of what TVM makes of the layer without a schedule. Nothing here imports
Tuna.
"""

import importlib
import itertools
import json
import os
import sys
import types
from pathlib import Path

# TVM takes half the cores otherwise; the records are for one
os.environ.setdefault("TVM_NUM_THREADS", "1")

import numpy as np
import tvm
import tvm.s_tir

WORKLOADS, RECORDS, LAYERS = "database_workload.json", "database_tuning_record.json", "layers.json"
LIMIT = {"FP32": 1e-4, "FP16": 2e-3, "BF16": 1.6e-2, "INT8": 0.0}


def skip_foreign_intrinsics():
    """Keep TVM from parsing the tensor intrinsics of every device (20 s); only x86's are
    imported."""
    package = types.ModuleType("tvm.s_tir.tensor_intrin")
    package.__path__ = [str(Path(tvm.s_tir.__file__).parent / "tensor_intrin")]
    sys.modules["tvm.s_tir.tensor_intrin"] = tvm.s_tir.tensor_intrin = package
    importlib.import_module("tvm.s_tir.tensor_intrin.x86")


def parse(driver):
    """The flags of a driver command: names and values."""
    words = driver.split()
    return words[1], dict(zip((word.lstrip("-") for word in words[2::2]), words[3::2], strict=True))


def label(driver):
    """A layer in a few words."""
    command, flags = parse(driver)
    if "gemm" in command:
        return f"{command} {flags['a_h']}x{flags['b_w']}x{flags['a_w']}"
    sizes = "x".join(flags.get(n, "?") for n in ("batchsize", "in_channels", "in_h", "in_w"))
    outs, rows, columns, stride = (
        flags.get(flag, "?") for flag in ("out_channels", "fil_h", "fil_w", "conv_stride_h")
    )
    return f"{command} {sizes} k{outs} {rows}x{columns} s{stride}"


def integers(flags):
    """The flags whose values are numbers."""
    return {name: int(value) for name, value in flags.items() if value.lstrip("-").isdigit()}


def geometry(ints):
    """Padding, stride and dilation of a convolution, a number per spatial axis each."""
    axes = "dhw" if ints["spatial_dim"] == 3 else "hw"
    return (
        [ints[f"{name}_{axis}"] for axis in axes] for name in ("pad", "conv_stride", "dilation")
    )


def channels_first(flags, *arrays):
    """The arrays in double precision, with channels where NCHW has them."""
    last = flags["in_layout"].endswith("C")
    return (
        np.moveaxis(array.astype(np.float64), -1, 1) if last else array.astype(np.float64)
        for array in arrays
    )


def as_laid_out(flags, answer):
    """An answer whose channels are where NCHW has them, as the layer lays it out."""
    return np.moveaxis(answer, 1, -1) if flags["in_layout"].endswith("C") else answer


def convolve(flags, x, w):
    """The layer's definition in double precision, tap by tap."""
    ints = integers(flags)
    x, w = channels_first(flags, x, w)
    pads, strides, dilations = geometry(ints)
    x = np.pad(x, [(0, 0), (0, 0), *((pad, pad) for pad in pads)])
    sizes = [
        (x.shape[2 + i] - dilations[i] * (w.shape[2 + i] - 1) - 1) // strides[i] + 1
        for i in range(len(pads))
    ]
    groups = ints["group_count"]
    k = w.shape[0] // groups
    y = np.zeros((x.shape[0], w.shape[0], *sizes))
    for tap in itertools.product(*map(range, w.shape[2:])):
        window = tuple(
            slice(t * d, t * d + (n - 1) * s + 1, s)
            for t, d, n, s in zip(tap, dilations, sizes, strides, strict=True)
        )
        part = x[(slice(None), slice(None), *window)].reshape(x.shape[0], groups, w.shape[1], -1)
        for g in range(groups):
            weight = w[(slice(g * k, (g + 1) * k), slice(None), *tap)]
            y[:, g * k : (g + 1) * k] += (weight @ part[:, g]).reshape(x.shape[0], k, *sizes)
    return as_laid_out(flags, y)


def backward_data(flags, dy, w):
    """The gradient of a layer's input in double precision, tap by tap."""
    ints = integers(flags)
    dy, w = channels_first(flags, dy, w)
    (ph, pw), (sh, sw), (dh, dw) = geometry(ints)
    height, width, groups = ints["in_h"], ints["in_w"], ints["group_count"]
    (batch, _, high, wide), ins = dy.shape, w.shape[1]
    dx = np.zeros((batch, ins * groups, height + 2 * ph, width + 2 * pw))
    for g, y, x in itertools.product(range(groups), *map(range, w.shape[2:])):
        outs = slice(g * (w.shape[0] // groups), (g + 1) * (w.shape[0] // groups))
        rows = slice(y * dh, y * dh + (high - 1) * sh + 1, sh)
        columns = slice(x * dw, x * dw + (wide - 1) * sw + 1, sw)
        dx[:, g * ins : (g + 1) * ins, rows, columns] += np.einsum(
            "nkhw,kc->nchw", dy[:, outs], w[outs, :, y, x]
        )
    return as_laid_out(flags, dx[:, :, ph : ph + height, pw : pw + width])


def backward_weights(flags, x, dy):
    """The gradient of a layer's weights in double precision, tap by tap."""
    ints = integers(flags)
    x, dy = channels_first(flags, x, dy)
    (ph, pw), (sh, sw), (dh, dw) = geometry(ints)
    x = np.pad(x, [(0, 0), (0, 0), (ph, ph), (pw, pw)])
    groups, (high, wide) = ints["group_count"], dy.shape[2:]
    ins, outs = x.shape[1] // groups, dy.shape[1] // groups
    found = np.zeros((dy.shape[1], ins, ints["fil_h"], ints["fil_w"]))
    for g, r, c in itertools.product(range(groups), *map(range, found.shape[2:])):
        rows = slice(r * dh, r * dh + (high - 1) * sh + 1, sh)
        part = x[:, g * ins : (g + 1) * ins, rows, c * dw : c * dw + (wide - 1) * sw + 1 : sw]
        k = slice(g * outs, (g + 1) * outs)
        found[k, :, r, c] = np.einsum("nkhw,nchw->kc", dy[:, k], part)
    return as_laid_out(flags, found)


def multiply(flags, a, b):
    """The matrix product in double precision."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    a = np.swapaxes(a, -1, -2) if flags.get("transA") == "1" else a
    b = np.swapaxes(b, -1, -2) if flags.get("transB") == "1" else b
    return a @ b


def pack(array, steps, kind=None):
    """An array of the layer as a kernel's argument, of that type; `layers.json` has the steps,
    Tuna's docs/formats.md says what they do."""
    if steps is None:
        return array
    array = array.transpose(steps["order"]) if "order" in steps else array
    if "turned" in steps:  # backward data is a convolution with the filter turned round
        groups, (k, c, *taps) = steps["turned"], array.shape
        array = array.reshape(groups, k // groups, c, *taps).transpose(0, 2, 1, 3, 4)[
            ..., ::-1, ::-1
        ]
        array = array.reshape(groups * c, k // groups, *taps)
    if "summed" in steps:
        array = array.reshape(len(array), -1).sum(axis=1, dtype=np.int32) * steps["summed"]
    extents = steps.get("filled", array.shape)
    filled = np.zeros(extents, np.float64 if "transform" in steps else array.dtype)
    groups, merged = steps.get("groups", (1, 1))
    rows, columns = len(array) // groups, array.shape[1] if array.ndim > 1 else 0
    for g in range(groups):
        first = g % merged * columns
        filled[
            (
                slice(g * rows, (g + 1) * rows),
                *[slice(first, first + columns)][: array.ndim - 1],
                *map(slice, array.shape[2:]),
            )
        ] = array[g * rows : (g + 1) * rows]
    if "transform" in steps:  # Winograd's, in double precision
        matrix = np.array(steps["transform"])
        filled = np.einsum("ui,kcij,vj->uvkc", matrix, filled, matrix, optimize=True)
    array = filled.reshape(steps.get("split", filled.shape))
    array = array.transpose(steps.get("permuted", range(array.ndim)))
    if "offset" in steps:  # signed bytes as unsigned ones
        return (array.astype(np.int16) + steps["offset"]).astype(np.uint8)
    if "word" in steps:  # the values of a word of 32 bits are side by side
        values = np.ascontiguousarray(array.astype(numpy_type(steps["word"])))
        return values.view(kind or "int32")[..., 0]
    return np.ascontiguousarray(array.astype(numpy_type(kind or "float32")))


def arguments(arrays, packing, kinds):
    """The kernel's inputs, of those types, from the layer's."""
    given = list(arrays)
    for place, steps in enumerate(packing[:-1]):
        if steps and "of" in steps:  # what the layer does not have
            given.insert(place, arrays[steps["of"]])
    return [pack(*each) for each in zip(given, packing[:-1], kinds, strict=False)]


def numpy_type(name):
    """NumPy's type of that name."""
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return np.dtype(name)


def unpack(array, steps, shape):
    """The layer's answer, of that shape, from a kernel's: the steps backwards."""
    if steps is None:
        return array
    order = steps.get("order", range(len(shape)))
    filled = array.transpose(np.argsort(steps["permuted"])).reshape(steps["filled"])
    return filled[tuple(slice(shape[axis]) for axis in order)].transpose(np.argsort(order))


def random(shape, kind):
    """Numbers of the argument's type."""
    generator = np.random.default_rng(1)
    if kind == "int8":
        return generator.integers(-8, 8, size=shape, dtype=np.int8)
    if kind == "bfloat16":
        return generator.uniform(-1, 1, size=shape).astype(numpy_type(kind))
    return generator.uniform(-1, 1, size=shape).astype(kind)


def extents(command, flags):
    """Extents of a layer's two inputs and its answer, as the layer lays them out."""
    ints = integers(flags)
    if "gemm" in command:
        m, n, k = ints["a_h"], ints["b_w"], ints["a_w"]
        batch = (ints["batch_count"],) if ints["batch_count"] > 1 else ()
        a, b = ((k, m) if ints["transA"] else (m, k)), ((n, k) if ints["transB"] else (k, n))
        return [(*batch, *a), (*batch, *b), (*batch, m, n)]
    sizes = [
        (
            ints[f"in_{axis}"]
            + 2 * ints[f"pad_{axis}"]
            - ints[f"dilation_{axis}"] * (ints[f"fil_{axis}"] - 1)
            - 1
        )
        // ints[f"conv_stride_{axis}"]
        + 1
        for axis in "hw"
    ]
    per_group = ints["in_channels"] // ints["group_count"]
    x = (ints["batchsize"], ints["in_channels"], ints["in_h"], ints["in_w"])
    w = (ints["out_channels"], per_group, ints["fil_h"], ints["fil_w"])
    y = (ints["batchsize"], ints["out_channels"], *sizes)
    if flags["in_layout"].endswith("C"):
        x, w, y = ((n, h, v, c) for n, c, h, v in (x, w, y))
    return {"1": [x, w, y], "2": [y, w, x], "4": [x, y, w]}[flags["forw"]]


def timed(function, arguments):
    """Median of five times in ms."""
    return float(np.median(function(*arguments).results)) * 1e3


def run(module, target, inputs, output):
    """Build the module, run it, and return its answer and its time in ms."""
    built = tvm.tirx.build(module, target=target)
    arguments = [tvm.runtime.tensor(array) for array in (*inputs, output)]
    built["main"](*arguments)
    timer = built.time_evaluator("main", tvm.cpu(), number=1, repeat=5, min_repeat_ms=10)
    return arguments[-1].numpy(), timed(timer, arguments)


def default_ms(command, flags, target, inputs):
    """Time in ms of the layer as TVM compiles it for who has no database; None for a gradient,
    which is no operator."""
    from tvm import relax

    if flags.get("forw", "1") != "1":
        return None
    builder = relax.BlockBuilder()
    x, w = (
        relax.Var(f"x{i}", relax.TensorType(array.shape, str(array.dtype)))
        for i, array in enumerate(inputs)
    )
    with builder.function("main", [x, w]):
        if "gemm" in command:
            a, b = (
                (
                    relax.op.permute_dims(v, [*range(inputs[0].ndim - 2), -1, -2])
                    if flags[name] == "1"
                    else v
                )
                for v, name in ((x, "transA"), (w, "transB"))
            )
            answer = relax.op.matmul(a, b, "int32" if inputs[0].dtype == np.int8 else None)
        else:
            pairs = (
                [int(flags[f"{name}_{axis}"]) for axis in "hw"]
                for name in ("conv_stride", "pad", "dilation")
            )
            strides, pads, dilation = pairs
            layout = flags["in_layout"]
            kernel = layout.replace("N", "O").replace("C", "I")
            answer = relax.op.nn.conv2d(
                x,
                w,
                strides,
                pads * 2,
                dilation,
                int(flags["group_count"]),
                layout,
                kernel_layout=kernel,
                out_dtype="int32" if inputs[0].dtype == np.int8 else None,
            )
        builder.emit_func_output(builder.emit(answer))
    machine = relax.VirtualMachine(tvm.compile(builder.get(), target=target), tvm.cpu())
    timer = machine.time_evaluator("main", tvm.cpu(), number=1, repeat=5, min_repeat_ms=10)
    return timed(timer, [tvm.runtime.tensor(array) for array in inputs])


def number(value, digits=3):
    """A figure for the table."""
    return "-" if value is None else f"{value:.{digits}f}"


def database_folder(directory):
    """The folder of the database: the one given, or the only one of those in it."""
    found = [
        folder
        for folder in (directory, *sorted(directory.glob("*.tvm")))
        if all((folder / name).is_file() for name in (WORKLOADS, RECORDS, LAYERS))
    ]
    if not found:
        raise SystemExit(
            f"{directory} holds no database for TVM; one is made by: tuna export --session-id 1"
            " --form tvm"
        )
    if len(found) > 1 and found[0] != directory:
        raise SystemExit(
            f"{directory} holds several databases; name one of: {', '.join(map(str, found))}"
        )
    return found[0]


def main(directory):
    """Compile every layer from the database; exit code 1 if an answer is wrong."""
    folder = database_folder(Path(directory))  # first: TVM would make files that are not there
    skip_foreign_intrinsics()
    from tvm.s_tir import meta_schedule as ms

    database = ms.database.JSONDatabase(work_dir=str(folder))
    workloads = [json.loads(line) for line in (folder / WORKLOADS).read_text().splitlines()]
    records = [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]
    best = {}
    tasks = 0
    for layer in json.loads((folder / LAYERS).read_text())["layers"]:
        if layer["driver"].startswith("{"):  # of a model, which has it in its own graph
            tasks += 1
        elif layer["key"] not in best or layer["time_ms"] < best[layer["key"]]["time_ms"]:
            best[layer["key"]] = layer
    names = {key: label(layer["driver"]) for key, layer in best.items()}
    wide = max(map(len, ["layer (times in ms)", *names.values()]))
    widest = max(len(layer["solver"]) for layer in best.values()) if best else 0
    print(
        f"{'layer (times in ms)':<{wide}} {'solver':<{widest}} {'untuned':>8} {'tuned':>7}"
        f" {'faster':>6} {'error':>7}"
    )
    wrong = 0
    for key, layer in best.items():
        command, flags = parse(layer["driver"])
        module = ms.database.Workload.from_json(workloads[layer["workload"]]).mod
        record = records[layer["records"][0]][1]
        target = tvm.target.Target(record[2])
        schedule = database.query_schedule(module, target, "main")
        if schedule is None:
            raise SystemExit(f"the database has no schedule for {layer['driver']}")
        tuned = tvm.s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(
            schedule.mod
        )
        *_, (_, kind, extent) = record[3]
        packing = layer.get("packing") or [None] * len(record[3])
        own = (
            extents(command, flags)
            if "packing" in layer
            else [tuple(shape) for *_, shape in record[3]]
        )
        given = {"uint8": "int8"}.get(record[3][0][1], record[3][0][1])
        inputs = [random(shape, given) for shape in own[:-1]]
        packed = arguments(inputs, packing, [kind for _, kind, _ in record[3]])
        kind = np.dtype(numpy_type(kind))
        blank = np.full(extent, np.iinfo(kind).min if kind.kind == "i" else np.nan, dtype=kind)
        found, tuned_ms = run(tuned, target, packed, blank)
        found = unpack(found, packing[-1], own[-1])
        if "packing" in layer:
            untuned_ms = default_ms(command, flags, target, inputs)
        else:
            _, untuned_ms = run(module, target, inputs, blank)
        directions = {"1": convolve, "2": backward_data, "4": backward_weights}
        expected = (multiply if "gemm" in command else directions[flags["forw"]])(flags, *inputs)
        error = float(
            np.max(np.abs(found.astype(np.float64) - expected)) / np.max(np.abs(expected))
        )
        data_type = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16", "int8": "INT8"}[
            given
        ]
        right = error <= LIMIT[data_type]  # false for NaN: an output that was not written
        wrong += not right
        print(
            f"{names[key]:<{wide}} {layer['solver']:<{widest}} {number(untuned_ms):>8}"
            f" {tuned_ms:>7.3f} {number(untuned_ms and untuned_ms / tuned_ms, 1):>6} {error:>7.1e}"
            f"{'' if right else '  WRONG'}"
        )
    if tasks:
        print(
            f"{tasks} results of functions of models are left out: MetaScheduleApplyDatabase uses"
            " them"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    raise SystemExit(main(sys.argv[1]))
