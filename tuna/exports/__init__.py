"""Results as files that a kernel library or compiler loads, in every format that an installed
library brings."""

from tuna.exports.write import export as export
from tuna.exports.write import export_golden as export_golden
from tuna.libraries.exporter import ExportReport as ExportReport
