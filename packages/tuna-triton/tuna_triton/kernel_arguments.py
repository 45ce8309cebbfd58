"""Families of kernels: ours and consumers' that do the same with the same arguments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuna.configs import Config, GemmConfig
from tuna.configs.values import DataType
from tuna_triton.artifact import Buffer
from tuna_triton.moe import FP8, INT8, MoeConfig
from tuna_triton.tiles import AXES, Element, KernelCall, Plan, Target, Tile, Value

ELEMENTS = {
    DataType.FP32: "fp32",
    DataType.FP16: "fp16",
    DataType.BF16: "bf16",
    DataType.INT8: "i8",
    DataType.FP8_E4M3: "fp8e4nv",
    DataType.FP8_E4M3FNUZ: "fp8e4b8",
}


@dataclass(frozen=True)
class KernelFamily:
    """Kernels that do the same with the same arguments, ours and consumers'."""

    name: str
    kind: str  #: kind of the configs that it can run
    #: True if a kernel can run the config; the last argument is the consumer, as in
    #: `Description.package`.
    fits: Callable[[Config, Target, str], bool]
    plan: Callable[[Config, Tile, Target, str], Plan]
    points: Callable[[Config, Target], Iterator[Tile]]
    default: Callable[[Config, Target, str], Tile]
    #: Return the tile as the kernel takes it: equal for tiles that are the same kernel.
    canonical: Callable[[Config, Tile, str], Tile]


def _points(target: Target, axes: Mapping[str, Sequence[int]]) -> Iterator[Tile]:
    if target.backend == "hip":
        more = {"num_stages": (2,), "num_warps": (2, 4, 8), "waves_per_eu": (0, 2)}
        axes = {**axes, **more, "matrix_instr_nonkdim": (16,), "kpack": (1, 2)}
    for point in itertools.product(*axes.values()):
        yield dict(zip(axes, point, strict=True))


def _with_amd(tile: Tile, target: Target) -> Tile:
    """The default of a consumer with what AMD's compiler takes where a file says nothing."""
    if target.backend != "hip":
        return tile
    return {**tile, "num_stages": 2, "waves_per_eu": 0, "matrix_instr_nonkdim": 0, "kpack": 1}


def _tiles(rows: int, columns: int, tile: Tile) -> tuple[int, int, int]:
    return (
        math.ceil(rows / tile["BLOCK_SIZE_M"]) * math.ceil(columns / tile["BLOCK_SIZE_N"]),
        1,
        1,
    )


def _grouped(tile: Tile, rows: int, groups: Sequence[int]) -> Tile:
    """The tile with the smallest group that orders programs as its own does: one group of all
    rows of tiles has no effect."""
    tall = math.ceil(rows / tile["BLOCK_SIZE_M"])
    enough = [group for group in groups if group >= tall]
    group = min([tile["GROUP_SIZE_M"], *enough]) if tile["GROUP_SIZE_M"] >= tall else None
    return tile if group is None else {**tile, "GROUP_SIZE_M": group}


#: Rows of tiles in the largest group that consumers' tuners try.
WIDEST_GROUP = 64
#: The space of vLLM's and SGLang's tuners of block-wise fp8 products.
_BLOCK_FP8_AXES: Mapping[str, Sequence[int]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (64, 128),
    "GROUP_SIZE_M": (1, 16, 32, WIDEST_GROUP),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}
#: The space of vLLM's `benchmark_moe.py` and SGLang's tuner: 1,920 points.
_MOE_AXES = {**_BLOCK_FP8_AXES, "BLOCK_SIZE_K": (64, 128, 256)}
_GEMM_AXES = {
    **_BLOCK_FP8_AXES,
    **{"BLOCK_SIZE_K": (32, 64, 128), "GROUP_SIZE_M": (1, 8), "num_stages": (2, 3, 4)},
}
_WIDE = (DataType.BF16, DataType.FP16, DataType.FP32)


def _gemm(config: Config) -> GemmConfig:
    assert isinstance(config, GemmConfig)
    return config


def _is_packed(config: Config) -> bool:
    """True for one product of packed matrices with A as it is written."""
    if not isinstance(config, GemmConfig) or config.batch_count != 1 or config.trans_a:
        return False
    strides = config.lda, config.ldb, config.ldc, config.b_type, config.compute_type
    return all(one is None for one in strides) and not config.scale_c


def _is_fp8(config: GemmConfig, target: Target) -> bool:
    return config.data_type is target.fp8 and config.c_type in _WIDE


