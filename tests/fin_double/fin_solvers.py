"""MIOpen's solvers as listed by fin, and simulated applicability.

The table is that of MIOpen 3.3.0 (2d1fd997). The applicability rule is invented: it only resembles
MIOpen's answers.
"""

from __future__ import annotations

from typing import NamedTuple

from .fin_problem import Device, Problem


class Solver(NamedTuple):
    """A row of the table."""

    id: int
    name: str
    algorithm: str  #: of a convolution: Direct, GEMM, Winograd, ImplicitGEMM or FFT
    #: a subset of FBW, inferred from its name or from recordings; "" for batch norm
    directions: str
    tunable: bool
    dynamic: bool

    @property
    def kind(self) -> str:
        """fin's problem type."""
        return "convolution" if self.directions else "batch_norm"

    def answer(self) -> dict[str, str]:
        """The entry of `all_solvers`: every value is a string."""
        flags = {"tunable": str(int(self.tunable)), "dynamic": str(int(self.dynamic))}
        return {"id": str(self.id), "name": self.name, **flags, "type": self.kind}


#: In fin's order. Columns: id, name, algorithm, directions, T for tunable and D for dynamic.
_TABLE = """
  1 ConvAsm3x3U Direct FB T-
  2 ConvAsm1x1U Direct FB T-
  3 ConvAsm1x1UV2 Direct FB T-
  5 ConvAsm5x10u2v2f1 Direct F --
  6 ConvAsm5x10u2v2b1 Direct B --
  7 ConvAsm7x7c3h224w224k64u2v2p3q3f1 Direct F --
  8 ConvOclDirectFwd11x11 Direct F --
  9 ConvOclDirectFwdGen Direct F --
 11 ConvOclDirectFwd Direct FB T-
 13 ConvOclDirectFwd1x1 Direct FB T-
 14 ConvBinWinograd3x3U Winograd FB -D
 15 ConvBinWinogradRxS Winograd FBW -D
 16 ConvAsmBwdWrW3x3 Direct W T-
 17 ConvAsmBwdWrW1x1 Direct W T-
 18 ConvOclBwdWrW2<1> Direct W T-
 19 ConvOclBwdWrW2<2> Direct W T-
 20 ConvOclBwdWrW2<4> Direct W T-
 21 ConvOclBwdWrW2<8> Direct W T-
 22 ConvOclBwdWrW2<16> Direct W T-
 23 ConvOclBwdWrW2NonTunable Direct W --
 24 ConvOclBwdWrW53 Direct W --
 25 ConvOclBwdWrW1x1 Direct W --
 26 ConvHipImplicitGemmV4R1Fwd ImplicitGEMM F T-
 31 ConvHipImplicitGemmV4R1WrW ImplicitGEMM W T-
 34 fft FFT FB --
 35 ConvWinograd3x3MultipassWrW<3-4> Winograd W -D
 37 ConvBinWinogradRxSf3x2 Winograd FBW TD
 38 ConvWinograd3x3MultipassWrW<3-5> Winograd W -D
 39 ConvWinograd3x3MultipassWrW<3-6> Winograd W -D
 40 ConvWinograd3x3MultipassWrW<3-2> Winograd W -D
 41 ConvWinograd3x3MultipassWrW<3-3> Winograd W -D
 42 ConvWinograd3x3MultipassWrW<7-2> Winograd W -D
 43 ConvWinograd3x3MultipassWrW<7-3> Winograd W -D
 44 ConvWinograd3x3MultipassWrW<7-2-1-1> Winograd W -D
 45 ConvWinograd3x3MultipassWrW<7-3-1-1> Winograd W -D
 46 ConvWinograd3x3MultipassWrW<1-1-7-2> Winograd W -D
 47 ConvWinograd3x3MultipassWrW<1-1-7-3> Winograd W -D
 48 ConvWinograd3x3MultipassWrW<5-3> Winograd W -D
 49 ConvWinograd3x3MultipassWrW<5-4> Winograd W -D
 53 ConvBinWinogradRxSf2x3 Winograd FBW TD
 54 ConvHipImplicitGemmV4R4Fwd ImplicitGEMM F T-
 55 ConvHipImplicitGemmBwdDataV1R1 ImplicitGEMM B T-
 56 ConvHipImplicitGemmBwdDataV4R1 ImplicitGEMM B T-
 57 ConvHipImplicitGemmBwdDataV1R1Xdlops ImplicitGEMM B T-
 60 ConvHipImplicitGemmBwdDataV4R1Xdlops ImplicitGEMM B T-
 61 ConvHipImplicitGemmV4R4WrW ImplicitGEMM W T-
 62 ConvAsmImplicitGemmV4R1DynamicFwd ImplicitGEMM F -D
 63 ConvAsmImplicitGemmV4R1DynamicFwd_1x1 ImplicitGEMM F -D
 64 ConvHipImplicitGemmForwardV4R4Xdlops ImplicitGEMM F T-
 65 ConvAsmImplicitGemmV4R1DynamicBwd ImplicitGEMM B -D
 66 ConvAsmImplicitGemmV4R1DynamicWrw ImplicitGEMM W -D
 67 ConvMPBidirectWinograd<2-3> Winograd FB -D
 68 ConvMPBidirectWinograd<3-3> Winograd FB -D
 69 ConvMPBidirectWinograd<4-3> Winograd FB -D
 70 ConvMPBidirectWinograd<5-3> Winograd FB -D
 71 ConvMPBidirectWinograd<6-3> Winograd FB -D
 72 ConvAsmImplicitGemmGTCDynamicWrwXdlops ImplicitGEMM W -D
 73 ConvHipImplicitGemmWrwV4R4Xdlops ImplicitGEMM W T-
 74 ConvAsmImplicitGemmGTCDynamicFwdXdlops ImplicitGEMM F -D
 75 ConvMPBidirectWinograd_xdlops<2-3> Winograd FB T-
 76 ConvMPBidirectWinograd_xdlops<3-3> Winograd FB T-
 77 ConvMPBidirectWinograd_xdlops<4-3> Winograd FB T-
 78 ConvMPBidirectWinograd_xdlops<5-3> Winograd FB T-
 79 ConvMPBidirectWinograd_xdlops<6-3> Winograd FB T-
 80 ConvHipImplicitGemmForwardV4R5Xdlops ImplicitGEMM F T-
 81 ConvHipImplicitGemmForwardV4R4Xdlops_Padded_Gemm ImplicitGEMM F T-
 82 ConvAsmImplicitGemmGTCDynamicBwdXdlops ImplicitGEMM B -D
 83 ConvHipImplicitGemmWrwV4R4Xdlops_Padded_Gemm ImplicitGEMM W T-
 84 ConvBinWinogradRxSf2x3g1 Winograd FBW -D
 85 ConvDirectNaiveConvFwd Direct F -D
 86 ConvDirectNaiveConvBwd Direct B -D
 87 ConvDirectNaiveConvWrw Direct W -D
 88 GemmFwd1x1_0_1 GEMM F -D
 89 GemmFwd1x1_0_1_int8 GEMM F -D
 90 GemmFwd1x1_0_2 GEMM F -D
 91 GemmFwdRest GEMM F -D
 95 GemmBwd1x1_stride2 GEMM B -D
 96 GemmBwd1x1_stride1 GEMM B -D
 97 GemmBwdRest GEMM B -D
 98 ConvMlirIgemmFwd ImplicitGEMM F T-
 99 ConvMlirIgemmBwd ImplicitGEMM B T-
100 ConvMlirIgemmWrW ImplicitGEMM W T-
101 GemmWrw1x1_stride1 GEMM W -D
102 GemmWrwUniversal GEMM W -D
103 ConvMlirIgemmFwdXdlops ImplicitGEMM F T-
104 ConvMlirIgemmBwdXdlops ImplicitGEMM B T-
105 ConvMlirIgemmWrWXdlops ImplicitGEMM W T-
107 ConvAsmImplicitGemmGTCDynamicFwdXdlopsNHWC ImplicitGEMM F TD
108 ConvAsmImplicitGemmGTCDynamicBwdXdlopsNHWC ImplicitGEMM B TD
110 ConvAsmImplicitGemmGTCDynamicWrwXdlopsNHWC ImplicitGEMM W TD
114 ConvCkIgemmFwdV6r1DlopsNchw ImplicitGEMM F T-
127 ConvAsmImplicitGemmGTCDynamicFwdDlopsNCHWC ImplicitGEMM F TD
128 ConvHipImplicitGemmFwdXdlops ImplicitGEMM F TD
129 ConvHipImplicitGemmBwdXdlops ImplicitGEMM B TD
137 ConvHipImplicitGemmGroupFwdXdlops ImplicitGEMM F TD
138 ConvHipImplicitGemm3DGroupFwdXdlops ImplicitGEMM F TD
139 ConvWinoFuryRxS<2-3> Winograd FBW -D
140 ConvHipImplicitGemm3DGroupWrwXdlops ImplicitGEMM W TD
141 ConvHipImplicitGemm3DGroupBwdXdlops ImplicitGEMM B TD
149 ConvHipImplicitGemmF16F8F16FwdXdlops ImplicitGEMM F TD
150 ConvHipImplicitGemmF16F8F16BwdXdlops ImplicitGEMM B TD
151 ConvHipImplicitGemmF16F8F16WrwXdlops ImplicitGEMM W TD
155 ConvHipImplicitGemmGroupBwdXdlops ImplicitGEMM B TD
156 ConvHipImplicitGemmGroupWrwXdlops ImplicitGEMM W TD
113 BnFwdTrainingSpatialSingle - - --
115 BnFwdTrainingSpatialMultiple - - --
116 BnFwdTrainingPerActivation - - --
117 BnBwdTrainingSpatialSingle - - --
118 BnBwdTrainingSpatialMultiple - - --
119 BnBwdTrainingPerActivation - - --
120 BnFwdInference - - --
142 BnCKFwdInference - - --
143 BnCKBwdBackward - - --
144 BnCKFwdTraining - - --
"""


