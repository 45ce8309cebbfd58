"""Check of FlashInfer's winners, a file or a store, by rules that its readers do not enforce.

To them whatever is wrong is a miss: the operation is tuned again or computed by a fallback.

The readers are `AutoTuner.load_configs`, `ManagedAutotuneCache` and `AutoTuner.search_cache` of
FlashInfer 0.7.4.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuna.errors import BadInput
from tuna.libraries import compressed
from tuna.libraries.exporter import CheckFacts, Findings
from tuna_triton.flashinfer_keys import (
    GENERATION,
    METADATA,
    SCHEMA,
    VERSIONS,
    content_of,
    entry_name,
    environment_hash,
    parse_key,
    text_of_fields,
)

#: Values of a version that its writer could not determine (`_INDETERMINATE_META_VALUES`)
_UNKNOWN = (None, "unknown", "None")
_MAX_BYTES = 64 << 20
_POLICY = "cuda_graph_profile_replays"  #: begins the policy of a measurement
_PROTOCOL = "('__protocol__', "  #: begins the key of an operation that tunes itself
Fault = tuple[str, str]  #: rule and description


def check_winners(
    by_form: Mapping[str, Sequence[Path]], known: CheckFacts, findings: Findings
) -> None:
    """Check each file and each store."""
    for path in (one for paths in by_form.values() for one in paths):
        if path.is_dir():
            findings.files.remove(path)
            _check_store(path, findings)
        else:
            faults = _read(path, findings)
            for rule, text in _file_faults(faults, findings) if faults is not None else ():
                findings.fault(path, rule, text)


def _read(path: Path, findings: Findings) -> dict[str, Any] | None:
    """The content of a file in JSON; None, and a fault, where there is none."""
    try:
        with compressed.unpacked(path, _MAX_BYTES) as plain:
            return content_of(plain.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, BadInput) as error:
        findings.fault(path, "damaged", f"it cannot be read: {error}")
        return None


def _check_store(store: Path, findings: Findings) -> None:
    for folder in sorted((store / SCHEMA).iterdir()):
        manifest = folder / "manifest.json"
        findings.files.append(manifest)
        content = _read(manifest, findings)
        for rule, text in _manifest_faults(folder.name, content) if content is not None else ():
            findings.fault(manifest, rule, text)
        keys = []
        for path in sorted((folder / "entries").glob("*")):
            if path.suffix != ".json":
                findings.left_out["files of other kinds"] += 1
                continue
            findings.files.append(path)
            entry = _read(path, findings)
            if entry is None:
                continue
            findings.entries += 1
            for rule, text in _entry_faults(path.name, entry):
                findings.fault(path, rule, text)
            keys.append(str(entry.get("key")))
        for text in _rivals(keys):
            findings.fault(folder / "entries", "rivals", text)


def _manifest_faults(name: str, manifest: Mapping[str, Any]) -> Iterator[Fault]:
    if manifest.get("cache_schema") != SCHEMA:
        yield "schema", f"cache_schema is not {SCHEMA}"
    if environment_hash(manifest) != name:
        yield "folder", f"its hash is {environment_hash(manifest)}: FlashInfer looks there"
    yield from _version_faults(manifest)


def _version_faults(versions: Mapping[str, Any]) -> Iterator[Fault]:
    for name in VERSIONS:
        if name not in versions:
            yield "versions", f"{name} is missing: no process has these versions"
        elif versions[name] in _UNKNOWN:
            yield "versions", f"{name} is {versions[name]}: its writer could not tell it"
        elif not isinstance(versions[name], str):
            yield "versions", f"{name} is not a text"


def _entry_faults(name: str, entry: Mapping[str, Any]) -> Iterator[Fault]:
    key, runner = entry.get("key"), entry.get("runner")
    if not isinstance(key, str) or not isinstance(runner, str) or "tactic" not in entry:
        yield "damaged", "key, runner or tactic is missing"
        return
    if entry_name(key) != name:
        yield "place", f"FlashInfer looks for its key in {entry_name(key)}"
    fields = entry.get("key_fields")
    if fields is None:
        yield "fields", "key_fields are missing: it is read when a request needs it, not at start"
    elif _told(fields) != key:
        yield "fields", "key_fields are another key's: it is not read at start"
    if key.startswith(_PROTOCOL):
        return  # an operation that tunes itself has its own record as the tactic
    yield from _winner_faults(key, runner, entry["tactic"])
    yield from _policy_faults(entry.get("profiling_policy"))


def _told(fields: Any) -> str:
    try:
        return text_of_fields(fields)
    except (ValueError, TypeError, RecursionError):
        return ""


def _winner_faults(key: str, runner: str, tactic: Any) -> Iterator[Fault]:
    parts = parse_key(key)
    if parts is None:
        yield "key", f"{key[:80]} is not a key of FlashInfer's"
    elif parts.runner != runner:
        yield "runner", f"the key is of {parts.runner}, the winner is {runner}: never taken"
    if tactic is None:
        yield "tactic", "there is no tactic"


def _policy_faults(policy: Any) -> Iterator[Fault]:
    if policy is None:
        yield "policy", "how it was measured is missing: where tuning is on, it is measured again"
    elif not isinstance(policy, list) or policy[:1] != [_POLICY] or len(policy) % 2:
        yield "policy", "no process measures so: where tuning is on, it is measured again"


def _rivals(keys: Iterable[str]) -> Iterator[str]:
    """Of two runners for one operation FlashInfer takes the one that its code lists first."""
    runners: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for parts in map(parse_key, keys):
        if parts is not None:
            runners[parts.op, parts.profile, parts.extras].append(parts.runner)
    for (op, profile, _), names in sorted(runners.items()):
        if len(names) > 1:
            yield f"{op} {profile} has {' and '.join(sorted(names))}: not the faster is taken"


def _file_faults(content: Mapping[str, Any], findings: Findings) -> Iterator[Fault]:
    if METADATA not in content:
        yield "versions", f"{METADATA} is missing: it is taken in every environment"
    else:
        yield from _version_faults(content[METADATA])
    if not isinstance(content.get(GENERATION, ""), str):
        yield "generation", f"{GENERATION} is not a text"
    entries = {key: value for key, value in content.items() if not key.startswith("_")}
    findings.entries += len(entries)
    keys = []
    for key, value in entries.items():
        if not isinstance(value, list) or len(value) < 2 or not isinstance(value[0], str):
            yield "damaged", f"{key[:80]} is no list of runner and tactic: its reader ends"
            continue
        runner, tactic = value[:2]
        keys.append(key)
        if runner.startswith("Cudnn") and isinstance(tactic, int) and tactic >= 0:
            yield "tactic", f"{key[:80]} is a plan's number of cuDNN, which is not read any more"
            continue
        for rule, text in _winner_faults(key, runner, tactic):
            yield rule, text
        for rule, text in _policy_faults(value[2]) if len(value) > 2 else ():
            yield rule, f"{json.dumps(key)[:80]}: {text}"
    for text in _rivals(keys):
        yield "rivals", text
