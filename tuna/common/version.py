"""Name and version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version

#: Name to install: on PyPI, `tuna` is a viewer of Python profiles
DISTRIBUTION = "tuna-autotuner"

try:
    __version__ = version(DISTRIBUTION)
except PackageNotFoundError:  # a source tree that is on the path but was never installed
    __version__ = "0+source"
