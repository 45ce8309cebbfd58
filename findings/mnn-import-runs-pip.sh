#!/usr/bin/env bash
# MNN 3.6.1: importing the converter of its wheel (MNN.tools.mnnconvert) runs `pip install -U` of a log
# service's client by whichever pip is first in PATH, which may be that of another environment; the
# wheel does not declare this package. `import MNN` alone does not do it. Here a program that only
# writes its arguments down stands in PATH as pip.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install MNN==3.6.1 numpy
mkdir "$folder/bin"
printf '#!/bin/sh\necho "$@" >>"%s/calls"\n' "$folder" >"$folder/bin/pip"
chmod +x "$folder/bin/pip"
touch "$folder/calls"
run() { PATH="$folder/bin:$PATH" "$folder/venv/bin/python" -c "$1" >/dev/null; }
run "import MNN"
plain=$(cat "$folder/calls")
run "import MNN.tools.mnnconvert"
converter=$(sort -u "$folder/calls")
"$folder/venv/bin/python" -c 'from importlib import metadata as of; print("MNN", of.version("MNN"), "requires", of.requires("MNN"))'
echo "import MNN:                  pip ${plain:-is not run}"
echo "import MNN.tools.mnnconvert: pip ${converter:-is not run}"
[[ -z $plain && $converter == "install -U aliyun-log-python-sdk" ]] || { echo "the behaviour has changed" >&2; exit 1; }
