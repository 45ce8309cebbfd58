"""Triton kernels as far as Triton is not needed: files, candidates, artifacts, the library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tuna.configs import GemmConfig
from tuna.configs.values import DataType
from tuna.errors import BadInput, LibraryMissing
from tuna_triton import kernel_file, library
from tuna_triton.artifact import (
    GLOBAL_SCRATCH,
    Artifact,
    BadArtifact,
    Buffer,
    Launch,
    Param,
    from_bytes,
)
from tuna_triton.descriptions import DESCRIPTIONS
from tuna_triton.library import TritonLibrary
from tuna_triton.moe import MoeConfig
from tuna_triton.tiles import TARGETS, least_shared_bytes, tile_of, tile_text

MOE = MoeConfig(64, 512, 128, 2048, 10, scheme="fp8_w8a8", block_n=128, block_k=128)
GEMM = GemmConfig(512, 1024, 768, data_type=DataType.BF16)
BLOCK_FP8 = GemmConfig(
    *(512, 1024, 768),
    trans_b=True,
    data_type=DataType.FP8_E4M3,
    c_type=DataType.BF16,
    scale_a="block1x128",
    scale_b="block128x128",
)
SM90 = TARGETS["sm_90"]
#: A consumer's module: it cannot be imported here, and its kernel needs a helper and a constant.
CONSUMER = """
import a_package_that_is_not_there
from a_package_that_is_not_there import tl, triton

STEP: tl.constexpr = 2


@triton.jit
def helper(x):
    return x + STEP


@triton.autotune(configs=a_package_that_is_not_there.CONFIGS, key=["N"])
@triton.jit(do_not_specialize=["EM"], launch_metadata=a_package_that_is_not_there.hook)
def fused_moe_kernel(a_ptr, EM, N, BLOCK_SIZE_M: tl.constexpr, USE_TD: tl.constexpr = False):
    offsets = tl.arange(0, BLOCK_SIZE_M)
    tl.store(a_ptr + offsets, helper(offsets), offsets < N)


@triton.jit
def unrelated(x):
    return a_package_that_is_not_there.f(x)
"""


@pytest.fixture
def consumer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed vLLM whose import would fail."""
    path = tmp_path / "vllm" / "model_executor" / "layers" / "fused_moe" / "fused_moe.py"
    path.parent.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('imported')\n")
    path.write_text(CONSUMER)
    monkeypatch.syspath_prepend(str(tmp_path))
    library.kernel_digests.cache_clear()
    yield path
    library.kernel_digests.cache_clear()


def test_a_kernel_is_taken_out_of_a_package_that_is_not_imported(consumer: Path) -> None:
    before = set(sys.modules)  # other tests of this process may import Triton
    found = DESCRIPTIONS["VllmMoe"].kernel()
    assert found is not None
    assert found.arguments == ("a_ptr", "EM", "N", "BLOCK_SIZE_M", "USE_TD")
    assert found.constants == {"BLOCK_SIZE_M", "USE_TD"}
    assert found.unspecialised == {"EM"}
    assert found.defaults == (("USE_TD", False),)
    assert "STEP: tl.constexpr = 2" in found.text
    assert "@triton.jit\ndef helper" in found.text
    assert "@triton.jit(do_not_specialize=['EM'])\ndef fused_moe_kernel" in found.text
    assert "not_there" not in found.text
    assert "unrelated" not in found.text
    assert not {"vllm", "triton"} & (sys.modules.keys() - before)


def test_the_digest_changes_with_the_kernel_and_with_nothing_else(consumer: Path) -> None:
    before = kernel_file.read(consumer, "fused_moe_kernel").digest
    consumer.write_text(CONSUMER.replace("def unrelated(x):", "def unrelated(x, y):"))
    assert kernel_file.read(consumer, "fused_moe_kernel").digest == before
    consumer.write_text(CONSUMER.replace("STEP: tl.constexpr = 2", "STEP: tl.constexpr = 3"))
    assert kernel_file.read(consumer, "fused_moe_kernel").digest != before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(x):\n  pass", "has no @triton.jit function f"),
        ("@triton.jit\ndef f(x):\n  g(x)", "uses g, which is defined elsewhere"),
        ("def g(x):\n  pass\n@triton.jit\ndef f(x):\n  g(x)", "g .* is not a @triton.jit"),
        ("A = open('/etc/passwd')\n@triton.jit\ndef f(x):\n  x + A", "is not a plain constant"),
        ("@triton.heuristics({})\n@triton.jit\ndef f(x):\n  x", "decorator that is not known"),
        ("@triton.jit\ndef f(*x):\n  x", "arguments without a name"),
        ("def f(", "cannot be read as Python"),
    ],
)
def test_a_bad_kernel_file_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(text)
    with pytest.raises(BadInput, match=words):
        kernel_file.read(path, "f")


def test_half_of_the_space_of_block_wise_experts_is_the_other_half_again() -> None:
    space = DESCRIPTIONS["TritonMoe"].space(MOE, SM90)
    assert space.size == 640
    assert space.same == 320
    assert len(space.tiles) + space.too_large == 320
    assert space.too_large == 32
    assert space.default is not None
    assert space.default in space.tiles
    assert all(tile["BLOCK_SIZE_K"] == 128 for tile in space.tiles)
    texts = [tile_text(tile) for tile in space.tiles]
    assert len(set(texts)) == len(texts)
    assert [tile_of(text) for text in texts] == list(space.tiles)


def test_a_group_of_all_rows_is_no_group() -> None:
    space = DESCRIPTIONS["TritonMoe"].space(replace(MOE, tokens=1), SM90)
    assert {tile["GROUP_SIZE_M"] for tile in space.tiles} == {1, 16}


