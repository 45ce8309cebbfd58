"""A fake ROCm installation: the fin double, a fake rocminfo, the version files that Tuna reads.

eval "$(PYTHONPATH=tests python -m fin_double.rocm DIR --arch gfx90a --num-cu 104)"
"""

from __future__ import annotations

import argparse
import compileall
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import fin_options

_SOURCE = Path(__file__).resolve().parent
_MARKETING_NAMES = {
    "gfx900": "Radeon Instinct MI25",
    "gfx906": "AMD Instinct MI50/MI60",
    "gfx908": "AMD Instinct MI100",
    "gfx90a": "AMD Instinct MI210",
    "gfx940": "AMD Instinct MI300A",
    "gfx942": "AMD Instinct MI300X",
    "gfx1030": "AMD Radeon RX 6800 XT",
}
_FEATURES = {"gfx900": ":xnack-", "gfx1030": ""}
_RULE = "*******"
_SYSTEM = (
    ("Runtime Version", "1.14"),
    ("Runtime Ext Version", "1.6"),
    ("System Timestamp Freq.", "1000.000000MHz"),
)


def install(
    folder: Path,
    arch: str = "gfx908",
    num_cu: int = 120,
    rocm: str = "6.2.0-66",
    miopen: str = "3.3.0",
    tweak: str = "2d1fd997",
    gpus: int = 1,
    options: dict[str, Any] | None = None,
    recordings: Path | None = None,
    marked: bool = True,
) -> dict[str, str]:
    """Write the tree and return the environment variables that make Tuna use it.

    `options` are those of `fin_options`; `recordings` is a directory with answers of a real fin.
    Both can be changed by installing again. Results of the double are marked as simulated;
    `marked=False` omits the marker file, for tests of how real results are handled. Raises
    ValueError for an unknown option.
    """
    folder = folder.absolute()
    checked = fin_options.checked({"gpus": gpus, **(options or {})})
    # beside fin, for the box lets fin read its own folder alone
    double = folder / "bin" / "fin_double"
    compileall.compile_dir(_SOURCE, quiet=1)  # a boxed fin cannot write bytecode
    shutil.copytree(_SOURCE, double, ignore=shutil.ignore_patterns("*.pyc.*"), dirs_exist_ok=True)
    settings = folder / "share" / "fin-double.json"
    variables = {"TUNA_FIN_DOUBLE": settings}
    if recordings is not None:
        variables["TUNA_FIN_RECORDINGS"] = recordings.absolute()
    command = shlex.join([sys.executable, "-S", "-E", str(double)])
    exports = "".join(
        f"export {name}={shlex.quote(str(value))}\n" for name, value in variables.items()
    )
    _write(settings, json.dumps(checked, indent=1))
    _write(folder / "bin" / "fin", f'#!/bin/sh\n{exports}exec {command} "$@"\n', mode=0o755)
    mark = folder / "bin" / "fin.simulated"
    if marked:
        _write(
            mark,
            "The program fin beside this file is Tuna's stand-in, which only pretends to"
            " measure.\n",
        )
    else:
        mark.unlink(missing_ok=True)
    info = rocminfo_text(arch, num_cu, gpus)
    _write(
        folder / "bin" / "rocminfo",
        f"#!/bin/sh\ncat <<'END_OF_INFO'\n{info}END_OF_INFO\n",
        mode=0o755,
    )
    _write(folder / ".info" / "version", f"{rocm}\n")
    words = zip(("MAJOR", "MINOR", "PATCH", "TWEAK"), [*miopen.split("."), tweak], strict=True)
    header = "".join(f"#define MIOPEN_VERSION_{name} {value}\n" for name, value in words)
    _write(
        folder / "include" / "miopen" / "version.h",
        f"// clang-format off\n{header}// clang-format on\n",
    )
    switch = {"TUNA_SIMULATED": "1"} if marked else {}
    return {"TUNA_ROCM_PATH": str(folder), "TUNA_FIN": str(folder / "bin" / "fin"), **switch}


