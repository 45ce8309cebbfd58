"""Files of tile sizes as vLLM and SGLang read them: names, contents and the rules that they must
keep.

Names and readers: `get_config_file_name`, `get_moe_configs` and `get_w8a8_block_fp8_configs` of
vLLM (0.33) and of SGLang (0.5.23). They take the key that is nearest to the batch size, of equally
near ones the first in the file, and check nothing.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuna.common.files import read_text
from tuna.configs import GemmConfig
from tuna.configs.values import DataType
from tuna.errors import BadInput
from tuna.libraries.exporter import Findings
from tuna_triton.kernel_arguments import BLOCK_FP8, MOE, block_sizes
from tuna_triton.moe import FP8, INT8, SCHEMES, MoeConfig
from tuna_triton.tiles import AMD_AXES, AXES, TARGETS, Target, Tile, least_shared_bytes

#: Batch sizes that consumers' tuners measure.
GRID = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
PROVENANCE = "provenance.json"
#: Releases whose readers these rules are.
_TITLES = {"vllm": "vLLM 0.33", "sglang": "SGLang 0.5.23"}
_MAX_BYTES = 1 << 20
_NAME = re.compile(
    r"(?:E=(?P<experts>\d+),N=(?P<intermediate>\d+)|N=(?P<n>\d+),K=(?P<k>\d+))"
    r",device_name=(?P<device>[^,]+?)(?:,dtype=(?P<dtype>\w+?))?"
    r"(?:,block_shape=\[(?P<block_n>\d+),(?P<space> ?)(?P<block_k>\d+)\])?"
    r"(?P<channels>,per_channel_quant=True)?(?P<down>_down)?\.json"
)
#: Data types that a reader asks for, by the consumer, for experts or not.
_DTYPES = {
    ("vllm", True): {"", FP8, INT8, "fp8_w8a16", "int4_w4a16", "float32"},
    ("vllm", False): {FP8},
    ("sglang", True): {"", FP8, INT8, "int8_w8a8", "int4_w4a16", "float32"},
    ("sglang", False): {FP8, "int8_w8a8"},
}
#: Architectures of devices by the beginning of their names.
_DEVICES = (
    (r"NVIDIA_(H100|H200|H20|H800|GH200)\b|NVIDIA_(H100|H200|H20|H800|GH200)_", "sm_90"),
    (r"NVIDIA_A(100|800)", "sm_80"),
    (r"AMD_Instinct_MI(300|325)", "gfx942"),
    (r"AMD_Instinct_MI2[15]0", "gfx90a"),
)
#: Values beside the usual ones: options of Triton on every device and on those of one vendor, and
#: what consumers take themselves. Triton refuses a launch with any other.
_OPTIONS = {"num_ctas", "maxnreg"}
_OPTIONS_OF = {"AMD": set(AMD_AXES), "Radeon": set(AMD_AXES), "Intel": {"grf_mode"}}
_TAKEN = {("vllm", True): {"SPLIT_K"}, ("sglang", True): {"USE_TMA"}}
#: SGLang's second kernel for products, on sm_90; a file selects it by one of them.
_HOPPER = {"SWAP_AB", "SPLIT_K"}
#: A batch size has a tile of its own unless the nearest key is more than so many times as large or
#: small.
_NEAR = 1.5


@dataclass(frozen=True)
class FileName:
    """The name of a file, and whose it is."""

    consumer: str  #: vllm or sglang, by the spelling; vllm where both spell it so
    device: str
    dtype: str
    block: tuple[int, int] | None
    experts: int  #: 0: of a block-wise product
    sizes: tuple[int, int]  #: experts and N, or N and K
    down: bool = False

    @property
    def text(self) -> str:
        """The name as the consumer asks for it."""
        first = "E={},N={}" if self.experts else "N={},K={}"
        words = [first.format(*self.sizes), f"device_name={self.device}"]
        words += [f"dtype={self.dtype}"] if self.dtype else []
        if self.block:
            apart = ", " if self.consumer == "sglang" else ","
            words.append(f"block_shape=[{self.block[0]}{apart}{self.block[1]}]")
        return ",".join(words) + ("_down" if self.down else "") + ".json"

    def layer(self, tokens: int) -> MoeConfig | GemmConfig | None:
        """Return the layer of a key, as far as the name says which; None for a scheme that Tuna
        does not have."""
        if not self.experts:
            block_n, block_k = self.block or (0, 0)
            n, k = self.sizes
            return GemmConfig(
                *(tokens, n, k),
                trans_b=True,
                data_type=DataType.FP8_E4M3,
                c_type=DataType.BF16,
                scale_a=f"block1x{block_k}",
                scale_b=f"block{block_k}x{block_n}",
            )
        if self.dtype not in SCHEMES or (self.block and self.dtype != FP8):
            return None
        block_n, block_k = self.block or (0, 0)
        experts, wide = self.sizes
        layer = MoeConfig(tokens, experts, wide, max(wide, 256), 1, scheme=self.dtype)
        return replace(layer, block_n=block_n, block_k=block_k)


def file_name(layer: MoeConfig | GemmConfig, device: str, consumer: str) -> FileName:
    """Return the name under which a consumer asks for the tiles of a layer.

    Neither batch size nor K and top-k of a mixture of experts are in it.
    """
    place = re.sub(r"[\s/]+", "_", device) if consumer == "vllm" else device.replace(" ", "_")
    if isinstance(layer, GemmConfig):
        blocks = block_sizes(layer)
        assert blocks is not None
        return FileName(consumer, place, FP8, blocks, 0, (layer.n, layer.k))
    if consumer == "vllm" and "H200" in place.split("_"):
        place = "NVIDIA_H200"
    block = (layer.block_n, layer.block_k) if layer.block_n else None
    sizes = layer.experts, layer.intermediate
    return FileName(consumer, place, layer.scheme, block, layer.experts, sizes)


def parse_name(name: str) -> FileName | None:
    """Return what a file's name says; None for a name that no consumer asks for."""
    found = _NAME.fullmatch(name)
    if found is None or (found["n"] and not found["block_n"]):
        return None
    block = (int(found["block_n"]), int(found["block_k"])) if found["block_n"] else None
    spaced = bool(block and found["space"])
    sglang = spaced or bool(found["down"]) or bool(found["channels"])
    experts = int(found["experts"] or 0)
    sizes = (experts, int(found["intermediate"])) if experts else (int(found["n"]), int(found["k"]))
    consumer, down = "sglang" if sglang else "vllm", bool(found["down"])
    return FileName(consumer, found["device"], found["dtype"] or "", block, experts, sizes, down)


