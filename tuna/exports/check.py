"""Check a folder of database files by the rules of their formats."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from tuna.errors import BadInput
from tuna.exports import registry
from tuna.exports.registry import AnyExporter
from tuna.libraries import compressed
from tuna.libraries.exporter import Check, CheckFacts, Findings


def check(directory: Path, known: CheckFacts) -> Findings:
    """Check all databases in a folder: by the format's own rules, else that they are readable and
    have no duplicates.

    MIOpen's rules are at `libraries.miopen.formats.check`. Raises BadInput if the folder has no
    database.
    """
    whole = [
        one for one in registry.exporters() if one.is_directory and one.recognises(directory, b"")
    ]
    endings = sorted({ending for exporter in registry.exporters() for ending in exporter.endings})
    files = sorted(
        path for path in directory.iterdir() if compressed.plain_name(path).endswith(tuple(endings))
    )
    files += [directory] if whole else []
    if not files:
        raise BadInput(
            f"{directory} holds no database.",
            hint=f"their names end in {', '.join(endings)}, or so and .bz2",
        )
    findings = Findings(files)
    together: dict[Check, dict[str, list[Path]]] = {}
    alone: list[tuple[AnyExporter, Path]] = []
    for path in files:
        try:
            exporter = registry.exporter_of(path)
        except BadInput as error:
            findings.fault(path, "damaged", str(error))
            continue
        checker = exporter.checker()
        if checker is None:
            alone.append((exporter, path))
        else:
            together.setdefault(checker, {}).setdefault(exporter.form, []).append(path)
    for check_files, by_form in together.items():
        check_files(by_form, known, findings)
    for exporter, path in alone:
        _read(exporter, path, findings)
    return findings


def _read(exporter: AnyExporter, path: Path, findings: Findings) -> None:
    seen: set[tuple[str, str]] = set()
    try:
        for entry in exporter.entries(path):
            findings.entries += 1
            if entry[:2] in seen:
                findings.fault(path, "duplicate", f"{entry.key} {entry.solver}")
            seen.add(entry[:2])
    except (BadInput, sqlite3.Error) as error:
        findings.fault(path, "damaged", str(error))
