"""`tuna capture` with small programs that log as the libraries do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from command_lines import Ended

from tuna.api import list_configs
from tuna.cli.main import guarded, tuna
from tuna.db.database import open_database
from tuna.db.models import Framework, GemmConfigRow, Model, ModelConfig
from tuna.errors import BadInput
from tuna_capture import api

CONV = (
    "onednn_verbose,v1,primitive,exec,cpu,convolution,jit:avx2,forward_training,"
    "src:f32:a:blocked:abcd::f0 "
    "wei:f32:a:blocked:Acdb8a::f0 bia:f32:a:blocked:a::f0"
    " dst:f32:a:blocked:aBcd8b::f0,attr-scratchpad:user,"
    "alg:convolution_direct,mb2_ic3oc16_ih32oh32kh3sh1dh0ph1_iw32ow32kw3sw1dw0pw1,0.03"
)
BENCH = (
    "hipblaslt-bench -m 8 -n 4 -k 2 --transA N --transB N --a_type f16_r --b_type f16_r"
    " --compute_type f32_r"
)
ROWS = "GemmTunableOp_Half_NN,nn_8_4_2_ld_8_2_8\nGemmTunableOp_Half_NN,nn_9_4_2_ld_9_2_9\n"
#: Asks for a convolution three times, one of them by MIOpen, for one product twice and for another
#: once.
PROGRAM = f"""
import os, sys
assert os.environ["ONEDNN_VERBOSE"] == os.environ["MIOPEN_ENABLE_LOGGING_CMD"] == "1"
print("epoch 1", end="", flush=True)
os.write(1, b"{CONV}\\n{CONV}\\n")
print(", done", flush=True)
os.write(1, b"{CONV.replace("convolution,", "reorder,", 1)}\\n")
os.write(2, b"MIOpen(HIP): Warning [x] mine\\n")
os.write(2, b"MIOpen(HIP): Command [LogCmdConvolution] ./bin/MIOpenDriver conv "
            b"-n 2 -c 3 -H 32 -W 32 -k 16 -y 3 -x 3 -p 1 -q 1 -F 1\\n")
with open(os.environ["HIPBLASLT_LOG_FILE"], "w") as log:
    log.write({BENCH + chr(10)!r} * 2)
with open(os.environ["PYTORCH_TUNABLEOP_UNTUNED_FILENAME"].replace(".csv", "0.csv"), "a") as log:
    log.write({ROWS!r})
