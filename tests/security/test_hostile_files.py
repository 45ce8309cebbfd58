"""Hostile input files: each is refused in one sentence, with bounded memory."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from settings_changes import change_setting

from tuna.archives.archive import verify
from tuna.common.files import gunzip
from tuna.common.setting_values import parse_cpus
from tuna.configs import parse_file
from tuna.configs.files import LINE_LIMIT
from tuna.errors import BadInput
from tuna.exports.intake import source_of
from tuna.libraries import compressed
from tuna.libraries.miopen.formats import database_file, find_db, kernel_db, perf_db
from tuna.libraries.tvm import tvm_db
from tuna.settings import get_settings
from tuna_mituna import yaml_steps
from tuna_mituna.go_fish import go_fish

DEEP = 100_000
KEY = "64-7-7-1x1-64-7-7-1-0x0-1x1-1x1-0-NCHW-FP32-F"
LAYER = "MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -p 1 -q 1 -F 1"
Little = Callable[..., str]


def _sparse(path: Path, size: int = 1 << 30) -> Path:
    """A sparse file of `size` bytes."""
    with open(path, "wb") as stream:
        stream.truncate(size)
    return path


def _refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(BadInput) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 2000


_READERS = """
from tuna_mituna.yaml_steps import _load
from tuna.configs import parse_file
from tuna.libraries import compressed
from tuna.libraries.miopen.formats import find_db, kernel_db, perf_db
from tuna.libraries.tvm import tvm_db
readers = [parse_file, _load, tvm_db._lines]
lazy = [find_db.read, perf_db.read, kernel_db.read]
readers += [lambda path, read=read: list(read(path)) for read in lazy]
reads = [(read, "big") for read in readers]
reads += [(_load, "steps.yaml"), (lambda path: next(compressed.lines(path, "find db")), "bomb.bz2")]
reads.append((lambda path: compressed.unpacked(path, 1 << 20).__enter__(), "bomb.bz2"))
for read, name in reads:
    try:
        read(Path(name))
    except BadInput as error:
        print(error)
