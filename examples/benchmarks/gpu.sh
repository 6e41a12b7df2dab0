#!/usr/bin/env bash
# What a GPU takes, in at most ten minutes: bash examples/benchmarks/gpu.sh [OUT] (gpu.py says what it does)
exec "$(command -v python || command -v python3)" "$(dirname "${BASH_SOURCE[0]}")/gpu.py" "$@"
