"""Write the results of a session or of a golden version as a database file, by the exporter of its
form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuna.db import sessions
from tuna.errors import BadInput
from tuna.exports.registry import exporter
from tuna.exports.source import of_golden, of_session
from tuna.libraries.exporter import ExportReport


def export(
    connection: sa.Connection,
    session_id: int,
    form: str,
    directory: Path,
    *,
    filename: str | None = None,
    config_tag: str | None = None,
    **options: Any,
) -> ExportReport:
    """Write the session's results into `directory`, which is made if it is missing.

    `filename` replaces the base name `<arch>_<num_cu>`, `config_tag` limits the export to the
    configs with this tag; the rest are the form's own options. Equal results give equal bytes; an
    older file is replaced at once or not at all. Raises NotFound if there is no such session or
    tag, or nothing to export (then nothing is written), BadInput, also for results of an emulated
    board, or StorageFull.
    """
    writer = exporter(form)
    given = writer.options_of(options)
    source = of_session(connection, session_id, config_tag)
    if emulator := sessions.get(connection, session_id).environment.flags.get("emulator"):
        raise BadInput(
            f"Session {session_id} was measured on a board that {emulator} emulates: its times are"
            " no device's.",
            hint="see them with `tuna report`; what is exported is measured on a real board",
        )
    report = writer.export(source, directory, given, filename)
    return replace(
        report,
        simulated=source.selected.count(connection, "simulated"),
        noisy=source.selected.count(connection, "noisy"),
    )


def export_golden(
    connection: sa.Connection,
    version: int,
    form: str,
    directory: Path,
    *,
    library: str = "miopen",
    arch: str,
    num_cu: int | None = None,
    filename: str | None = None,
    config_tag: str | None = None,
    **options: Any,
) -> ExportReport:
    """Write what a golden version holds for a device, as `export` does for a session.

    Without `num_cu` the file is named after the architecture alone and holds the results of all CU
    counts: MIOpen's formats of each key and solver what was measured last, of equally late ones
    that of fewer CUs; a kernel db the code of the winners of each CU count; the generic forms all
    of them. There is no TVM database of a golden version.
    """
    writer = exporter(form)
    given = writer.options_of(options)
    source = of_golden(connection, library, version, arch, num_cu, config_tag)
    report = writer.export(source, directory, given, filename)
    return replace(report, noisy=source.selected.count(connection, "noisy"))
