"""Networks of torchvision, timm and transformers as ONNX files, for benchmarks/networks.py.

`python -m benchmarks.network_exports FOLDER NAME ...`, in a checkout, writes FOLDER/NAME.onnx in
fp32 and FOLDER/NAME/0.npz to 3.npz, inputs by name; it needs torch, torchvision, timm, transformers
and onnxscript, and imports nothing of Tuna. Weights are random and have a seed; batch norms have
the statistics of a few inputs, so that the values are of the size that trained ones have.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

#: Inputs of a kind: a function of a generator of random numbers.
Maker = Callable[[Any], Any]
#: Inputs of a network: the first to run it on, all for the statistics of norms and to calibrate.
_CASES = 4
#: Weights that begin below it, such as those of ViT's head and ConvNeXt's scales, hide what is
#: before them until they are trained.
_SMALL = 1e-3


@dataclass(frozen=True)
class Network:
    """A network with random weights."""

    make: Callable[[], Any]  #: Returns the module
    inputs: Mapping[str, Maker]


class _Whole(nn.Module):  # type: ignore[misc]
    """A module of which some function of its inputs is computed."""

    def __init__(self, module: Any, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.run = module, run

    def forward(self, *inputs: Any) -> Any:
        return self.run(self.module, *inputs)


class _Recurrent(nn.Module):  # type: ignore[misc]
    """Ids or frames, two recurrent layers both ways, and a label for each step."""

    def __init__(self, kind: str, first: Any, width: int, labels: int) -> None:
        super().__init__()
        options = {"num_layers": 2, "bidirectional": True, "batch_first": True}
        self.first, self.labels = first, nn.Linear(512, labels)
        self.layers = getattr(nn, kind)(width, 256, **options)

    def forward(self, x: Any) -> Any:
        return self.labels(self.layers(self.first(x))[0])


def _twice(before: int, after: int, **norm: Any) -> Any:
    layers: list[Any] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)


class _UNet(nn.Module):  # type: ignore[misc]
    """Four levels, with transposed convolutions upwards."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 64, 128, 256, 512]
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(_twice(*pair) for pair in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs[:0:-1])
        self.join = nn.ModuleList(_twice(2 * a, a) for a, _ in pairs[:0:-1])
        self.head = nn.Conv2d(widths[1], 2, 1)

    def forward(self, x: Any) -> Any:
        levels = [self.down[0](x)]
        for layer in self.down[1:]:
            levels.append(layer(nn.functional.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([levels.pop(), up(x)], 1))
        return self.head(x)


class _Residual(nn.Module):  # type: ignore[misc]
    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return x + self.layers(x)


def _super_resolution() -> Any:
    """EDSR of eight blocks, three times as many pixels each way."""

    def conv(before: int, after: int) -> Any:
        return nn.Conv2d(before, after, 3, padding=1)

    blocks = [_Residual(conv(48, 48), nn.ReLU(), conv(48, 48)) for _ in range(8)]
    return nn.Sequential(conv(3, 48), _Residual(*blocks), conv(48, 27), nn.PixelShuffle(3))


def _image_decoder() -> Any:
    """The decoder of a latent image: group norms, SiLU, nearest neighbours, convolutions."""

    def normed(before: int, after: int) -> list[Any]:
        return [nn.GroupNorm(32, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1)]

    layers: list[Any] = [nn.Conv2d(4, 128, 3, padding=1)]
    for before, after in ((128, 128), (128, 64), (64, 32)):
        layers.append(_Residual(*normed(before, before), *normed(before, before)))
        layers += [nn.Upsample(scale_factor=2.0), nn.Conv2d(before, after, 3, padding=1)]
    return nn.Sequential(*layers, *normed(32, 3))


class _Tabular(nn.Module):  # type: ignore[misc]
    """Categories by embeddings and numbers, then dense layers, for many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(n, 16) for n in (12, 7, 365, 1000, 50, 31, 5, 200))
        self.norm = nn.BatchNorm1d(24)
        layers: list[Any] = []
        for before, after in ((152, 256), (256, 128), (128, 64)):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.BatchNorm1d(after)]
        self.dense = nn.Sequential(*layers, nn.Linear(64, 1), nn.Sigmoid())

    def forward(self, categories: Any, numbers: Any) -> Any:
        words = [table(categories[:, place]) for place, table in enumerate(self.embed)]
        return self.dense(torch.cat([*words, self.norm(numbers)], 1))


def _torchvision(name: str, field: str = "", **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from torchvision import models

        given = {"weights_backbone": None} if field else {}
        model = models.get_model(name, weights=None, **given, **options)
        return _Whole(model, lambda module, x: module(x)[field]) if field else model

    return make


def _detector() -> Any:
    """SSDLite: its features and heads, without the choice of boxes."""
    from torchvision.models import detection

    model = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)

    def run(module: Any, x: Any) -> Any:
        answers = module.head(list(module.backbone(x).values()))
        return answers["bbox_regression"], answers["cls_logits"]

    return _Whole(model, run)


def timm_model(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import timm

        return timm.create_model(name, pretrained=False, **options)

    return make


def transformers_model(
    name: str, run: Callable[..., Any], part: str = "", **options: Any
) -> Callable[[], Any]:
    """The model `name` by a configuration with these options, or a part of it."""

    def make() -> Any:
        import transformers

        model = getattr(transformers, name)
        module = model(model.config_class(**options))
        return _Whole(getattr(module, part) if part else module, run)

    return make


def hidden_state(module: Any, x: Any, mask: Any = None) -> Any:
    masked = {} if mask is None else {"attention_mask": mask}
    return module(x, **masked).last_hidden_state


def logits(module: Any, *inputs: Any) -> Any:
    return module(*inputs, use_cache=False).logits


def _segments(module: Any, x: Any) -> Any:
    return module(x).logits


def _step(module: Any, x: Any, *kept: Any) -> Any:
    """One step of a decoder with what it keeps of the steps before: keys and values by layer."""
    from transformers import DynamicCache

    cache = DynamicCache(list(zip(kept[::2], kept[1::2], strict=True)))
    answer = module(x, cache, use_cache=True)
    layers = answer.past_key_values.layers if "past_key_values" in answer else cache.layers
    return answer.logits, *(each for layer in layers for each in (layer.keys, layer.values))


def image(*shape: int) -> dict[str, Maker]:
    return {"x": lambda generator: torch.randn(shape, generator=generator)}


def token_ids(count: int, *shape: int) -> Maker:
    return lambda generator: torch.randint(0, count, shape, generator=generator)


def real_numbers(*shape: int) -> Maker:
    return lambda generator: torch.randn(shape, generator=generator)


def _mask(rows: int, columns: int) -> Maker:
    """Rows of several lengths."""

    def make(generator: Any) -> Any:
        lengths = torch.randint(columns // 2, columns + 1, (rows, 1), generator=generator)
        return (torch.arange(columns)[None] < lengths).to(torch.int64)

    return make


def text_sizes(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return dict(zip(names, (hidden, layers, heads, 4 * hidden), strict=True))


_KEPT: dict[str, Maker] = {
    f"{kind}{layer}": real_numbers(1, 12, 256, 64) for layer in range(12) for kind in ("k", "v")
}
_GPT2: dict[str, Any] = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 8000}
_LLAMA = {**text_sizes(512, 6, 8), "num_key_value_heads": 2, "vocab_size": 8000}
NETWORKS = {
    "efficientnet": Network(_torchvision("efficientnet_b0"), image(1, 3, 224, 224)),
    "mobilenetv3": Network(_torchvision("mobilenet_v3_large"), image(1, 3, 224, 224)),
    "resnet50_b8": Network(_torchvision("resnet50"), image(8, 3, 224, 224)),
    "resnext": Network(_torchvision("resnext50_32x4d"), image(1, 3, 224, 224)),
    "regnety": Network(timm_model("regnety_016"), image(1, 3, 224, 224)),
    "densenet": Network(_torchvision("densenet121"), image(1, 3, 224, 224)),
    "convnext": Network(_torchvision("convnext_tiny"), image(1, 3, 224, 224)),
    "unet": Network(_UNet, image(1, 3, 256, 256)),
    "deeplab": Network(
        _torchvision("deeplabv3_mobilenet_v3_large", "out"),
        image(1, 3, 320, 320),
    ),
    "segformer": Network(
        transformers_model("SegformerForSemanticSegmentation", _segments),
        image(1, 3, 256, 256),
    ),
    "ssdlite": Network(_detector, image(1, 3, 320, 320)),
    "super_resolution": Network(_super_resolution, image(1, 3, 96, 96)),
    "image_decoder": Network(_image_decoder, image(1, 4, 32, 32)),
    "video": Network(_torchvision("r3d_18", num_classes=400), image(1, 3, 8, 112, 112)),
    "swin": Network(_torchvision("swin_t"), image(1, 3, 224, 224)),
    "vit": Network(_torchvision("vit_b_16"), image(1, 3, 224, 224)),
    "mixer": Network(timm_model("mixer_s16_224"), image(1, 3, 224, 224)),
    "whisper": Network(
        transformers_model(
            "WhisperModel",
            hidden_state,
            "encoder",
            **{"d_model": 384, "encoder_layers": 4, "decoder_layers": 1, "vocab_size": 100},
            **{"encoder_attention_heads": 6, "encoder_ffn_dim": 1536, "pad_token_id": 0},
            **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
        ),
        image(1, 80, 3000),
    ),
    "wav2vec2": Network(
        transformers_model(
            "Wav2Vec2Model", hidden_state, **text_sizes(256, 4, 4), conv_dim=[256] * 7
        ),
        image(1, 16000),
    ),
    "bert": Network(
        transformers_model("BertModel", hidden_state, **text_sizes(768, 12, 12), vocab_size=8000),
        {"x": token_ids(8000, 1, 128)},
    ),
    "bert_masked": Network(
        transformers_model("BertModel", hidden_state, **text_sizes(384, 6, 12), vocab_size=8000),
        {"x": token_ids(8000, 8, 32), "mask": _mask(8, 32)},
    ),
    "t5": Network(
        transformers_model(
            "T5EncoderModel", hidden_state, vocab_size=8000, attn_implementation="eager"
        ),
        {"x": token_ids(8000, 1, 128)},
    ),
    "llama": Network(
        transformers_model("LlamaForCausalLM", logits, **_LLAMA),
        {"x": token_ids(8000, 1, 128)},
    ),
    "gpt2_step": Network(
        transformers_model("GPT2LMHeadModel", _step, **_GPT2),
        {"x": token_ids(8000, 1, 1), **_KEPT},
    ),
    "lstm": Network(
        lambda: _Recurrent("LSTM", nn.Embedding(8000, 128), 128, 20),
        {"x": token_ids(8000, 1, 64)},
    ),
    "gru": Network(
        lambda: _Recurrent("GRU", nn.Linear(80, 256), 256, 40),
        {"x": real_numbers(1, 200, 80)},
    ),
    "tabular": Network(
        _Tabular,
        {"categories": token_ids(5, 256, 8), "numbers": real_numbers(256, 24)},
    ),
}


def _drawn(network: Network, count: int) -> Sequence[dict[str, Any]]:
    """Inputs by name, so many times."""
    generator = torch.Generator().manual_seed(7)
    return [{name: make(generator) for name, make in network.inputs.items()} for _ in range(count)]


def _module(network: Network) -> Any:
    """The module, its batch norms with the statistics of a few inputs."""
    torch.manual_seed(0)
    np.random.seed(0)
    module = network.make().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not name.endswith("bias") and parameter.abs().max() < _SMALL:
                is_matrix = parameter.ndim in (2, 4)
                parameter.normal_(0, 0.02) if is_matrix else parameter.fill_(0.5)
    norms = [each for each in module.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = None
        norm.reset_running_stats()
        norm.train()
    if norms:
        cases = _drawn(network, _CASES)
        with torch.no_grad():
            module(*(torch.cat([case[name] for case in cases]) for name in network.inputs))
    return module.eval()


def write(network: Network, name: str, folder: Path) -> None:
    """Write the network as FOLDER/NAME.onnx and its inputs as FOLDER/NAME/*.npz."""
    inputs, cases = folder / name, _drawn(network, _CASES)
    inputs.mkdir(exist_ok=True)
    for place, case in enumerate(cases):
        np.savez(inputs / f"{place}.npz", **{key: each.numpy() for key, each in case.items()})
    torch.onnx.export(
        *(_module(network), tuple(cases[0].values()), folder / f"{name}.onnx"),
        input_names=list(network.inputs),
        dynamo=True,
        verbose=False,
        external_data=False,
    )


def main() -> None:
    """Write the networks that are named."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        write(NETWORKS[name], name, Path(sys.argv[1]))
        print(name, flush=True)


if __name__ == "__main__":
    main()
