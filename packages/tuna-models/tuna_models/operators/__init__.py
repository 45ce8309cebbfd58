"""Operators that TVM lacks or gets wrong, as Relax, and their reference answers. Imports TVM."""