def _gemm_fits(config: Config, target: Target, consumer: str) -> bool:
    if not _is_packed(config) or _gemm(config).scale_a or _gemm(config).scale_b:
        return False
    half = _gemm(config).data_type in (DataType.BF16, DataType.FP16)
    return (half and _gemm(config).c_type in (None, DataType.FP32)) or _is_fp8(
        _gemm(config), target
    )


def block_sizes(config: GemmConfig) -> tuple[int, int] | None:
    """Return columns and depth of the blocks of B; None unless the scales are those of block-wise
    fp8."""
    words = config.scale_b.removeprefix("block").split("x")
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    block_k, block_n = (int(word) for word in words)
    fits = config.scale_a == f"block1x{block_k}" and block_k % 16 == 0 and block_n > 0
    return (block_n, block_k) if fits else None


def _block_fp8_fits(config: Config, target: Target, consumer: str) -> bool:
    if not _is_packed(config) or not _gemm(config).trans_b:
        return False
    if consumer == "sglang" and target.backend == "hip":
        return False  # there it has another kernel for small grids, and changes BLOCK_SIZE_K
    return _is_fp8(_gemm(config), target) and block_sizes(_gemm(config)) is not None


def _gemm_plan(config: Config, tile: Tile, target: Target, consumer: str) -> Plan:
    product = _gemm(config)
    m, n, k = product.m, product.n, product.k
    element = ELEMENTS[product.data_type]
    buffers = [
        Buffer("a", element, (m, k), "input"),
        Buffer("b", element, (n, k) if product.trans_b else (k, n), "input"),
        Buffer("c", ELEMENTS[product.c_type or product.data_type], (m, n), "output"),
    ]
    row, column = (1, k) if product.trans_b else (n, 1)
    arguments: dict[str, Value] = {
        **{"a_ptr": "a", "b_ptr": "b", "c_ptr": "c", "M": m, "N": n, "K": k},
        **{"stride_am": k, "stride_ak": 1, "stride_bk": row, "stride_bn": column},
        **{"stride_cm": n, "stride_cn": 1, **tile},
    }
    blocks = block_sizes(product)
    if blocks is not None:
        block_n, block_k = blocks
        wide, deep = math.ceil(n / block_n), math.ceil(k / block_k)
        buffers += [
            Buffer("a_scale", "fp32", (m, deep), "input"),
            Buffer("b_scale", "fp32", (wide, deep), "input"),
        ]
        arguments |= {"a_scale_ptr": "a_scale", "b_scale_ptr": "b_scale"}
        arguments |= {"group_n": block_n, "group_k": block_k}
        arguments |= {"needs_masking": k % tile["BLOCK_SIZE_K"] != 0}
        arguments |= {"stride_asm": deep, "stride_ask": 1, "stride_bsk": 1, "stride_bsn": deep}
        # the names that vLLM's and SGLang's kernel has
        old = {"A": "a", "B": "b", "C": "c", "As": "a_scale", "Bs": "b_scale"}
        strides = {"As_m": deep, "As_k": 1, "Bs_k": 1, "Bs_n": deep}
        arguments |= {**old, **{f"stride_{name}": value for name, value in strides.items()}}
    return Plan(tuple(buffers), (KernelCall(arguments, _tiles(m, n, tile)),))


def _gemm_default(config: Config, target: Target, consumer: str) -> Tile:
    return _with_amd(dict(zip(AXES, (128, 128, 64, 8, 4, 3), strict=True)), target)


def _block_fp8_default(config: Config, target: Target, consumer: str) -> Tile:
    block_n, block_k = block_sizes(_gemm(config)) or (128, 128)
    values = (64, block_n, block_k, 32, 4, 3 if consumer == "sglang" else 2)
    return _with_amd(dict(zip(AXES, values, strict=True)), target)


def _block_fp8_points(config: Config, target: Target) -> Iterator[Tile]:
    _, block_k = block_sizes(_gemm(config)) or (128, 128)
    points = _points(target, _BLOCK_FP8_AXES)
    return (tile for tile in points if block_k % tile["BLOCK_SIZE_K"] == 0)


GEMM = KernelFamily(
    "gemm",
    "gemm",
    _gemm_fits,
    _gemm_plan,
    lambda config, target: _points(target, _GEMM_AXES),
    _gemm_default,
    lambda config, tile, _: _grouped(tile, _gemm(config).m, _GEMM_AXES["GROUP_SIZE_M"]),
)
BLOCK_FP8 = KernelFamily(
    "block_fp8",
    "gemm",
    _block_fp8_fits,
    _gemm_plan,
    _block_fp8_points,
    _block_fp8_default,
    lambda config, tile, _: _grouped(tile, _gemm(config).m, _BLOCK_FP8_AXES["GROUP_SIZE_M"]),
)