"""


def test_what_would_fill_the_memory_is_refused_in_little_of_it(
    tmp_path: Path, in_little_memory: Little
) -> None:
    """A file of a gigabyte, one nested 100,000 times, and a packed one that unpacks for ever."""
    _sparse(tmp_path / "big")
    (tmp_path / "steps.yaml").write_text("[" * DEEP)
    (tmp_path / "bomb.bz2").write_bytes(bz2.compress(bytes(64 << 20)) * 2)
    said = in_little_memory(_READERS).splitlines()
    assert (len(said), "nested" in said[6]) == (9, True)
    assert compressed.LIMIT_BYTES <= 8 << 30


def test_settings_of_a_gigabyte_are_refused_in_little_memory(
    tmp_path: Path, in_little_memory: Little, monkeypatch: pytest.MonkeyPatch
) -> None:
    _sparse(tmp_path / "tuna.toml")
    monkeypatch.setenv("TUNA_CONFIG", str(tmp_path / "tuna.toml"))
    code = (
        "from tuna.settings import get_settings\ntry:\n    get_settings()\nexcept BadInput as"
        " error:\n    print(error)\n"
    )
    assert "more than" in in_little_memory(code)


def test_an_endless_file_of_layers_is_refused(tmp_path: Path) -> None:
    _refused(lambda: parse_file("/dev/zero"), "/dev/zero", "not a plain file, but a device")
    path = tmp_path / "layers.txt"
    path.write_text("\0" * LINE_LIMIT)
    _refused(lambda: parse_file(path), "layers.txt", "NUL")
    path.write_text("x" * (LINE_LIMIT + 1))
    _refused(lambda: parse_file(path), "line 1 does not end")
    path.write_text("x\n" * 100_001)
    _refused(lambda: parse_file(path), "100000 lines name none")


def test_an_impossible_number_in_a_layer_loses_only_its_line(tmp_path: Path) -> None:
    numbers = ["nan", "inf", "-1", "1e400", "9" * 5000, "0x10", "1_0", "٣", "''", "8;DROP"]
    path = tmp_path / "layers.txt"
    path.write_text(
        "\n".join(
            [LAYER, *(LAYER.replace("-H 8", f"-H {number}") for number in numbers), LAYER + " -t 1"]
        )
    )
    parsed = parse_file(path)
    assert len(parsed.configs) == 1
    assert parsed.counts.rejected == len(numbers)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{a: " * 2000, "nested"),
        ("- " * 2000 + "x", "nested"),
        ("!!python/object/apply:os.system ['id']", "YAML"),
        ("a: !!python/name:os.system x", "YAML"),
        ("a: 1\na: 2", "twice"),
        ("a: \x00", "YAML"),
        ("a: \x01", "YAML"),
        ("- a", "mapping"),
        ("5: a", "mapping"),
        ("", "mapping"),
        ("init_session: {enabled: true, label: {x: y}}", "one value"),
        ("init_session: {enabled: true, label: !!binary aGk=}", "one value"),
        ("init_session: {enabled: true, session_id: .nan}", "cannot be run"),
        ("init_session: {enabled: true, session_id: 1e400}", "cannot be run"),
        ("init_session: {enabled: yes, colour: red}", "no option"),
        ("__import__: {enabled: true}", "Unknown step"),
    ],
)
def test_a_hostile_yaml_file_is_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "steps.yaml"
    path.write_text(text)
    _refused(lambda: yaml_steps.run_file(path, "noop", go_fish), word)


def test_references_that_multiply_are_refused_before_they_do(tmp_path: Path) -> None:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    path = tmp_path / "steps.yaml"
    text = "\n".join(["a0: &a0 [x]", *levels])
    path.write_text(text + "\ninit_session: {enabled: true, label: *a29}\n")
    _refused(lambda: yaml_steps.run_file(path, "noop", go_fish))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("x = " + "[" * DEEP, "read"),
        ("x = " + "{a=" * DEEP, "read"),
        ("lease_s = nan", "LEASE_S"),
        ("lease_s = inf", "LEASE_S"),
        ("lease_s = -1.0", "LEASE_S"),
        ("lease_s = 1e400", "LEASE_S"),
        ("claim_batch = " + "9" * 400, "CLAIM_BATCH"),
        ("max_attempts = [3]", "MAX_ATTEMPTS"),
        ("rocm_path = 5", "ROCM_PATH"),
        ("surprise = 1", "surprise"),
        ("max_attempts = 1\nmax_attempts = 2", "read"),
        ('log_level = "LOUD"', "LOG_LEVEL"),
        ('eval_cpus = "0-99999999999"', "EVAL_CPUS"),
        ("db_url = 5", "DB_URL"),
        ("\x00", "read"),
        ("\ufeff\u202e=", "read"),
    ],
    ids=lambda text: text[:24].strip(),
)
def test_hostile_settings_are_refused_by_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, word: str
) -> None:
    (tmp_path / "tuna.toml").write_text(text)
    change_setting(monkeypatch, "TUNA_CONFIG", "tuna.toml")
    _refused(get_settings, word)


def test_a_range_of_cores_is_never_a_list_of_billions() -> None:
    with pytest.raises(ValueError, match="not a core"):
        parse_cpus("0-4000000000")


@pytest.fixture()
def perf(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """An empty perf db, perf.db, open for writing."""
    connection = sqlite3.connect(tmp_path / "perf.db", isolation_level=None)
    for statement in perf_db.TABLES:
        connection.execute(statement)
    yield connection
    connection.close()


_ROW = "1, 'NCHW', 'FP32', 'F', 2, " + ", ".join(["1"] * 20)


def _read_perf(tmp_path: Path) -> None:
    list(perf_db.read(tmp_path / "perf.db"))


def test_an_endless_view_is_no_table(tmp_path: Path, perf: sqlite3.Connection) -> None:
    perf.execute("DROP TABLE perf_db")
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    perf.execute(
        f"CREATE VIEW perf_db AS {endless} SELECT i AS id, 's' AS solver, 1 AS config, 'p' AS"
        " params FROM n"
    )
    _refused(lambda: _read_perf(tmp_path), "not a perf db")


def test_triggers_and_virtual_tables_of_a_foreign_file_do_nothing(
    tmp_path: Path, perf: sqlite3.Connection
) -> None:
    perf.execute(f"INSERT INTO config VALUES ({_ROW})")
    perf.execute("INSERT INTO perf_db VALUES (1, 's', 1, 'p')")
    perf.execute("CREATE TRIGGER t AFTER INSERT ON perf_db BEGIN DELETE FROM config; END")
    perf.execute("CREATE VIRTUAL TABLE kern_db USING fts5(kernel_name)")
    before = (tmp_path / "perf.db").read_bytes()
    assert len(list(perf_db.read(tmp_path / "perf.db"))) == 1
    _refused(lambda: list(kernel_db.read(tmp_path / "perf.db")), "not a kernel db")
    assert (tmp_path / "perf.db").read_bytes() == before


@pytest.mark.parametrize("value", ["5", "NULL", "x'00ff'", "1e400", "CAST(x'ff' AS TEXT)"])
def test_a_perf_db_with_wrong_types_is_refused(
    tmp_path: Path, perf: sqlite3.Connection, value: str
) -> None:
    perf.execute("DROP TABLE perf_db")
    perf.execute("CREATE TABLE perf_db (id INTEGER PRIMARY KEY, solver, config, params)")
    perf.execute(f"INSERT INTO config VALUES ({_ROW})")
    perf.execute(f"INSERT INTO perf_db VALUES (1, 's', 1, {value})")
    _refused(lambda: _read_perf(tmp_path), "perf.db")


def test_a_perf_db_whose_sizes_are_no_numbers_is_refused(
    tmp_path: Path, perf: sqlite3.Connection
) -> None:
    perf.execute(f"INSERT INTO config VALUES ({_ROW.replace('2, 1', '2, 1e400', 1)})")
    perf.execute("INSERT INTO perf_db VALUES (1, 's', 1, 'p')")
    _refused(lambda: _read_perf(tmp_path), "types")


def test_a_value_that_would_fill_the_memory_is_refused(
    tmp_path: Path, perf: sqlite3.Connection, in_little_memory: Little
) -> None:
    perf.execute(f"INSERT INTO config VALUES ({_ROW})")
    perf.execute("DROP TABLE perf_db")
    made = "params TEXT GENERATED ALWAYS AS (hex(zeroblob(400000000))) VIRTUAL"
    perf.execute(f"CREATE TABLE perf_db (id INTEGER PRIMARY KEY, solver, config, {made})")
    perf.execute("INSERT INTO perf_db (id, solver, config) VALUES (1, 's', 1)")
    code = "from tuna.libraries.miopen.formats.perf_db import read\n"
    code += "try:\n    list(read(Path('perf.db')))\nexcept BadInput as e:\n    print(e)"
    assert "perf.db" in in_little_memory(code)


def test_a_kernel_that_unpacks_to_more_than_it_says_is_refused(
    tmp_path: Path, in_little_memory: Little
) -> None:
    bomb = bz2.compress(bytes(1 << 20)) * 1
    with sqlite3.connect(tmp_path / "k.kdb") as connection:
        connection.execute(kernel_db.TABLE)
        rows = [
            (1, "n", "a", bomb, "0" * 32, 10),
            (2, "n", "b", bomb, "0" * 32, 2**62),
            (3, "n", "c", "text", "", -1),
        ]
        connection.executemany("INSERT INTO kern_db VALUES (?, ?, ?, ?, ?, ?)", rows)
    code = """
