#!/usr/bin/env bash
# Proofs on a GPU, and rows of products, decode steps and the tuner, by importance: scripts/record.sh FOLDER [STEP...]
#
# Steps log to FOLDER/log, one line a step in FOLDER/log/steps; rows go to benchmarks/results, the new map to FOLDER. By
# default all steps run; their limits add up to 27 minutes on two GPUs, of which the second measures the map and whole
# steps, and to 46 on one. Kernels are compiled concurrently. A step that fails or times out does not affect the others.
# AGAINST=TREE: a tree whose host times are measured beside this one's.
set -u
OUT=$(realpath -m "${1:?a folder for logs and the new map}")
shift
STEPS=" $* "
ALL=" bitplane memcheck memcheck_bitplane racecheck_bitplane tests packed steady map generate launch "
for name in "$@"; do
  [[ $ALL == *" $name "* ]] || { echo "no step is called '$name'; there are:$ALL" >&2; exit 2; }
done
cd "$(dirname "$0")/.."
mkdir -p "$OUT/log"
export PYTHONPATH=src PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} # tests and compilers share the cores with what is timed
PYTHON=${PYTHON:-python3}
# Before anything is measured: rows name their commit, which a copy without .git takes from ANYBIT_COMMIT.
ANYBIT_COMMIT=$(PYTHONPATH=benchmarks $PYTHON -c 'import rows; print(rows.commit())') || exit 2
export ANYBIT_COMMIT
GPUS=$(nvidia-smi -L | wc -l)
began=$(date +%s)

wanted() { # NAME
  [[ $STEPS == "  " || $STEPS == *" $1 "* ]]
}

step() { # NAME SECONDS COMMAND...
  wanted "$1" || return 0
  local name=$1 seconds=$2 start
  shift 2
  start=$(date +%s)
  timeout -k 5 "$seconds" "$@" > "$OUT/log/$name" 2>&1
  echo "$(($(date +%s) - began)) s: $name ended with $? after $(($(date +%s) - start)) s" | tee -a "$OUT/log/steps"
}

proofs_and_rows() {
  step bitplane 90 $PYTHON benchmarks/linear_bitplane.py --seconds 80
  step memcheck 120 compute-sanitizer --tool memcheck --report-api-errors no $PYTHON tests/kernels/sanitize_packed.py
  for tool in memcheck racecheck; do # both filters: with only one, the tool has crashed in kernels before
    step "${tool}_bitplane" 120 compute-sanitizer --tool $tool --report-api-errors no \
      --kernel-name regex=bitplane --kernel-name regex=quantize $PYTHON tests/kernels/sanitize.py
  done
  # A process a file, eight at once: tests compile what they need. Files that cannot be collected fail there, with the reason.
  step tests 600 bash -c "$PYTHON -m pytest -q -p no:cacheprovider --collect-only -m gpu tests | sed -n 's/::.*//p; s/^ERROR \([^ ]*\).*/\1/p' |
    sort -u |
    xargs -P 8 -n 1 $PYTHON -m pytest -q -p no:cacheprovider -m gpu"
  step packed 300 $PYTHON benchmarks/linear_packed.py --seconds 280
  step steady 150 $PYTHON benchmarks/linear_packed.py --steady 0.5 --models llama-3-8b --tokens 1024 4096 --seconds 140 --again
}

map_and_steps() {
  local ahead
  if wanted map; then
    $PYTHON tools/tuning/build_policy.py measure --compile --out "$OUT/whole.json" > "$OUT/log/ahead" 2>&1 &
    ahead=$!
    step map 700 $PYTHON tools/tuning/build_policy.py measure --out "$OUT/whole.json" --seconds "${MAP_SECONDS:-600}"
    kill $ahead 2> "$OUT/log/kill"
    step compact 300 $PYTHON tools/tuning/build_policy.py compact "$OUT/whole.json" --out "$OUT/nvidia-h200.json"
  fi
  step generate 150 $PYTHON benchmarks/generate.py --record --seconds 130
}

host_times() { # with nothing beside it
  step launch 100 $PYTHON benchmarks/launch.py ${AGAINST:+--against "$AGAINST"}
}

if [ "$GPUS" -ge 2 ]; then
  (export CUDA_VISIBLE_DEVICES=1; map_and_steps) &
  models=$!
  (export CUDA_VISIBLE_DEVICES=0; proofs_and_rows)
  wait $models
  host_times
else
  proofs_and_rows
  map_and_steps
  host_times
fi
true