def _moe(config: Config) -> MoeConfig:
    assert isinstance(config, MoeConfig)
    return config


def _moe_fits(config: Config, target: Target, consumer: str) -> bool:
    return isinstance(config, MoeConfig) and (config.scheme != FP8 or target.fp8 is not None)


def _moe_points(config: Config, target: Target) -> Iterator[Tile]:
    """With blocks the tiles that vLLM's tuner keeps: whole blocks."""
    layer = _moe(config)
    for tile in _points(target, _MOE_AXES):
        whole = not layer.block_n or (
            tile["BLOCK_SIZE_N"] % layer.block_n == 0 and tile["BLOCK_SIZE_K"] % layer.block_k == 0
        )
        if whole:
            yield tile


def _moe_default(config: Config, target: Target, consumer: str) -> Tile:
    """Return the default of SGLang 0.5, or of vLLM 0.33: older ones have others."""
    layer = _moe(config)
    values = _sglang_default(layer) if consumer == "sglang" else _vllm_default(layer, target)
    return _with_amd(dict(zip(AXES, values, strict=True)), target)


def _vllm_default(layer: MoeConfig, target: Target) -> Sequence[int]:
    m = layer.tokens
    if layer.block_n:
        few = m <= 8 and layer.block_n % 64 == 0 and target.backend == "cuda"
        stages = 4 if few and m <= 4 else 3
        wide, group = 64 if few else layer.block_n, 1 if m <= 16 else 32
        return 16 if m <= 64 else 64, wide, layer.block_k, group, 4, stages
    tall = 16 if m <= 32 else 32 if m <= 96 else 64 if m <= 512 else 128
    deep = 128 if layer.scheme == FP8 or m <= 64 else 64
    group = 16 if m // layer.experts > 128 else 1
    return tall, 64 if m <= 64 else 128, deep, group, 4 if m <= 128 else 8, 4 if m <= 32 else 3


def _sglang_default(layer: MoeConfig) -> Sequence[int]:
    few = layer.tokens <= layer.experts
    if layer.block_n:
        return 64, layer.block_n, layer.block_k, 32, 4, 3
    if layer.scheme == FP8:
        return (64, 128, 128, 1, 4, 4) if few else (128, 256, 128, 32, 8, 4)
    return (16, 32, 64, 1, 4, 3) if few else (64, 64, 32, 8, 4, 3)


def _moe_canonical(config: Config, tile: Tile, consumer: str) -> Tile:
    """With blocks consumers clip BLOCK_SIZE_K before they launch."""
    layer = _moe(config)
    if layer.block_n:
        tile = {**tile, "BLOCK_SIZE_K": min(tile["BLOCK_SIZE_K"], layer.block_n, layer.block_k)}
    rows = _padded_rows(layer, tile["BLOCK_SIZE_M"], consumer)
    return _grouped(tile, rows, _MOE_AXES["GROUP_SIZE_M"])


def _padded_rows(layer: MoeConfig, block_m: int, consumer: str) -> int:
    """Rows that each product is launched for: at most a tile for each expert that may be met."""
    routed = layer.tokens * layer.topk
    if consumer == "sglang":
        few, experts = routed < layer.experts + 1, layer.experts + 1
        rows = routed * block_m if few else routed + experts * (block_m - 1)
        rows = math.ceil(rows / 4) * 4
        return min(rows, routed * block_m) if layer.tokens < block_m else rows
    return min(routed * block_m, routed + layer.experts * (block_m - 1))


