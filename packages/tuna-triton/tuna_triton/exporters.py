"""Exports of tile sizes as folders that vLLM and SGLang load, with a file that says where each came
from.

A consumer's file is for the kernel that it runs: results of Tuna's own kernels are not written. A
key has the tuned tile only where it is faster beyond doubt, else the consumer's default, for once
there is a file its reader takes the nearest key of it, and never the default.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from tuna.configs import GemmConfig, read_one
from tuna.errors import BadInput
from tuna.libraries.exporter import (
    Check,
    CheckFacts,
    Entry,
    Exporter,
    ExportOptions,
    ExportTally,
    Findings,
)
from tuna.libraries.results import ResultRecord, ResultSource, is_close, is_time
from tuna_triton.descriptions import DEFAULT, DESCRIPTIONS, USER_KERNEL
from tuna_triton.kernel_arguments import BLOCK_FP8, MOE, WIDEST_GROUP, KernelFamily
from tuna_triton.moe import MoeConfig
from tuna_triton.tiles import TARGETS, Tile, tile_of, tile_text
from tuna_triton.tuned_files import (
    GRID,
    PROVENANCE,
    FileName,
    check_folder,
    file_name,
    parse_name,
    read_tiles,
)

#: A tile is written where it is at least this much faster than the consumer's default.
GAIN = 1.03


@dataclass(frozen=True)
class _Answer:
    """Results of one layer: the best tile, and the consumer's default beside it."""

    layer: MoeConfig | GemmConfig
    consumer: str
    best: ResultRecord
    default: ResultRecord

    @property
    def doubt(self) -> str:
        """The reason to write the default; empty: the best tile is faster than it by 3 % or more.

        Times of different jobs are minutes apart. They decide only where they are so far apart that
        finals are not held; where they are close, both must be from the same finals, which measure
        in turn.
        """
        best, default = self.best, self.default
        assert best.time_ms is not None
        assert default.time_ms is not None
        if tile_of(best.params) == tile_of(default.params):
            return "it is the fastest"
        if default.time_ms < GAIN * best.time_ms:
            return "nothing is 3 % faster"
        if not is_close(default.time_ms, best.time_ms):
            return ""
        if best.final_job_id is None or best.final_job_id != default.final_job_id:
            return "not in the finals of the best tile"
        low_ms, high_ms = default.low_ms or default.time_ms, best.high_ms or best.time_ms
        return "" if low_ms > high_ms else "its interval overlaps that of the best tile"

    @property
    def origin(self) -> dict[str, Any]:
        """The facts about the choice, for the file beside."""
        return {
            "tile": f"the default: {self.doubt}" if self.doubt else "tuned",
            "solver": self.best.solver,
            "session": self.best.session_id,
            "best": _times(self.best),
            "default": _times(self.default),
        }

    @property
    def tokens(self) -> int:
        """The key in the file."""
        return self.layer.tokens if isinstance(self.layer, MoeConfig) else self.layer.m


def _times(record: ResultRecord) -> dict[str, Any]:
    """Return the median, the 95 % interval of it, and the finals that both are from."""
    names = ("time_ms", "low_ms", "high_ms", "final_job_id")
    return {name: getattr(record, name) for name in names}


