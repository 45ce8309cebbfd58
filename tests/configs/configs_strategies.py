"""Hypothesis strategies that draw valid configs of every kind."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tuna.configs import (
    BatchNormConfig,
    Config,
    ConvConfig,
    DataType,
    Direction,
    GemmConfig,
    conv,
    gemm,
)

sizes = st.integers(1, 40)


@st.composite
def convs(draw: st.DrawFn) -> ConvConfig:
    """Any valid convolution: 2D or 3D, grouped, dilated, strided, transposed, in every layout, type
    and direction."""
    spatial_dim = draw(st.sampled_from([2, 3]))
    mode = draw(st.sampled_from(["conv", "trans"]))
    groups = draw(st.integers(1, 6))
    layout = draw(st.sampled_from(["NCHW", "NHWC"] if spatial_dim == 2 else ["NCDHW", "NDHWC"]))
    fields: dict[str, Any] = {
        "spatial_dim": spatial_dim,
        "mode": mode,
        "batchsize": draw(sizes),
        "group_count": groups,
        "in_channels": groups * draw(sizes),
        "out_channels": groups * draw(sizes),
        "direction": draw(st.sampled_from(Direction)),
        "data_type": draw(st.sampled_from(list(conv.COMMANDS))),
        "in_layout": layout,
        "fil_layout": layout,
        "out_layout": layout,
    }
    for axis in "dhw"[3 - spatial_dim :]:
        fil, dilation, stride = (
            draw(st.integers(1, 7)),
            draw(st.integers(1, 3)),
            draw(st.integers(1, 4)),
        )
        reach = dilation * (fil - 1) + 1
        pad = draw(st.integers(0, 5 if mode == "conv" else (reach - 1) // 2))
        fields[f"in_{axis}"] = draw(st.integers(max(1, reach - 2 * pad), 60))
        fields[f"fil_{axis}"], fields[f"dilation_{axis}"] = fil, dilation
        fields[f"conv_stride_{axis}"], fields[f"pad_{axis}"] = stride, pad
        if mode == "trans":
            fields[f"trans_output_pad_{axis}"] = draw(st.integers(0, stride - 1))
    return ConvConfig(**fields)


gemms = st.builds(
    GemmConfig,
    m=sizes,
    n=sizes,
    k=sizes,
    batch_count=sizes,
    trans_a=st.booleans(),
    trans_b=st.booleans(),
    data_type=st.sampled_from(list(gemm.COMMANDS)),
)


@st.composite
def wide_gemms(draw: st.DrawFn) -> GemmConfig:
    """Any valid matrix product, with gaps, types and scales that MIOpenDriver has no flags for."""
    m, n, k, trans_a, trans_b = (
        draw(sizes),
        draw(sizes),
        draw(sizes),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    data_type = draw(st.sampled_from([found for found in DataType if found is not DataType.INT32]))

    def maybe(lowest: int) -> int | None:
        return draw(st.none() | st.integers(lowest, lowest + 3))

    scales = st.sampled_from(["", "tensor", "vector", "block32_e8m0", "block1x128"])
    return GemmConfig(
        *(m, n, k, draw(st.integers(1, 3)), trans_a, trans_b, data_type),
        *(
            maybe(m if trans_a else k),
            maybe(k if trans_b else n),
            maybe(n),
            maybe(0),
            maybe(0),
            maybe(1),
        ),
        b_type=draw(st.none() | st.just(DataType.BF16)),
        c_type=draw(st.none() | st.sampled_from(DataType)),
        compute_type=draw(st.none() | st.just("TF32")) if data_type is DataType.FP32 else None,
        scale_a=draw(scales),
        scale_b=draw(scales),
        scale_c=draw(scales),
    )


factors = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def batch_norms(draw: st.DrawFn) -> BatchNormConfig:
    """Any valid batch normalisation: 2D or 3D (also of depth 1), in every mode, layout, type and
    direction."""
    spatial_dim = draw(st.sampled_from([2, 3]))
    return BatchNormConfig(
        batchsize=draw(sizes),
        in_channels=draw(sizes),
        in_h=draw(sizes),
        in_w=draw(sizes),
        in_d=draw(sizes) if spatial_dim == 3 else 1,
        spatial_dim=spatial_dim,
        mode=draw(st.integers(0, 1)),
        run=draw(st.integers(0, 1)),
        save=draw(st.integers(0, 1)),
        alpha=draw(factors),
        beta=draw(factors),
        direction=draw(st.sampled_from(Direction)),
        layout=draw(st.sampled_from(["NCHW", "NHWC"] if spatial_dim == 2 else ["NCDHW", "NDHWC"])),
        data_type=draw(st.sampled_from([DataType.FP32, DataType.FP16, DataType.BF16])),
    )


configs: st.SearchStrategy[Config] = st.one_of(convs(), gemms, wide_gemms(), batch_norms())