def rocminfo_text(arch: str, num_cu: int, gpus: int) -> str:
    """rocminfo's output on a host with one CPU and `gpus` equal GPUs."""
    lines = ["ROCk module is loaded", *_title("HSA System Attributes", "=" * 21)]
    lines += [_line(0, name, value) for name, value in _SYSTEM]
    lines += [
        "",
        *_title("HSA Agents", "=" * 10),
        *_agent(0, *_cpu()),
        "  ISA Info:                ",
    ]
    for index in range(1, gpus + 1):
        target = arch + _FEATURES.get(arch, ":sramecc+:xnack-")
        lines += [
            *_agent(index, *_gpu(arch, num_cu, index)),
            "  ISA Info:                ",
            "    ISA 1                    ",
        ]
        lines += [
            _line(6, "Name", f"amdgcn-amd-amdhsa--{target}"),
            _line(6, "Machine Models", "HSA_MACHINE_MODEL_LARGE"),
        ]
        lines += [_line(6, "Profiles", "HSA_PROFILE_BASE"), _line(6, "Fast f16", "TRUE")]
    return "\n".join([*lines, "*** Done ***             ", ""])


def _cpu() -> tuple[tuple[str, object], ...]:
    name = "AMD EPYC 7003 (test double)"
    return (
        *(("Name", name), ("Uuid", "CPU-XX"), ("Marketing Name", name), ("Vendor Name", "CPU")),
        *(
            ("Feature", "None specified"),
            ("Profile", "FULL_PROFILE"),
            ("Node", 0),
            ("Device Type", "CPU"),
        ),
        *(
            ("Max Clock Freq. (MHz)", 3000),
            ("BDFID", 0),
            ("Internal Node ID", 0),
            ("Compute Unit", 64),
        ),
    )


def _gpu(arch: str, num_cu: int, index: int) -> tuple[tuple[str, object], ...]:
    marketing = f"{_MARKETING_NAMES.get(arch, 'AMD GPU')} (test double)"
    return (
        *(
            ("Name", arch),
            ("Uuid", f"GPU-{index:016x}"),
            ("Marketing Name", marketing),
            ("Vendor Name", "AMD"),
        ),
        *(
            ("Feature", "KERNEL_DISPATCH"),
            ("Profile", "BASE_PROFILE"),
            ("Node", index),
            ("Device Type", "GPU"),
        ),
        *(("Max Clock Freq. (MHz)", 1500), ("BDFID", 256 * index), ("Internal Node ID", index)),
        *(("Compute Unit", num_cu), ("SIMDs per CU", 4), ("Wavefront Size", "64(0x40)")),
    )


def _agent(index: int, *fields: tuple[str, object]) -> list[str]:
    return [
        *_title(f"Agent {index + 1}", _RULE),
        *(_line(2, name, value) for name, value in fields),
    ]


def _title(text: str, rule: str) -> list[str]:
    return [f"{rule:<25}", f"{text:<25}", f"{rule:<25}"]


def _line(indent: int, name: str, value: object) -> str:
    return f"{' ' * indent}{name + ':':<25}{value!s:<35}"


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def main(arguments: Sequence[str] | None = None) -> None:
    """Install from the command line and print export lines for a shell."""
    parser = argparse.ArgumentParser(prog="python -m fin_double.rocm", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="gfx908")
    parser.add_argument("--num-cu", type=int, default=120)
    parser.add_argument("--rocm", default="6.2.0-66", help="version of ROCm")
    parser.add_argument("--miopen", default="3.3.0", help="version of MIOpen")
    parser.add_argument("--tweak", default="2d1fd997", help="MIOpen's commit")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument(
        "--options", type=json.loads, default={}, help="JSON: see tests/fin_double/fin_options.py"
    )
    parser.add_argument("--recordings", type=Path, help="folder with real_applicability_*.jsonl.gz")
    for name, value in install(**vars(parser.parse_args(arguments))).items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