def read_tiles(path: Path) -> tuple[dict[str, Any], dict[int, Tile]]:
    """Return a file's content and the tiles by batch size; raises BadInput where a consumer could
    not read it."""
    try:
        content = json.loads(read_text(path, _MAX_BYTES))
        if not isinstance(content, dict):
            raise ValueError("the JSON is not an object")
        tiles: dict[int, Tile] = {
            int(key): dict(tile) for key, tile in content.items() if key != "triton_version"
        }
    except (ValueError, TypeError, RecursionError) as error:
        raise BadInput(f"{path} is not a file of tiles: {error}") from None
    return content, tiles


def check_folder(folder: Path, findings: Findings) -> None:
    """Check each file in `folder` and below by the rules that consumers do not enforce."""
    files = sorted(path for path in folder.rglob("*.json") if path.name != PROVENANCE)
    findings.files += files
    for path in files:
        name = parse_name(path.name)
        if name is None:
            findings.left_out["files of other kinds"] += 1
            continue
        try:
            content, tiles = read_tiles(path)
        except BadInput as error:
            findings.fault(path, "damaged", str(error))
            continue
        findings.entries += len(tiles)
        for rule, text in _faults(path, name, content, tiles, findings):
            findings.fault(path, rule, text)
    _check_provenance(folder, findings)


def _faults(
    path: Path,
    name: FileName,
    content: Mapping[str, Any],
    tiles: Mapping[int, Tile],
    findings: Findings,
) -> Iterator[tuple[str, str]]:
    versioned = any(part.startswith("triton_") for part in path.parts[:-1])
    spelled = name.consumer
    name = replace(name, consumer="sglang" if versioned else spelled)
    if name.dtype not in _DTYPES[name.consumer, bool(name.experts)]:
        yield "name", f"{_TITLES[name.consumer]} does not ask for dtype={name.dtype}"
    if versioned and name.block and spelled != "sglang":
        yield "name", "SGLang asks for a space in block_shape, and never reads this file"
    if not versioned and name.experts and spelled == "sglang":
        yield "name", "vLLM asks for no space in block_shape, and SGLang for a folder triton_X_Y_Z"
    family = name.consumer == "vllm" and name.experts and "H200" in name.device.split("_")
    if family and name.device != "NVIDIA_H200":
        yield "name", "vLLM asks for device_name=NVIDIA_H200 on every H200"
    if "triton_version" in content and (name.consumer == "sglang" or not name.experts):
        yield "key", "its reader applies int() to triton_version, and the server ends"
    far = [str(batch) for batch in GRID if not tiles or _distance(tiles, batch) > _NEAR]
    if far:
        yield "grid", f"no tile near {' '.join(far)}: they take a far one, and not the default"
    tokens_of: dict[tuple[str, str], list[str]] = defaultdict(list)
    for tokens, tile in sorted(tiles.items()):
        for fault in _tile_faults(name, tokens, tile, findings):
            tokens_of[fault].append(str(tokens))
    for (rule, text), keys in tokens_of.items():
        yield rule, f"{' '.join(keys)}: {text}"
    if name.down:
        yield from _pair_faults(path, tiles)


def _distance(tiles: Iterable[int], batch: int) -> float:
    key = nearest_key(tiles, batch)
    return max(key / batch, batch / max(key, 1))


