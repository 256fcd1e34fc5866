#!/usr/bin/env bash
# Everything that wants a GPU, in one command, from a bare checkout: builds and installs nanscan
# beside the torch that is there (into build/gpu, nothing else is touched), runs the GPU tests, then
# the GPU benchmarks. No network is needed where cmake, ninja, pybind11 and setuptools can be
# imported, or their wheels are in .whl/.
#
#   PYTHON   the Python that has a CUDA build of torch; default python3
#   OUT      folder for gpu.log and the results; default benchmarks/results/local
#   STAGES   which to run; default "install info tests suites bandwidth calls training"
#   LIMIT    seconds for all; default 470. Each stage has a limit of its own, too
#   GPU_DRY  1: try it without a GPU, on the CPU, with tiny sizes
#
# A failed stage stops no other. The exit status is the sum of 1 (install), 2 (info), 4 (tests),
# 8 (suites), 16 (bandwidth), 32 (calls) and 64 (training) for those that failed. A missed bar is no
# failure.
# shellcheck disable=SC2329  # the stages are called through --run
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
ROOT=$PWD
WORK=$ROOT/build/gpu
PACKAGES=$WORK/packages
END=$((SECONDS + ${LIMIT:-470}))
export PYTHON=${PYTHON:-python3} GPU_DRY=${GPU_DRY:-0}
STAGES=${STAGES:-install info tests suites bandwidth calls training}
mkdir -p "${OUT:=$ROOT/benchmarks/results/local}" "$WORK" || exit 1
OUT=$(cd "$OUT" && pwd)
export OUT
LOG=$OUT/gpu.log

export PYTHONPATH=$PACKAGES${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONUTF8=1
export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_RETRIES=0 PIP_TIMEOUT=10
export NANSCAN_CACHE=$WORK/cache
if [ "$GPU_DRY" = 1 ]; then
  MODE=(--device cpu --small)
  PATIENCE=4 # wherever it is tried may be slow
else
  MODE=(--device cuda)
  PATIENCE=1
  export NANSCAN_NEEDS_GPU=1 # a test that finds no GPU fails
fi

say() { printf '%s\n' "$*" | tee -a "$LOG"; }

# stage NAME BIT SECONDS COMMAND...: runs it under a time limit; shows and keeps what it prints.
stage() {
  local name=$1 bit=$2 limit=$(($3 * PATIENCE)) begin=$SECONDS offset status=0 verdict
  shift 3
  [[ " $STAGES " == *" $name "* ]] || return 0
  ((limit > END - SECONDS)) && limit=$((END - SECONDS))
  say "== $name: $* (at most $limit s)"
  offset=$(stat -c %s "$LOG")
  if ((limit < 3)); then
    status=124
  else
    # Into a file, not a pipe: a process that outlives the stage cannot keep the script waiting.
    timeout --kill-after=5 "$limit" "$@" >>"$LOG" 2>&1 </dev/null || status=$?
  fi
  tail -c +$((offset + 1)) "$LOG"
  case $status in
    0) verdict=ok ;;
    124 | 137) verdict="FAILED: over its time limit" ;;
    *) verdict="FAILED: exit status $status" ;;
  esac
  ((status == 0)) || FAILED=$((FAILED + bit))
  SUMMARY+=$(printf '  %-10s %4d s  %s' "$name" $((SECONDS - begin)) "$verdict")$'\n'
}

has() { "$PYTHON" -c "import $1" 2>/dev/null; }

# Where pip finds what is not there: a folder of wheels, or its index.
SOURCE=()
[ -d "$ROOT/.whl" ] && SOURCE=(--no-index --find-links "$ROOT/.whl")

# pip_install ARGUMENTS...: into build/gpu/packages, so that the environment stays as it is.
pip_install() { "$PYTHON" -m pip install --quiet --upgrade --target "$PACKAGES" "$@"; }

has_pip() { "$PYTHON" -m pip --version >/dev/null 2>&1; }