class TunedExporter(Exporter[ExportOptions]):
    """A folder of files; a subclass says of which kernels."""

    is_directory = True
    options = ExportOptions
    consumers: ClassVar[tuple[str, ...]]
    family: ClassVar[KernelFamily]

    def write(
        self, path: Path, source: ResultSource, options: ExportOptions, tally: ExportTally
    ) -> int:
        """Write each file with every key of the consumers' grid: a key without a result, or without
        a gain of 3 %, has the consumer's default."""
        files: dict[FileName, list[_Answer]] = defaultdict(list)
        for answer in _answers(source, self.family, self.consumers, tally.skipped):
            device = answer.best.environment.device
            files[file_name(answer.layer, device, answer.consumer)].append(answer)
        entries, provenance = 0, {}
        for name, answers in sorted(files.items(), key=lambda pair: pair[0].text):
            layers = sorted({_unnamed(answer.layer) for answer in answers})
            if len(layers) > 1:
                tally.skipped["layers of another K, top-k or type have the same file"] += len(
                    answers
                )
                continue
            tiles, origins = self._tiles(answers, tally.notes)
            version = answers[0].best.environment.library_version
            for file, content in self.contents(name, tiles, version).items():
                (path / file).parent.mkdir(parents=True, exist_ok=True)
                (path / file).write_text(json.dumps(content, indent=4) + "\n")
                entries += len(tiles)
                provenance[file] = {
                    "layers": layers,
                    "environment": answers[0].best.environment._asdict(),
                    "keys": origins,
                }
            tally.configs += len(answers)
        if provenance:
            text = json.dumps({"files": provenance}, indent=1, sort_keys=True)
            (path / PROVENANCE).write_text(text + "\n")
        return entries

    def contents(
        self, name: FileName, tiles: Mapping[str, Tile], version: str
    ) -> dict[str, dict[str, Any]]:
        """Return the content of each file by its place in the folder."""
        return {name.text: dict(tiles)}

    def _tiles(
        self, answers: Sequence[_Answer], notes: Counter[str]
    ) -> tuple[dict[str, Tile], dict[str, Any]]:
        """Tiles and origins by key."""
        known = {answer.tokens: answer for answer in answers}
        target = TARGETS[answers[0].best.environment.target]
        consumer = answers[0].consumer
        tiles: dict[str, Tile] = {}
        origins: dict[str, Any] = {}
        keys = sorted({*GRID, *known})
        for tokens, after in zip(keys, [*keys[1:], keys[-1]], strict=True):
            layer, answer = _at(answers[0].layer, tokens), known.get(tokens)
            if answer is not None and not answer.doubt:
                last = _at(layer, (tokens + after) // 2)
                tile = _for_all(self.family, layer, last, tile_of(answer.best.params), consumer)
            else:
                default = self.family.default(layer, target, consumer)
                # as the consumer has it, also for the batch sizes between two keys
                group = {"GROUP_SIZE_M": default["GROUP_SIZE_M"]}
                tile = {**self.family.canonical(layer, default, consumer), **group}
                doubt = answer.doubt if answer is not None else "not measured"
                notes[f"the default is written: {doubt}"] += 1
            none = {"tile": "the default: not measured"}
            origins[str(tokens)] = none if answer is None else answer.origin
            tiles[str(tokens)] = dict(json.loads(tile_text(tile)))
        return tiles, origins

    def recognises(self, path: Path, head: bytes) -> bool:
        """Whether files of this consumer lie in the folder itself."""
        names = (parse_name(one.name) for one in path.glob("*.json"))
        experts = {bool(name.experts) for name in names if name is not None}
        # a folder with files of both is one of experts
        return experts == {False} if self.family is BLOCK_FP8 else True in experts

    def entries(self, path: Path) -> Iterator[Entry]:
        """Each key of each file."""
        if not path.is_dir():
            raise BadInput(f"{path} is not a {self.title}.")
        for file in sorted(path.rglob("*.json")):
            if parse_name(file.name) is not None:
                for tokens, tile in sorted(read_tiles(file)[1].items()):
                    key = f"{file.relative_to(path)} {tokens}"
                    yield Entry(key, self.form, (json.dumps(tile, sort_keys=True),))

    def checker(self) -> Check | None:
        """One check for all of these formats."""
        return check_folders


class VllmMoeExporter(TunedExporter):
    """The folder that VLLM_TUNED_CONFIG_FOLDER names."""

    form, title, endings = "vllm-moe", "folder of vLLM's experts", (".vllm-moe",)
    consumers, family = ("vllm",), MOE

    def contents(
        self, name: FileName, tiles: Mapping[str, Tile], version: str
    ) -> dict[str, dict[str, Any]]:
        """With Triton's version, which this reader takes out."""
        return {name.text: {"triton_version": version, **tiles}}


class SglangMoeExporter(TunedExporter):
    """The folder that SGLANG_MOE_CONFIG_DIR names; both products of a layer have the same tiles."""

    form, title, endings = "sglang-moe", "folder of SGLang's experts", (".sglang-moe",)
    consumers, family = ("sglang",), MOE

    def contents(
        self, name: FileName, tiles: Mapping[str, Tile], version: str
    ) -> dict[str, dict[str, Any]]:
        """A pair of files below the folder of Triton's version."""
        place = f"configs/triton_{version.replace('.', '_')}/"
        pair = name.text, replace(name, down=True).text
        return {place + text: dict(tiles) for text in pair}

    def recognises(self, path: Path, head: bytes) -> bool:
        """Whether there is a folder for a version of Triton."""
        return any(one.is_dir() for one in (*path.glob("configs/triton_*"), *path.glob("triton_*")))


class BlockFp8Exporter(TunedExporter):
    """Files for the folder `configs` beside the kernel in either package, which has no setting for
    another. The spelling of a name says whose it is, and neither reads the other's."""

    form, title, endings = "block-fp8", "folder of block-wise fp8 products", (".block-fp8",)
    consumers, family = ("vllm", "sglang"), BLOCK_FP8


class WinnersExporter(Exporter[ExportOptions]):
    """One file with the best tile of each layer, for programs of one's own."""

    form, title, endings = "triton-json", "file of Triton tiles", (".triton.json",)
    options = ExportOptions

    def write(
        self, path: Path, source: ResultSource, options: ExportOptions, tally: ExportTally
    ) -> int:
        """Write tiles by architecture, kernel and label of the layer; a default where it is the
        fastest."""
        fastest: dict[tuple[str, str, str], ResultRecord] = {}
        versions: dict[tuple[str, str, str], set[str]] = defaultdict(set)
        for record in source.records(baselines=True):
            name = _kernel_name(record)
            if not name or not is_time(record.time_ms):
                tally.skipped["of another library, or without a time"] += 1
                continue
            place = record.environment.arch, name, record.label
            # in order of time, so the first is the fastest
            fastest.setdefault(place, record)
            versions[place].add(record.config_key)
        tiles: dict[str, dict[str, dict[str, Any]]] = {}
        for (arch, name, label), record in fastest.items():
            if len(versions[arch, name, label]) > 1:
                tally.skipped["versions of a kernel's file have the same label"] += 1
                continue
            tile = dict(json.loads(record.params))
            tiles.setdefault(arch, {}).setdefault(name, {})[label] = tile
        layers = [label for kernels in tiles.values() for row in kernels.values() for label in row]
        tally.configs = len(set(layers))
        text = json.dumps({"format": self.form, "tiles": tiles}, indent=1, sort_keys=True)
        path.write_text(text + "\n")
        return len(layers)

    def recognises(self, path: Path, head: bytes) -> bool:
        """By its first field."""
        return head.startswith(b'{\n "format": "triton-json"')

    def entries(self, path: Path) -> Iterator[Entry]:
        """Each layer of each kernel."""
        try:
            tiles = json.loads(path.read_text())["tiles"]
            rows = [
                Entry(f"{label} on {arch}", name, (json.dumps(tile, sort_keys=True),))
                for arch, kernels in tiles.items()
                for name, layers in kernels.items()
                for label, tile in layers.items()
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{path} is not a {self.title}: {error}") from None
        yield from rows


def _kernel_name(record: ResultRecord) -> str:
    """The name of a kernel in a file of tiles: that of its solver, or of the function that came in
    a file; empty for results of others."""
    solver = record.solver.removesuffix(DEFAULT)
    if solver == USER_KERNEL:
        return str(json.loads(record.config)["function"])
    return solver if solver in DESCRIPTIONS else ""


def check_folders(
    by_form: Mapping[str, Sequence[Path]], known: CheckFacts, findings: Findings
) -> None:
    """Check each folder by the rules of `tuned_files`."""
    for folders in by_form.values():
        for folder in folders:
            findings.files.remove(folder)
            check_folder(folder, findings)


def _answers(
    source: ResultSource, family: KernelFamily, consumers: Sequence[str], skipped: Counter[str]
) -> Iterator[_Answer]:
    """The layers of a family that were measured with a consumer's kernel."""
    best: dict[tuple[str, str], ResultRecord] = {}
    defaults: dict[tuple[str, str], ResultRecord] = {}
    for record in source.records(baselines=True):
        description = DESCRIPTIONS.get(record.solver.removesuffix(DEFAULT))
        if description is None or description.family is not family:
            skipped["of a kernel of another kind"] += 1
        elif description.package not in consumers:
            skipped[f"of a kernel that {' or '.join(consumers)} does not run"] += 1
        elif not is_time(record.time_ms) or not record.environment.device:
            skipped["without a time or without the name of its device"] += 1
        else:
            # in order of time, so the first is the fastest
            records = defaults if record.solver.endswith(DEFAULT) else best
            records.setdefault((record.config_key, description.package), record)
    for key in sorted(best.keys() | defaults.keys()):
        if key in best and key in defaults:
            yield _Answer(_layer(best[key]), key[1], best[key], defaults[key])
        else:
            skipped["whose default was not measured, or nothing else"] += 1


def _layer(record: ResultRecord) -> MoeConfig | GemmConfig:
    found = read_one(record.config)
    assert isinstance(found, MoeConfig | GemmConfig)
    return found


def _for_all(
    family: KernelFamily,
    layer: MoeConfig | GemmConfig,
    last: MoeConfig | GemmConfig,
    tile: Tile,
    consumer: str,
) -> Tile:
    """Return the tile of a key for all batch sizes up to the last that has it as the nearest.

    A group of all rows of tiles at the key, of whatever size, is one for the last of them too: a
    smaller one would read the other matrix several times.
    """
    widest = {**tile, "GROUP_SIZE_M": WIDEST_GROUP}
    if family.canonical(layer, widest, consumer) != family.canonical(layer, tile, consumer):
        return tile
    return family.canonical(last, widest, consumer)


def _at(layer: MoeConfig | GemmConfig, tokens: int) -> MoeConfig | GemmConfig:
    """The layer at another batch size."""
    if isinstance(layer, MoeConfig):
        return replace(layer, tokens=tokens)
    return replace(layer, m=tokens)


def _unnamed(layer: MoeConfig | GemmConfig) -> tuple[Any, ...]:
    """Facts about a layer that the file's name leaves out."""
    if isinstance(layer, MoeConfig):
        return layer.hidden, layer.topk, layer.data_type.value
    return (str(layer.c_type),)
