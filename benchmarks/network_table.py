"""The networks of benchmarks/networks.py by name: for which operators each is there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """A network, and how it is quantised."""

    kind: str  #: Operators for which it is here
    quick: bool = False  #: True: one of `--quick`
    dynamic: bool = False  #: True: by `quantize_dynamic`, else by `quantize_static`


#: Random weights, out of `network_exports.py`.
EXPORTED = {
    "efficientnet": Network("gates", quick=True),
    "mobilenetv3": Network("gates, hard swish", quick=True),
    "resnet50_b8": Network("a batch of images"),
    "resnext": Network("groups"),
    "regnety": Network("groups and gates"),
    "densenet": Network("Concat"),
    "convnext": Network("7 × 7 depthwise"),
    "unet": Network("transposed convolutions", quick=True),
    "deeplab": Network("dilated convolutions"),
    "segformer": Network("reduced attention"),
    "ssdlite": Network("detection heads"),
    "super_resolution": Network("PixelShuffle", quick=True),
    "image_decoder": Network("group norms, nearest neighbours"),
    "video": Network("3-D convolutions"),
    "swin": Network("windows", quick=True),
    "vit": Network("attention"),
    "mixer": Network("products of planes"),
    "whisper": Network("long attention", quick=True, dynamic=True),
    "wav2vec2": Network("sound, 1-D convolutions"),
    "bert": Network("text", quick=True, dynamic=True),
    "bert_masked": Network("a batch of texts with masks", dynamic=True),
    "t5": Network("relative positions", dynamic=True),
    "llama": Network("rotary positions, grouped heads", quick=True, dynamic=True),
    "gpt2_step": Network("a decoder's step with a cache", dynamic=True),
    "lstm": Network("LSTM both ways", quick=True, dynamic=True),
    "gru": Network("GRU both ways"),
    "tabular": Network("embeddings and numbers", dynamic=True),
}
#: Trained weights, out of `wheel_models.py`.
TRAINED = {
    "ocr4_detector": Network("text detector", quick=True),
    "ocr4_recogniser": Network("text recogniser"),
    "nudenet": Network("YOLOv8", quick=True),
    "layout": Network("PicoDet"),
    "orientation": Network("PP-LCNet"),
    "pnet": Network("PReLU, few channels"),
    "rnet": Network("PReLU, a batch", quick=True),
    "onet": Network("PReLU, a batch"),
    "silero_sequence": Network("LSTM of sound"),
    "dnsmos": Network("spectrum of sound"),
    "dns_p808": Network("spectrum of sound"),
    "basic_pitch": Network("transcription of sound"),
    "aecmos": Network("GRU of sound"),
    "magika": Network("bytes", dynamic=True),
}
NETWORKS = EXPORTED | TRAINED
