"""A cache of 100,000 entries of 10 KB, asked over HTTP.

`--parts get` reads entries on 8 connections at a time, `batch` eight at once; `put` stores new ones
on 8 connections; `race` lets 1,000 clients put different bytes to one key at the same time. Times
are those of the client, on the same cores; on a busy machine look at the CPU time of the service
(`_cpu_ms`).
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Outcome, command_line
from benchmarks.serve import Service, serving, timed
from benchmarks.servers import home

_PARTS = ("get", "batch", "put", "race")
_BYTES = 10_000
_PER_KEY = 8  #: files of a key
_CLIENTS = 1000
LIMITS = {"get_p99_ms": 30.0, "race_winners": 1.0}
BUDGET = {"get_per_s": 300.0, "race_winners": 1.0, "race_told": float(_CLIENTS)}


def main() -> int:
    """Command line; `--entries`: of the cache; `--repeats`: requests of a part."""
    parser = command_line(__doc__, entries=100_000, repeats=5000)
    parser.add_argument("--db", choices=("sqlite", "mariadb"), default="sqlite")
    parser.add_argument("--parts", default=",".join(_PARTS), help="default: %(default)s")
    options = parser.parse_args()
    with home(options.db):
        return _measure(options)


def _measure(options: Any) -> int:
    from tuna import api
    from tuna.db.database import upgrade
    from tuna.db.engine import make_engine
    from tuna.settings import get_settings

    upgrade(make_engine(get_settings().sql_url))
    line = api.create_space_token("bench", 86_400.0)
    _say("filling the cache")
    fill(line.partition("#")[2].partition(".")[0], options.entries)
    figures = {"entries": float(options.entries)}
    parts: dict[str, Callable[[Service, Any], dict[str, float]]] = {
        "get": _get,
        "batch": _batch,
        "put": _put,
        "race": _race,
    }
    with serving() as service:
        token = ".".join(line.partition("#")[2].split(".")[:2])
        mine = Service(service.host, {"Authorization": f"Bearer {token}"}, service.process)
        for name in options.parts.split(","):
            measured = parts[name](mine, options)
            _say(json.dumps({key: round(value, 4) for key, value in measured.items()}))
            figures |= measured
    limits = {name: most for name, most in LIMITS.items() if name in figures}
    budget = {name: least for name, least in BUDGET.items() if name in figures}
    return Outcome(f"cache {options.db}", figures, budget=budget, limits=limits).print()


def fill(token_id: str, entries: int) -> None:
    """Store entries with bytes of their own."""
    from tuna.api.services import artifacts_of_models
    from tuna.db.bulk import insert
    from tuna.db.database import open_database
    from tuna.db.engine import writing
    from tuna.db.models import CacheEntryRow
    from tuna.db.types import utc_now

    artifacts, made, rows = artifacts_of_models(), random.Random(7), []  # noqa: S311
    now = utc_now()
    for number in range(entries):
        row = {
            "space": "bench",
            "key": f"K{number // _PER_KEY}",
            "file": f"f{number % _PER_KEY}",
            "digest": artifacts.put(made.randbytes(_BYTES)),
            "size_bytes": _BYTES,
            "token_id": token_id,
            "refused": 0,
            "created_at": now,
            "used_at": now,
        }
        rows.append(row)
    with writing(open_database()) as connection:
        insert(connection, CacheEntryRow, rows)


def _get(service: Service, options: Any) -> dict[str, float]:
    def path() -> str:
        number = random.randrange(options.entries)  # noqa: S311
        return f"/v1/cache/bench/K{number // _PER_KEY}/f{number % _PER_KEY}"

    return timed("get", service, options.repeats, lambda _: service.get(path())[0])


def _batch(service: Service, options: Any) -> dict[str, float]:
    files = "&".join(f"file=f{number}" for number in range(_PER_KEY))

    def ask(_: int) -> float:
        key = random.randrange(options.entries // _PER_KEY)  # noqa: S311
        seconds, content = service.get(f"/v1/cache/bench/K{key}?{files}")
        if len(content) < _PER_KEY * _BYTES:
            raise SystemExit(f"K{key} has {len(content)} bytes")
        return seconds

    return timed("batch", service, options.repeats // 5, ask)


def _put(service: Service, options: Any) -> dict[str, float]:
    def put(number: int) -> float:
        started = time.perf_counter()
        status = _put_one(service, f"new{number}", b"%10d" % number * (_BYTES // 10))
        if status != 201:
            raise SystemExit(f"PUT: {status}")
        return time.perf_counter() - started

    return timed("put", service, options.repeats // 10, put)


def _put_one(service: Service, key: str, data: bytes) -> int:
    connection = http.client.HTTPConnection(service.host, timeout=300)
    connection.request("PUT", f"/v1/cache/bench/{key}/f", data, service.headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def _race(service: Service, _: Any) -> dict[str, float]:
    ready, told = threading.Barrier(_CLIENTS), Counter[int]()

    def put(number: int) -> None:
        ready.wait()
        told[_put_one(service, "raced", b"%d" % number * 2500)] += 1

    started = time.perf_counter()
    threads = [threading.Thread(target=put, args=(number,)) for number in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    return {
        "race_winners": float(told[201]),
        "race_told": float(told[201] + told[409]),
        "race_s": seconds,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
