"""A server that starts from a pack: no kernel is compiled, without network and without Tuna, and
each kernel that it would miss after an edit of its sources is named. Needs the extra `triton`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_served_cache import Service, service  # noqa: F401  # a fixture

from tuna_cache_client.remote_space import LINE, TIMEOUT

pytest.importorskip("triton", reason="needs the extra `triton`")
SCRIPT = Path(__file__).parent / "server_start.py"
ISOLATED = ["unshare", "--net", "--map-root-user"]
FILLING = {
    "TRITON_CACHE_MANAGER": "triton.runtime.cache:RemoteCacheManager",
    "TRITON_REMOTE_CACHE_BACKEND": "tuna_cache_client.triton:Cache",
    TIMEOUT: "10000",
}


def started(
    script: Path, arch: str, count: int, settings: Mapping[str, str], *prefix: str
) -> dict[str, Any]:
    """The figures of a process."""
    command = [*prefix, sys.executable, str(script), arch, str(count)]
    environment = {"PATH": os.environ["PATH"], **settings}
    found: dict[str, Any] = json.loads(subprocess.check_output(command, env=environment))
    return found


def packed(
    service: Service,  # noqa: F811
    folder: Path,
    arch: str,
    count: int,
) -> tuple[Path, Path, dict[str, Any]]:
    """A script of one's own, a pack of its kernels, and the figures of the process that compiled
    them."""
    script = Path(shutil.copy(SCRIPT, folder))
    settings = {**FILLING, LINE: service.line, "TRITON_CACHE_DIR": str(folder / "first")}
    first = started(script, arch, count, settings)
    pack = folder / "pack"
    service.tuna("cache", "pack", "gpu", str(pack), "--arch", arch)
    return script, pack, first


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_one_edited_comment_is_named_and_costs_the_kernels_below_it(
    service: Service,  # noqa: F811
    tmp_path: Path,
    arch: str,
) -> None:
    script, pack, first = packed(service, tmp_path, arch, 2)
    assert first["compiled"] == 2
    settings = {"TRITON_CACHE_DIR": str(pack / "triton")}
    second = started(script, arch, 2, settings)
    assert (second["compiled"], second["code"]) == (0, first["code"])
    verify = ("cache", "verify", "--pack", str(pack))
    assert service.tuna(*verify).endswith("2 kernels as installed; 0 missed; 0 unknown\n")

    text = script.read_text()
    line = text.splitlines().index("@triton.jit") + 2
    edits = {
        text.replace("# tiles of C by rows", "# tiles of C"): "product is changed",
        text.replace("@triton.jit", "# a comment\n@triton.jit"): (
            f"product is in line {line + 1}, not {line}"
        ),
    }
    for edited, reason in edits.items():
        script.write_text(edited)
        with pytest.raises(subprocess.CalledProcessError) as caught:
            service.tuna(*verify)
        told = caught.value.stdout.splitlines()
        assert [line.endswith(f"({script}: {reason})") for line in told] == [True, True, False]
        copy = shutil.copytree(pack / "triton", tmp_path / "copy")
        missed = started(script, arch, 2, {"TRITON_CACHE_DIR": str(copy)})
        assert missed["compiled"] == 2, "Triton misses what verify names"
        shutil.rmtree(copy)

    script.write_text(text + "# the end\n")
    assert "2 kernels as installed" in service.tuna(*verify)
    assert started(script, arch, 2, settings)["compiled"] == 0


@pytest.mark.drill(only=True)
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_a_server_starts_from_a_pack_in_a_tenth_of_the_time(
    service: Service,  # noqa: F811
    tmp_path: Path,
    arch: str,
) -> None:
    if subprocess.run([*ISOLATED, "true"], check=False, capture_output=True).returncode:
        pytest.skip("unshare --net is not allowed here")
    script, pack, _ = packed(service, tmp_path, arch, 72)
    fresh = started(script, arch, 72, {"TRITON_CACHE_DIR": str(tmp_path / "none")})
    settings = {"TRITON_CACHE_DIR": str(pack / "triton")}
    second = started(script, arch, 72, settings, *ISOLATED)
    print(f"{arch}: {fresh['start_s']:.1f} s compiling, {second['start_s']:.2f} s from the pack")
    assert (fresh["compiled"], second["compiled"]) == (72, 0)
    assert second["code"] == fresh["code"]
    assert second["start_s"] <= 0.1 * fresh["start_s"]
