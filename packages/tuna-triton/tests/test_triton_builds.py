"""Triton kernels compiled for GPUs that are not here. Needs the extra `triton` (docs/gpu.md)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuna.configs import Config, GemmConfig
from tuna.configs.values import DataType
from tuna.libraries.items import WorkItem
from tuna.libraries.kernels import KernelJob
from tuna.testing.rehearsal import run_context
from tuna.vocabulary import Cause
from tuna_triton.artifact import PARAM_BYTES, BadArtifact, from_bytes
from tuna_triton.descriptions import DESCRIPTIONS
from tuna_triton.library import TritonLibrary
from tuna_triton.moe import MoeConfig
from tuna_triton.tiles import AXES, TARGETS, tile_of, tile_text
from tuna_triton.triton_kernel import TritonKernelConfig
from tuna_triton.user_file import parse

pytest.importorskip("triton", reason="needs the extra `triton`")

BF16, E4M3, FNUZ = DataType.BF16, DataType.FP8_E4M3, DataType.FP8_E4M3FNUZ
SCALES = {"c_type": BF16, "trans_b": True, "scale_a": "block1x128", "scale_b": "block128x128"}
CASES: list[tuple[str, str, Config]] = [
    ("sm_80", "TritonGemm", GemmConfig(512, 1024, 768, data_type=BF16)),
    ("sm_80", "TritonMoe", MoeConfig(7, 8, 256, 512, 2)),
    ("sm_90", "TritonGemm", GemmConfig(1, 17, 1, data_type=BF16, c_type=DataType.FP32)),
    ("sm_90", "TritonGemm", GemmConfig(64, 64, 64, trans_b=True, data_type=E4M3, c_type=BF16)),
    ("sm_90", "TritonBlockFp8", GemmConfig(64, 256, 512, data_type=E4M3, **SCALES)),
    ("sm_90", "TritonMoe", MoeConfig(1, 8, 256, 512, 2, scheme="fp8_w8a8")),
    ("sm_90", "TritonMoe", MoeConfig(33, 8, 256, 512, 2, scheme="int8_w8a16")),
    (
        *("sm_90", "TritonMoe"),
        MoeConfig(64, 512, 128, 2048, 10, scheme="fp8_w8a8", block_n=128, block_k=128),
    ),
    ("gfx90a", "TritonGemm", GemmConfig(512, 1024, 768, data_type=DataType.FP16)),
    ("gfx942", "TritonBlockFp8", GemmConfig(64, 256, 512, data_type=FNUZ, **SCALES)),
    ("gfx942", "TritonMoe", MoeConfig(16, 8, 256, 512, 2, scheme="fp8_w8a8")),
]


def test_options_of_amd_that_change_no_code_give_equal_artifacts() -> None:
    from tuna_triton import builder

    job = KernelJob(GemmConfig(512, 512, 512, data_type=BF16), "TritonGemm", target="gfx942")
    tile = dict(zip(AXES, (64, 64, 32, 8, 4, 2), strict=True)) | {"kpack": 1, "waves_per_eu": 0}
    automatic, small, large = (
        builder.artifact(DESCRIPTIONS["TritonGemm"], job, {**tile, "matrix_instr_nonkdim": size})
        for size in (0, 16, 32)
    )
    assert automatic.to_bytes() == large.to_bytes() != small.to_bytes()


@pytest.mark.parametrize(
    ("arch", "solver", "config"), CASES, ids=[f"{a}-{s}-{n}" for n, (a, s, _) in enumerate(CASES)]
)
def test_the_parameters_of_a_build_are_those_of_its_code(
    arch: str, solver: str, config: Config
) -> None:
    from tuna_triton import builder

    job = KernelJob(config, solver, target=arch, count=2)
    description, target = DESCRIPTIONS[solver], TARGETS[arch]
    assert description.family.fits(config, target, description.package)
    for params in builder.TritonBuilder().propose(job):
        made = builder.artifact(description, job, tile_of(params))
        assert from_bytes(made.to_bytes()) == made
        for launch in made.launches:
            code = made.binaries[launch.binary]
            assert code.startswith(b"\x7fELF")
            assert launch.symbol.encode() in code
            assert 0 <= launch.shared_bytes <= target.shared_bytes
            assert [one.name for one in launch.params][-2:] == ["global_scratch", "profile_scratch"]
            if arch.startswith("sm_"):
                stated = cubin_param_bytes(code)
                # the last parameter ends where the parameters end
                assert stated == _packed_bytes([PARAM_BYTES[one.type] for one in launch.params])


def cubin_param_bytes(code: bytes) -> int:
    """Bytes of all parameters, by the attribute EIATTR_PARAM_CBANK (0x0a) of `.nv.info.<kernel>`:
    format 4, attribute, size 8, symbol, offset (0x160 on sm_80, 0x210 on sm_90), bytes."""
    found = re.findall(rb"\x04\x0a\x08\x00....(?:\x60\x01|\x10\x02)(..)", code, re.DOTALL)
    sizes = {int.from_bytes(size, "little") for size in found}
    assert len(sizes) == 1, sizes
    return sizes.pop()


def _packed_bytes(sizes: list[int]) -> int:
    at = 0
    for size in sizes:
        at = (at + size - 1) // size * size + size
    return at


def test_a_pointer_that_has_no_alignment_would_be_seen() -> None:
    assert _packed_bytes([8, 4, 8]) == 24


def test_specialisation_is_that_of_tritons_own_jit() -> None:
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import MockTensor, create_function_from_signature

    from tuna_triton import builder

    dtypes = {"fp8e4nv": tl.float8e4nv, "fp32": tl.float32, "i32": tl.int32, "bf16": tl.bfloat16}
    _, name, config = CASES[7]
    description, target = DESCRIPTIONS[name], TARGETS["sm_90"]
    kernel = description.kernel()
    assert kernel is not None
    function = builder._function(kernel)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(function.signature, function.params, backend)
    for tokens in (1, 8, 64):
        layer = MoeConfig(**{**vars_of(config), "tokens": tokens})
        tile = description.family.default(layer, target, "")
        plan = description.family.plan(layer, tile, target, "")
        elements = {one.name: dtypes[one.element] for one in plan.buffers}
        for call in plan.calls:
            source = builder.specialise(kernel, plan, call, target)
            values = {
                one: MockTensor(elements[value]) if isinstance(value, str) else value
                for one, value in ((one, call.arguments[one]) for one in kernel.arguments)
            }
            _, specialised, _ = bind(**values)
            types = tuple(kind for kind, _ in specialised)
            assert types == source.types
            for kind, (_, hint), ours in zip(types, specialised, source.hints, strict=True):
                if kind != "constexpr":
                    assert (hint or "") == ours


def vars_of(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.field_names()}


SMALL = dict(zip(AXES, (16, 32, 32, 2, 4, 2), strict=True))
ROUTED = MoeConfig(9, 4, 64, 96, 2, DataType.FP16)
#: bf16 is left out: Triton's interpreter does not multiply it.
ANSWERS = [
    ("TritonGemm", GemmConfig(37, 50, 70, trans_b=True, data_type=DataType.FP16)),
    (
        "TritonBlockFp8",
        GemmConfig(
            *(37, 48, 96),
            trans_b=True,
            data_type=E4M3,
            c_type=DataType.FP16,
            scale_a="block1x32",
            scale_b="block32x16",
        ),
    ),
    ("TritonMoe", MoeConfig(9, 4, 40, 70, 2, DataType.FP16)),
    ("TritonMoe", replace(ROUTED, scheme="fp8_w8a8", block_n=32, block_k=32)),
    ("TritonMoe", replace(ROUTED, scheme="fp8_w8a8")),
    ("TritonMoe", replace(ROUTED, scheme="int8_w8a16")),
]


@pytest.mark.parametrize(("solver", "config"), ANSWERS, ids=range(len(ANSWERS)))
def test_the_arguments_of_a_launch_give_the_right_answer(solver: str, config: Config) -> None:
    """On the CPU, by Triton's interpreter."""
    script = Path(__file__).with_name("triton_interpreter.py")
    done = subprocess.run(
        [sys.executable, script, "sm_90", solver, config.json_text(), tile_text(SMALL)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    # two roundings to fp16 in sums of up to 96 products
    assert float(done.stdout) < 2e-3


EXAMPLES = Path(__file__).parents[3] / "examples" / "triton_kernels"
#: Tiles of the examples whose blocks and rows end inside of the shape, and at its end.
OWN = [
    ("softmax", '{"BLOCK": 256, "num_warps": 4}'),
    ("softmax", '{"BLOCK": 1024, "num_warps": 4}'),
    ("layer_norm", '{"ROWS": 4, "BLOCK": 128, "num_warps": 4}'),
    ("layer_norm", '{"ROWS": 1, "BLOCK": 512, "num_warps": 4}'),
]


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], tuple[TritonKernelConfig, Path]]:
    """A kernel of the examples as a config, and its body."""

    def made(name: str) -> tuple[TritonKernelConfig, Path]:
        file = parse((EXAMPLES / f"{name}.py").read_text(), name)
        body = tmp_path / name
        body.write_text(file.text)
        return TritonKernelConfig(name, (("rows", 9), ("columns", 700)), file.digest), body

    return made


