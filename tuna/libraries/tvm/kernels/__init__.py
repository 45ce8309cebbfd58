"""Kernels for CPUs whose space is small because every point of it is good: TIR that calls LLVM's
intrinsics for dot products of small values (`instructions.py`), prefetches and rounding."""

#: Version of the kernels. Raise it when a family's kernel, the order of its space, the packing of
#: its weights or the options of LLVM (`toolchain.for_code`) change for any layer. It is part of the
#: toolchain, so that results of other kernels belong to another environment: a record is the steps
#: from a kernel's definition to its schedule, the index of a point in its space, and says nothing
#: of the order of packed weights.
VERSION = 15
