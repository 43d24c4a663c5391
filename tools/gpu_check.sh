#!/usr/bin/env bash
# Everything that only a GPU can show, in under eight minutes: build, correctness, compute-sanitizer, benchmarks.
#
#   tools/gpu_check.sh [OUT]     writes OUT/{build,tests,sanitizer}.log, OUT/operators.jsonl and OUT/summary.txt (gpu_check/)
#
# Needs a CUDA build of torch (2.11 or later), nvcc, and pytest and hypothesis; PYTHON names the interpreter. Every step
# has a limit and runs whatever became of the one before it; the exit status is the number of steps that failed.
set -u -o pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${1:-gpu_check}
mkdir -p "$OUT"
: >"$OUT/summary.txt"
failed=0

step() { # NAME LIMIT_S COMMAND...
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    timeout --kill-after=10 "$limit" "$@" >"$OUT/$name.log" 2>&1
    status=$?
    [ "$status" = 0 ] || failed=$((failed + 1))
    printf '%-12s status %s after %s s (limit %s s)\n' "$name" "$status" "$((SECONDS - start))" "$limit" | tee -a "$OUT/summary.txt"
    [ "$status" = 0 ] || tail -n 15 "$OUT/$name.log"
}

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=8
"$PYTHON" - <<'PY' | tee -a "$OUT/summary.txt" || exit 1
import sys, torch
print("python", sys.version.split()[0], "torch", torch.__version__, "cuda", torch.version.cuda)
print(torch.cuda.get_device_name(), "compute capability", torch.cuda.get_device_capability()) if torch.cuda.is_available() else sys.exit("gpu_check: torch sees no CUDA device")
PY

step build 150 env GRPO_MC_CUDA=1 "$PYTHON" setup.py -q build_ext --inplace
step tests 150 "$PYTHON" -m pytest tests/gpu -q -p no:cacheprovider
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if [ -x "$sanitizer" ]; then
    for tool in memcheck racecheck synccheck; do
        step "$tool" 40 "$sanitizer" --tool "$tool" --error-exitcode 9 "$PYTHON" tests/gpu/every_kernel_once.py
    done
else
    echo "sanitizer    compute-sanitizer is not installed" | tee -a "$OUT/summary.txt"
fi
step operators 90 bash -c '"$0" -m grpo_mc bench all --device cuda --json >"$1"' "$PYTHON" "$OUT/operators.jsonl"
echo "steps that failed: $failed" | tee -a "$OUT/summary.txt"
exit "$failed"
