"""Sessions compared layer by layer: the time of each one's fastest solver, ratios to the first
session, and totals."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import sqlalchemy as sa

from tuna.common.messages import counted
from tuna.db import configs, networks, sessions
from tuna.db.bulk import rows_among
from tuna.db.models import ConfigRow, Job
from tuna.errors import BadInput, NotFound
from tuna.libraries.base import Environment
from tuna.results.selectable import SESSIONS, Results

#: Minimum of repeats whose spread means something
MIN_TIMES = 3
#: Number of standard deviations on either side of the middle that hold 95 % of a normal
#: distribution
_NORMAL_95 = NormalDist().inv_cdf(0.975)
#: Name of the total over all layers, each counted once
ALL_LAYERS = "all layers, each once"


@dataclass(frozen=True)
class Ratio:
    """A ratio of two times with its 95 % confidence interval; None where one side has too few
    repeats."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def certain(self) -> bool:
        """Whether the interval is known and excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high


def ratio_of_medians(
    first_ms: float, first: Sequence[float], second_ms: float, second: Sequence[float]
) -> Ratio:
    """`first_ms / second_ms`, two medians, with an interval from their repeats, all positive.

    The distribution-free interval of R. M. Price and D. G. Bonett, "Distribution-free confidence
    intervals for difference and ratio of medians", J. Stat. Comput. Simul. 72 (2002) 119-124:
    normal on the logarithm, each side's variance from two order statistics. Repeats count as
    independent: what differs from one process to the next is not in it.
    """
    value = first_ms / second_ms
    if min(len(first), len(second)) < MIN_TIMES:
        return Ratio(value)
    half = _NORMAL_95 * math.hypot(_log_error(first), _log_error(second))
    return Ratio(value, value * math.exp(-half), value * math.exp(half))


def _log_error(values: Sequence[float]) -> float:
    """Standard error of the logarithm of the median."""
    ordered, count = sorted(values), len(values)
    rank = max(1, round((count + 1) / 2 - math.sqrt(count)))
    outside = sum(math.comb(count, below) for below in range(rank)) / 2**count
    return math.log(ordered[count - rank] / ordered[rank - 1]) / (
        2 * NormalDist().inv_cdf(1 - outside)
    )


@dataclass(frozen=True)
class ComparedSession:
    """One of the sessions, in the order in which they were named; the first is the baseline."""

    session_id: int
    library: str
    library_version: str
    reason: str
    device: str
    arch: str
    num_cu: int
    conditions: Mapping[str, str]  #: conditions of measurement that differ from the default
    layers: int  #: number of layers with a result
    simulated: int  #: number of results that a stand-in timed


@dataclass(frozen=True)
class Best:
    """The fastest solver of a session for a layer."""

    solver: str
    params: str
    time_ms: float
    times_ms: tuple[float, ...]  #: time of every repeat; empty for an imported result
    noisy: bool = False  #: true if the machine was busy during the measurement


@dataclass(frozen=True)
class ComparedLayer:
    """A layer that at least one of the sessions has a result for; tuples are in the order of the
    sessions."""

    config_id: int
    label: str
    driver: str
    bests: tuple[Best | None, ...]
    missing: tuple[str, ...]  #: reason, for each session, why it has no result; "" where it has one
    #: time over the first session's time, for each session; None for the first, and without both
    ratios: tuple[Ratio | None, ...]
    #: id of the fastest session; None: too close to say, or only one has a result
    fastest: int | None
    counts: Mapping[str, int]  #: number of times that the layer occurs, by network


@dataclass(frozen=True)
class Total:
    """Sums over the layers that all sessions have, each times its count; tuples are in the order of
    the sessions."""

    name: str  #: name of a network, or ALL_LAYERS
    layers: int
    runs: int  #: sum of the counts
    times_ms: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Each session's sum over the first session's."""
        return tuple(time_ms / self.times_ms[0] for time_ms in self.times_ms)


