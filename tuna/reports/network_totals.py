"""Sums over the layers of each network, and how often a network has a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tuna.reports.report_data import EACH_ONCE, LayerFigures, TotalFigures

#: Networks with a total; of more, those with the most layers in the session.
_MAX_NETWORKS = 20
#: How often each network has each config: {network: {config id: count}}.
Counts = Mapping[str, Mapping[int, int]]


def ordered(networks: Counts, configs: Iterable[int]) -> list[str]:
    """The networks by the number of these configs that they have, most first, then by name; those
    without any are left out."""
    ids = set(configs)
    shared = {name: len(ids & counts.keys()) for name, counts in networks.items()}
    return sorted(
        (name for name in shared if shared[name]), key=lambda name: (-shared[name], name)
    )[:_MAX_NETWORKS]


def totals(layers: Sequence[LayerFigures], networks: Counts) -> tuple[TotalFigures, ...]:
    """One total for each network, in the order of `ordered`; without networks one that counts each
    layer once."""
    if not layers:
        return ()
    names = ordered(networks, (layer.config_id for layer in layers))
    if not names:
        return (_total(EACH_ONCE, layers, {layer.config_id: 1 for layer in layers}),)
    return tuple(_total(name, layers, networks[name]) for name in names)


def _total(name: str, layers: Sequence[LayerFigures], counts: Mapping[int, int]) -> TotalFigures:
    found = [
        (counts[layer.config_id], layer)
        for layer in layers
        if layer.best and counts.get(layer.config_id)
    ]

    def gain(other_ms: Callable[[LayerFigures], float | None]) -> tuple[int, float | None]:
        both = [(count, layer, other_ms(layer)) for count, layer in found]
        known = [
            (count * time, count * (layer.best_ms or 0.0)) for count, layer, time in both if time
        ]
        best = sum(ours for _, ours in known)
        return len(known), sum(theirs for theirs, _ in known) / best if best else None

    time_ms = sum(count * (layer.best_ms or 0.0) for count, layer in found)
    flops = [
        (count * layer.flops, count * (layer.best_ms or 0.0))
        for count, layer in found
        if layer.flops
    ]
    shares = [
        (count * (layer.best_ms or 0.0), layer.peak_share)
        for count, layer in found
        if layer.peak_share
    ]
    timed = sum(weight for weight, _ in shares)
    untuned_layers, gain_untuned = gain(
        lambda layer: layer.untuned.time_ms if layer.untuned else None
    )
    other_layers, gain_other = gain(lambda layer: layer.other.time_ms if layer.other else None)
    return TotalFigures(
        name=name,
        layers=len(found),
        missing=len(counts) - len(found),
        calls=sum(count for count, _ in found),
        time_ms=time_ms if found else None,
        gflops=sum(work for work, _ in flops) / sum(time for _, time in flops) / 1e6
        if flops
        else None,
        peak_share=sum(weight * share for weight, share in shares) / timed if timed else None,
        untuned_layers=untuned_layers,
        gain_untuned=gain_untuned,
        other_layers=other_layers,
        gain_other=gain_other,
    )