def _row(line: str) -> Solver:
    number, name, algorithm, directions, flags = line.split()
    algorithm, directions = algorithm.strip("-"), directions.strip("-")
    return Solver(int(number), name, algorithm, directions, flags[0] == "T", flags[1] == "D")


SOLVERS = tuple(_row(line) for line in _TABLE.strip().splitlines())
BY_NAME = {solver.name: solver for solver in SOLVERS}
CONVOLUTION = tuple(solver for solver in SOLVERS if solver.kind == "convolution")
#: Precompiled into MIOpen's library: tunable, but without kernel objects.
PRECOMPILED = frozenset(
    s.name for s in CONVOLUTION if s.id >= 128 and s.name.startswith("ConvHipImplicitGemm")
)
WITHOUT_KERNELS = PRECOMPILED | {
    solver.name for solver in CONVOLUTION if solver.algorithm == "GEMM"
}
_XDLOPS = ("gfx908", "gfx90a", "gfx940", "gfx942")
_OLD_WINOGRAD = ("gfx900", "gfx906", "gfx908")


def applicable(problem: Problem, device: Device) -> list[str]:
    """Three to eight solvers in the order of the table; none for INT8 backward, which MIOpen does
    not implement."""
    if problem.data_type == "INT8" and problem.direction != "F":
        return []
    names = {*_always(problem), *_implicit_gemm(problem, device)}
    if (
        problem.is_default_layout
        and problem.dims == 2
        and problem.groups == 1
        and problem.data_type in ("FP32", "FP16")
    ):
        names |= {*_direct(problem), *_winograd(problem, device)}
    elif (
        problem.is_default_layout
        and problem.dims == 2
        and problem.groups > 1
        and problem.data_type == "FP32"
    ):
        names.add("ConvBinWinogradRxSf2x3")
    return [
        solver.name
        for solver in CONVOLUTION
        if solver.name in names and problem.direction in solver.directions
    ]