@dataclass(frozen=True)
class Comparison:
    """Sessions side by side."""

    sessions: tuple[ComparedSession, ...]
    layers: tuple[ComparedLayer, ...]
    #: totals over all layers, then over each network that has some of them
    totals: tuple[Total, ...]
    #: geometric mean, for each session, of the ratios over the layers that all have; 1 for the
    #: first
    geometric_means: tuple[float, ...]
    differences: tuple[str, ...]  #: sentences that say why the comparison is not like for like

    @property
    def common(self) -> tuple[ComparedLayer, ...]:
        """The layers for which all sessions have a result."""
        return tuple(layer for layer in self.layers if None not in layer.bests)

    @property
    def wins(self) -> tuple[int, ...]:
        """For how many layers each session is the fastest."""
        counted = Counter(layer.fastest for layer in self.layers)
        return tuple(counted[session.session_id] for session in self.sessions)

    def as_json(self) -> dict[str, Any]:
        """Every field, for programs, with what follows from them."""
        document = asdict(self)
        for total, shown in zip(self.totals, document["totals"], strict=True):
            shown["ratios"] = total.ratios
        return document | {"wins": self.wins}


def compare(
    connection: sa.Connection,
    session_ids: Sequence[int],
    tag: str | None = None,
    most_layers: int | None = None,
) -> Comparison:
    """Compare the results of two sessions or more; with `tag` only for the layers that carry it.

    Raises BadInput for fewer than two different sessions, for more than `most_layers` layers, or
    where they have no layer in common; NotFound for an unknown session or tag.
    """
    ids = list(dict.fromkeys(session_ids))
    if len(ids) < 2:
        raise BadInput(
            "A comparison needs at least two different sessions.", hint="repeat --session-id"
        )
    if len(ids) < len(session_ids):
        raise BadInput("A session is named twice.")
    infos = [sessions.get(connection, session_id) for session_id in ids]
    if tag is not None:
        configs.require_tag(connection, tag)
    if most_layers is not None:
        _require_few(connection, ids, tag, most_layers)
    bests = _bests(connection, ids, tag)
    layers = _layers(connection, ids, bests)
    common = [layer for layer in layers if None not in layer.bests]
    compared = tuple(
        ComparedSession(
            session_id=info.id,
            library=info.environment.library,
            library_version=info.environment.library_version,
            reason=info.reason,
            device=info.environment.device,
            arch=info.environment.arch,
            num_cu=info.environment.num_cu,
            conditions=dict(info.environment.conditions),
            layers=sum(layer.bests[place] is not None for layer in layers),
            simulated=of_sessions(info.id).count(connection, "simulated"),
        )
        for place, info in enumerate(infos)
    )
    if not common:
        counts = ", ".join(f"session {entry.session_id}: {entry.layers}" for entry in compared)
        raise NotFound(
            "These sessions have no layer with a result in all of them.",
            hint=f"layers with one: {counts}",
        )
    return Comparison(
        sessions=compared,
        layers=tuple(layers),
        totals=_totals(common),
        geometric_means=_geometric_means(common),
        differences=(
            *differences(ids, [info.environment for info in infos]),
            *_stand_ins(compared),
        ),
    )


def _require_few(connection: sa.Connection, ids: Sequence[int], tag: str | None, most: int) -> None:
    """Raise BadInput for sessions with results for more layers; by the unique key of find_db."""
    for session_id in ids:
        query = of_sessions(session_id).only(tag=tag).select("config_id").distinct()
        layers = len(connection.execute(query.limit(most + 1)).all())
        if layers > most:
            raise BadInput(
                f"Session {session_id} has more than {most} layers, too many for one answer.",
                hint=f"type `tuna compare --session-id {ids[0]} --session-id {ids[-1]} --json`",
            )


def of_sessions(*ids: int) -> Results:
    """Return the results of sessions."""
    return SESSIONS.only(SESSIONS["session_id"].in_(ids))


def _bests(
    connection: sa.Connection, ids: Sequence[int], tag: str | None
) -> dict[int, dict[int, Best]]:
    """config -> session -> its fastest solver; ties are broken by the solver's name."""
    wanted = of_sessions(*ids).only(SESSIONS["time_ms"] > 0, SESSIONS.no_baseline, tag=tag)
    best = wanted.fastest(("session_id", "config_id"), "id")
    names = ("config_id", "session_id", "solver", "params", "time_ms", "noisy", "times_ms")
    query = SESSIONS.select(*names).where(SESSIONS["id"].in_(best))
    found: dict[int, dict[int, Best]] = defaultdict(dict)
    for row in connection.execute(query):
        repeats = tuple(float(time_ms) for time_ms in json.loads(row.times_ms or "[]"))
        found[row.config_id][row.session_id] = Best(
            row.solver, row.params, row.time_ms, repeats, bool(row.noisy)
        )
    return found


