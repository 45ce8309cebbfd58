"""Triton kernels for GPUs, compiled where no GPU is."""
