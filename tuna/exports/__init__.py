"""Results as files that a kernel library or compiler loads: one module for each format, reader and writer together."""

from tuna.exports.exporter import ExportReport, Form, export, export_golden

__all__ = ["ExportReport", "Form", "export", "export_golden"]