# A Python without pip gets an environment of its own that sees all of the other one's packages.
ensure_pip() {
  has_pip && return 0
  echo "$PYTHON has no pip: making an environment in $WORK/venv"
  "$PYTHON" -m venv --system-site-packages "$WORK/venv" || return 1
  local site
  site=$("$WORK/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$PYTHON" -c 'import sys; print(*filter(None, sys.path), sep="\n")' >"$site/outer.pth"
  PYTHON=$WORK/venv/bin/python
}

install() {
  ensure_pip || return 1
  rm -rf "$PACKAGES"
  local tools='cmake, ninja, pybind11, setuptools'
  tools+='; assert int(setuptools.__version__.split(".")[0]) >= 77'
  local build=("${SOURCE[@]}")
  has "$tools" && build=(--no-build-isolation)
  pip_install --no-deps "${build[@]}" "$ROOT" ||
    pip_install --no-deps --no-build-isolation "$ROOT" ||
    NANSCAN_CUDA=0 pip_install --no-deps --no-build-isolation "$ROOT" || return 1
  local package
  for package in pytest rich numpy; do
    has "$package" || pip_install "${SOURCE[@]}" "$package" || return 1
  done
  "$PYTHON" -c 'import nanscan; print("nanscan", nanscan.__version__, "in", nanscan.__file__)'
}

info() {
  command -v nvidia-smi >/dev/null && nvidia-smi \
    --query-gpu=name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem --format=csv
  cd "$WORK" && "$PYTHON" -m nanscan info && "$PYTHON" - <<'PYTHON'
import os, torch
print("torch's CUDA ", torch.version.cuda, "on", os.cpu_count(), "cores")
if os.environ.get("GPU_DRY") != "1":
    assert torch.cuda.is_available(), "torch sees no CUDA device"
    from nanscan._scan import cuda
    assert cuda.prepare(0), cuda.why_not(0)
PYTHON
}

# From within tests/: the checkout's own package, which is not built, must not be imported.
run_pytest() {
  local options=(-p no:cacheprovider --tb=short --show-capture=stdout --durations=8 -v)
  cd "$ROOT/tests" || return 1
  if [ -n "${WORKERS:-}" ] && has xdist && has pytest_timeout; then
    # A test that hangs, or ruins the CUDA context, takes its worker with it, not the others.
    options+=(-n "$WORKERS" --timeout 90 --timeout-method thread --max-worker-restart 6)
  fi
  "$PYTHON" -m pytest "${options[@]}" "$@"
}

tests() { WORKERS=1 run_pytest --maxfail=30 gpu; }

suites() {
  local which="cuda and not test_packaging"
  [ "$GPU_DRY" = 1 ] && which="cpu and float16 and test_layouts"
  WORKERS=4 run_pytest --maxfail=30 --continue-on-collection-errors --ignore cuda --ignore gpu -k "$which" .
}

benchmark() { "$PYTHON" "$ROOT/benchmarks/gpu_$1.py" "${MODE[@]}" --out "$OUT"; }

# Failed tests, and what the benchmarks' bars say.
in_short() {
  grep -E '^(FAILED|ERROR) |^=+ .*(passed|failed|error).* in ' "$LOG" | cut -c 1-160 | head -40
  "$PYTHON" - "$OUT" <<'PYTHON'
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("gpu_*.json")):
    data = json.loads(path.read_text())
    print(f"{path.stem} on {data['machine'].get('gpu')}")
    for bar in data.get("bars", []):
        sign = ">=" if bar["at_least"] else "<="
        measured = bar["measured"]
        print(
            f"  {'pass' if bar['passed'] else 'FAIL'}  {bar['name']}: {measured['median']:.3g}"
            f"{bar['unit']} ({measured['low']:.3g} .. {measured['high']:.3g}), "
            f"required {sign} {bar['required']:g}{bar['unit']}"
        )
PYTHON
}

# `timeout` runs commands, not functions: the script calls itself for one.
if [ "${1:-}" = --run ]; then
  shift
  "$@"
  exit
fi

FAILED=0
SUMMARY=""
: >"$LOG"
rm -f "$OUT"/gpu_*.json "$OUT"/gpu_*.txt
say "nanscan on a GPU: $(date -u +%FT%TZ), $(git rev-parse --short HEAD 2>/dev/null || echo 'no git')"
SELF=(bash "$ROOT/benchmarks/gpu.sh" --run)
stage install 1 150 "${SELF[@]}" install
if ((FAILED == 0)); then
  has_pip || PYTHON=$WORK/venv/bin/python
  stage info 2 40 "${SELF[@]}" info
  stage tests 4 130 "${SELF[@]}" tests
  stage suites 8 70 "${SELF[@]}" suites
  stage bandwidth 16 90 "${SELF[@]}" benchmark bandwidth
  stage calls 32 40 "${SELF[@]}" benchmark call_overhead
  stage training 64 75 "${SELF[@]}" benchmark training
fi

say "== in short"
say "$(in_short 2>&1)"
say "$SUMMARY"
say "all of it is in $OUT; exit status $FAILED"
exit "$FAILED"
