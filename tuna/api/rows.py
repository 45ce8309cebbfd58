"""The rows of Tuna's database, for packages: connections, tables, and what is read of them.

A package that keeps or reads rows imports them from here, so that it depends on no room below.
Classes are the tables as the ORM knows them, lower-case nouns as Core alone does, which costs no
start of mappers; plural nouns are modules of functions of one table. The names are those that
`rows.pyi` imports; each is imported when it is used first.
"""

from __future__ import annotations

from tuna.api.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
