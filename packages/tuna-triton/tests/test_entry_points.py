"""What the distribution brings is found by its entry points."""

from __future__ import annotations

from pathlib import Path

from tuna.configs import KINDS
from tuna.configs.sources import source_of
from tuna.exports import registry as forms
from tuna.libraries import registry as libraries
from tuna.sandbox.discovery import VENDORS
from tuna_triton.library import TritonLibrary


def test_what_the_page_names_is_there() -> None:
    assert isinstance(libraries.get_library("triton"), TritonLibrary)
    assert {"block-fp8", "sglang-moe", "triton-json", "vllm-moe"} <= set(forms.forms())
    assert {"moe", "triton_kernel"} <= set(KINDS.names())
    assert "nvidia" in VENDORS.names()
    source = source_of(Path("kernel.py"))
    assert source is not None
    assert source.noun == "kernel"
