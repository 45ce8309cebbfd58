"""Reports for people: the figures of a session, and one HTML file that shows them."""

from tuna.reports.html import write_report
from tuna.reports.reading import read_figures

__all__ = ["read_figures", "write_report"]
