"""examples/ci/: both files type the same commands, and these tune, release, and stop at a
regression."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import sqlalchemy as sa
from builders import DRIVERS
from deploy_files import ROOT, load

from tuna import api
from tuna.db.models import GoldenEntry
from tuna.golden.versions import GateViolated
from tuna.libraries.registry import get_library

FOLDER = ROOT / "examples" / "ci"
TUNE, COMPARE = "Tune", "Compare with the current release"
RELEASE = "Release, unless a layer is slower"
STOPPED = GateViolated.exit_code


@dataclass(frozen=True)
class Steps:
    """The steps of a file that type something, by name, and their variables."""

    env: Mapping[str, str]
    scripts: Mapping[str, str]


def of_github() -> Steps:
    (workflow,) = load(FOLDER / "github.yaml")
    (job,) = workflow["jobs"].values()
    scripts = {step["name"]: step["run"] for step in job["steps"] if "run" in step}
    return Steps(workflow["env"], scripts)


def of_jenkins() -> Steps:
    text = (FOLDER / "Jenkinsfile").read_text()
    (block,) = re.findall(r"\n  environment \{\n(.*?)\n  \}", text, re.DOTALL)
    env = dict(re.findall(r"^ +(\w+) = ['\"](.*)['\"]$", block, re.MULTILINE))
    stages = re.findall(r"stage\('([^']+)'\) \{\s+steps \{\s+sh '''\n(.*?)'''", text, re.DOTALL)
    return Steps(env, {name: dedent(script) for name, script in stages})


@dataclass
class Site:
    """A machine on which CI runs."""

    folder: Path
    steps: Steps

    def run(self, number: int, program: str = "true", skipped: int = 0) -> list[tuple[str, int]]:
        """Type the steps of a run in order, with a program for `example` to time, until one fails;
        their names and exit codes."""
        timed = self.folder / "program"
        timed.write_text(f"#!/bin/sh\n{program}\n")
        timed.chmod(0o755)
        env = {**os.environ, **self.steps.env, "LIBRARY": "example", "VERSION": str(number)}
        env |= {"TUNA_EXAMPLE_PROGRAM": str(timed), "TUNA_SANDBOX_READ": str(self.folder)}
        env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
        ended = []
        for name, script in list(self.steps.scripts.items())[skipped:]:
            words = ["/bin/bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
            done = subprocess.run(words, env=env, cwd=self.folder, check=False)
            ended.append((name, done.returncode))
            if done.returncode:
                break
        return ended

    def states(self) -> dict[int, str]:
        """Version -> state."""
        return {one.version: one.state.value for one in api.golden.versions("example")}


@pytest.fixture
def site(tuna_home: Path, tmp_path: Path) -> Site:
    folder = tmp_path / "checkout"
    folder.mkdir()
    steps = of_github()
    (folder / steps.env["LAYERS"]).write_text(f"{DRIVERS[0]}\n")
    return Site(folder, steps)


def test_both_files_type_the_same() -> None:
    github, jenkins = of_github(), of_jenkins()
    assert jenkins.scripts == github.scripts
    assert list(github.scripts) == [TUNE, COMPARE, RELEASE]
    assert github.env == {**jenkins.env, "VERSION": "${{ github.run_number }}"}
    assert jenkins.env["VERSION"] == "${BUILD_NUMBER}"


@pytest.mark.timeout(600)
def test_a_regression_stops_the_release(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Beside a release that is planted: one that no run can keep up with, then one that each is
    faster than."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "golden")
    from golden_scene import Scene

    scene = Scene(api.open_database())
    home = get_library("example").environment()
    facts: dict[str, Any] = {"arch": home.arch, "num_cu": home.num_cu, "library_version": "1"}
    before = scene.session({(DRIVERS[0], "Rocminfo"): 1e-6}, "example", **facts)
    scene.build(1, before)
    api.golden.promote(1, library="example")
    assert site.run(2) == [(TUNE, 0), (COMPARE, 0), (RELEASE, STOPPED)]
    assert "more than 5 % slower" in capfd.readouterr().err
    assert site.states() == {1: "promoted", 2: "draft"}
    assert "version 1" in (site.folder / "results" / "release.txt").read_text()
    scene.execute(sa.update(GoldenEntry).where(GoldenEntry.time_ms < 1e-3).values(time_ms=1e9))
    assert site.run(2, skipped=2) == [(RELEASE, 0)]
    assert site.states() == {1: "promoted", 2: "promoted"}