def applicable_batch_norm(config: dict[str, object], direction: object) -> list[str]:
    """The batch norm solvers of a mode (0 is per activation) and a direction (1 forward, 2
    backward)."""
    mode = "PerActivation" if config["mode"] == 0 else "Spatial"
    if direction != 2 and config.get("forw") == 2:
        return ["BnFwdInference"]
    stem = ("BnBwdTraining" if direction == 2 else "BnFwdTraining") + mode
    return [solver.name for solver in SOLVERS if solver.name.startswith(stem)]


def is_winograd_only(problem: Problem, names: list[str]) -> bool:
    """MIOpen's shortcut: only Winograd, if the 3x3 kernel applies and there are enough output
    channels."""
    channels = (problem.y if problem.direction == "F" else problem.x)[0]
    return "ConvBinWinograd3x3U" in names and channels >= 16 and channels % 2 == 0


def _is_1x1(problem: Problem) -> bool:
    return set(problem.filter) == {1} and set(problem.pads) == {0} and set(problem.dilations) == {1}


def _is_3x3(problem: Problem) -> bool:
    ones = {*problem.pads, *problem.strides, *problem.dilations}
    return problem.filter == (3, 3) and ones == {1}


def _always(problem: Problem) -> list[str]:
    """A naive kernel and one GEMM."""
    naive = [f"ConvDirectNaiveConv{word}" for word in ("Fwd", "Bwd", "Wrw")]
    if not _is_1x1(problem):
        return [*naive, "GemmFwdRest", "GemmBwdRest", "GemmWrwUniversal"]
    strides = set(problem.strides)
    if strides == {2}:
        return [*naive, "GemmFwd1x1_0_2", "GemmBwd1x1_stride2", "GemmWrwUniversal"]
    if strides != {1}:
        return [*naive, "GemmFwdRest", "GemmBwdRest", "GemmWrwUniversal"]
    forward = "GemmFwd1x1_0_1_int8" if problem.data_type == "INT8" else "GemmFwd1x1_0_1"
    return [*naive, forward, "GemmBwd1x1_stride1", "GemmWrw1x1_stride1"]


