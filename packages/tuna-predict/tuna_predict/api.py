"""Predictors: trained from the trials of the database, evaluated on layers that they have not seen,
used in answers and searches."""

from __future__ import annotations

from tuna.api.rows import open_database, reading, transaction
from tuna.libraries.registry import get_library
from tuna_predict import predictors, training
from tuna_predict.evaluation import Evaluation, evaluate
from tuna_predict.predictor import Table, train, usable
from tuna_predict.predictors import StoredPredictor
from tuna_predict.training import Seen


def train_predictor(seen: Seen, seed: int = 0) -> StoredPredictor:
    """Train a predictor from the trials of the database and keep it with its evaluation.

    The same trials and seed give the same one. Raises BadInput where the trials do not suffice,
    NotFound for an unknown library, LibraryMissing without xgboost.
    """
    tables = _tables(seen)
    found = _evaluated(tables, seen, seed)
    made = training.Trained(seen, seed, tables, train(tables, seed), found)
    return transaction(open_database(), training.store, made)


def evaluate_predictor(seen: Seen, seed: int = 0) -> Evaluation:
    """Return how good such a predictor is on layers that it has not seen; raises as
    `train_predictor`."""
    return _evaluated(_tables(seen), seen, seed)


def list_predictors() -> list[StoredPredictor]:
    """The predictors that were trained, the latest first."""
    with reading(open_database()) as connection:
        return predictors.read_all(connection)


def use_predictor(name: str, library: str, *, force: bool = False) -> StoredPredictor | None:
    """Use a predictor, or none of a library; see `predictors.use`."""
    return transaction(open_database(), predictors.use, library, name, force=force)


def _tables(seen: Seen) -> list[Table]:
    with reading(open_database()) as connection:
        return usable(training.trials_of(connection, get_library(seen.library), seen))


def _evaluated(tables: list[Table], seen: Seen, seed: int) -> Evaluation:
    return evaluate(tables, get_library(seen.library).params.prior(), seed)