"""
LAYERS = [
    ("conv 2x3x32x32 k16 3x3 s1 p1 NCHW fp32 F", 3),
    ("gemm 4x8x2 NN fp16", 2),
    ("gemm 4x9x2 NN fp16", 1),
]
Capture = Callable[..., Ended]


@pytest.fixture
def capture(home: Path, capfd: pytest.CaptureFixture[str]) -> Capture:
    """`tuna capture WORDS...`, with what is written to the descriptors."""

    def run(*words: str) -> Ended:
        code = guarded(tuna, ["capture", *words])
        return Ended(code, *capfd.readouterr())

    return run


def test_a_program_runs_as_ever_and_its_layers_are_imported_with_their_counts(
    capture: Capture,
) -> None:
    ended = capture("-t", "net", "--model", "My net", "--", sys.executable, "-c", PROGRAM)
    assert (ended.code, ended.out) == (0, "epoch 1, done\n"), ended.err
    assert ended.err.startswith("MIOpen(HIP): Warning [x] mine\n")
    assert "oneDNN's reorder" in ended.err
    assert "left out: a bias (2 lines)" in ended.err
    assert (
        "6 calls of 3 layers in 8 logged lines (1 unsupported, 0 rejected): 3 layers added"
        in ended.err
    )
    assert [layer.label for layer in list_configs("net")] == [label for label, _ in LAYERS]
    columns = (Model.name, Model.version, Framework.name, ModelConfig.weight)
    statement = sa.select(*columns).join(ModelConfig, ModelConfig.model_id == Model.id)
    statement = statement.join(Framework, Framework.id == ModelConfig.framework_id).order_by(
        ModelConfig.config_id
    )
    with open_database().connect() as connection:
        rows = [tuple(row) for row in connection.execute(statement)]
    assert rows == [("My net", "captured", "tuna capture", weight) for _, weight in LAYERS]


def test_python_gets_the_same(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = api.capture([sys.executable, "-c", PROGRAM + "\nos.kill(os.getpid(), 9)"], "net")
    assert [(config.label, count) for config, count in found.layers] == LAYERS
    assert (found.status, found.exit_code, found.stopped) == (-9, 137, "")
    assert capfd.readouterr().out == "epoch 1, done\n"


def test_what_was_logged_before_a_crash_counts(capture: Capture) -> None:
    ended = capture(
        "-t", "net", "--", "sh", "-c", f"echo '{CONV}'; printf '{CONV[:90]}'; kill -ABRT $$"
    )
    assert ended.code == 134
    assert "ended by SIGABRT; what it had logged until then counts" in ended.err
    assert "log:2: the oneDNN line is cut short" in ended.err
    assert "1 call of 1 layer in 2 logged lines (0 unsupported, 1 rejected)" in ended.err


def test_a_program_that_logs_nothing_keeps_its_exit_code_and_the_reason_is_said(
    capture: Capture,
) -> None:
    ended = capture("-t", "net", "--", "sh", "-c", "echo hello; exit 3")
    assert (ended.code, ended.out) == (3, "hello\n")
    assert "logged nothing" in ended.err
    assert "MKL" in ended.err
    ended = capture(
        "-t", "net", "--", "sh", "-c", f"echo '{CONV.replace('convolution,', 'lrn,', 1)}'"
    )
    assert "none of 1 logged lines names a layer" in ended.err


@pytest.mark.parametrize(
    "words",
    [("-t", " ", "--", "true"), ("-t", "x", "--model", "y" * 129, "--", "true"), ("-t", "x", "--")],
)
def test_bad_words_are_refused_before_the_program_runs(
    capture: Capture, words: tuple[str, ...]
) -> None:
    assert capture(*words).code == 2


def test_a_program_that_is_not_there_is_bad_input(capture: Capture) -> None:
    ended = capture("-t", "x", "--", "/no/such", "-t", "--help")
    assert ended.code == 2
    assert "/no/such cannot be started" in ended.err


def test_the_logs_of_a_run_are_gone_after_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = 'stat -c "%a %F" "$HIPBLASLT_LOG_FILE" "${HIPBLASLT_LOG_FILE%/*}" > seen'
    assert api.capture(["sh", "-c", script], "x").status == 0
    assert Path("seen").read_text() == "600 fifo\n700 directory\n"
    assert not list(tmp_path.glob("tuna-capture-*"))


def test_no_command_is_bad_input_from_python(home: Path) -> None:
    with pytest.raises(BadInput, match="No command"):
        api.capture([], "x")


def test_a_product_that_miopendriver_cannot_name_is_stored_and_read_back(home: Path) -> None:
    line = f"{BENCH} --lda 9 --batch_count 2 --stride_a 0 --stride_b 0 --scaleA 1"
    (layer,) = api.capture(["sh", "-c", f'echo "{line}" > $HIPBLASLT_LOG_FILE'], "wide").layers
    assert list_configs("wide") == [layer[0]]
    assert layer[0].label == "gemm b2 4x8x2 NN fp16 ld -,9,- stride 0,0,- scale -,tensor,-"
    with open_database().connect() as connection:
        assert (
            connection.execute(sa.select(sa.func.count()).select_from(GemmConfigRow)).scalar_one()
            == 0
        )


def test_what_pytorch_asks_onednn_for(home: Path) -> None:
    python = os.environ.get("TUNA_TEST_TORCH", "")
    if not python:
        pytest.skip("no PyTorch here (set TUNA_TEST_TORCH to a Python that has it)")
    program = (
        "import torch; net = torch.nn.Conv2d(3, 16, 3, padding=1).eval(); x = torch.randn(2, 3, 32,"
        " 32)\nwith torch.inference_mode(): [net(x) for _ in range(5)]"
    )
    found = api.capture([python, "-c", program], "net")
    assert [(config.label, count) for config, count in found.layers] == [(LAYERS[0][0], 5)]
