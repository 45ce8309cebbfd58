"""What a record or an exported database relies on changes only together with the version of the
kernels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("tvm") is None:
    pytest.skip("TVM is not installed: pip install '.[tvm]'", allow_module_level=True)

from tuna.configs import ConvConfig, GemmConfig, from_json
from tuna.libraries.tvm import kernels
from tuna.libraries.tvm.kernels import shape
from tuna.libraries.tvm.kernels.families import FAMILIES, GEMM
from tuna.libraries.tvm.kernels.gemm import Product
from tuna.libraries.tvm.kernels.machine import Machine
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.stages import Layer

MACHINE = Machine(32, 16, 32 << 10, 512 << 10, 1, "none")
CONVOLUTIONS = (
    ConvConfig(1, 16, 12, 12, 32, 3, 3, 1, 1),
    ConvConfig(1, 16, 12, 12, 16, 1, 1),
    ConvConfig(1, 16, 12, 12, 16, 3, 3, 1, 1, group_count=16),
    ConvConfig(1, 16, 12, 12, 16, 3, 3, 1, 1, 2, 2),
)
#: The version of the kernels, and of what it has the digest.
KNOWN = (3, "2b5786848231dc05")
#: Winograd's transforms have thirds, which other machines may round otherwise: times this, no value
#: is half way between two digits.
_NO_TIES = 1.618


def facts() -> Iterator[object]:
    """Points, in order, and packed weights of a layer for each family and mode."""
    layers = list(CONVOLUTIONS)
    for direction in ("B", "W"):
        layers.append(from_json({**CONVOLUTIONS[3].to_json(), "direction": direction}))  # type: ignore[arg-type]
    for config in layers:
        sizes = shape.of(config, MACHINE.floats)
        for mode in Mode:
            layer = Layer(sizes, mode, MACHINE)
            for _, family in sorted(FAMILIES.items()):
                if family.direction is sizes.direction and family.applies(sizes, mode):
                    yield (
                        family.name,
                        [point.to_json() for point in family.kernel.space(layer)],
                        packed(family, config, sizes),
                    )
    for mode in Mode:
        product = Product(GemmConfig(24, 40, 36), mode, MACHINE)
        b = np.arange(36 * 40, dtype=np.float32).reshape(36, 40)
        yield (
            "gemm",
            [point.to_json() for point in GEMM.kernel.space(product)],
            digest(GEMM.kernel.pack_weights(product, b)),
        )


def packed(family: object, config: ConvConfig, sizes: shape.ConvShape) -> str:
    if config.direction.value == "W":
        return ""
    weights = (
        np.arange(np.prod(config.weight_shape), dtype=np.float32).reshape(config.weight_shape) % 251
    )
    answer = family.kernel.pack_weights(sizes, shape.forward_weights(config, weights))  # type: ignore[attr-defined]
    return digest(np.round(answer * _NO_TIES, 1))


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(
        repr(array.shape).encode() + np.ascontiguousarray(array + 0.0).tobytes()
    ).hexdigest()[:16]


def test_points_and_packed_weights_change_only_with_the_version() -> None:
    found = hashlib.sha256(json.dumps(list(facts())).encode()).hexdigest()[:16]
    assert (kernels.VERSION, found) == KNOWN, (
        "the order of a space or of packed weights has changed: raise"
        " tuna.libraries.tvm.kernels.VERSION, and write both here"
    )
