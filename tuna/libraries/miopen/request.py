"""The jobs of fin's input file; field names are fin's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tuna.configs import BatchNormConfig, ConvConfig, batch_norm
from tuna.configs.conv import COMMANDS, FORW
from tuna.errors import BadInput

Job = dict[str, Any]

#: Fields of a convolution with equal names in fin and Tuna; only the filter's layout differs
#: (`wei_layout`).
_CONV = (
    *(
        "spatial_dim",
        "batchsize",
        "in_channels",
        "in_h",
        "in_w",
        "in_d",
        "out_channels",
        "fil_h",
        "fil_w",
        "fil_d",
    ),
    *("pad_h", "pad_w", "pad_d", "conv_stride_h", "conv_stride_w", "conv_stride_d"),
    *("dilation_h", "dilation_w", "dilation_d", "group_count", "mode", "pad_mode"),
    *("trans_output_pad_h", "trans_output_pad_w", "trans_output_pad_d"),
)
EVAL_PREPARATION = ("alloc_buf", "fill_buf")


def target_id(arch: str) -> str:
    """The target ID for fin's compile and eval steps: the architecture with the features that
    MITuna adds."""
    if arch == "gfx900":
        return "gfx900:xnack-"
    return arch if arch.startswith("gfx1") else f"{arch}:sram-ecc+:xnack-"


def config_fields(config: ConvConfig | BatchNormConfig) -> dict[str, Any]:
    """A config in fin's format."""
    if isinstance(config, ConvConfig):
        return {
            "cmd": COMMANDS[config.data_type],
            **{name: getattr(config, name) for name in _CONV},
            "direction": config.direction.value,
            "in_layout": config.in_layout,
            "wei_layout": config.fil_layout,
            "out_layout": config.out_layout,
        }
    bits = FORW[config.direction]
    return {
        "cmd": batch_norm.COMMANDS[config.data_type],
        **{
            name: getattr(config, name)
            for name in ("batchsize", "in_channels", "in_d", "in_h", "in_w")
        },
        **{name: getattr(config, name) for name in ("mode", "run", "save", "alpha", "beta")},
        "forw": bits & 3,
        "back": bits >> 2,
        "direction": config.direction.value,
        "in_layout": config.layout,
        "out_layout": config.layout,
    }


def get_solvers() -> list[Job]:
    """The job that lists all solvers."""
    return [{"steps": ["get_solvers"]}]


def applicability(
    configs: Iterable[ConvConfig | BatchNormConfig], arch: str, num_cu: int
) -> list[Job]:
    """Jobs that ask which solvers can run each config; `config_tuna_id` is the index of the config,
    from 0."""
    return [
        {
            "steps": ["applicability"],
            "arch": arch,
            "num_cu": num_cu,
            "config_tuna_id": number,
            "config": config_fields(config),
            "direction": FORW[config.direction],
        }
        for number, config in enumerate(configs)
    ]


def job(
    step: str,
    config: ConvConfig | BatchNormConfig,
    arch: str,
    num_cu: int,
    solvers: Sequence[str],
    compiled: Sequence[Mapping[str, Any]] = (),
) -> Job:
    """The job for a compile or an eval step of one config with these solvers.

    `compiled` is the matching compile step's answer, which an eval step needs. Raises BadInput for
    an unknown step.
    """
    found: Job = {
        "steps": [step],
        "arch": target_id(arch),
        "num_cu": num_cu,
        "config_tuna_id": 0,
        "direction": FORW[config.direction],
        "dynamic_only": False,
        "config": config_fields(config),
        "solvers": list(solvers),
    }
    if step.endswith("_eval"):
        found["steps"] = [*EVAL_PREPARATION, step]
        found[result_key(step.removesuffix("_eval") + "_compile")] = list(compiled)
    elif not step.endswith("_compile"):
        raise BadInput(f"fin has no step {step!r} for a config.")
    return found


def result_key(step: str) -> str:
    """The field of fin's answer that holds a step's result."""
    return f"{step}_result"
