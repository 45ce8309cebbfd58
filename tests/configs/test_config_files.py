"""Files of commands: the account of lines, real lists, and files that are no lists at all."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tuna.configs import (
    DataType,
    LineCounts,
    ParsedFile,
    from_json,
    parse_file,
    parse_line,
    parse_lines,
)
from tuna.errors import BadInput

GOOD = "MIOpenDriver conv -n 1 -F 1"


def _adds_up(parsed: ParsedFile) -> bool:
    counts = parsed.counts
    lines = counts.accepted + counts.ignored + counts.rejected + counts.unsupported
    named = (
        len(parsed.weights) == len(parsed.configs)
        and sum(parsed.weights) == len(parsed.configs) + counts.duplicates
    )
    return (
        counts.total == lines
        and len(parsed.rejections) == counts.rejected + counts.unsupported
        and named
    )


def test_every_line_is_accounted_for() -> None:
    lines = [
        "# a list",
        "",
        GOOD,
        "MIOpenDriver conv -n 0 -F 1",
        "MIOpenDriver pool -n 1",
        "MIOpenDriver conv -n 1",
        GOOD,
    ]
    parsed = parse_lines(lines, "list.txt")
    assert parsed.counts == LineCounts(
        total=7, accepted=3, ignored=2, rejected=1, unsupported=1, expanded=1, duplicates=2
    )
    assert [str(config.to_json()["direction"]) for config in parsed.configs] == ["F", "B", "W"]
    assert parsed.weights == (3, 1, 1)
    assert _adds_up(parsed)
    bad, unsupported = parsed.rejections
    assert str(bad) == "list.txt:4: batchsize must be at least 1, got 0"
    assert bad.text == "MIOpenDriver conv -n 0 -F 1"
    assert (unsupported.line, unsupported.unsupported, bad.unsupported) == (5, True, False)


def test_strict_makes_a_rejected_line_an_error() -> None:
    parse_lines([GOOD, "# note"], "list.txt").check_strict()
    with pytest.raises(BadInput, match=r"list.txt:2: .*\(and 1 more\)"):
        parse_lines([GOOD, "nonsense", "MIOpenDriver pool"], "list.txt").check_strict()


def test_a_long_bad_line_is_cut() -> None:
    (rejection,) = parse_lines(["MIOpenDriver conv -I " + "x" * 100_000], "x").rejections
    assert len(rejection.text) <= 200
    assert len(rejection.reason) <= 200


def test_a_line_without_a_direction_is_expanded_and_counted() -> None:
    parsed = parse_lines(["MIOpenDriver conv -F 0", GOOD], "x")
    assert (parsed.counts.accepted, parsed.counts.expanded, len(parsed.configs)) == (2, 1, 4)
    assert parsed.configs[0].to_json()["batchsize"] == 100


def test_layers_can_be_read_at_other_batch_sizes() -> None:
    lines = [
        GOOD,
        "MIOpenDriver conv -n 2 -F 0",
        "MIOpenDriver bnorm -F 1",
        GOOD.replace("-n 1", "-n 64"),
    ]
    parsed = parse_lines(lines, "x", batches=[4, 1, 4])
    found = [
        (config.kind, config.to_json()["batchsize"], config.to_json()["direction"])
        for config in parsed.configs
    ]
    convs = [("convolution", batch, direction) for direction in "FBW" for batch in (4, 1)]
    assert found == [*convs, ("batch_norm", 4, "F"), ("batch_norm", 1, "F")]
    assert parsed.weights == (3, 3, 1, 1, 1, 1, 1, 1)
    assert (parsed.counts.accepted, parsed.counts.expanded, parsed.counts.duplicates) == (4, 1, 4)
    assert _adds_up(parsed)


def test_a_matrix_product_has_no_batch_size_to_replace() -> None:
    parsed = parse_lines(["MIOpenDriver gemm", GOOD], "x", batches=(8,))
    assert (parsed.counts.rejected, len(parsed.configs)) == (1, 1)
    assert "a gemm has no batch size" in parsed.rejections[0].reason


@pytest.mark.parametrize("batches", [(0,), (1, -1), (1.5,), ("2",), (2**31,), (True,)])
def test_batch_sizes_are_whole_numbers_from_1(batches: tuple[Any, ...]) -> None:
    with pytest.raises(BadInput, match="a batch size must be"):
        parse_lines([GOOD], "x", batches=batches)


def test_a_command_overrides_the_precision_of_convolutions_only(tmp_path: Path) -> None:
    lines = [
        GOOD,
        GOOD.replace("conv", "convbfp16"),
        "MIOpenDriver bnorm -F 1",
        "MIOpenDriver gemm",
    ]
    key = "3-32-32-3x3-32-30-30-1-0x0-1x1-1x1-0-NCHW-FP32-F=ConvAsm3x3U:1,2,3"
    file = tmp_path / "list.txt"
    file.write_text("\n".join([*lines, key]))
    parsed = parse_file(file, command="convfp16")
    assert [config.data_type for config in parsed.configs] == [
        DataType.FP16,
        DataType.FP32,
        DataType.FP32,
    ]
    assert parsed.weights == (3, 1, 1)


@pytest.mark.parametrize("command", ["convint8", "bnorm", "bnormfp16", "gemm", "FP16", "", "CONV"])
def test_other_commands_do_not_override_the_precision(command: str) -> None:
    with pytest.raises(BadInput, match="only conv, convfp16, convbfp16 can override"):
        parse_lines([GOOD], "x", command=command)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\xfd\xfe\x80\x81", "not valid UTF-8"),
        (b"\xff\xfe\x80", "is not a text"),
        (GOOD.encode() + b"\n\0\n", "line 2 holds a NUL character"),
        (GOOD.encode("utf-16-le"), "NUL character"),
    ],
)
def test_what_is_no_text_file_is_refused_as_a_whole(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    file = tmp_path / "list.txt"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=reason) as caught:
        parse_file(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        parse_file(tmp_path / "missing.txt")
    with pytest.raises(BadInput, match="but a folder"):
        parse_file(tmp_path)


def test_a_file_of_comments_has_no_configs_and_no_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    file.write_text("# nothing yet\n\n")
    assert parse_file(file).counts == LineCounts(total=2, ignored=2)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_windows_line_ends_and_a_byte_order_mark_do_not_matter(
    tmp_path: Path, encoding: str
) -> None:
    file = tmp_path / "list.txt"
    file.write_bytes(f"# note\r\n{GOOD}\r\n".encode(encoding))
    assert parse_file(str(file)).configs == tuple(parse_line(GOOD))


def test_every_real_line_is_parsed_or_has_a_reason(driver_commands: Path) -> None:
    for file in sorted(driver_commands.glob("*.txt")):
        parsed = parse_file(file)
        with open(file) as lines:
            assert parsed.counts.total == sum(1 for _ in lines), file.name
        assert _adds_up(parsed), file.name
        assert all(rejection.reason for rejection in parsed.rejections)


def test_real_configs_survive_all_their_texts(driver_commands: Path) -> None:
    configs = parse_file(driver_commands / "all.txt").configs
    assert len({config.key for config in configs}) == len(configs)
    for config in configs:
        assert parse_line(config.driver()) == [config]
        assert from_json(config.to_json()) == config


def test_the_largest_real_list_gives_the_known_counts(driver_commands: Path) -> None:
    parsed = parse_file(driver_commands / "all.txt")
    assert parsed.counts == LineCounts(
        total=1370,
        accepted=1287,
        ignored=36,
        rejected=1,
        unsupported=46,
        expanded=349,
        duplicates=1000,
    )
    wrong = [
        str(rejection).split("all.txt:")[1]
        for rejection in parsed.rejections
        if not rejection.unsupported
    ]
    assert [text.partition(",")[0] for text in wrong] == [
        "1341: the line has no MIOpenDriver command"
    ]


def test_lines_that_mituna_accepts_give_the_configs_that_mituna_imports(
    driver_commands: Path,
) -> None:
    lines = (driver_commands / "all.txt").read_text().splitlines()
    convolutions = [line for line in lines if "MIOpenDriver conv" in line]
    assert len(convolutions) == 1237
    usable = [line for line in convolutions if re.search(r" -F [124]( |$)", line)]
    assert len(usable) == 888
    parsed = parse_lines(usable, "all.txt")
    assert (parsed.counts.expanded, parsed.counts.rejected, len(parsed.configs)) == (0, 0, 662)


def test_ten_thousand_lines_are_read_in_a_second(driver_commands: Path) -> None:
    lines = (driver_commands / "all.txt").read_text().splitlines() * 10
    start = time.process_time()
    parse_lines(lines, "all.txt")
    assert len(lines) > 13_000
    # it takes 0.4 s; the bound leaves room for a slow machine
    assert time.process_time() - start < 2.5


def test_a_direction_that_is_no_number_loses_its_line_only(driver_commands: Path) -> None:
    parsed = parse_file(driver_commands / "msra.txt")
    (wrong,) = parsed.rejections
    assert str(wrong).endswith("msra.txt:1: flag -F needs a whole number, got '1.'")
    assert wrong.text.endswith("-F 1.")
    assert (parsed.counts.total, parsed.counts.accepted, parsed.counts.rejected) == (2, 1, 1)


def test_lists_without_directions_are_expanded_instead_of_lost(driver_commands: Path) -> None:
    counts = parse_file(driver_commands / "resnet50_pytorch.txt").counts
    assert (counts.accepted, counts.expanded, counts.rejected) == (60, 60, 0)
    assert len(parse_file(driver_commands / "google_net.txt").configs) == 3 * 49
