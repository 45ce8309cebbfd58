"""The service by HTTP alone: a model submitted for an emulated board, and for this machine.

The owner starts a tracker, the emulated board of scripts/board, a session of that board, `tuna
serve`, a gateway, a compile worker that joins it, and a worker that measures on the board. From
then on a visitor with a token for submissions speaks HTTP and nothing else: it submits a small
residual network, watches it, takes the answer away, and runs it on the board. Again, it is known;
another model with the same tasks has none of them tuned. On this machine it is tuned in an empty
database, and in another one for 1.2 times of the latency that was found: that ends early.

With `--kill-board N` that many models with the same tasks follow, and the board is killed (-9)
while each is checked on it; `--board-only` leaves this machine out.

With `--by-command MODEL` (of examples/make_models.py) that alone: it is tuned by `tuna tune` and by
a request, each in an empty database and for the same minutes, and both are timed in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Outcome, command_line
from tests.private_servers import free_port, listens, wait_until

_ROOT = Path(__file__).resolve().parents[1]
_KEY = "emulated"
#: Limits: seconds until what is known is answered, error on the board, and the whole.
_KNOWN_S, _ERROR, _WHOLE_S = 1.0, 1e-3, 1200.0
_FACTOR = 1.2
#: Limit of the time of a model by a request, relative to that by command.
_BY_COMMAND = 1.05


def main() -> int:
    """Run it."""
    parser = command_line(__doc__)
    parser.add_argument("--size", type=int, default=32, help="rows and columns of an image")
    parser.add_argument("--minutes", type=float, default=4.0, help="of tuning, each time")
    parser.add_argument("--no-board", action="store_true", help="this machine alone")
    parser.add_argument("--board-only", action="store_true", help="the board alone")
    parser.add_argument("--kill-board", type=int, default=0, metavar="N", help="times")
    parser.add_argument("--by-command", metavar="MODEL", help="against `tuna tune`, that alone")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tuna-service-") as temporary:
        run = _Run(Path(temporary), options.size, options.minutes)
        with contextlib.closing(run):
            if options.by_command:
                ratio = {"by_request_to_by_command": run.versus_command(options.by_command)}
                limits = dict.fromkeys(ratio, _BY_COMMAND)
                return Outcome("service", ratio, limits=limits).print()
            figures: dict[str, float] = {}
            if not options.no_board:
                figures |= run.elsewhere(options.kill_board)
            if not options.board_only:
                figures |= run.here()
    figures["seconds"] = time.monotonic() - began
    limits = {"seconds": _WHOLE_S + 60 * options.kill_board}
    budget = dict[str, float]()
    if not options.board_only:
        limits |= {"here_known_s": _KNOWN_S, "here_second_trials": 0.0}
        budget |= {"here_target_met": 1.0}
    if not options.no_board:
        limits |= {"board_known_s": _KNOWN_S, "board_error": _ERROR, "board_second_trials": 0.0}
    if options.kill_board:
        limits["stored_twice"] = 0.0
    outcome = Outcome("service", figures, limits=limits, budget=budget)
    return outcome.print()


class Visitor:
    """Somebody with a token, who speaks HTTP."""

    def __init__(self, address: str, token: str) -> None:
        self._host = address.partition("//")[2]
        self._headers = {"authorization": f"Bearer {token}"}

    def get(self, path: str) -> bytes:
        """Return what is there."""
        return self._ask("GET", path)

    def submit(self, path: Path, **fields: object) -> dict[str, Any]:
        """Submit a file; return the request."""
        boundary = uuid.uuid4().hex
        head = f"--{boundary}\r\nContent-Disposition: form-data; name="
        parts = [f'{head}"{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()]
        parts.append(f'{head}"file"; filename="{path.name}"\r\n\r\n')
        body = "".join(parts).encode() + path.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
        kind = {"content-type": f"multipart/form-data; boundary={boundary}"}
        found: dict[str, Any] = json.loads(self._ask("POST", "/v1/requests", body, kind))
        return found

    def ended(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Watch a request by its events; return it once it is over."""
        last = ""
        for line in self._lines(f"/v1/requests/{request['id']}/events"):
            if line.startswith(b"data: {"):
                found: dict[str, Any] = json.loads(line[6:])
                shown = f"{found['state']} {found['progress']}"
                if shown != last:
                    last = shown
                    _say(f"  request {found['id']}: {shown}")
                if found["ended_at"] is not None:
                    if found["state"] not in ("built", "known"):
                        raise SystemExit(f"{found['state']}: {found['message']}")
                    return found
        raise SystemExit("the events ended")

    def _lines(self, path: str) -> Iterator[bytes]:
        with contextlib.closing(self._connection()) as connection:
            connection.request("GET", path, headers=self._headers)
            with connection.getresponse() as answer:
                yield from answer

    def _ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> bytes:
        with contextlib.closing(self._connection()) as connection:
            connection.request(method, path, body, {**self._headers, **(headers or {})})
            with connection.getresponse() as answer:
                found = answer.read()
        if answer.status >= 400:
            raise SystemExit(f"{answer.status}: {found.decode()}")
        return found

    def _connection(self) -> HTTPConnection:
        return HTTPConnection(self._host, timeout=60)