def _implicit_gemm(problem: Problem, device: Device) -> list[str]:
    if problem.dims == 3:
        return [f"ConvHipImplicitGemm3DGroup{word}Xdlops" for word in ("Fwd", "Bwd", "Wrw")]
    xdlops = device.arch in _XDLOPS
    names = [f"ConvMlirIgemm{word}" + "Xdlops" * xdlops for word in ("Fwd", "Bwd", "WrW")]
    if xdlops and problem.data_type != "INT8":
        names = [f"ConvAsmImplicitGemmGTCDynamic{word}XdlopsNHWC" for word in ("Fwd", "Bwd", "Wrw")]
    if xdlops and not problem.is_default_layout:
        names += [f"ConvHipImplicitGemmGroup{word}Xdlops" for word in ("Fwd", "Bwd", "Wrw")]
    if problem.is_default_layout and problem.groups == 1 and problem.data_type == "FP32":
        names += [
            "ConvHipImplicitGemmV4R1Fwd",
            "ConvHipImplicitGemmBwdDataV1R1",
            "ConvHipImplicitGemmV4R1WrW",
        ]
    return names


def _direct(problem: Problem) -> list[str]:
    if _is_1x1(problem):
        asm = "ConvAsm1x1U" if set(problem.strides) == {1} else "ConvAsm1x1UV2"
        return [asm, "ConvOclDirectFwd1x1", "ConvAsmBwdWrW1x1", "ConvOclBwdWrW1x1"]
    names = ["ConvOclBwdWrW53"]
    if _is_3x3(problem):
        return [*names, "ConvAsm3x3U", "ConvAsmBwdWrW3x3", "ConvOclBwdWrW2<1>"]
    return [*names, "ConvOclDirectFwd"] if set(problem.strides) == {1} else names


def _winograd(problem: Problem, device: Device) -> list[str]:
    if max(problem.strides) > 2 or set(problem.dilations) != {1}:
        return []
    names = ["ConvBinWinogradRxSf3x2"]
    if problem.direction != "W":
        names.append("ConvBinWinogradRxSf2x3g1")
        if _is_3x3(problem) and problem.data_type == "FP32" and device.arch in _OLD_WINOGRAD:
            names.append("ConvBinWinograd3x3U")
    return names
