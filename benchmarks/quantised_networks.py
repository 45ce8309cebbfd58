"""Small networks of timm and transformers, quantised by onnxruntime, for benchmarks/quantised.py.

`python -m benchmarks.quantised_networks FOLDER [NAME ...]`, in a checkout, writes FOLDER/NAME.onnx;
it needs timm, transformers, onnxscript and onnxruntime, and imports nothing of Tuna. Weights are as
in `network_exports.py`; images are small and stages few, so that each is built in a minute.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from timm.models.mlp_mixer import MlpMixer

from benchmarks import wheel_process
from benchmarks.network_exports import (
    Network,
    image,
    timm_model,
    token_ids,
    transformers_model,
    write,
)


def _timm(name: str, size: int = 64, **options: Any) -> Network:
    return Network(timm_model(name, num_classes=32, **options), image(1, 3, size, size))


def _transformers(name: str, field: str, inputs: Mapping[str, Any], **options: Any) -> Network:
    """The model `name` by a configuration with these options; a field of its answer."""
    get = attrgetter(field)
    eager = {"attn_implementation": "eager", **options}
    return Network(transformers_model(name, lambda model, x: get(model(x)), **eager), inputs)


def _mixer() -> Any:
    return MlpMixer(num_classes=32, img_size=64, num_blocks=2, embed_dim=96)


_IMAGE, _IDS = image(1, 3, 64, 64), {"x": token_ids(200, 1, 32)}
_TEXT: Mapping[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
#: Each with the form that `wheel_process.quantise` gives it.
NETWORKS: Mapping[str, tuple[Network, str]] = {
    # gates, hard swish, depthwise
    "mobilenetv3": (_timm("mobilenetv3_small_050"), "qdq U8 S8 channel"),
    "efficientnet": (_timm("test_efficientnet"), "qdq U8 U8 tensor"),
    "regnety": (_timm("regnety_002"), "qdq S8 S8 channel"),  # groups and gates
    "convnext": (_timm("convnext_atto", depths=(1, 1, 2, 1)), "qdq U8 S8 tensor"),
    "vit": (_timm("vit_tiny_patch16_224", img_size=64, depth=2), "qdq S8 S8 tensor"),
    "swin": (
        _timm(
            "swin_tiny_patch4_window7_224",
            56,
            **{"img_size": 56, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)},
        ),
        "qdq U8 S8 channel",
    ),
    "mixer": (Network(_mixer, _IMAGE), "qdq U8 U8 channel"),
    "levit": (_timm("levit_128s", img_size=64), "qdq S8 S8 channel"),
    "densenet": (
        _timm("densenet121", growth_rate=8, block_config=(2, 3, 2)),
        "qoperator U8 S8 channel",
    ),
    "prelu": (_timm("resnet10t", act_layer="prelu"), "qdq U8 S8 channel"),
    "mobilenetv2": (_timm("mobilenetv2_050"), "qoperator U8 U8 tensor"),
    "resnet": (_timm("resnet10t"), "qoperator S8 S8 channel"),
    "byobnet": (_timm("test_byobnet"), "dynamic U8 U8 tensor"),
    "depth": (  # transposed convolutions, bilinear resizing
        _transformers(
            "DPTForDepthEstimation",
            "predicted_depth",
            _IMAGE,
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
    "segformer": (
        _transformers(
            "SegformerForSemanticSegmentation",
            "logits",
            _IMAGE,
            depths=[1, 1, 1, 1],
            hidden_sizes=[16, 32, 48, 64],
            decoder_hidden_size=32,
        ),
        "qdq S8 S8 channel",
    ),
    "speech": (
        _transformers(
            "Wav2Vec2Model",
            "last_hidden_state",
            image(1, 4000),
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
    ),
    "bert": (
        _transformers("BertModel", "last_hidden_state", _IDS, **_TEXT),
        "dynamic U8 S8 tensor",
    ),
    "llama": (
        _transformers("LlamaForCausalLM", "logits", _IDS, **_TEXT, use_cache=False),
        "dynamic U8 S8 channel",
    ),
    "albert": (
        _transformers("AlbertModel", "last_hidden_state", _IDS, **_TEXT, embedding_size=32),
        "qdq U8 S8 channel",
    ),
}


def main() -> None:
    """Write the networks that are named, all by default."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in sys.argv[2:] or NETWORKS:
        network, form = NETWORKS[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write(network, name, folder)
            real, output = folder / f"{name}.onnx", Path(sys.argv[1], f"{name}.onnx")
            wheel_process.quantise(str(real), str(output), folder / name, form)
        print(name, flush=True)


if __name__ == "__main__":
    main()