class _Run:
    """The processes of an owner, and what a visitor does."""

    def __init__(self, folder: Path, size: int, minutes: float) -> None:
        self._folder, self._size, self._minutes = folder, size, minutes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = (folder / "log").open("ab")

    def elsewhere(self, kills: int) -> dict[str, float]:
        """Submit for the emulated board, and kill it so often."""
        tracker, port = free_port(), free_port()
        where = f"127.0.0.1:{tracker}"
        words = ["--host", "127.0.0.1", "--port", str(tracker), "--port-end", str(tracker + 1)]
        self._start({}, "-m", "tvm.exec.rpc_tracker", *words)
        board = str(_ROOT / "scripts" / "board")
        serving = [board, "aarch64", "--tracker", where, "--key", _KEY, "--port", str(port)]
        its_parent = self._start_server(port, 600, {}, *serving).pid
        home = {"TUNA_HOME": str(self._folder / "board")}
        at_board = ["--tvm-tracker", where, "--device-key", _KEY]
        _say(self._tuna(home, "init-session", "tvm", "-l", "my board", *at_board))
        gateway = free_port()
        self._start_server(gateway, 120, home, "-m", "tuna", "gateway", "--port", str(gateway))
        line = self._tuna(home, "token", "create", "--role", "compile").strip().splitlines()[-1]
        joined = {"TUNA_HOME": str(self._folder / "joined"), "TUNA_JOIN": line}
        self._start(joined, "-m", "tuna", "worker", "compile")
        self._start(home, "-m", "tuna", "worker", "eval", *at_board)
        asked = {"device": "qemu-aarch64", "untuned": "true"}
        visitor, figures, answer = self._served(home, "board", **asked)
        run = [board, "aarch64", "--run", str(_ROOT / "examples" / "run_model.py"), str(answer)]
        printed = subprocess.run([sys.executable, *run], capture_output=True, text=True, check=True)
        _say(f"on the board: {printed.stdout.strip()}")
        if kills:
            for number in range(kills):
                self._killed(visitor, its_parent, number, **asked)
            figures |= _attempts(self._folder / "board")
        self.close()
        return figures

    def _killed(self, visitor: Visitor, board: int, number: int, **asked: object) -> None:
        """Submit another model, and kill the board while that is checked and timed on it."""
        submitted = visitor.submit(self._model(2 + number), name=f"killed-{number}", **asked)
        wait_until(lambda: _evaluating(self._folder / "board"), 300, "a check on the board")
        time.sleep(0.4 * number)
        checked = _evaluating(self._folder / "board")
        for server in psutil.Process(board).children():
            os.killpg(server.pid, signal.SIGKILL)
        _say(f"killed, {checked} on it; {visitor.ended(submitted)['state']}")

    def here(self) -> dict[str, float]:
        """Submit for this machine: in an empty database, then in another one for a wanted time."""
        home = {"TUNA_HOME": str(self._folder / "here")}
        _, figures, _ = self._served(home, "here")
        target_ms = _FACTOR * figures["here_ms"]
        visitor = self._visitor({"TUNA_HOME": str(self._folder / "again")})
        asked = {"name": "residual", "minutes": self._minutes, "target_ms": target_ms}
        built = visitor.ended(visitor.submit(self._model(0), **asked))
        _say(f"for {target_ms:.3f} ms: {built['progress']} {built['message']}")
        self.close()
        return figures | {
            "here_target_ms": target_ms,
            "here_target_met": float(built["progress"]["time_ms"] <= target_ms),
            "here_target_trials": built["progress"]["trials"],
        }

    def versus_command(self, name: str) -> float:
        """Tune a model by command and by a request; return the ratio of their times in turn."""
        model, mine = self._made(name, "-o", f"{name}.onnx"), self._folder / "by-command.so"
        minutes = ["--minutes", str(self._minutes), "-o", str(mine)]
        self._tuna({"TUNA_HOME": str(self._folder / "command")}, "tune", str(model), *minutes)
        visitor = self._visitor({"TUNA_HOME": str(self._folder / "request")})
        asked = visitor.submit(model, name=name, minutes=self._minutes)
        theirs = self._taken(visitor, visitor.ended(asked), "request") / f"{name}.so"
        if theirs.read_bytes() == mine.read_bytes():
            return 1.0
        words = ["benchmark-model", str(mine), "--local", "--against", str(theirs), "--json"]
        _, found = json.loads(self._tuna({"TUNA_HOME": str(self._folder / "command")}, *words))
        _say(json.dumps(found))
        return float(found["ratio"])

    def _served(
        self, home: Mapping[str, str], name: str, **asked: object
    ) -> tuple[Visitor, dict[str, float], Path]:
        """Submit a model, again, and another with the same tasks; return the visitor, figures and
        the built model."""
        visitor, fields = self._visitor(home), {"minutes": self._minutes, **asked}
        first = visitor.submit(self._model(0), name="residual", **fields)
        built = visitor.ended(first)
        began = time.monotonic()
        again = visitor.submit(self._model(0), name="residual", **fields)
        known_s = time.monotonic() - began
        assert again["state"] == "known", again
        second = visitor.ended(visitor.submit(self._model(1), name="second", **fields))
        assert second["state"] == "known", second
        folder = self._taken(visitor, built, name)
        progress = built["progress"]
        figures = {
            "ms": progress["time_ms"],
            "error": max(progress["errors"].values()),
            "trials": progress["trials"],
            "known_s": known_s,
            "known_trials": again["progress"]["trials"],
            "second_trials": second["progress"]["trials"],
        }
        if "untuned" in asked:
            figures |= {key: progress[key] for key in ("untuned_ms", "in_turn_ms")}
        named = {f"{name}_{key}": value for key, value in figures.items()}
        return visitor, named, folder / "residual.so"

    def _taken(self, visitor: Visitor, built: Mapping[str, Any], name: str) -> Path:
        """Download the files of a request; return their folder."""
        folder = self._folder / f"answer-{name}"
        folder.mkdir()
        for file in built["files"]:
            path = f"/v1/requests/{built['id']}/result?file={file}"
            (folder / file).write_bytes(visitor.get(path))
        return folder

    def _visitor(self, home: Mapping[str, str]) -> Visitor:
        """Start a service; return a visitor with a token for submissions."""
        serve = self._start(home, "-m", "tuna", "serve", "--listen", "127.0.0.1:0", read=True)
        assert serve.stdout is not None
        address = serve.stdout.readline().decode().partition("/login")[0]
        made = self._tuna(home, "token", "create", "--role", "submit")
        token = re.search(r"[0-9a-f]{12}\.[\w-]+", made)
        assert token is not None, made
        return Visitor(address, token[0])

    def _model(self, seed: int) -> Path:
        words = ["--size", str(self._size), "--seed", str(seed)]
        return self._made("residual", *words, "-o", f"residual-{seed}.onnx")

    def _made(self, model: str, *words: str) -> Path:
        make = [sys.executable, str(_ROOT / "examples" / "make_models.py"), model, *words]
        subprocess.run(make, check=True, stdout=sys.stderr, cwd=self._folder)
        return self._folder / words[-1]

    def _tuna(self, env: Mapping[str, str], *words: str) -> str:
        command = [sys.executable, "-m", "tuna", *words]
        done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        return done.stdout

    def _start(
        self, env: Mapping[str, str], *words: str, read: bool = False
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, "TVM_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE if read else self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def _start_server(
        self, port: int, seconds: float, env: Mapping[str, str], *words: str
    ) -> subprocess.Popen[bytes]:
        """Start what listens on a port, and wait for that."""
        server, what = self._start(env, *words), " ".join(words)
        wait_until(lambda: listens(("127.0.0.1", port)) or server.poll() is not None, seconds, what)
        if server.poll() is not None:
            said = Path(self._log.name).read_text(errors="replace")
            raise SystemExit(f"{what} ended:\n{said[-2000:]}")
        return server

    def close(self) -> None:
        """End all that was started."""
        for process in reversed(self._processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()


def _evaluating(home: Path) -> int:
    """Return how many jobs are checked or timed now."""
    with contextlib.closing(sqlite3.connect(home / "tuna.sqlite")) as connection:
        query = "SELECT count(*) FROM job WHERE state = 'evaluating'"
        return int(connection.execute(query).fetchone()[0])


def _attempts(home: Path) -> dict[str, float]:
    """Return how many attempts of a home failed, and how many steps of jobs have two results."""
    with contextlib.closing(sqlite3.connect(home / "tuna.sqlite")) as connection:
        (failed,) = connection.execute("SELECT count(*) FROM step_result WHERE NOT ok").fetchone()
        query = "SELECT 1 FROM step_result WHERE ok GROUP BY job_id, step HAVING count(*) > 1"
        twice = connection.execute(query).fetchall()
    return {"attempts_failed": failed, "stored_twice": len(twice)}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TimeoutError as error:
        sys.exit(str(error))
