#!/usr/bin/env python3
"""Runs a model that `tuna model build` wrote, with TVM's runtime alone: `python
examples/run_model.py model.so`.

The library holds code and weights. `model.so.json` beside it says what the inputs are; here they
are drawn at random, or read with `--input FILE.npy`, one for each input, in order. Nothing here
imports Tuna.

It runs on as many threads as the model is built for, or fewer where the affinity (`taskset`) or the
container's CPU quota allows fewer; `TVM_NUM_THREADS` overrides that.
"""

import argparse
import ctypes
import hashlib
import json
import math
import os
import statistics
import time
from pathlib import Path

import numpy as np

#: What a program needs to know of a library.
_KEYS = ("size_bytes", "sha256", "inputs", "target")


def drawn(entry, random):
    """An array for an input: integers are token ids and the like within its bounds, else ones."""
    if "bounds" in entry:
        low, high = entry["bounds"]
        return random.integers(low, high, entry["shape"], endpoint=True).astype(entry["dtype"])
    if np.dtype(entry["dtype"]).kind == "f":
        return random.standard_normal(entry["shape"]).astype(entry["dtype"])
    return np.ones(entry["shape"], entry["dtype"])


def text(path):
    """The text of a file, empty where it is absent."""
    return path.read_text() if path.is_file() else ""


def cpu_quota(groups=Path("/proc/self/cgroup"), mounts=Path("/proc/self/mountinfo")):
    """CPU seconds a second that the control groups (v2 or v1) allow; infinite without a limit."""
    limits = [math.inf]
    paths = [line.split(":", 2)[1:] for line in text(groups).splitlines()]
    for line in text(mounts).splitlines():
        top, point = map(Path, line.split()[3:5])
        kind, _, options = line.split(" - ", 1)[1].split(" ", 2)
        if kind != "cgroup2" and (kind != "cgroup" or "cpu" not in options.split(",")):
            continue
        controller = "cpu" if kind == "cgroup" else ""  # one hierarchy of v2 has all of them
        for path in (Path(path) for names, path in paths if controller in names.split(",")):
            group = path.relative_to(top) if path.is_relative_to(top) else Path()
            for folder in (point / each for each in (group, *group.parents)):
                v1 = (text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
                words = (text(folder / "cpu.max") or " ".join(v1)).split()
                if len(words) == 2 and words[0] not in ("max", "-1"):
                    limits.append(int(words[0]) / int(words[1]))
    return min(limits)


def set_threads(built_for):
    """Say how TVM's thread pool is to be; it reads this once, before the first run."""
    quota, cpus = cpu_quota(), len(os.sched_getaffinity(0))
    os.environ.setdefault("TVM_NUM_THREADS", str(int(max(1, min(built_for, cpus, quota)))))
    # Else TVM pins its threads to cores of its own choice, also to those that are not ours.
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    if quota < cpus:
        # Idle threads that spin use up the quota.
        os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "1000")


def missing_flags(needed, cpuinfo=Path("/proc/cpuinfo")):
    """The instructions that the library was compiled with and this CPU does not have; none where
    the system does not say what it has."""
    for line in text(cpuinfo).splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return sorted(set(needed) - set(flags.split()))
    return []


def use_large_pages():
    """Have Linux keep what this process has allocated so far, such as weights, in pages of 2 MB.

    The CPU finds them with fewer misses of its TLB. Linux before 6.1 does it in the background, by
    and by; where there are no such pages, nothing happens.
    """
    libc, page = ctypes.CDLL(None), 2 << 20
    for line in text(Path("/proc/self/maps")).splitlines():
        addresses, access, _, _, inode, *name = line.split(maxsplit=5)
        first, end = (int(address, 16) for address in addresses.split("-"))
        first, end = -(-first // page) * page, end // page * page
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]) and first < end:
            for advice in (14, 25):  # MADV_HUGEPAGE, MADV_COLLAPSE
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)


def facts_of(library):
    """What stands beside a library, which it has to be: one that is cut off, and any other file,
    would end the process while it is loaded."""
    beside = Path(f"{library}.json")
    for path in (library, beside):
        if not path.is_file():
            raise SystemExit(f"{path} is not there: `tuna model build -o {library}` writes both")
    try:
        facts = json.loads(beside.read_bytes())
        size_bytes, sha256, _, _ = (facts[key] for key in _KEYS)
    except (ValueError, TypeError, KeyError):
        raise SystemExit(
            f"{beside} is not what `tuna model build` writes, or is of an older Tuna: build again"
        ) from None
    data = library.read_bytes()
    if (len(data), hashlib.sha256(data).hexdigest()) != (size_bytes, sha256):
        raise SystemExit(
            f"{library} is not the library of {beside}, or is cut off: it has {len(data)} bytes,"
            f" and should have {size_bytes}; copy both again, or build again"
        )
    return facts


def main():
    """Load, run, print the outputs' shapes and first values, and how long a run takes."""
    parser = argparse.ArgumentParser(description="Run a model that `tuna model build` wrote.")
    parser.add_argument("library", type=Path)
    parser.add_argument("--input", type=Path, action="append", default=[], metavar="FILE.npy")
    given = parser.parse_args()
    facts = facts_of(given.library)
    missing = missing_flags(facts.get("cpu_flags", ()))
    if missing:  # the first of these instructions would end the process
        raise SystemExit(
            f"{given.library} is built for {facts['target'].get('mcpu', 'another CPU')}: this CPU"
            f" has no {', '.join(missing)}; build it here, or for a CPU like this one"
        )
    set_threads(facts["target"].get("num-cores", 1))  # before TVM is imported
    import tvm
    from tvm import relax

    wanted = facts["inputs"]
    if given.input:
        # runs no pickle
        arrays = [np.array(np.lib.format.open_memmap(path, mode="r")) for path in given.input]
    else:
        random = np.random.default_rng(0)
        arrays = [drawn(entry, random) for entry in wanted]
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(given.library)), tvm.cpu())
    use_large_pages()
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    answer = machine["main"](*tensors)
    for output in [answer] if hasattr(answer, "numpy") else answer:
        values = output.numpy()
        print(values.shape, values.dtype, values.reshape(-1)[:4])
    times_ms = []
    for _ in range(9):
        started = time.perf_counter()
        machine["main"](*tensors)
        times_ms.append(1e3 * (time.perf_counter() - started))
    print(f"{statistics.median(times_ms):.2f} ms a run, median of {len(times_ms)}")


if __name__ == "__main__":
    main()
