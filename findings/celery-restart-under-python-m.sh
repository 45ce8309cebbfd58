#!/usr/bin/env bash
# Celery 5.7.0: a worker without a terminal takes SIGHUP for "restart": it ends its pool and executes
# sys.argv again with the same Python. Started as `python -m celery`, argv[0] is the file
# celery/__main__.py, which imports relatively: the new program ends with ImportError and exit code 1,
# so a worker of a script, cron or ssh session dies of what is documented to renew it, and does not
# end warmly as on SIGTERM. Started as `celery` the same signal restarts it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install celery==5.7.0
cat >"$folder/app.py" <<'PY'
from celery import Celery
app = Celery("app", broker="memory://")
PY
cd "$folder"
hup() { # the exit code and the last line of a worker 20 s after SIGHUP, which may have ended
  C_FORCE_ROOT=1 timeout --foreground 60 "$@" -A app worker -P solo --without-mingle --without-gossip -l INFO </dev/null >"$folder/log" 2>&1 &
  for _ in $(seq 300); do if grep -q "ready\." "$folder/log"; then break; fi; sleep 0.1; done
  pkill -HUP -P $! || kill -HUP $!
  for _ in $(seq 200); do
    kill -0 $! 2>/dev/null || { wait $! && code=0 || code=$?; echo "ends with $code: $(tail -n 1 "$folder/log")"; return; }
    if [ "$(grep -c "ready\." "$folder/log")" -gt 1 ]; then break; fi
    sleep 0.1
  done
  pkill -TERM -P $! || true
  wait $! || true
  echo "ready $(grep -c "ready\." "$folder/log") times"
}
module=$(hup "$folder/venv/bin/python" -m celery)
script=$(hup "$folder/venv/bin/celery")
"$folder/venv/bin/python" -c 'import celery; print("celery", celery.__version__)'
echo "python -m celery: $module"
echo "celery:           $script"
[[ $module == "ends with 1: ImportError: attempted relative import with no known parent package" && $script == "ready 2 times" ]] ||
  { echo "the behaviour has changed" >&2; exit 1; }
