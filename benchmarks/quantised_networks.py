"""Small networks of timm and transformers, quantised by onnxruntime, for benchmarks/quantised.py.

`python -P quantised_networks.py FOLDER [NAME ...]` writes FOLDER/NAME.onnx; it needs timm,
transformers, onnxscript and onnxruntime, and imports nothing of Tuna. Weights are random and have a
seed, norms the statistics of a few inputs; images are small and stages few, so that each is built
in a minute.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import transformers
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quant_pre_process,
    quantize_dynamic,
    quantize_static,
)
from timm.models.mlp_mixer import MlpMixer

_TYPES = {"U8": QuantType.QUInt8, "S8": QuantType.QInt8}


@dataclass(frozen=True)
class Network:
    """A network, and how it is quantised."""

    make: Callable[[], Any]  #: Returns the module
    form: str  #: qdq, qoperator, dynamic; types of activations and weights; `channel` or `tensor`
    shape: tuple[int, ...] = (1, 3, 64, 64)
    ids: int = 0  #: Number of token ids; 0: the input is of real values


class _Field(torch.nn.Module):  # type: ignore[misc]
    """A model of transformers that returns one field of its answer."""

    def __init__(self, model: Any, field: str) -> None:
        super().__init__()
        self.model, self.field = model, field

    def forward(self, x: Any) -> Any:
        return self.model(x)[self.field]


def _timm(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: timm.create_model(name, pretrained=False, num_classes=32, **options)


def _transformers(name: str, field: str, **options: Any) -> Callable[[], Any]:
    """The model `name` by a configuration with these options."""

    def make() -> Any:
        model = getattr(transformers, name)
        config = model.config_class(**options, attn_implementation="eager")
        return _Field(model(config), field)

    return make


def _mixer() -> Any:
    return MlpMixer(num_classes=32, img_size=64, num_blocks=2, embed_dim=96)


_TEXT: Mapping[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
NETWORKS = {
    # gates, hard swish, depthwise
    "mobilenetv3": Network(_timm("mobilenetv3_small_050"), "qdq U8 S8 channel"),
    "efficientnet": Network(_timm("test_efficientnet"), "qdq U8 U8 tensor"),
    "regnety": Network(_timm("regnety_002"), "qdq S8 S8 channel"),  # groups and gates
    "convnext": Network(_timm("convnext_atto", depths=(1, 1, 2, 1)), "qdq U8 S8 tensor"),
    "vit": Network(_timm("vit_tiny_patch16_224", img_size=64, depth=2), "qdq S8 S8 tensor"),
    "swin": Network(
        _timm(
            "swin_tiny_patch4_window7_224",
            **{"img_size": 56, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)},
        ),
        "qdq U8 S8 channel",
        (1, 3, 56, 56),
    ),
    "mixer": Network(_mixer, "qdq U8 U8 channel"),
    "levit": Network(_timm("levit_128s", img_size=64), "qdq S8 S8 channel"),
    "densenet": Network(
        _timm("densenet121", growth_rate=8, block_config=(2, 3, 2)), "qoperator U8 S8 channel"
    ),
    "prelu": Network(_timm("resnet10t", act_layer="prelu"), "qdq U8 S8 channel"),
    "mobilenetv2": Network(_timm("mobilenetv2_050"), "qoperator U8 U8 tensor"),
    "resnet": Network(_timm("resnet10t"), "qoperator S8 S8 channel"),
    "byobnet": Network(_timm("test_byobnet"), "dynamic U8 U8 tensor"),
    "depth": Network(  # transposed convolutions, bilinear resizing
        _transformers(
            "DPTForDepthEstimation",
            "predicted_depth",
            hidden_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=96,
            image_size=64,
            patch_size=16,
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[16, 24, 32, 48],
            fusion_hidden_size=16,
        ),
        "qdq U8 S8 channel",
    ),
    "segformer": Network(
        _transformers(
            "SegformerForSemanticSegmentation",
            "logits",
            depths=[1, 1, 1, 1],
            hidden_sizes=[16, 32, 48, 64],
            decoder_hidden_size=32,
        ),
        "qdq S8 S8 channel",
    ),
    "speech": Network(
        _transformers(
            "Wav2Vec2Model",
            "last_hidden_state",
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            conv_dim=(32, 32, 64),
            conv_stride=(5, 4, 4),
            conv_kernel=(10, 8, 4),
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
        ),
        "qdq U8 U8 tensor",
        (1, 4000),
    ),
    "bert": Network(
        _transformers("BertModel", "last_hidden_state", **_TEXT),
        "dynamic U8 S8 tensor",
        (1, 32),
        200,
    ),
    "llama": Network(
        _transformers("LlamaForCausalLM", "logits", **_TEXT, use_cache=False),
        "dynamic U8 S8 channel",
        (1, 32),
        200,
    ),
    "albert": Network(
        _transformers("AlbertModel", "last_hidden_state", **_TEXT, embedding_size=32),
        "qdq U8 S8 channel",
        (1, 32),
        200,
    ),
}


class _Calibration(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, network: Network) -> None:
        self._inputs = ({"x": values.numpy()} for values in _drawn(network, 4))

    def get_next(self) -> Any:
        return next(self._inputs, None)


def _drawn(network: Network, count: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        if network.ids:
            yield torch.randint(0, network.ids, network.shape, generator=generator)
        else:
            yield torch.randn(network.shape, generator=generator)


def _module(network: Network) -> Any:
    """The module, its batch norms with the statistics of a few inputs."""
    torch.manual_seed(0)
    module = network.make()
    norms = [
        each for each in module.modules() if isinstance(each, torch.nn.modules.batchnorm._BatchNorm)
    ]
    for norm in norms:
        norm.momentum = None
        norm.reset_running_stats()
    if norms:
        module.train()
        with torch.no_grad():
            module(torch.cat([*_drawn(network, 8)]))
    return module.eval()


def write(name: str, folder: Path) -> None:
    """Write the quantised network into the folder."""
    network = NETWORKS[name]
    kind, activations, weights, where = network.form.split()
    with tempfile.TemporaryDirectory() as temporary:
        real, ready = Path(temporary, "real.onnx"), Path(temporary, "ready.onnx")
        module, example = _module(network), next(_drawn(network, 1))
        torch.onnx.export(
            module, (example,), real, input_names=["x"], dynamo=True, external_data=False
        )
        quant_pre_process(real, ready, skip_symbolic_shape=True)
        given = {"weight_type": _TYPES[weights], "per_channel": where == "channel"}
        if kind == "dynamic":
            quantize_dynamic(ready, folder / f"{name}.onnx", **given)
            return
        quantize_static(
            ready,
            folder / f"{name}.onnx",
            _Calibration(network),
            quant_format=QuantFormat.QDQ if kind == "qdq" else QuantFormat.QOperator,
            activation_type=_TYPES[activations],
            **given,
        )


def main() -> None:
    """Write the networks that are named, all by default."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name in sys.argv[2:] or NETWORKS:
        np.random.seed(0)
        write(name, folder)
        print(name, flush=True)


if __name__ == "__main__":
    main()
