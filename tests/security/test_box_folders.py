"""Which folders of this machine a box opens: places of packages, without what lies beside them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from box_place import LIMIT_S, Place, perform
from settings_changes import change_setting

from tuna.sandbox import box as boxes
from tuna.sandbox.processes import run
from tuna.settings import get_settings

pytestmark = pytest.mark.usefixtures("needs_a_box")
ROOT = Path(boxes.__file__).parents[2]


def test_a_home_inside_a_folder_of_libraries_stays_closed(
    acts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as TUNA_HOME in a checkout of Tuna, or in /opt."""
    home = tmp_path / "checkout" / "data" / "home"
    monkeypatch.setenv("TUNA_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "checkout"))
    change_setting(monkeypatch, "TUNA_DB_URL", f"sqlite:///{tmp_path}/checkout/tuna.sqlite")
    place = Place(home, tmp_path)
    (tmp_path / "checkout" / "tuna.sqlite").touch()
    for path in (home.parent / "module.py", home.parent.parent / "package.py"):
        path.touch()
    wanted = {"read": place.secret, "list": home.parent.parent}
    assert perform(acts, wanted, place) == {"read": "Permission denied", "list": "DONE"}
    assert perform(acts, {"read": tmp_path / "checkout" / "tuna.sqlite"}, place) == {
        "read": "Permission denied"
    }
    for path in (home.parent / "module.py", home.parent.parent / "package.py"):
        assert perform(acts, {"read": path}, place) == {"read": "DONE"}
    get_settings.cache_clear()


@pytest.mark.parametrize("named", [(), (ROOT,), (ROOT.parent,)])
def test_of_a_checkout_only_packages_are_open(
    acts: Path, place: Place, monkeypatch: pytest.MonkeyPatch, named: tuple[Path, ...]
) -> None:
    """docker/secrets and .git/config cannot be read, although the checkout is in a child's
    PYTHONPATH."""
    change_setting(monkeypatch, "TUNA_SANDBOX_READ", os.pathsep.join(map(str, named)))
    git = ROOT / ".git"
    closed = [
        git / "config" if git.is_dir() else git,
        ROOT / "docker" / "compose.yaml",
        ROOT / "pyproject.toml",
    ]
    code = (
        "import sys, tuna.sandbox.box\nfor path in sys.argv[1:]:\n    try: open(path).close();"
        " print('read', path)\n"
    )
    code += "    except PermissionError: print('refused')"
    done = run(
        [sys.executable, "-c", code, *map(str, closed)],
        timeout_s=LIMIT_S,
        box=place.box,
        cwd=place.room,
    )
    assert done.output.split("\n")[:-1] == ["refused"] * 3


def test_a_folder_around_the_home_may_have_thousands_of_entries(
    acts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a rule of its own, since the home stays closed; an argument with them all was too
    long."""
    around = tmp_path / "around"
    for number in range(2000):
        (around / f"{number}-{'x' * 80}").mkdir(parents=True)
    monkeypatch.setenv("TUNA_HOME", str(around / "home"))
    change_setting(monkeypatch, "TUNA_SANDBOX_READ", str(around))
    place = Place(around / "home", tmp_path)
    beside = around / f"7-{'x' * 80}" / "file"
    beside.touch()
    assert perform(acts, {"read": beside}, place) == {"read": "DONE"}
    assert perform(acts, {"read": place.secret}, place) == {"read": "Permission denied"}


def test_of_a_plug_in_that_is_developed_elsewhere_only_packages_are_open(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    for path in (".git/config", "keys/token", "plug/__init__.py", "module.py"):
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text("found = 1\n")
    monkeypatch.syspath_prepend(checkout)  # as a .pth file of an editable installation does
    boxes._python.cache_clear()
    try:
        code = (
            f"import sys\nsys.path.append({str(checkout)!r})\nimport plug, module\nprint(plug.found"
            " + module.found)\n"
        )
        code += (
            f"for path in ('.git/config', 'keys/token'):\n    try: open({str(checkout)!r} + '/' +"
            " path)\n"
        )
        code += "    except PermissionError: print('refused')"
        done = run([sys.executable, "-c", code], timeout_s=LIMIT_S, box=place.box, cwd=place.room)
        assert done.output.splitlines() == ["2", "refused", "refused"]
    finally:
        boxes._python.cache_clear()
