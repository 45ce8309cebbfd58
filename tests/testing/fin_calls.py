"""Helpers that call the fin double like Tuna calls fin."""

from __future__ import annotations

import base64
import bz2
import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fin_double import __path__ as double_path

DOUBLE = Path(double_path[0])
ABORTED = -6
#: A 3x3 convolution with all fields that Tuna sends.
CONFIG: dict[str, Any] = {
    **{
        "cmd": "conv",
        "spatial_dim": 2,
        "batchsize": 16,
        "in_channels": 64,
        "out_channels": 32,
        "group_count": 1,
    },
    **{
        "in_d": 1,
        "in_h": 28,
        "in_w": 20,
        "fil_d": 1,
        "fil_h": 3,
        "fil_w": 3,
        "pad_d": 0,
        "pad_h": 1,
        "pad_w": 1,
    },
    **{
        "conv_stride_d": 0,
        "conv_stride_h": 1,
        "conv_stride_w": 1,
        "dilation_d": 0,
        "dilation_h": 1,
        "dilation_w": 1,
    },
    **{"mode": "conv", "pad_mode": "default", "direction": "F"},
    **{"in_layout": "NCHW", "wei_layout": "NCHW", "out_layout": "NCHW"},
}
KEY = "64-28-20-3x3-32-28-20-16-1x1-1x1-1x1-0-NCHW-FP32-F"
SIZES_3D = {
    "spatial_dim": 3,
    "in_d": 8,
    "fil_d": 3,
    "pad_d": 1,
    "conv_stride_d": 1,
    "dilation_d": 1,
}
LAYOUTS_3D = {"in_layout": "NCDHW", "wei_layout": "NCDHW", "out_layout": "NCDHW"}


def job(*steps: str, config: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A job for a gfx908 with 120 compute units; `fields` override."""
    number = {"F": 1, "B": 2, "W": 4}
    config = {**CONFIG, **(config or {})}
    device = {"arch": "gfx908:sram-ecc+:xnack-", "num_cu": 120}
    direction = number.get(str(config["direction"]), 4)
    return {
        "steps": [*steps],
        **device,
        "config_tuna_id": 7,
        "direction": direction,
        "config": config,
        **fields,
    }


class Fin:
    """The fin double in a private directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.source, self.target = folder / "in.json", folder / "out.json"

    def environment(self, options: dict[str, Any], env: dict[str, str]) -> dict[str, str]:
        """The minimal environment of fin."""
        (self.folder / "double.json").write_text(json.dumps(options))
        own = {
            "TUNA_FIN_DOUBLE": str(self.folder / "double.json"),
            "MIOPEN_CUSTOM_CACHE_DIR": str(self.cache),
        }
        return {**own, **env}

    def start(
        self, *jobs: dict[str, Any], env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start fin without waiting for it."""
        self.source.write_text(json.dumps(jobs))
        command = [
            sys.executable,
            "-S",
            "-E",
            str(DOUBLE),
            "-i",
            str(self.source),
            "-o",
            str(self.target),
        ]
        environment = self.environment(options, env or {})
        return subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )

    def code(
        self, *jobs: dict[str, Any], env: dict[str, str] | None = None, **options: Any
    ) -> tuple[int, str]:
        """Run fin; returns exit code and stderr."""
        process = self.start(*jobs, env=env, **options)
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors

    def answers(
        self, *jobs: dict[str, Any], env: dict[str, str] | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """fin's answer to each job."""
        code, errors = self.code(*jobs, env=env, **options)
        assert code == 0, errors
        first, *rest = json.loads(self.target.read_text())
        assert list(first) == ["process_env"]
        return rest

    def answer(
        self, one: dict[str, Any], env: dict[str, str] | None = None, **options: Any
    ) -> dict[str, Any]:
        """fin's answer to one job."""
        (only,) = self.answers(one, env=env, **options)
        return only

    def compiled(
        self, form: str, one: dict[str, Any], env: dict[str, str] | None = None, **options: Any
    ) -> list[Any]:
        """The result entries of find_compile or perf_compile."""
        answer = self.answer({**one, "steps": [f"miopen_{form}_compile"]}, env=env, **options)
        entries: list[Any] = answer[f"miopen_{form}_compile_result"]
        return entries

    def evaluated(
        self,
        form: str,
        one: dict[str, Any],
        entries: list[Any],
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> list[Any]:
        """The result entries of find_eval or perf_eval for the output of a compile step."""
        steps = ["alloc_buf", "fill_buf", f"miopen_{form}_eval"]
        sent = [{"kernel_objects": [], **entry} for entry in entries]
        answer = self.answer(
            {**one, "steps": steps, f"miopen_{form}_compile_result": sent}, env=env, **options
        )
        result: list[Any] = answer[f"miopen_{form}_eval_result"]
        return result


def succeeded(entries: list[Any]) -> list[Any]:
    """The entries with the reason Success."""
    return [entry for entry in entries if entry.get("reason") == "Success"]


def code_of(kernel: dict[str, Any]) -> bytes:
    """A kernel object's code, verified against its MD5 and size."""
    code = bz2.decompress(base64.b64decode(kernel["blob"], validate=True))
    assert len(code) == kernel["uncompressed_size"]
    assert hashlib.md5(code, usedforsecurity=False).hexdigest() == kernel["md5_sum"]
    return code


def record(
    folder: Path, arch: str, num_cu: int, config: dict[str, Any], solvers: list[str]
) -> dict[str, str]:
    """Make the double answer `solvers` for a config; returns the environment variable for it."""
    folder.mkdir(exist_ok=True)
    line = json.dumps({"applicable_solvers": solvers, "input": {"config": config}})
    with gzip.open(
        folder / f"real_applicability_{arch.partition(':')[0]}_{num_cu}.jsonl.gz", "wt"
    ) as file:
        file.write(line + "\n")
    return {"TUNA_FIN_RECORDINGS": str(folder)}
