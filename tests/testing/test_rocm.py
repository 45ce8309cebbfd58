"""The fake ROCm installation, made from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fin_double import rocm


def test_the_command_prints_what_a_shell_can_eval(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fin_double.rocm",
        str(tmp_path / "a b"),
        "--options",
        '{"sleep_s": 0}',
    ]
    script = f'eval "$({" ".join(map(repr, command))})"; "$TUNA_FIN" -h; echo "$TUNA_ROCM_PATH"'
    done = subprocess.run(
        ["/bin/sh", "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(rocm.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith(f"{tmp_path / 'a b'}\n")
    assert "test double" in done.stderr