def _layers(
    connection: sa.Connection, ids: Sequence[int], by_layer: Mapping[int, Mapping[int, Best]]
) -> list[ComparedLayer]:
    query = sa.select(ConfigRow.id, ConfigRow.label, ConfigRow.driver)
    texts = sorted(rows_among(connection, query, ConfigRow.id, by_layer))
    lacking = [config_id for config_id, bests in by_layer.items() if len(bests) < len(ids)]
    jobs = sa.select(Job.session_id, Job.config_id).where(Job.session_id.in_(ids)).distinct()
    with_jobs = set(map(tuple, rows_among(connection, jobs, Job.config_id, lacking)))
    counts = networks.occurrences(connection)
    layers = []
    for config_id, label, driver in texts:
        bests = tuple(by_layer[config_id].get(session_id) for session_id in ids)
        missing = tuple(
            "" if best else "no winner" if (session_id, config_id) in with_jobs else "no jobs"
            for session_id, best in zip(ids, bests, strict=True)
        )
        ratios = (None, *(_ratio(best, bests[0]) for best in bests[1:]))
        fastest = _fastest(ids, bests)
        layers.append(
            ComparedLayer(
                config_id, label, driver, bests, missing, ratios, fastest, counts.get(config_id, {})
            )
        )
    return layers


def _ratio(best: Best | None, base: Best | None) -> Ratio | None:
    if best is None or base is None:
        return None
    return ratio_of_medians(best.time_ms, best.times_ms, base.time_ms, base.times_ms)


def _fastest(ids: Sequence[int], bests: Sequence[Best | None]) -> int | None:
    """The session whose time is less than every other's beyond doubt."""
    there = [(session_id, best) for session_id, best in zip(ids, bests, strict=True) if best]
    if len(there) < 2:
        return None
    (session_id, first), *others = sorted(there, key=lambda one: (one[1].time_ms, one[0]))
    return session_id if all(_faster(first, other) for _, other in others) else None


def _faster(best: Best, other: Best) -> bool:
    """Whether the interval of the ratio excludes 1; without an interval, whether the time is
    less."""
    ratio = ratio_of_medians(best.time_ms, best.times_ms, other.time_ms, other.times_ms)
    return ratio.certain if ratio.low is not None else ratio.value < 1


def _totals(common: Sequence[ComparedLayer]) -> tuple[Total, ...]:
    names = sorted({name for layer in common for name in layer.counts})
    of_networks = (
        _total(name, [(one, one.counts[name]) for one in common if name in one.counts])
        for name in names
    )
    return (_total(ALL_LAYERS, [(layer, 1) for layer in common]), *of_networks)


def _total(name: str, counted: Sequence[tuple[ComparedLayer, int]]) -> Total:
    times = zip(
        *([best.time_ms * count for best in layer.bests if best] for layer, count in counted),
        strict=True,
    )
    return Total(
        name,
        len(counted),
        sum(count for _, count in counted),
        tuple(math.fsum(column) for column in times),
    )


def _geometric_means(common: Sequence[ComparedLayer]) -> tuple[float, ...]:
    columns = zip(*(layer.ratios for layer in common), strict=True)
    return tuple(
        statistics.geometric_mean(ratio.value if ratio else 1.0 for ratio in column)
        for column in columns
    )


def differences(ids: Sequence[int], environments: Sequence[Environment]) -> tuple[str, ...]:
    """Return the differences of the sessions' machines and ways to measure, a sentence each."""
    facts: dict[str, list[str]] = {
        "measured on different devices": [env.device for env in environments],
        "measured on different numbers of compute units": [str(env.num_cu) for env in environments],
    }
    # another library may name the same one in another way
    if len({env.library for env in environments}) == 1:
        facts["measured on different architectures"] = [env.arch for env in environments]
    for name in sorted({name for env in environments for name in env.conditions}):
        facts[f"measured under different conditions of {name}"] = [
            env.conditions.get(name, "default") for env in environments
        ]
    sentences = []
    for what, values in facts.items():
        if len(set(values)) > 1:
            each = "; ".join(
                f"session {number}: {value or 'unknown'}"
                for number, value in zip(ids, values, strict=True)
            )
            sentences.append(f"The sessions were {what} ({each}).")
    return tuple(sentences)


def _stand_ins(compared: Sequence[ComparedSession]) -> tuple[str, ...]:
    return tuple(
        f"In session {one.session_id} {counted(one.simulated, 'result was', 'results were')} timed"
        " by a stand-in, not by a device."
        for one in compared
        if one.simulated
    )
