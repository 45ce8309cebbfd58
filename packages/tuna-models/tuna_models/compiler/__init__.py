"""The compiler: one graph of a model, its groups, their kernels, and what TVM makes of the rest.

Imports TVM."""
