"""oneDNN: what it lists becomes solvers, and each of them answers rightly; this process never loads
it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared_data import need

from tuna.configs import Config, ConvConfig, GemmConfig
from tuna.configs.values import DataType, Direction
from tuna.errors import BadInput, LibraryMissing
from tuna.libraries import reference
from tuna.libraries.kernels import KernelJob
from tuna.sandbox.cores import eval_cpus
from tuna_onednn import OneDnnLibrary, library
from tuna_onednn.library import (
    SOLVERS,
    Layout,
    allowed,
    by_solver,
    family_of,
    has_exact_int8,
)

pytestmark = pytest.mark.service

NATIVE = {"layouts": "native"}


def conv(
    channels: int = 8, filters: int = 16, size: int = 9, taps: int = 3, **more: Any
) -> ConvConfig:
    facts: dict[str, Any] = {
        "batchsize": 2,
        "in_h": size,
        "in_w": size + 2,
        "fil_h": taps,
        "fil_w": taps,
        "pad_h": 1,
    }
    layout = more.pop("layout", "NCHW")
    facts |= {f"{name}_layout": layout for name in ("in", "fil", "out")}
    return ConvConfig(
        **{**facts, "in_channels": channels, "out_channels": filters, "pad_w": 1, **more}
    )


_BACKWARD = {"direction": Direction.BACKWARD_DATA}
CONFIGS: Sequence[Config] = [
    conv(),
    conv(layout="NHWC"),
    conv(3, 5, 13, 5, conv_stride_h=2, conv_stride_w=3, pad_h=2),
    conv(1, 1, 7, batchsize=1),
    conv(dilation_h=2, dilation_w=3, pad_h=2, pad_w=0),
    conv(16, 8, 10, 1, pad_h=0, pad_w=0, conv_stride_h=2, conv_stride_w=2),
    conv(12, 6, group_count=3),
    conv(24, 24, group_count=24, layout="NHWC"),
    conv(24, 24, group_count=24),
    conv(
        4,
        8,
        5,
        spatial_dim=3,
        in_d=4,
        fil_d=2,
        pad_d=1,
        conv_stride_d=1,
        dilation_d=1,
        layout="NCDHW",
    ),
    conv(
        4,
        8,
        5,
        spatial_dim=3,
        in_d=4,
        fil_d=2,
        pad_d=0,
        conv_stride_d=2,
        dilation_d=1,
        layout="NDHWC",
    ),
    conv(16, 16, data_type=DataType.INT8),
    *(
        GemmConfig(5, 17, 33, trans_a=a, trans_b=b, batch_count=n)
        for a in (False, True)
        for b in (False, True)
        for n in (1, 3)
    ),
    GemmConfig(8, 16, 32, data_type=DataType.INT8),
    conv(**_BACKWARD),
    conv(3, 5, 13, 5, conv_stride_h=2, conv_stride_w=3, pad_h=2, dilation_w=2, **_BACKWARD),
    conv(24, 24, group_count=24, layout="NHWC", **_BACKWARD),
]


@pytest.fixture(scope="module")
def installed() -> Path:
    """Where the library lies."""
    try:
        return library.library_path()
    except LibraryMissing as error:
        need(False, f"oneDNN ({error.hint})")
        raise


@pytest.mark.parametrize(
    "conditions",
    # native has all layouts, the layer's own too
    [pytest.param({}, marks=pytest.mark.drill(only=True)), NATIVE],
    ids=["layer", "native"],
)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_each_implementation_answers_rightly(
    installed: Path, config: Config, conditions: dict[str, str], tmp_path: Path
) -> None:
    from tuna_onednn.implementations import OneDnnBuilder, OneDnnLoader  # loads it, here

    builder, loader, path = OneDnnBuilder(), OneDnnLoader(), tmp_path / "candidate.json"
    problem, tried = reference.make(config), 0
    for solver in SOLVERS:
        job = KernelJob(config, solver.name, conditions=conditions)
        for name in builder.propose(job) if config.kind in solver.kinds else ():
            builder.build(job, name, path)
            kernel = loader.load(job, path, [*problem.inputs, problem.blank()])
            assert not problem.error(kernel.answer()) <= problem.tolerance, (
                "there is no answer before the first run"
            )
            kernel.run()
            assert problem.error(kernel.answer()) <= problem.tolerance, (solver.name, name)
            tried += 1
    assert tried


def test_an_input_that_changes_the_answer_is_read_in_its_own_layout(
    installed: Path, tmp_path: Path
) -> None:
    from tuna_onednn.implementations import OneDnnBuilder, OneDnnLoader

    config, path = conv(layout="NHWC"), tmp_path / "candidate.json"
    problem = reference.make(config)
    job = KernelJob(config, "OneDnnGemmPlain", conditions=NATIVE)
    (name,) = OneDnnBuilder().propose(job)
    OneDnnBuilder().build(job, name, path)
    kernel = OneDnnLoader().load(
        job, path, [*(np.zeros_like(array) for array in problem.inputs), problem.blank()]
    )
    kernel.run()
    assert np.array_equal(kernel.answer(), np.zeros(problem.expected.shape))
    path.write_text('{"implementation": "no such thing"}')
    with pytest.raises(LookupError, match="does not list no such thing"):
        OneDnnLoader().load(job, path, [*problem.inputs, problem.blank()])


def test_a_layer_of_the_layers_own_layout_or_of_any_by_the_sessions_choice(installed: Path) -> None:
    library = OneDnnLibrary()
    here = library.environment()
    first, last = conv(16, 16), conv(16, 16, layout="NHWC")
    own = dict(library.applicable([first, last], here))
    assert {name.removeprefix("OneDnn") for name in own[first]} == {"GemmPlain"}
    assert all(name.endswith("ChannelsLast") for name in own[last])
    any_layout = dict(library.applicable([first], replace(here, conditions=NATIVE)))[first]
    assert {"OneDnnGemmPlain", "OneDnnJitAny"} < set(any_layout)
    assert "OneDnnBrgconvAny" not in any_layout, "it is the same as channels last"


def test_what_onednn_cannot_compute_has_no_solver(installed: Path) -> None:
    library = OneDnnLibrary()
    transposed = conv(8, 8, mode="trans")
    weights = conv(direction=Direction.BACKWARD_WEIGHTS)
    assert dict(library.applicable([transposed, weights], library.environment())) == {
        transposed: [],
        weights: [],
    }


def test_the_environment_names_the_cpu_its_instructions_the_cores_and_onednn(
    installed: Path,
) -> None:
    found = OneDnnLibrary().environment()
    assert found.library_version.startswith("3.")
    assert found.toolchain == f"onednn-{found.library_version}"
    assert found.num_cu == len(eval_cpus())
    assert found.arch.startswith(("sse", "avx"))
    assert found.device
    assert found.flags["cpu_runtime"] == "omp"


def test_a_session_of_another_cpu_is_refused(installed: Path) -> None:
    library = OneDnnLibrary()
    with pytest.raises(BadInput, match="arch is sparc"):
        library.applicable([conv()], replace(library.environment(), arch="sparc"))


def test_this_process_never_loads_onednn(installed: Path) -> None:
    program = (
        "from pathlib import Path; from tuna.configs import GemmConfig; from tuna_onednn"
        " import OneDnnLibrary;library = OneDnnLibrary(); found ="
        " list(library.applicable([GemmConfig(4, 4, 4)], library.environment()));assert"
        " found[0][1], found; print('libdnnl' in Path('/proc/self/maps').read_text())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_a_library_that_is_missing_or_unknown_is_a_sentence_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(library, "files", missing)
    with pytest.raises(LibraryMissing, match="oneDNN is not installed") as error:
        OneDnnLibrary().environment()
    assert error.value.hint == "pip install 'tuna-autotuner[onednn]'"
    assert len(OneDnnLibrary().solvers()) == len(SOLVERS), (
        "what solvers there are is known without it"
    )


def test_another_major_version_and_a_file_that_is_no_onednn_are_refused(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuna_onednn import capi

    with pytest.raises(LibraryMissing, match="cannot be loaded"):
        capi.Dnnl("libc.so.6")
    monkeypatch.setattr(capi, "MAJOR", 4)
    with pytest.raises(LibraryMissing, match=r"is oneDNN 3\.\d+; Tuna knows version 4"):
        capi.Dnnl(str(installed))


def test_a_child_that_cannot_load_it_says_so(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "libdnnl.so.3"
    broken.write_text("no library")
    monkeypatch.setattr(library, "library_path", lambda: broken)
    with pytest.raises(LibraryMissing, match=r"cannot be used here: .*cannot be loaded"):
        OneDnnLibrary().environment()


@pytest.mark.parametrize(
    ("kind", "implementation", "family"),
    [
        ("convolution", "brgconv_1x1:avx512_core", "Brgconv"),
        ("convolution", "brg_fwd:avx2+brgconv:avx2", "Brgconv"),
        ("convolution", "brdgmm_dw:avx2", "Brdgmm"),
        ("convolution", "jit_dw:avx2", "Jit"),
        ("convolution", "jit_uni_int8:avx2 #2", "Jit"),
        ("convolution", "x64:gemm:jit", "Gemm"),
        ("convolution", "gemm:ref", "Gemm"),
        ("convolution", "ref:any", "Ref"),
        ("convolution", "acl", "Other"),
        ("gemm", "brg:avx512_core_vnni", "Brgemm"),
        ("gemm", "gemm:jit:f32", "Gemm"),
    ],
)
def test_an_implementation_belongs_to_a_family(kind: str, implementation: str, family: str) -> None:
    assert family_of(kind, implementation) == family


def test_the_slow_reference_applies_only_where_nothing_else_does() -> None:
    listed = {Layout.PLAIN: ["ref:any"], Layout.ANY: ["jit:avx2", "jit:sse41", "ref:any"]}
    assert by_solver("convolution", listed) == {"OneDnnJitAny": ["jit:avx2", "jit:sse41"]}
    assert by_solver("convolution", {Layout.PLAIN: ["ref:any"]}) == {"OneDnnRefPlain": ["ref:any"]}


@pytest.mark.parametrize(
    ("name", "with_vnni", "without"),
    [
        ("brgconv:avx512_core_vnni", True, False),
        ("brgconv:avx512_core", False, False),
        ("jit_uni_int8:avx2", False, False),
        ("x64:gemm_s8s8s32:jit", True, False),
        ("ref_int8:any", True, True),
    ],
)
def test_int8_is_left_to_implementations_that_keep_every_bit(
    name: str, with_vnni: bool, without: bool
) -> None:
    assert (has_exact_int8(name, True), has_exact_int8(name, False)) == (with_vnni, without)
    assert list(allowed("convolution", channels_last=True, native=False)) == [Layout.CHANNELS_LAST]
