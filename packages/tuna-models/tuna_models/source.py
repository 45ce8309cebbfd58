"""Files of models, as `tuna tune` takes them."""

from __future__ import annotations

from tuna.configs.sources import Source

#: How files of ONNX and of `torch.export` end.
MODEL_ENDINGS = (".onnx", ".pt2")
SOURCE = Source(
    MODEL_ENDINGS,
    "model",
    "models",
    "tuna_models.cli.tune:tune",
    api="tuna_models.api",
    holds="a model",
    help="The tasks of a model (*.onnx, *.pt2) are tuned and, with -o, built into a shared"
    " library.",
    # functions that the compiler schedules itself, and a view
    scheduled=frozenset(
        {
            *("to_blocks", "from_blocks", "window", "channels", "concatenation"),
            *("max_pool", "average_pool", "global_average", "reshape"),
        }
    ),
)
