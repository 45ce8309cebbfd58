"""Files that are something else under the name of a model, and places that are not plain files."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.drills.healthy import network
from benchmarks.drills.zoo import FILE, Specimen, kind


def _of(data: bytes, *says: str) -> Specimen:
    return Specimen({FILE: data}, says)


@kind
def git_lfs_pointers(rng: random.Random) -> Specimen:
    digest, size = rng.randbytes(32).hex(), rng.randrange(1 << 30)
    end = rng.choice(["\n", "\r\n"])
    lines = ["version https://git-lfs.github.com/spec/v1", f"oid sha256:{digest}", f"size {size}"]
    return _of("".join(line + end for line in lines).encode(), "LFS")


@kind
def web_pages(rng: random.Random) -> Specimen:
    begin = rng.choice(
        ["<!DOCTYPE html>", "\n\n  <html>", "<HTML lang=en>", "\ufeff<!doctype html>"]
    )
    return _of(f"{begin}<head><title>404</title></head><body>x</body></html>".encode(), "HTML")


@kind
def archives(rng: random.Random) -> Specimen:
    stream, data = io.BytesIO(), network(rng).SerializeToString()
    if rng.random() < 0.5:
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("model.onnx", data)
        return _of(stream.getvalue(), "zip")
    with tarfile.open(fileobj=stream, mode="w") as archive:
        entry = tarfile.TarInfo("model.onnx")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return _of(stream.getvalue(), "tar|not an ONNX model")


@kind
def compressed_models(rng: random.Random) -> Specimen:
    return _of(gzip.compress(network(rng).SerializeToString(), mtime=0), "gzip|compressed")


@kind
def pickles(rng: random.Random) -> Specimen:
    # a dictionary with a number, as pickletools.dis shows it
    data = bytes([0x80, rng.choice([2, 4, 5])]) + b"}X\x07\0\0\0weightsG"
    data += struct.pack(">d", rng.random()) + b"s."
    return _of(data, "pickle")


@kind
def texts(rng: random.Random) -> Specimen:
    words = [
        b"hello\n", b"{}", json.dumps({"format": "onnx", "nodes": [1, 2]}).encode(),
        b"conv -n 1 -c 3 -H 224 -W 224 -k 64 -y 7 -x 7\n", "model\n".encode("utf-16"),
        b"#!/bin/sh\nexit 0\n", b"ir_version: 8\ngraph {\n  name: \"x\"\n}\n",
    ]  # fmt: skip
    return _of(rng.choice(words), "not an ONNX model|text|JSON|script")


@kind
def other_formats(rng: random.Random) -> Specimen:
    begin = rng.choice(
        [b"\x89PNG\r\n\x1a\n", b"GGUF\x03\0\0\0", b"\x7fELF\x02\x01\x01", b"\x93NUMPY\x01\0",
         b"\x1c\0\0\0TFL3", b"\x89HDF\r\n\x1a\n", b"\x40\0\0\0\0\0\0\0{\"a\":", b"ORTM"]
    )  # fmt: skip
    return _of(
        begin + rng.randbytes(300),
        "not an ONNX model|PNG|ELF|HDF|TensorFlow|TFLite|GGUF|NumPy|weights|image|program",
    )


@kind
def noise(rng: random.Random) -> Specimen:
    data = rng.choice([rng.randbytes(rng.randrange(1, 4000)), bytes(1000), b"\xff" * 1000])
    return _of(data, "not an ONNX model")


@kind
def empty_files(rng: random.Random) -> Specimen:
    return _of(b"", "empty")


def _placed(*says: str, make: Callable[[Path], None]) -> Specimen:
    return Specimen({}, says, prepare=lambda folder: make(folder / FILE))


@kind
def folders(rng: random.Random) -> Specimen:
    return _placed("directory|folder|plain file", make=Path.mkdir)


@kind
def pipes_without_a_writer(rng: random.Random) -> Specimen:
    return _placed("plain file", make=os.mkfifo)


@kind
def links_to_devices(rng: random.Random) -> Specimen:
    device = rng.choice(["/dev/zero", "/dev/urandom", "/dev/null", "/dev/full"])
    return _placed("plain file", make=lambda place: place.symlink_to(device))


@kind
def links_to_nothing(rng: random.Random) -> Specimen:
    target = rng.choice(["absent.onnx", FILE, "/proc/self/mem/x"])
    return _placed("cannot be read|plain file", make=lambda place: place.symlink_to(target))