from tuna.libraries.miopen.formats.kernel_db import lookup
with lookup(Path("k.kdb")) as find:
    for args in "abc":
        try:
            find("n", args)
        except BadInput as error:
            print(error)
"""
    assert in_little_memory(code).count("is damaged") == 3


@pytest.mark.parametrize(
    "item",
    [
        "s:nan,0,a",
        "s:inf,0,a",
        "s:-1,0,a",
        "s:1e400,0,a",
        "s:1,9223372036854775808,a",
        "s:1,0," + "a" * 65,
    ],
)
def test_an_impossible_find_db_entry_is_left_out_and_its_neighbours_are_kept(
    type_in: Callable[..., object], tmp_path: Path, item: str
) -> None:
    path = tmp_path / "gfx90a68.HIP.fdb.txt"
    path.write_text(f"{KEY}={item};ConvDirectNaiveConvFwd:1.5,0,miopenConvolutionFwdAlgoDirect\n")
    given = ("--rocm-version", "6", "--miopen-version", "3")
    ended = type_in("tuna", "import-db", path, *given)
    assert (ended.code, "1 entry of 1 layer" in ended.out, "not imported: 1" in ended.err) == (
        0,
        True,
        True,
    ), ended


@pytest.mark.parametrize(
    "item", ["s:1," + "9" * 5000 + ",a", "s:1,-5,a", "s:1", "s", ":1,0,a", "s:0x1,0,a", "s:1,٣,a"]
)
def test_a_find_db_line_that_is_none_is_refused(tmp_path: Path, item: str) -> None:
    path = tmp_path / "x.fdb.txt"
    path.write_text(f"{KEY}={item}\n")
    _refused(lambda: list(find_db.read(path)), "x.fdb.txt:1")


@pytest.mark.parametrize(
    "listing",
    [
        "[" * DEEP, '{"a":' * DEEP, "null", "[]", '{"version": 2}', '{"version": 1}',
        '{"version": 1, "layers": 5}',
        '{"version": 1, "layers": [5]}',
        '{"version": 1, "layers": [{"key": "k", "records": [1e400]}]}',
        '{"version": 1, "layers": [{"key":"k","driver":"d","solver":"s","workload":7,'
        '"records":[]}]}',
        "9" * 5000,
    ],
    ids=range(11),
)  # fmt: skip
def test_a_hostile_tvm_database_is_refused(tmp_path: Path, listing: str) -> None:
    (tmp_path / tvm_db.WORKLOADS).write_text('["h", "b"]\n')
    (tmp_path / tvm_db.RECORDS).write_text("")
    (tmp_path / tvm_db.LAYERS).write_text(listing)
    _refused(lambda: list(tvm_db.read(tmp_path)))


@pytest.mark.parametrize("text", ["[" * DEEP, '{"a":' * DEEP, "null", "", "5", "\ud800"])
def test_hostile_params_and_workloads_are_no_tvm_records(text: str) -> None:
    _refused(lambda: tvm_db.tuned_record(text, 1.0, "llvm"))
    _refused(lambda: tvm_db.workload_text(text.encode("utf-8", "surrogatepass")))


def test_a_folder_or_a_pipe_is_no_database(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(BadInput), database_file.open_read_only(path):
            pass


@pytest.mark.parametrize("made", ["folder", "pipe", "device"])
@pytest.mark.parametrize(
    "read",
    [
        compressed.head, verify, source_of,
        lambda path: next(iter(compressed.lines(path, "list"))),
        lambda path: next(iter(compressed.lines(path.with_suffix(".bz2"), "list"))),
    ],
    ids=["head", "verify", "source_of", "lines", "packed"],
)  # fmt: skip
def test_what_is_not_a_plain_file_is_not_waited_for(
    tmp_path: Path, read: Callable[[Path], object], made: str
) -> None:
    makers: dict[str, Callable[[Path], None]] = {
        "folder": Path.mkdir, "pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero")
    }  # fmt: skip
    for path in (tmp_path / "file", tmp_path / "file.bz2"):
        makers[made](path)
    if (read, made) == (source_of, "folder"):  # one of a database's files
        makers["pipe"](tmp_path / "file" / "pipe")
        made = "pipe"
    _refused(lambda: read(tmp_path / "file"), f"it is not a plain file, but a {made}.")


def test_text_of_layers_may_come_from_a_pipe(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, f"{LAYER}\n".encode())
    os.close(writing)
    assert parse_file(f"/dev/fd/{reading}").counts.total == 1
    os.close(reading)
    os.mkfifo(tmp_path / "pipe")
    _refused(lambda: parse_file(tmp_path / "pipe"), "is empty")


_HEADER = {
    "version": 1, "uuid": "0" * 32, "library": "noop", "reason": "r", "tuna": "1", "schema": "1",
    "columns": {}, "ids": {}, "jobs": 1,
}  # fmt: skip


def test_an_archive_that_unpacks_to_gigabytes_is_refused_in_little_memory(
    tmp_path: Path, in_little_memory: Little
) -> None:
    """13.7 MB of such an archive would fill 2.9 GB before they were refused."""
    for number, (start, repeated, times) in enumerate(
        [
            (b'["kernel",["', b"A" * (1 << 20), 2048),
            (b'["kernel",["', b"[" * (1 << 20), 2048),
            (b'["trial",[', b"{}," * (1 << 18), 60),
            (b"", b" " * (1 << 20), 60),
        ]
    ):
        head = json.dumps(["tuna-session", _HEADER]).encode() + b"\n" + start
        members = [gzip.compress(head, 1), *[gzip.compress(repeated, 1)] * times]
        (tmp_path / f"archive{number}").write_bytes(b"".join(members) + gzip.compress(b"\n"))
    code = """
from tuna.archives.archive import verify
for number in range(4):
    try:
        verify(Path(f"archive{number}"))
    except BadInput as refused:
        print(refused)
"""
    first, second, *others = in_little_memory(code).splitlines()
    assert "more than 86 MiB" in first
    assert "more than 86 MiB" in second
    assert ["a line has" in other for other in others] == [True, True]


def test_a_block_of_trials_that_unpacks_for_ever_is_damaged() -> None:
    packed = gzip.compress(bytes(8 << 20))
    assert len(gunzip(packed)) == 8 << 20
    for damaged in (packed[:-9], b"", b"no gzip"):
        with pytest.raises(ValueError, match=r"cut off|incorrect header"):
            gunzip(damaged)
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        gunzip(packed, 1 << 20)
