"""Results as files that a kernel library or compiler loads: one module for each format, reader and writer together."""

from tuna.exports.exporter import ExportReport, export, export_golden
from tuna.exports.task import Form

__all__ = ["ExportReport", "Form", "export", "export_golden"]
