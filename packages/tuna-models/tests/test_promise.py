"""Models in bf16 that keep an error: what stays in fp32, and the inputs that it is measured on."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from compiled import HERE, TARGET, planned, run
from nets import NETS
from shared_data import need
from test_model_store import manifest

from tuna.configs.values import DataType
from tuna.libraries.tvm.kernels import machine
from tuna.libraries.tvm.model_answers import Answers, distance
from tuna_models.api import building
from tuna_models.compiler import passes
from tuna_models.compiler.build import TaskKernels
from tuna_models.judging import edges, inputs, natural, promise
from tuna_models.judging.checks import Imprecise
from tuna_models.judging.promise import Roundings
from tuna_models.manifest import LeftInFp32, Manifest, Precision, Promise
from tuna_models.reading import importer

IMAGE = [{"name": "x", "shape": (2, 3, 64, 48), "dtype": "float32"}]


@cache
def measured(name: str, bound: float) -> tuple[Answers, Roundings, list[float]]:
    """The answers of a model to be kept to a bound, with its roundings and their costs."""
    if "bf16" not in machine.from_target(tvm.target.Target(HERE)).words:
        need(None, "a CPU with avx512_bf16")
    model, target = NETS[name](), tvm.target.Target(TARGET)
    analysis = passes.analyse(importer.to_relax(model, "net"), target, precision=Precision.BF16)
    declared = importer.inputs_of(model)
    cases, _ = edges.cases(model, declared, inputs.values(declared, 0), bound)
    roundings = Roundings(analysis, target)
    answers, count = promise.with_natural(Answers(cases, bound), roundings, declared)
    assert count == len(answers.cases) - len(cases) > 3
    return answers, roundings, promise.costs(roundings, analysis, target)


@pytest.mark.parametrize("name", ["residual", "attention"])
def test_as_little_stays_in_fp32_as_keeps_the_error(name: str) -> None:
    answers, roundings, costs = measured(name, 0.1)
    sites = set(range(len(roundings.sites)))
    errors = [roundings.error(case, sites) for case in answers.cases]
    assert max(roundings.error(case, ()) for case in answers.cases) < 1e-5 < max(errors)
    assert not promise.choose(answers, roundings, costs).left
    # an error of which some of the groups alone are the cause
    bound = 0.7 * max(errors)
    kept = Answers([replaced(case, bound) for case in answers.cases], bound)
    chosen = promise.choose(kept, roundings, costs)
    assert chosen.whole_error == pytest.approx(max(errors), rel=0.06)
    assert 0 < len(chosen.left) < len(sites)
    on = {site for site in sites if roundings.places[site] not in chosen.places}
    assert max(roundings.error(case, on) for case in answers.cases) <= bound
    wider = promise.choose(kept, roundings, costs, left=chosen.places, built_error=2 * bound)
    assert set(wider.places) > set(chosen.places), "it was off when it was built"
    plan = planned(NETS[name](), precision=Precision.BF16, in_fp32=chosen.places)
    types = [task.core.data_type for task, n in plan.tasks() for _ in range(n) if task.core]
    assert types.count(DataType.FP32) == len(chosen.left)
    assert types.count(DataType.BF16) == len(on)
    kernels = TaskKernels(tvm.target.Target(TARGET), {}, winograd=False)
    plan = planned(NETS[name](), kernels, precision=Precision.BF16, in_fp32=chosen.places)
    for case in answers.cases[:2]:
        outputs = zip(case.outputs, run(plan, *case.inputs), strict=True)
        error = max(distance(own, right.values) for right, own in outputs)
        assert error == pytest.approx(roundings.error(case, on), rel=0.2)


def replaced(case: object, bound: float) -> object:
    return case.__class__(**{**vars(case), "tolerance": bound})


def test_natural_images_have_neighbours_alike_and_drawn_ones_do_not() -> None:
    given = inputs.values(IMAGE, 0)
    sets = dict(natural.sets(IMAGE, given))
    for title in ("natural (11)", "natural (12)", "natural (0 to 1)"):
        image = sets[title]["x"]
        assert (image.shape, image.dtype) == ((2, 3, 64, 48), np.float32)
        assert neighbours(image) > 0.6 > neighbours(given["x"])
    assert sets["natural (0 to 1)"]["x"].min() >= 0
    assert not sets["silent"]["x"].any()


def test_a_page_has_dark_lines_of_writing_on_light_ground() -> None:
    for title, arrays in natural.sets(IMAGE, inputs.values(IMAGE, 0)):
        if title.startswith("written"):
            page = arrays["x"][0, 0]
            assert 0.05 < (page < 0).mean() < 0.6
            rows = (page < 0).any(axis=1)
            assert rows.any()
            assert not rows.all()


def neighbours(image: object) -> float:
    """The correlation of pixels with those beside them."""
    values = np.asarray(image)
    return float(np.corrcoef(values[..., 1:].ravel(), values[..., :-1].ravel())[0, 1])


def test_a_natural_sound_has_pauses_and_whole_numbers_stay_drawn() -> None:
    given = [
        {"name": "x", "shape": (1, 16000), "dtype": "float32"},
        {"name": "ids", "shape": (1, 8), "dtype": "int64", "bounds": (3, 9)},
    ]
    sets = dict(natural.sets(given, inputs.values(given, 0)))
    sound = sets["natural (11)"]["x"]
    loud = np.abs(sound.reshape(-1, 200)).max(1)
    assert (loud < 0.01).any()
    assert (loud > 0.2).any()
    for arrays in sets.values():
        assert arrays["ids"].min() >= 3
        assert arrays["ids"].max() <= 9


def test_a_model_that_is_off_is_built_again_with_more_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time the error of the build before is given; where nothing is left, it is refused."""
    offs = {0: 0.5, 1: 0.2, 2: 0.0}

    def keep(model: SimpleNamespace, *_: object, built_error: float = 0.0) -> SimpleNamespace:
        assert built_error == (offs[model.version] if built_error else 0.0)
        return SimpleNamespace(version=min(model.version + bool(built_error), last))

    def build(model: SimpleNamespace) -> str:
        if offs[model.version]:
            error = Imprecise("it is off")
            error.error = offs[model.version]
            raise error
        return "built"

    monkeypatch.setattr(building, "keep_error", keep)
    last, first = 2, SimpleNamespace(version=0)
    kept = building._kept(first, None, None, build)  # type: ignore[arg-type]
    assert (kept[0].version, kept[1]) == (2, "built")
    last = 1
    with pytest.raises(Imprecise):
        building._kept(first, None, None, build)  # type: ignore[arg-type]


def test_what_stays_in_fp32_makes_an_import_another_version_and_nothing_changes_none() -> None:
    narrow = manifest().model_copy(update={"precision": Precision.BF16})
    left = LeftInFp32(place=3, label="conv", cost=0.1)
    kept = narrow.model_copy(
        update={"promise": Promise(max_error=1e-2, error=8e-3, whole_error=3e-2, left=(left,))}
    )
    assert b"promise" not in narrow.to_bytes()
    assert kept.digest != narrow.digest
    assert Manifest.from_bytes(kept.to_bytes()).in_fp32 == (3,)
    assert kept.source == narrow.source
