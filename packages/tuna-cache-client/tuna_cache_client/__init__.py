"""Remote caches of programs that compile and tune by themselves, in a space of `tuna serve`
(docs/adapters.md). Imports the standard library and the program's own package, nothing of Tuna's.
"""