def nearest_key(tiles: Iterable[int], batch: int) -> int:
    """Return the key whose tile both consumers take for a batch size."""
    return min(tiles, key=lambda key: abs(key - batch))


def _tile_faults(
    name: FileName, tokens: int, tile: Tile, findings: Findings
) -> Iterator[tuple[str, str]]:
    target, layer = _target(name.device), name.layer(max(tokens, 1))
    text = _shape_fault(name, tile, target)
    if text:
        yield "tile", text
        return
    if name.block and tile.get("BLOCK_SIZE_K", 0) > min(name.block):
        deep = f"BLOCK_SIZE_K {tile['BLOCK_SIZE_K']} is"
        if name.consumer == "vllm" and name.experts:
            yield "clipped", f"{deep} clipped to {min(name.block)}"
        elif name.experts or name.sizes[1] > name.block[1]:
            yield "scale", f"{deep} deeper than a block: one scale for several, a wrong answer"
    if target is None or layer is None or not tile.keys() >= set(AXES[:4]):
        findings.left_out["tiles for a device or a scheme whose shared memory is not known"] += 1
        return
    whole = {"num_warps": 4, "num_stages": 2 if target.backend == "hip" else 3, **tile}
    family = MOE if name.experts else BLOCK_FP8
    if name.consumer == "vllm":
        whole = {**whole, **dict(family.canonical(layer, whole, name.consumer))}
    needed = least_shared_bytes(family.plan(layer, whole, target, ""), whole, target)
    if needed > target.shared_bytes:
        yield "shared", f"needs {needed} bytes of shared memory or more of {target.shared_bytes}"


def _shape_fault(name: FileName, tile: Tile, target: Target | None) -> str:
    """Return why no kernel can be launched with such a tile; empty where one can."""
    vendor = next((one for one in _OPTIONS_OF if name.device.startswith(one)), "")
    known = {*AXES, *_OPTIONS, *_OPTIONS_OF.get(vendor, ())}
    known |= _TAKEN.get((name.consumer, bool(name.experts)), set())
    second = tile.get("SWAP_AB") or tile.get("SPLIT_K", 1) != 1
    on_hopper = target is not None and target.arch == "sm_90"
    if name.consumer == "sglang" and not name.experts and on_hopper and second:
        known |= _HOPPER
    needed: Sequence[str] = AXES[:4]
    if name.consumer == "vllm" and name.dtype in (INT8, "int4_w4a16"):
        needed = ("BLOCK_SIZE_M", "GROUP_SIZE_M")  # it adds the others where scales are in groups
    unknown, lacking = sorted(set(tile) - known), [one for one in needed if one not in tile]
    if unknown or lacking:
        return f"unknown: {' '.join(unknown) or '-'}; missing: {' '.join(lacking) or '-'}"
    odd = [one for one, value in sorted(tile.items()) if not _is_taken(one, value)]
    return f"no value that a kernel takes: {' '.join(odd)}" if odd else ""


def _is_taken(name: str, value: object) -> bool:
    if name == "grf_mode":
        return isinstance(value, str)
    if not isinstance(value, int) or value < 0:
        return False
    power = name.startswith("BLOCK_") or name == "num_warps"
    return not power or (value > 0 and value & (value - 1) == 0)


def _target(device: str) -> Target | None:
    found = (TARGETS[arch] for pattern, arch in _DEVICES if re.match(pattern, device))
    return next(found, None)


def _pair_faults(path: Path, tiles: Mapping[int, Tile]) -> Iterator[tuple[str, str]]:
    """Both products of a batch share one assignment of rows, by BLOCK_SIZE_M of the first."""
    other = path.with_name(path.name.replace("_down.json", ".json"))
    try:
        up = read_tiles(other)[1]
    except BadInput:
        yield "pair", f"{other.name} is missing beside it"
        return
    spans = [pair for keys in (sorted(tiles), sorted(up)) for pair in itertools.pairwise(keys)]
    middles = [sum(pair) // 2 for pair in spans]
    for batch in sorted({*up, *tiles, *(middle + more for middle in middles for more in (0, 1))}):
        pair = [found[nearest_key(found, batch)].get("BLOCK_SIZE_M") for found in (up, tiles)]
        if pair[0] != pair[1]:
            yield (
                "pair",
                f"for a batch of {batch} BLOCK_SIZE_M is {pair[0]} in the first file and {pair[1]}"
                " here: SGLang 0.5.9 asserts that they are equal, 0.5.23 takes the first",
            )
            return


def _check_provenance(folder: Path, findings: Findings) -> None:
    path = folder / PROVENANCE
    if not path.is_file():
        return
    try:
        files = dict(json.loads(path.read_text())["files"])
        layers = {name: {tuple(one) for one in facts["layers"]} for name, facts in files.items()}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        findings.fault(path, "damaged", f"it cannot be read: {error}")
        return
    for name, found in sorted(layers.items()):
        if len(found) > 1:
            findings.fault(folder / name, "collision", f"serves several layers: {sorted(found)}")