def _moe_plan(config: Config, tile: Tile, target: Target, consumer: str) -> Plan:
    layer = _moe(config)
    block_m, routed = tile["BLOCK_SIZE_M"], layer.tokens * layer.topk
    rows = _padded_rows(layer, block_m, consumer)
    tall = math.ceil(rows / block_m)
    answer = ELEMENTS[layer.data_type]
    inputs = weights = answer
    if layer.scheme == FP8:
        assert target.fp8 is not None
        inputs = weights = ELEMENTS[target.fp8]
    elif layer.scheme == INT8:
        weights = "i8"
    # for so few tokens vLLM gives each a tile of its own, and sorts nothing
    unsorted = consumer == "vllm" and 4 * routed <= layer.experts
    swapped = target.arch == "sm_90" and block_m < 64 <= tile["BLOCK_SIZE_N"]
    swapped = swapped and layer.scheme == FP8
    buffers = [
        Buffer("topk_weights", "fp32", (routed,), "input"),
        Buffer("expert_ids", "i32", (tall,), "input"),
        Buffer("num_tokens_post_padded", "i32", (1,), "input"),
    ]
    if not unsorted:
        buffers.append(Buffer("sorted_token_ids", "i32", (tall * block_m,), "input"))
    tables: dict[str, Value] = {buffer.name + "_ptr": buffer.name for buffer in buffers}
    tables |= {"naive_block_assignment": unsorted, "SWAP_AB": swapped, "swap_ab": swapped}
    calls = []
    up, down = 2 * layer.intermediate, layer.hidden
    for name, columns, depth, height, top_k in (
        ("up", up, layer.hidden, layer.tokens, layer.topk),
        ("down", down, layer.intermediate, routed, 1),
    ):
        scales, scaled = _moe_scales(layer, name, height, columns, depth)
        buffers += [
            Buffer(f"{name}_a", inputs, (height, depth), "input"),
            Buffer(f"{name}_b", weights, (layer.experts, columns, depth), "input"),
            *scales,
            Buffer(f"{name}_c", answer, (routed, columns), "output"),
        ]
        arguments: dict[str, Value] = {
            **{"a_ptr": f"{name}_a", "b_ptr": f"{name}_b", "c_ptr": f"{name}_c", **scaled},
            **{"sorted_token_ids_ptr": None, **tables},
            **{"N": columns, "K": depth, "EM": rows, "num_valid_tokens": routed},
            **{"stride_am": depth, "stride_ak": 1, "stride_be": columns * depth},
            **{"stride_bk": 1, "stride_bn": depth, "stride_cm": columns, "stride_cn": 1},
            **{"MUL_ROUTED_WEIGHT": name == "down", "top_k": top_k},
            **{"compute_type": Element(answer), "even_Ks": depth % tile["BLOCK_SIZE_K"] == 0},
            **{"use_fp8_w8a8": layer.scheme == FP8, "use_int8_w8a16": layer.scheme == INT8},
            **{"ROUTER_TOPK": layer.topk, **_MOE_UNUSED, **tile},
        }
        calls.append(KernelCall(arguments, _tiles(rows, columns, tile)))
    return Plan(tuple(buffers), tuple(calls))


def _moe_scales(
    layer: MoeConfig, name: str, height: int, columns: int, depth: int
) -> tuple[list[Buffer], dict[str, Value]]:
    """The buffers of one product's scales, and the arguments for them."""
    block_n, block_k = layer.block_n, layer.block_k
    arguments: dict[str, Value] = {"group_n": block_n, "group_k": block_k}
    shapes: dict[str, tuple[int, ...]] = {}
    strides = dict.fromkeys(("asm", "ask", "bse", "bsk", "bsn"), 0)
    if layer.scheme == FP8 and block_n:
        wide, deep = math.ceil(columns / block_n), math.ceil(depth / block_k)
        shapes = {"a": (height, deep), "b": (layer.experts, wide, deep)}
        strides = {"asm": deep, "ask": 1, "bse": wide * deep, "bsk": 1}
        strides["bsn"] = deep if wide > 1 else 0
    elif layer.scheme == FP8:
        shapes = {"a": (1,), "b": (layer.experts,)}
    elif layer.scheme == INT8:
        shapes = {"b": (layer.experts, columns)}
        strides |= {"bse": columns, "bsn": 1}
    for letter in "ab":
        arguments[f"{letter}_scale_ptr"] = f"{name}_{letter}_scale" if letter in shapes else None
    arguments |= {f"stride_{key}": value for key, value in strides.items()}
    return [
        Buffer(f"{name}_{letter}_scale", "fp32", shape, "input") for letter, shape in shapes.items()
    ], arguments


#: Arguments of consumers' kernels for what they do elsewhere: biases, adapters, other schemes.
_MOE_UNUSED: Mapping[str, Value] = {
    **dict.fromkeys(("b_bias_ptr", "bias_ptr", "a_desc", "b_desc", "add_mask_ptr")),
    **dict.fromkeys(("stride_bbe", "stride_bbn", "stride_bias_e", "stride_bias_n"), 0),
    **dict.fromkeys(("HAS_BIAS", "use_int8_w8a8"), False),
    **dict.fromkeys(("per_channel_quant", "c_sorted", "filter_expert"), False),
    **dict.fromkeys(("FUSE_ADD_TO_OUTPUT", "MASK_OUTPUT", "FUSE_SUM_ALL_REDUCE"), False),
    **{"LORA_PRESERVE_BASE": False, "SPLIT_K": 1},
}

MOE = KernelFamily("moe", "moe", _moe_fits, _moe_plan, _moe_points, _moe_default, _moe_canonical)
