"""Kernels for CPUs whose space is small because every point of it is good: plain TIR, no intrinsics."""
