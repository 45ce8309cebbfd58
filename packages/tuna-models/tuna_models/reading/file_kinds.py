"""Kinds of files that are no models Tuna imports, by their first bytes, with advice on each."""

from __future__ import annotations

import contextlib
import io
import json
import re
import zipfile
from typing import IO

from tuna.errors import BadInput

#: Bytes at the beginning of a file that are looked at
_HEAD_BYTES = 4096
#: How a zip archive begins: a program of `torch.export` is one
ZIP = b"PK\x03\x04"
_EXPORT = "export it to ONNX with the framework that made it"
#: What to do about a file that is not whole
AGAIN = "write it or fetch it again, and compare its size with that of its source"
_UNPACK = "unpack it, and name the model inside"
_TO_ONNX = "export the network: torch.onnx.export(model, inputs, 'model.onnx', dynamo=True)"
#: Patterns of the first bytes; what such a file is, and what to do.
_KINDS = tuple(
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), what, advice)
    for pattern, what, advice in (
        (
            rb"version https://git-lfs\.github\.com/",
            "a pointer of Git LFS, not the file that it stands for",
            "fetch the file: git lfs pull",
        ),
        (rb"oid sha256:", "a part of a pointer of Git LFS", "fetch the file: git lfs pull"),
        (
            rb"\s*(\xef\xbb\xbf)?\s*(<!doctype html|<html|<head|<!--)",
            "a page of HTML",
            "the download went wrong: fetch the file itself, not the page about it",
        ),
        (
            rb"\s*<\?xml.{0,400}?<net\b|\s*<net\b",
            "a network of OpenVINO",
            "Tuna reads the ONNX file that it was made of",
        ),
        (rb"\s*<\?xml|\s*<Error>", "a document of XML", "check where it was downloaded from"),
        (
            rb"\x08\x01\x12.*?(serve|saved_model)|\x0a.{1,60}\x12\x0bPlaceholder",
            "a model of TensorFlow",
            "convert it with tf2onnx",
        ),
        (rb".{4}TFL3", "a model of TFLite", "convert it with tf2onnx"),
        (rb"GGUF|ggjt|lmgg", "a model of GGUF", "Tuna reads ONNX and torch.export alone"),
        (
            rb".{8}\{\s*\"",
            "weights of safetensors without a graph",
            _TO_ONNX,
        ),
        (rb"\x80[\x02-\x05]", "a pickle, such as an old checkpoint of PyTorch", _TO_ONNX),
        (rb"\x89HDF\r\n", "a file of HDF5, such as weights of Keras", "convert it with tf2onnx"),
        (rb"\x93NUMPY", "an array of NumPy", _EXPORT),
        (rb"\x1f\x8b", "a file compressed by gzip", _UNPACK),
        (rb"\x28\xb5\x2f\xfd", "a file compressed by zstd", _UNPACK),
        (rb"BZh", "a file compressed by bzip2", _UNPACK),
        (rb"\xfd7zXZ", "a file compressed by xz", _UNPACK),
        (rb".{257}ustar", "a tar archive", _UNPACK),
        (rb"7z\xbc\xaf|Rar!", "a 7z or RAR archive", _UNPACK),
        (rb"\x7fELF", "a compiled program or library", "name the model that it was built of"),
        (rb"7767517\s", "a network of ncnn", _EXPORT),
        (rb".{4}ORTM", "a model in onnxruntime's own format", "name the ONNX file it was made of"),
        (
            rb"\s*<?\s*(ir_version|producer_name|graph \{|opset_import)",
            "ONNX as text",
            "write it as protobuf: onnx.save(onnx.load(path, format='textproto'), 'model.onnx')",
        ),
        (rb"\s*[{\[][\s\"]", "a document of JSON", "check where it was downloaded from"),
        (rb"%PDF|\x89PNG|\xff\xd8\xff|GIF8|#!", "an image, a document or a script", _EXPORT),
        (rb"\s*(graph|model) *=|\s*(import|from|def|class) \w", "source code", _EXPORT),
    )
)
#: A file that programs of `torch.export` have in their archives
_PROGRAM = r"(^|/)(serialized_exported_program\.json|models/[^/]+\.json)$"
#: Errors of `zipfile` for files that are no whole archives
_NO_ARCHIVE = (zipfile.BadZipFile, ValueError, NotImplementedError, OSError)
#: The number of the format's version, with which every exporter begins an ONNX file
_ONNX = re.compile(rb"\x08[\x01-\x1f][\x12\x1a\x22\x2a\x32\x38\x3a\x42]")


def is_program(data: bytes) -> bool:
    """Whether a zip archive may be a program of `torch.export`, of any version of it."""
    with contextlib.suppress(*_NO_ARCHIVE):
        names = zipfile.ZipFile(io.BytesIO(data)).namelist()
        return any(re.search(_PROGRAM, name) for name in names)
    return False


def refusal(name: str, file: IO[bytes], *, inside: bool = True) -> BadInput:
    """The error for a file that no model could be read from; without `inside` archives are not
    looked into, which takes memory."""
    what, advice = _kind(file, inside)
    return BadInput(f"{name} {what}.", hint=advice)


def _kind(file: IO[bytes], inside: bool) -> tuple[str, str]:
    """Return the rest of a sentence that begins with such a file's name, and advice."""
    file.seek(0)
    head = file.read(_HEAD_BYTES)
    if not head:
        return "is empty", "write it or fetch it again"
    if head.startswith(ZIP):
        return _archive(file) if inside else ("is a zip archive, not an ONNX model", _UNPACK)
    for pattern, what, advice in _KINDS:
        if pattern.match(head):
            return f"is {what}", advice
    if _ONNX.match(head):
        return "is not a whole ONNX model: it is cut off or damaged", AGAIN
    if head.count(0) == len(head):
        return "is not an ONNX model: it begins with zeros alone", AGAIN
    return "is not an ONNX model, nor another file that Tuna knows", AGAIN


def _archive(file: IO[bytes]) -> tuple[str, str]:
    try:
        names = zipfile.ZipFile(file).namelist()
    except _NO_ARCHIVE:
        return "is a zip archive that is cut off or damaged", AGAIN
    ends = {name.partition("/")[2] or name for name in names}
    if any(end.startswith("code/") for end in ends) and "data.pkl" in ends:
        return "is a program of TorchScript", _TO_ONNX
    if "data.pkl" in ends:
        return "is a checkpoint of PyTorch, which has weights and no graph", _TO_ONNX
    if names and all(name.endswith(".npy") for name in names):
        return "is an archive of NumPy's arrays", _EXPORT
    if "model.weights.h5" in names:
        return "is a model of Keras", "convert it with tf2onnx"
    inside = [name for name in names if name.lower().endswith((".onnx", ".pt2"))]
    if inside:
        return f"is a zip archive with {json.dumps(inside[0])} in it", _UNPACK
    return "is a zip archive that is no program of torch.export", "write one: torch.export.save"
