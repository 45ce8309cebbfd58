"""A builder of candidates for the stand-in of NVIDIA's driver, which say in their params how they
behave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cuda_double import product
from tuna.configs import GemmConfig
from tuna.libraries.kernels import Builder, KernelJob


class CudaToyBuilder(Builder):
    """`job.options["params"]` are the candidates, separated by `|`: words of libcuda.c."""

    def propose(self, job: KernelJob) -> Sequence[str]:
        return str(job.options["params"]).split("|")

    def build(self, job: KernelJob, params: str, path: Path) -> None:
        config = job.config
        assert isinstance(config, GemmConfig)
        words = dict(word.split("=") for word in params.split())
        element = config.data_type.value.lower()
        path.write_bytes(product(config.m, config.n, config.k, element, **words).to_bytes())
