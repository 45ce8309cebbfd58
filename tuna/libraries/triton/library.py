"""Triton kernels as a library of Tuna. This process never imports Triton: a child of the sandbox
does."""

from __future__ import annotations

DEFAULT = "Default"
