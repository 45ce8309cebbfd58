"""Source files of kernels, as the compiler's input names them. Needs no Triton."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tuna_cache_client.kernel_sources import kernel_sources, sources_name

TEXT = """\
import triton.language as tl

WIDE = tl.constexpr(4)
OTHER = 5


@triton.jit
def helper(x):
    return x * WIDE


class Kernels:
    @triton.jit
    def inner(x):
        return x


@triton.autotune([])
@triton.jit
def kernel(x):
    # doubled
    y = helper(x)
    return y + y
    # the end


def host():
    return OTHER
"""


def sources(folder: Path, *lines: int, text: str = TEXT) -> list[dict[str, Any]]:
    """What is stored of a kernel that has these lines."""
    path = folder / "kernels.py"
    path.write_text(text)
    places = [f'#loc{line} = loc("{path}":{line}:3)' for line in lines]
    places.append(f'#loc = loc("{folder}/triton/standard.py":3:1)\n#loc0 = loc("x"(#loc))')
    files = {"kernel.source": "\n".join(places).encode(), "kernel.json": b"{}"}
    return list(json.loads(kernel_sources(files, folder / "triton")))


def test_a_kernel_has_its_function_and_what_that_uses_of_the_same_file(tmp_path: Path) -> None:
    (found,) = sources(tmp_path, 23)
    assert found["path"] == str(tmp_path / "kernels.py")
    assert found["sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    parts = [(one["name"], one["line"], one["lines"], one["constant"]) for one in found["parts"]]
    assert parts == [("WIDE", 3, 1, True), ("helper", 8, 2, False), ("kernel", 20, 5, False)]


def test_the_text_of_a_function_ends_with_its_last_comment(tmp_path: Path) -> None:
    block = "".join(TEXT.splitlines(keepends=True)[19:24])
    assert block.endswith("    # the end\n")
    (found,) = sources(tmp_path, 21)
    assert found["parts"][-1]["sha256"] == hashlib.sha256(block.encode()).hexdigest()


def test_a_kernel_in_a_class_is_found(tmp_path: Path) -> None:
    (found,) = sources(tmp_path, 15)
    assert [one["name"] for one in found["parts"]] == ["inner"]


def test_a_file_that_is_gone_or_no_python_has_no_parts(tmp_path: Path) -> None:
    (found,) = sources(tmp_path, 1, text="def (")
    assert (found["sha256"], found["parts"]) == ("", [])
    files = {"kernel.ttir": b'loc("/no/such/file.py":1:1)'}
    (found,) = json.loads(kernel_sources(files, tmp_path))
    assert (found["path"], found["parts"]) == ("/no/such/file.py", [])


def test_a_kernel_without_the_compilers_input_has_no_sources(tmp_path: Path) -> None:
    assert kernel_sources({"kernel.cubin": b"\x7fELF"}, tmp_path) == b""
    assert sources_name("kernel.json") == "kernel.sources"
