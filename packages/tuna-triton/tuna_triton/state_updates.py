"""Files of tiles for vLLM's state update of Mamba models (`selective_state_update`): their rules.

vLLM 0.33 reads one for each `headdim`, `dstate` and type of the state in VLLM_TUNED_CONFIG_FOLDER
(`get_ssm_configs` of `mamba/ops/mamba_ssm.py`): keys are the batch times the number of heads of a
rank, of which the nearest is taken.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuna.errors import BadInput

_NAME = re.compile(
    r"headdim=(?P<headdim>\d+),dstate=(?P<dstate>\d+),device_name=(?P<device>[^,]+),"
    r"cache_dtype=(?P<dtype>\w+)\.json"
)
TILE = ("BLOCK_SIZE_M", "num_warps")  #: all values that the reader takes
#: Types of a state for which the reader asks; bfloat16 reads the file of float16
DTYPES = ("float16", "float32")
#: Times as large as the key before: between two keys the nearer one's tile is taken, and never the
#: default; the files that vLLM brings have steps of 8 at most
_FARTHEST = 8


@dataclass(frozen=True)
class StateFileName:
    """The name of a file."""

    headdim: int
    dstate: int
    device: str
    dtype: str

    @property
    def text(self) -> str:
        """The name as vLLM asks for it."""
        sizes = f"headdim={self.headdim},dstate={self.dstate}"
        return f"{sizes},device_name={self.device},cache_dtype={self.dtype}.json"


def parse_state_name(name: str) -> StateFileName | None:
    """Return what a file's name says; None for the name of another file."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return StateFileName(
        int(found["headdim"]), int(found["dstate"]), found["device"], found["dtype"]
    )


def read_states(path: Path) -> tuple[dict[str, Any], dict[int, Any]]:
    """Return a file's content and the values by batch as its reader takes them: keys that are not
    digits are left out; raises BadInput where the reader takes none or ends."""
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("the JSON is not an object, and the reader goes on to the next file")
        return content, {int(key): tile for key, tile in content.items() if key.isdigit()}
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not a file of state updates: {error}") from None


def state_faults(name: StateFileName, path: Path) -> Iterator[tuple[str, str]]:
    """Return the rules that a file breaks, each with a description; raises BadInput for one that
    cannot be read."""
    content, tiles = read_states(path)
    if name.dtype not in DTYPES:
        why = ": it reads that of float16" if name.dtype == "bfloat16" else ""
        yield "name", f"vLLM 0.33 does not ask for cache_dtype={name.dtype}{why}"
    if re.search(r"[\s/]", name.device):
        yield "name", "vLLM asks for _ in the place of spaces and slashes"
    odd = [key for key in content if not key.isdigit() and key != "triton_version"]
    if odd:
        yield "key", f"left out without a word, for they are not digits: {' '.join(odd)[:80]}"
    if not tiles:
        yield "grid", "no batch has a tile"
    batches = sorted(tiles)
    gaps = [
        f"{one} {other}" for one, other in itertools.pairwise(batches) if other > _FARTHEST * one
    ]
    if gaps:
        yield "grid", f"more than {_FARTHEST} times apart: {', '.join(gaps)}"
    for batch in batches:
        for rule, text in _tile_faults(name, tiles[batch]):
            yield rule, f"{batch}: {text}"


def _tile_faults(name: StateFileName, tile: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(tile, dict) or any(one not in tile for one in TILE):
        yield "tile", f"it has not both of {' and '.join(TILE)}, and the server ends"
        return
    if more := sorted(set(tile) - set(TILE)):
        yield "tile", f"not read: {' '.join(more)}"
    for one in TILE:
        value = tile[one]
        if type(value) is not int or value < 1 or value & (value - 1):
            yield "tile", f"{one} is no power of two"
            return
    lanes = 64 if name.device.startswith("AMD_Instinct") else 32
    if tile["num_warps"] * lanes > 1024:
        yield "tile", f"{tile['num_warps']} warps are more than 1,024 threads"
    if tile["BLOCK_SIZE_M"] >= 2 * name.headdim:
        yield "tile", f"BLOCK_SIZE_M {tile['BLOCK_SIZE_M']} is mostly beyond headdim"
