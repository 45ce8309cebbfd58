"""Stand-ins for NVIDIA's driver and management library, and candidates that run on them."""

from __future__ import annotations

from collections.abc import Sequence

from tuna_triton.artifact import (
    GLOBAL_SCRATCH,
    PARAM_BYTES,
    PROFILE_SCRATCH,
    Artifact,
    Buffer,
    Launch,
    Param,
)

UUID = "GPU-fa4e0000-0000-0000-0000-000000000000"


def image(params: Sequence[Param], **words: object) -> bytes:
    """A module that does what the words say: see libcuda.c."""
    sizes = ",".join(str(PARAM_BYTES[one.type]) for one in params)
    told = {"params": sizes, **words}
    return ("FAKE " + " ".join(f"{name}={value}" for name, value in told.items())).encode()


def product(m: int, n: int, k: int, element: str = "fp16", **words: object) -> Artifact:
    """A candidate that multiplies packed matrices; `words` say how it behaves."""
    params = (
        *(Param(f"{name}_ptr", "ptr", name) for name in "abc"),
        *(Param(name, "i32", value=size) for name, size in (("M", m), ("N", n), ("K", k))),
        *(Param(name, "ptr", name) for name in (GLOBAL_SCRATCH, PROFILE_SCRATCH)),
    )
    shapes = {"a": ((m, k), "input"), "b": ((k, n), "input"), "c": ((m, n), "output")}
    code = image(params, run=f"product_{element}", **words)
    return Artifact(
        "sm_90",
        "3.6.0",
        "0" * 64,
        tuple(Buffer(name, element, shape, role) for name, (shape, role) in shapes.items()),
        (Launch(0, "gemm", (m * n, 1, 1), 4, 32, 65536, 0, 1, 0, 1, params),),
        (code,),
    )