@pytest.mark.parametrize(("name", "params"), OWN)
def test_the_answer_of_a_kernel_of_ones_own_is_right(
    own: Callable[[str], tuple[TritonKernelConfig, Path]], name: str, params: str
) -> None:
    """By Triton's interpreter, where the artifact's header has it."""
    config, body = own(name)
    script = Path(__file__).with_name("triton_interpreter.py")
    done = subprocess.run(
        [sys.executable, script, "sm_90", "TritonKernel", config.json_text(), params, body],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 1e-5


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_a_kernel_of_ones_own_is_built_with_its_right_answer(
    own: Callable[[str], tuple[TritonKernelConfig, Path]], arch: str, tmp_path: Path
) -> None:
    from tuna_triton import builder

    config, body = own("softmax")
    made = builder.TritonBuilder()
    jobs = [
        KernelJob(config, f"TritonKernel{end}", target=arch, count=3, body=str(body))
        for end in ("", "Default")
    ]
    proposed, default = (made.propose(job) for job in jobs)
    assert default == ['{"BLOCK": 1024, "num_warps": 4}'] == proposed[:1]
    assert len(set(proposed)) == 3
    made.build(jobs[1], default[0], tmp_path / "built")
    built = from_bytes((tmp_path / "built").read_bytes())
    (launch,), (answer,) = built.launches, built.answers
    assert (launch.symbol, launch.grid, launch.num_warps) == ("softmax", (9, 1, 1), 4)
    assert [(one.name, one.value) for one in launch.params if one.type != "ptr"] == [
        ("columns", 700)
    ]
    assert (answer.buffer, answer.rows) == ("y_ptr", tuple(range(9)))
    assert 200 < len(answer.columns) <= 2048 // 9
    assert 0 < max(max(row) for row in answer.values) < 0.01


PROGRAM = """
import hashlib, sys
from tuna.configs import from_json_text
from tuna.libraries.kernels import KernelJob
from tuna_triton import builder
from tuna_triton.descriptions import DESCRIPTIONS
arch, solver, config = sys.argv[1:]
job = KernelJob(from_json_text(config), solver, target=arch, count=2)
for params in builder.TritonBuilder().propose(job):
    made = builder.artifact(DESCRIPTIONS[solver], job, builder.tile_of(params))
    print(hashlib.sha256(made.to_bytes()).hexdigest())
"""


@pytest.mark.parametrize("number", [5, 9])
def test_two_processes_in_two_folders_build_the_same_bytes(number: int, tmp_path: Path) -> None:
    arch, solver, config = CASES[number]
    answers = set()
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, arch, solver, config.json_text()],
            env={"TMPDIR": str(folder), "HOME": str(folder), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        answers.add(done.stdout)
    (answer,) = answers
    assert len(set(answer.split())) == 2


def test_a_candidate_that_is_too_large_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuna_triton import builder

    def compiled(source: object) -> None:
        raise AssertionError("it was compiled")

    monkeypatch.setattr(builder, "compiled", compiled)
    config = MoeConfig(64, 8, 256, 512, 2)
    job = KernelJob(config, "TritonMoe", target="sm_90")
    tile = {
        **DESCRIPTIONS["TritonMoe"].family.default(config, TARGETS["sm_90"], ""),
        **{"BLOCK_SIZE_M": 256, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 256},
    }
    with pytest.raises(builder.TooLarge, match=r"at least 786432 bytes .* sm_90 has 232448"):
        builder.artifact(DESCRIPTIONS["TritonMoe"], job, tile)


@pytest.fixture
def triton() -> Iterator[TritonLibrary]:
    made = TritonLibrary()
    yield made
    made.close()


def test_a_worker_without_a_gpu_compiles_a_job(triton: TritonLibrary, tmp_path: Path) -> None:
    context = run_context(tmp_path)
    environment = triton.environment_by_hand({"arch": "sm_90", "num_cu": "132"})
    item = WorkItem(
        job_id=1,
        attempt=1,
        session_id=1,
        library="triton",
        step="compile",
        solver="TritonGemm",
        config=GemmConfig(512, 1024, 768, data_type=BF16).to_json(),
        target=environment.target,
        seed=7,
        options={"candidates": 3},
    )
    (result,) = triton.run(triton.steps[0], [item], context)
    assert result.ok, result.output_tail
    assert [trial.cause for trial in result.trials] == [None] * 3
    for trial in result.trials:
        made = from_bytes(context.artifacts.get(trial.artifact))
        assert made.arch == "sm_90"
        assert made.launches[0].symbol == "gemm"
    (again,) = triton.run(triton.steps[0], [item], context)
    assert [trial.artifact for trial in again.trials] == [one.artifact for one in result.trials]
    large = tile_text({**tile_of(result.trials[0].params), "BLOCK_SIZE_K": 512})
    bad = item.model_copy(
        update={"candidates": (item.candidates or ()) + (candidate(large),), "attempt": 2}
    )
    (result,) = triton.run(triton.steps[0], [bad], context)
    assert [trial.cause for trial in result.trials] == [Cause.BUILD_ERROR]
    assert "of shared memory" in result.trials[0].output_tail


def test_shapes_share_the_code_of_a_kernel_of_ones_own_and_have_their_own_answers(
    own: Callable[[str], tuple[TritonKernelConfig, Path]], tmp_path: Path
) -> None:
    from tuna_triton import builder

    config, body = own("softmax")
    other = TritonKernelConfig("softmax", (("rows", 5), ("columns", 300)), config.body)
    jobs = [
        KernelJob(one, "TritonKernel", target="sm_90", body=str(body)) for one in (config, other)
    ]
    made, (params,) = builder.TritonBuilder(), ['{"BLOCK": 256, "num_warps": 4}']
    (key,) = {made.build_key(job, params) for job in jobs}
    assert key not in {made.build_key(jobs[0], '{"BLOCK": 512, "num_warps": 4}'), ""}
    for job, name in zip(jobs, "ab", strict=True):
        made.build(job, params, tmp_path / name)
    made.rebuild(jobs[1], params, tmp_path / "a", tmp_path / "c")
    first, second, again = ((tmp_path / name).read_bytes() for name in "abc")
    assert second == again != first
    assert from_bytes(again).answers != from_bytes(first).answers


def test_a_worker_without_a_gpu_compiles_a_kernel_of_ones_own_from_its_body(
    triton: TritonLibrary,
    tmp_path: Path,
    own: Callable[[str], tuple[TritonKernelConfig, Path]],
) -> None:
    context, (config, path) = run_context(tmp_path), own("softmax")
    body = context.artifacts.put(path.read_bytes())
    assert body == config.body
    facts = {"job_id": 1, "attempt": 1, "session_id": 1, "library": "triton", "step": "compile"}
    item = WorkItem(
        **facts,
        solver="TritonKernel",
        config=config.to_json(),
        body=body,
        target="sm_90",
        options={"candidates": 2},
    )
    (result,) = triton.run(triton.steps[0], [item], context)
    assert [trial.cause for trial in result.trials] == [None, None], result.output_tail
    sized = path.read_text().replace('shape["rows"], shape["columns"]', 'shape["rows"], shape["m"]')
    wrong = {**config.to_json(), "body": context.artifacts.put(sized.encode())}
    bad = item.model_copy(update={"config": wrong, "body": wrong["body"], "attempt": 2})
    (result,) = triton.run(triton.steps[0], [bad], context)
    assert (result.ok, result.cause) == (False, Cause.BUILD_ERROR)
    assert "arguments in the kernel's file fails for softmax" in result.output_tail
    assert "the shape has no m." in result.output_tail


def candidate(params: str) -> Any:
    from tuna.libraries.items import Candidate

    return Candidate(index=0, params=params)


BLOCKS = {"scheme": "fp8_w8a8", "block_n": 128, "block_k": 128}
#: Solver, architecture and config: with other numbers of rows, and those of them that have a build
#: key of their own.
SHARED = [
    ("TritonMoe", "sm_90", MoeConfig(16, 64, 128, 256, 4, **BLOCKS), (64, 4096, 2), {2}),
    ("TritonMoe", "gfx942", MoeConfig(16, 64, 128, 256, 4, **BLOCKS), (512, 2), {2}),
    ("TritonMoe", "sm_90", MoeConfig(16, 8, 256, 512, 2), (128, 1), {1}),
    ("TritonMoe", "gfx942", MoeConfig(16, 8, 256, 512, 2), (128,), set()),
    ("TritonGemm", "sm_90", GemmConfig(64, 256, 512, data_type=BF16), (48, 1, 8), {1, 8}),
    ("TritonGemm", "gfx942", GemmConfig(64, 256, 512, data_type=BF16), (1024, 9), {9}),
]


@pytest.mark.parametrize(
    ("solver", "arch", "config", "others", "own"), SHARED, ids=[f"{s}-{a}" for s, a, *_ in SHARED]
)
def test_a_candidate_made_of_anothers_code_is_as_if_it_was_compiled(
    solver: str, arch: str, config: Config, others: Sequence[int], own: set[int], tmp_path: Path
) -> None:
    from tuna_triton import builder

    rows = "tokens" if isinstance(config, MoeConfig) else "m"
    made, path = builder.TritonBuilder(), tmp_path / "built"
    tile = DESCRIPTIONS[solver].family.default(config, TARGETS[arch], "")
    params, job = tile_text(tile), KernelJob(config, solver, target=arch)
    made.build(job, params, path)
    keys = {}
    for number in others:
        other = replace(job, config=type(config)(**{**vars_of(config), rows: number}))
        keys[number] = made.build_key(other, params)
        if number in own:
            continue
        builder.compiled.cache_clear()
        made.build(other, params, tmp_path / "compiled")
        builder.compiled.cache_clear()
        made.rebuild(other, params, path, tmp_path / "rebuilt")
        assert builder.compiled.cache_info().misses == 0
        assert (tmp_path / "rebuilt").read_bytes() == (tmp_path / "compiled").read_bytes()
        assert (tmp_path / "rebuilt").read_bytes() != path.read_bytes()
    mine = made.build_key(job, params)
    assert {number for number, key in keys.items() if key != mine} == own
    wider = replace(job, config=replace(config, **{"n" if rows == "m" else "hidden": 768}))
    assert made.build_key(wider, params) == mine
    elsewhere = replace(job, target={"sm_90": "gfx942"}.get(arch, "sm_90"))
    assert made.build_key(elsewhere, params) != mine
    built = from_bytes(path.read_bytes())
    short = replace(built.launches[0], params=built.launches[0].params[1:])
    for fact in ({"triton": "3.5.0"}, {"kernel_file": "0" * 64}, {"launches": (short,)}):
        path.write_bytes(replace(built, **fact).to_bytes())
        with pytest.raises(BadArtifact, match=r"another kernel|fewer launches"):
            made.rebuild(job, params, path, tmp_path / "no")
    faster = tile_text({**tile, "num_warps": 2 * tile["num_warps"]})
    assert made.build_key(job, faster) != mine


def test_equal_sources_are_compiled_once() -> None:
    from tuna_triton import builder

    description, target = DESCRIPTIONS["TritonMoe"], TARGETS["sm_90"]
    config = MoeConfig(64, 8, 256, 512, 2)
    tile = description.family.default(config, target, "")

    def built(config: MoeConfig) -> tuple[bytes, ...]:
        job = KernelJob(config, "TritonMoe", target="sm_90")
        return builder.artifact(description, job, tile).binaries

    first, before = built(config), builder.compiled.cache_info().misses
    assert built(MoeConfig(128, 8, 256, 512, 2)) == first
    assert builder.compiled.cache_info().misses == before
