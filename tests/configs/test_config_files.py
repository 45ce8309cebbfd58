"""Files of commands: the account of lines, real lists, and files that are no lists at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuna.configs import LineCounts, ParsedFile, from_json, parse_file, parse_line, parse_lines
from tuna.errors import BadInput

GOOD = "MIOpenDriver conv -n 1 -F 1"


def _adds_up(parsed: ParsedFile) -> bool:
    counts = parsed.counts
    lines = counts.accepted + counts.ignored + counts.rejected + counts.unsupported
    return counts.total == lines and len(parsed.rejections) == counts.rejected + counts.unsupported


def test_every_line_is_accounted_for() -> None:
    lines = [
        "# a list",
        "",
        GOOD,
        "MIOpenDriver conv -n 0 -F 1",
        "MIOpenDriver bnorm -n 1",
        "MIOpenDriver conv -n 1",
        GOOD,
    ]
    parsed = parse_lines(lines, "list.txt")
    assert parsed.counts == LineCounts(
        total=7, accepted=3, ignored=2, rejected=1, unsupported=1, expanded=1, duplicates=2
    )
    assert [str(config.to_json()["direction"]) for config in parsed.configs] == ["F", "B", "W"]
    bad, unsupported = parsed.rejections
    assert str(bad) == "list.txt:4: batchsize must be at least 1, got 0"
    assert bad.text == "MIOpenDriver conv -n 0 -F 1"
    assert (unsupported.line, unsupported.unsupported, bad.unsupported) == (5, True, False)


def test_one_bad_line_never_loses_the_others() -> None:
    parsed = parse_lines([f"{GOOD} -p {pad}" if pad != 5 else f"{GOOD} -p x" for pad in range(10)], "x")
    assert len(parsed.configs) == 9
    assert parsed.counts.rejected == 1


def test_strict_makes_a_rejected_line_an_error() -> None:
    parse_lines([GOOD, "# note"], "list.txt").check_strict()
    with pytest.raises(BadInput, match=r"list.txt:2: .*\(and 1 more\)"):
        parse_lines([GOOD, "nonsense", "MIOpenDriver pool"], "list.txt").check_strict()


def test_a_long_bad_line_is_cut() -> None:
    (rejection,) = parse_lines(["MIOpenDriver conv -I " + "x" * 100_000], "x").rejections
    assert len(rejection.text) <= 200
    assert len(rejection.reason) <= 200


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x80\x81", "not valid UTF-8"),
        (GOOD.encode() + b"\n\0\n", "line 2 holds a NUL character"),
        (GOOD.encode("utf-16-le"), "NUL character"),
    ],
)
def test_what_is_no_text_file_is_refused_as_a_whole(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "list.txt"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=reason) as caught:
        parse_file(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        parse_file(tmp_path / "missing.txt")
    with pytest.raises(BadInput, match="directory"):
        parse_file(tmp_path)


def test_a_file_of_comments_has_no_configs_and_no_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    file.write_text("# nothing yet\n\n")
    assert parse_file(file).counts == LineCounts(total=2, ignored=2)


def test_windows_line_ends_and_a_byte_order_mark_do_not_matter(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    file.write_bytes(b"\xef\xbb\xbf" + f"# note\r\n{GOOD}\r\n".encode())
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
        total=1370, accepted=1235, ignored=36, rejected=3, unsupported=96, expanded=349, duplicates=972
    )
    wrong = [str(rejection).split("all.txt:")[1] for rejection in parsed.rejections if not rejection.unsupported]
    assert wrong == [
        "762: flag -t has no value",
        "763: flag -t has no value",
        "1341: there is no MIOpenDriver command in the line",
    ]


def test_lines_that_mituna_accepts_give_the_configs_that_mituna_imports(driver_commands: Path) -> None:
    lines = (driver_commands / "all.txt").read_text().splitlines()
    convolutions = [line for line in lines if "MIOpenDriver conv" in line]
    assert len(convolutions) == 1237
    usable = [line for line in convolutions if "-F" in line.split()]
    assert len(usable) == 888
    parsed = parse_lines(usable, "all.txt")
    assert (parsed.counts.expanded, parsed.counts.rejected, len(parsed.configs)) == (0, 2, 660)
    # MITuna overlooks a flag at the end of the line that lost its value; two lines have one.
    mended = parse_lines([f"{line} 1" if line.rstrip().endswith(" -t") else line for line in usable], "all.txt")
    assert (mended.counts.rejected, len(mended.configs)) == (0, 662)


def test_lists_without_directions_are_expanded_instead_of_lost(driver_commands: Path) -> None:
    counts = parse_file(driver_commands / "resnet50_pytorch.txt").counts
    assert (counts.accepted, counts.expanded, counts.rejected) == (60, 60, 0)
    assert len(parse_file(driver_commands / "google_net.txt").configs) == 3 * 49
