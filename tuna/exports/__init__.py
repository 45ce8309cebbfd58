"""Results as files that a kernel library or compiler loads, in every format that an installed
library brings."""

from tuna.exports.write import export, export_golden
from tuna.libraries.exporter import ExportReport

__all__ = ["ExportReport", "export", "export_golden"]