@pytest.mark.parametrize("arch", sorted(TARGETS))
@pytest.mark.parametrize("name", ["TritonGemm", "TritonMoe"])
def test_no_candidate_needs_more_shared_memory_than_there_is(arch: str, name: str) -> None:
    config = MoeConfig(64, 8, 7168, 4096, 2) if name == "TritonMoe" else GEMM
    target, description = TARGETS[arch], DESCRIPTIONS[name]
    space = description.space(config, target)
    for tile in space.tiles:
        plan = description.family.plan(config, tile, target, "")
        assert 0 < least_shared_bytes(plan, tile, target) <= target.shared_bytes
    assert space.too_large > 0
    assert space.size == len(space.tiles) + space.same + space.too_large - (
        space.default not in [None, *description.family.points(config, target)]
    )


@pytest.mark.parametrize("params", ["", "[]", '{"BLOCK_SIZE_M": 1}', '{"x": "y"}'])
def test_params_of_something_else_are_refused(params: str) -> None:
    with pytest.raises(BadInput, match="no params of a Triton kernel"):
        tile_of(params)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> TritonLibrary:
    """The library as if Triton were installed."""
    monkeypatch.setattr(library, "version", lambda name: "3.6.0")
    return TritonLibrary()


FACTS = {"arch": "sm_90", "num_cu": "132", "device_name": "NVIDIA H100 80GB HBM3"}


def test_a_consumers_kernel_is_preferred_to_ours_and_is_part_of_the_environment(
    triton: TritonLibrary, request: pytest.FixtureRequest
) -> None:
    alone = triton.environment_by_hand(FACTS)
    assert dict(triton.applicable([MOE, GEMM, BLOCK_FP8], alone)) == {
        MOE: ["TritonMoe", "TritonMoeDefault"],
        GEMM: ["TritonGemm", "TritonGemmDefault"],
        BLOCK_FP8: ["TritonBlockFp8", "TritonBlockFp8Default"],
    }
    path = request.getfixturevalue("consumer")
    both = triton.environment_by_hand(FACTS)
    assert both.key != alone.key
    assert both.toolchain == triton.toolchain() != alone.toolchain
    assert dict(triton.applicable([MOE, GEMM], both))[MOE] == ["VllmMoe", "VllmMoeDefault"]
    assert path.exists()


def test_a_consumer_whose_kernel_is_gone_has_no_solver(
    triton: TritonLibrary, consumer: Path
) -> None:
    consumer.write_text("")
    assert "VllmMoe" not in triton.environment_by_hand(FACTS).flags


def test_what_a_target_cannot_multiply_has_no_solver(triton: TritonLibrary) -> None:
    old = triton.environment_by_hand({"arch": "sm_80", "num_cu": "108"})
    assert dict(triton.applicable([MOE, BLOCK_FP8], old)) == {MOE: [], BLOCK_FP8: []}
    batch = GemmConfig(8, 8, 8, batch_count=2, data_type=DataType.BF16)
    assert dict(triton.applicable([batch], old)) == {batch: []}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"arch": "sm_70", "num_cu": "80"}, "Unknown architecture"),
        ({"arch": "sm_90"}, "not a number of compute units"),
        ({"rocm_v": "6"}, "takes no rocm_v"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(
    triton: TritonLibrary, facts: dict[str, str], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        triton.environment_by_hand(facts)


def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise library.PackageNotFoundError(name)

    monkeypatch.setattr(library, "version", missing)
    with pytest.raises(LibraryMissing, match="not installed") as caught:
        TritonLibrary().toolchain()
    assert "[triton]" in str(caught.value.hint)


def artifact() -> Artifact:
    params = (
        Param("a", "ptr", buffer="a"),
        Param("n", "i32", value=3),
        Param(GLOBAL_SCRATCH, "ptr", buffer=GLOBAL_SCRATCH),
    )
    launch = Launch(0, "k", (4, 1, 1), 4, 32, 1024, 0, 1, 0, 1, params)
    buffers = (Buffer("a", "bf16", (3, 4), "output"),)
    return Artifact("sm_90", "3.6.0", "0" * 64, buffers, (launch,), (b"code",))


def test_an_artifact_is_read_back_as_it_was_written() -> None:
    made = artifact()
    assert from_bytes(made.to_bytes()) == made
    assert made.buffers[0].bytes == 24


@pytest.mark.parametrize("at", [0, 9, 40, -1])
def test_a_damaged_artifact_is_refused(at: int) -> None:
    data = bytearray(artifact().to_bytes())
    data[at] ^= 0x41
    with pytest.raises(BadArtifact):
        from_bytes(bytes(data))
    for cut in (0, 7, 11, len(data) - 1):
        with pytest.raises(BadArtifact):
            from_bytes(artifact().to_bytes()[:cut])


@pytest.mark.parametrize(
    "change",
    [
        {"binary": 1},
        {"grid": (0, 1, 1)},
        {"num_warps": 65},
        {"shared_bytes": -1},
        {"params": (Param("a", "ptr", buffer="b"),)},
        {"params": (Param("a", "f8"),)},
        {"params": (Param("a", "i32", buffer="a"),)},
    ],
)
def test_a_launch_that_could_not_be_made_is_refused(change: dict[str, object]) -> None:
    made = artifact()
    (launch,) = made.launches
    bad = replace(made, launches=(replace(launch, **change),))  # type: ignore[arg-type]
    with pytest.raises(BadArtifact):
        from_bytes(bad.to_bytes())
