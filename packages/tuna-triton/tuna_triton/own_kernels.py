"""Tuna's own Triton kernels. This file is read as text and compiled in a child; Tuna never imports
it.

Arguments have the names that vLLM and SGLang use, so that one description serves all of them. The
algorithms are the textbook ones: a tiled matrix product in fp32, with a factor for each block of
the inputs (DeepSeek-V3, section 3.3), or with rows gathered by the expert that they are routed to.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_at(program, rows, columns, height: tl.constexpr):
    """Row and column of a program's tile: bands of `height` rows are passed column by column, so
    that what neighbours read stays in the cache."""
    band = program // (height * columns)
    first = band * height
    tall = min(rows - first, height)
    inside = program - band * height * columns
    return first + inside % tall, inside // tall


@triton.jit
def gemm(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """C = A B, summed in fp32."""
    row, column = tile_at(
        tl.program_id(0), tl.cdiv(M, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N), GROUP_SIZE_M
    )
    m = (row * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)).to(tl.int64)[:, None]
    n = (column * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)).to(tl.int64)[None, :]
    k = tl.arange(0, BLOCK_SIZE_K)
    left, right = a_ptr + m * stride_am, b_ptr + n * stride_bn
    total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    for start in range(0, K, BLOCK_SIZE_K):
        at = start + k
        a = tl.load(left + at[None, :] * stride_ak, (m < M) & (at[None, :] < K), 0.0)
        b = tl.load(right + at[:, None] * stride_bk, (n < N) & (at[:, None] < K), 0.0)
        total = tl.dot(a, b, total)
    out = c_ptr + m * stride_cm + n * stride_cn
    tl.store(out, total.to(c_ptr.dtype.element_ty), (m < M) & (n < N))


@triton.jit
def block_fp8_gemm(
    a_ptr,
    b_ptr,
    c_ptr,
    a_scale_ptr,
    b_scale_ptr,
    M,
    N,
    K,
    group_n: tl.constexpr,
    group_k: tl.constexpr,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    stride_asm,
    stride_ask,
    stride_bsk,
    stride_bsn,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """C = A B where each row of A has a factor for `group_k` columns, and B one for each block of
    `group_k` x `group_n`; BLOCK_SIZE_K divides `group_k`."""
    row, column = tile_at(
        tl.program_id(0), tl.cdiv(M, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N), GROUP_SIZE_M
    )
    m = (row * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)).to(tl.int64)
    n = (column * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_SIZE_K)
    left, right = a_ptr + m[:, None] * stride_am, b_ptr + n[None, :] * stride_bn
    left_scale, right_scale = a_scale_ptr + m * stride_asm, b_scale_ptr + n // group_n * stride_bsn
    total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    for start in range(0, K, BLOCK_SIZE_K):
        at = start + k
        a = tl.load(left + at[None, :] * stride_ak, (m[:, None] < M) & (at[None, :] < K), 0.0)
        b = tl.load(right + at[:, None] * stride_bk, (n[None, :] < N) & (at[:, None] < K), 0.0)
        block = start // group_k
        a_scale = tl.load(left_scale + block * stride_ask, m < M, 0.0)
        b_scale = tl.load(right_scale + block * stride_bsk, n < N, 0.0)
        total += tl.dot(a, b) * (a_scale[:, None] * b_scale[None, :])
    out = c_ptr + m[:, None] * stride_cm + n[None, :] * stride_cn
    tl.store(out, total.to(c_ptr.dtype.element_ty), (m[:, None] < M) & (n[None, :] < N))


@triton.jit
def moe(
    a_ptr,
    b_ptr,
    c_ptr,
    a_scale_ptr,
    b_scale_ptr,
    topk_weights_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    N,
    K,
    EM,
    num_valid_tokens,
    stride_am,
    stride_ak,
    stride_be,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    stride_asm,
    stride_ask,
    stride_bse,
    stride_bsk,
    stride_bsn,
    group_n: tl.constexpr,
    group_k: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    MUL_ROUTED_WEIGHT: tl.constexpr,
    top_k: tl.constexpr,
    compute_type: tl.constexpr,
    use_fp8_w8a8: tl.constexpr,
    use_int8_w8a16: tl.constexpr,
):
    """Row s of C is row s // top_k of A times the matrix of the expert that it is routed to.

    `sorted_token_ids` lists the rows by expert, padded to whole tiles with numbers from
    `num_valid_tokens`; `expert_ids` names the expert of each tile.
    """
    row, column = tile_at(
        tl.program_id(0), tl.cdiv(EM, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N), GROUP_SIZE_M
    )
    if row * BLOCK_SIZE_M >= tl.load(num_tokens_post_padded_ptr):
        return
    slot = tl.load(sorted_token_ids_ptr + row * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M))
    routed = slot < num_valid_tokens
    token = (slot // top_k).to(tl.int64)
    expert = tl.load(expert_ids_ptr + row).to(tl.int64)
    n = (column * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_SIZE_K)
    left = a_ptr + token[:, None] * stride_am
    right = b_ptr + expert * stride_be + n[None, :] * stride_bn
    left_scale = a_scale_ptr + token * stride_asm if use_fp8_w8a8 else a_ptr
    right_scale = b_scale_ptr + expert * stride_bse if use_fp8_w8a8 or use_int8_w8a16 else b_ptr
    total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    for start in range(0, K, BLOCK_SIZE_K):
        at = start + k
        a = tl.load(left + at[None, :] * stride_ak, routed[:, None] & (at[None, :] < K), 0.0)
        b = tl.load(right + at[:, None] * stride_bk, (n[None, :] < N) & (at[:, None] < K), 0.0)
        if use_int8_w8a16:
            total = tl.dot(a, b.to(compute_type), total)
        elif use_fp8_w8a8 and group_k > 0:
            block = start // group_k
            a_scale = tl.load(left_scale + block * stride_ask, routed, 0.0)
            b_scale = tl.load(
                right_scale + n // group_n * stride_bsn + block * stride_bsk, n < N, 0.0
            )
            total += tl.dot(a, b) * (a_scale[:, None] * b_scale[None, :])
        else:
            total = tl.dot(a, b, total)
    if use_int8_w8a16:
        total *= tl.load(right_scale + n * stride_bsn, n < N, 0.0)[None, :]
    elif use_fp8_w8a8 and group_k == 0:
        total *= tl.load(a_scale_ptr) * tl.load(b_scale_ptr + expert)
    if MUL_ROUTED_WEIGHT:
        total *= tl.load(topk_weights_ptr + slot, routed, 0.0)[:, None]
    out = c_ptr + slot.to(tl.int64)[:, None] * stride_cm + n[None, :] * stride_cn
    tl.store(out, total.to(compute_type), routed[:, None] & (n[None, :] < N))
