"""`Config`, any layer that Tuna can tune, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from reprlib import repr as shown
from typing import Any, TypeAlias

from tuna.configs import batch_norm, conv
from tuna.configs.batch_norm import BatchNormConfig
from tuna.configs.conv import ConvConfig
from tuna.configs.gemm import GemmConfig
from tuna.errors import BadInput

Config: TypeAlias = ConvConfig | GemmConfig | BatchNormConfig

_KINDS: dict[str, type[Config]] = {cls.kind: cls for cls in (ConvConfig, GemmConfig, BatchNormConfig)}
_NORMALISE = {ConvConfig.kind: conv.normalise, BatchNormConfig.kind: batch_norm.normalise}
_REQUIRED: dict[str, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(cls) if field.default is MISSING) for kind, cls in _KINDS.items()
}


def from_json(mapping: Mapping[str, Any]) -> Config:
    """The config that `to_json` wrote, or one written by hand; raises BadInput.

    A missing field takes the default of the config's class. Fields that a convolution does not use (depth in two
    dimensions, output padding unless transposed) are brought into normal form, and a batch normalisation gets its
    dimensions from depth and layout, as they do when a command is read.
    """
    values = dict(mapping)
    kind = values.pop("kind", None)
    if kind is None:
        raise BadInput(f"a config needs a 'kind': {' or '.join(_KINDS)}")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadInput(f"unknown kind of config {shown(kind)}; Tuna has {', '.join(_KINDS)}")
    unknown = [str(name) for name in values if name not in _KINDS[kind].json_fields]
    if unknown:
        raise BadInput(f"a {kind} config has no field {', '.join(sorted(unknown))}")
    missing = [name for name in _REQUIRED[kind] if name not in values]
    if missing:
        raise BadInput(f"a {kind} config needs {', '.join(missing)}")
    if kind in _NORMALISE:
        values = _NORMALISE[kind](values)
    return _KINDS[kind](**values)
