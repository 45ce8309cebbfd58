"""Triton kernels for GPUs, compiled where no GPU is. How they are used is in docs/gpu.md."""
