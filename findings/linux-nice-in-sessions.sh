#!/usr/bin/env bash
# Linux with kernel.sched_autogroup_enabled=1, the default of distributions' kernels (sched(7)): each
# session is a group of its own, and `nice` ranks processes of one session only. A server, a worker or
# a sandbox that called setsid() takes as much of a CPU at nice 19 as a benchmark at nice -20 beside
# it: `nice` neither spares others nor protects a measurement. What counts between sessions is the
# group's own number, which `echo 19 >/proc/PID/autogroup` sets. Here two endless loops share one CPU,
# at nice 0 and 19.
set -euo pipefail
[ "$(cat /proc/sys/kernel/sched_autogroup_enabled 2>/dev/null || echo 0)" = 1 ] ||
  { echo "autogroups are off here: nothing to show"; exit 0; }
uname -sr
python3 - <<'PY'
import subprocess, sys
LOOP = """import os, sys, time
os.nice(int(sys.argv[1]))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if sys.argv[2]: open("/proc/self/autogroup", "w").write(sys.argv[2])
start, end = time.process_time(), time.monotonic() + 8
while time.monotonic() < end: pass
print(time.process_time() - start)"""
def ratio(apart, group=""):
    """CPU time at nice 0 over that at nice 19, in sessions of their own or in one; `group` is the
    number of the second's."""
    together = ["setsid", "--wait", sys.executable, "-c", f"""import subprocess, sys
runs = [subprocess.Popen([sys.executable, "-c", {LOOP!r}, nice, group], stdout=subprocess.PIPE,
    start_new_session={apart}) for nice, group in (("0", ""), ("19", {group!r}))]
print(*(run.communicate()[0].decode().strip() for run in runs))"""]
    first, second = map(float, subprocess.check_output(together).split())
    return first / max(second, 1e-3)
apart, one, group = ratio(True), ratio(False), ratio(True, "19")
print(f"nice 0 over nice 19, two sessions:             {apart:.1f}")
print(f"nice 0 over nice 19, one session:              {one:.1f}")
print(f"the same in two sessions of groups 0 and 19:   {group:.1f}")
sys.exit(0 if apart < 3 and min(one, group) > 8 else "the behaviour has changed")
PY
