"""The cost model of a search: gradient-boosted trees (xgboost) that rank candidates by their
features.

Its file is a line that names the format, a line of JSON that says what it was trained on, and
xgboost's own UBJSON. Nothing is pickled. The same histories give the same bytes: one thread, a
fixed seed, trials in the order of their params.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tuna.configs import Config
from tuna.errors import BadInput, LibraryMissing
from tuna.libraries.kernels import Known, Past

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FORMAT = b"tuna-cost-model 2\n"
#: Number of trees: few and shallow, for there are tens to hundreds of trials
_ROUNDS = 100
_TREES: Mapping[str, Any] = {
    "objective": "reg:squarederror",
    "max_depth": 5,
    "eta": 0.15,
    "min_child_weight": 1.0,
    "subsample": 0.7,
    "colsample_bytree": 0.5,
    "tree_method": "hist",
    "max_bin": 64,
    "nthread": 1,
    "seed": 0,
}
#: Natural logarithm of the slowdown beyond which slower does not matter, and of that which a failed
#: candidate counts as
_SLOWEST, _FAILED = 4.0, 5.0
#: Weight of all trials of similar problems together, and maximum for each; a trial of the problem
#: itself weighs 1
_SIBLINGS_WEIGH, _SIBLING_WEIGHS = 64.0, 0.5
#: Spread of trials, in squares of what a prior predicts of them, at which they count as much as the
#: prior
_TRUSTED = 4.0

Features = Mapping[str, float]


def in_order(history: Iterable[Past]) -> Sequence[Past]:
    """The trials that are done sorted by params, one for each; of several trials of one candidate
    the fastest.

    So the model does not depend on the order of measurement.
    """
    best: dict[str, Past] = {}
    for trial in history:
        known = best.get(trial.params)
        if trial.is_done and (known is None or _key(trial) < _key(known)):
            best[trial.params] = trial
    return [best[params] for params in sorted(best)]


def _key(trial: Past) -> tuple[float, str]:
    return (float("inf") if trial.time_ms is None else trial.time_ms, trial.cause or "")


def learn(
    features_of: Callable[[str, Config | None], Features | None],
    sources: Sequence[Known],
    *,
    prior: bytes | None = None,
    trees: int = _ROUNDS,
    depth: int = 5,
    seed: int = 0,
) -> bytes:
    """The cost model trained on these trials; `features_of` is `Space.features_of`, which knows
    like problems too.

    With a `prior`, a cost model of other problems, the trees learn how the trials differ from what
    it predicts. Raises BadInput if no trial has a time, LibraryMissing without xgboost.
    """
    xgboost = _xgboost()
    rows: list[Features] = []
    targets: list[float] = []
    weights: list[float] = []
    trained_on = []
    others = sum(trial.is_done for source in sources if not source.same for trial in source.trials)
    sibling_weight = min(_SIBLING_WEIGHS, _SIBLINGS_WEIGH / others) if others else 0.0
    for source in sorted(sources, key=lambda source: (not source.same, source.label)):
        trials = in_order(source.trials)
        known = [(trial, features_of(trial.params, source.config)) for trial in trials]
        best = min(
            (trial.time_ms for trial, features in known if features and trial.time_ms), default=None
        )
        if best is None:
            continue
        used = [(trial, features) for trial, features in known if features]
        rows += [features for _, features in used]
        targets += [_slowdown(trial.time_ms, best) for trial, _ in used]
        weights += [1.0 if source.same else sibling_weight] * len(used)
        about = {"label": source.label, "trials": len(used), "sibling": not source.same}
        trained_on.append(about)
    if not rows:
        raise BadInput("No trial has a time to learn from.")
    names = sorted({name for row in rows for name in row})
    expected = CostModel(prior).slowdowns(rows) if prior else np.zeros(len(rows), np.float32)
    trust = _trust(expected, np.array(targets), np.array(weights))
    expected = trust * expected
    offset = float(np.median(np.array(targets) - expected))
    data = xgboost.DMatrix(
        _matrix(rows, names),
        label=np.array(targets),
        weight=np.array(weights),
        feature_names=names,
        nthread=1,
        base_margin=expected + offset,
    )
    booster = xgboost.train(
        {**_TREES, "max_depth": depth, "seed": seed, "base_score": 0.0}, data, num_boost_round=trees
    )
    header = {"features": names, "trained_on": trained_on, "trust": trust, "offset": offset}
    return (
        _FORMAT
        + json.dumps(header, sort_keys=True).encode()
        + b"\n"
        + bytes(booster.save_raw("ubj"))
    )


class CostModel:
    """A trained model."""

    def __init__(self, data: bytes, prior: bytes | None = None) -> None:
        """`prior`: that of `learn`. Raises BadInput for bytes that `learn` did not make,
        LibraryMissing without xgboost."""
        xgboost = _xgboost()
        self._prior = CostModel(prior) if prior else None
        header, newline, trees = data.removeprefix(_FORMAT).partition(b"\n")
        if not data.startswith(_FORMAT) or not newline:
            raise BadInput("These bytes are not a cost model.")
        try:
            self.header: Mapping[str, Any] = json.loads(header)
            self._names: Sequence[str] = list(self.header["features"])
            self._trust, self._offset = float(self.header["trust"]), float(self.header["offset"])
            self._booster = xgboost.Booster({"nthread": 1}, model_file=bytearray(trees))
        except (ValueError, KeyError, TypeError, xgboost.core.XGBoostError) as error:
            raise BadInput(f"The cost model cannot be read: {str(error).splitlines()[0]}") from None

    def slowdowns(self, rows: Sequence[Features]) -> NDArray[np.float32]:
        """Return for each candidate the predicted logarithm of its time over the best's: the
        smaller, the faster."""
        matrix = _matrix(rows, self._names)
        expected = self._prior.slowdowns(rows) if self._prior else np.zeros(len(rows), np.float32)
        found: NDArray[np.float32] = self._booster.inplace_predict(
            matrix,
            missing=math.nan,
            validate_features=False,
            base_margin=self._trust * expected + self._offset,
        )
        return found


def _trust(
    expected: NDArray[np.float32], found: NDArray[np.float64], weights: NDArray[np.float64]
) -> float:
    """Return from 0 to 1 how far trials confirm the prior: the slope of a line through them, and 1
    before there are many."""
    x = expected - np.average(expected, weights=weights)
    y = found - np.average(found, weights=weights)
    slope = (float(np.sum(weights * x * y)) + _TRUSTED) / (
        float(np.sum(weights * x * x)) + _TRUSTED
    )
    return min(1.0, max(0.0, slope))


def _slowdown(time_ms: float | None, best_ms: float) -> float:
    return _FAILED if not time_ms else min(math.log(time_ms / best_ms), _SLOWEST)


def _matrix(rows: Sequence[Features], names: Sequence[str]) -> NDArray[np.float32]:
    """Rows of features; NaN, which xgboost takes for missing, where one has no such feature."""
    column = {name: index for index, name in enumerate(names)}
    matrix = np.full((len(rows), len(names)), math.nan, np.float32)
    for index, row in enumerate(rows):
        for name, value in row.items():
            if name in column:
                matrix[index, column[name]] = value
    return matrix


def _xgboost() -> Any:
    try:
        import xgboost
    except ImportError:
        raise LibraryMissing(
            "xgboost is not installed, with which a search learns.",
            hint="pip install 'xgboost-cpu>=3,<4', which Tuna's extras tvm and triton bring",
        ) from None
    return xgboost
