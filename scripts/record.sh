#!/usr/bin/env bash
# Proofs on a GPU, and rows of products, whole models and the tuner, the first worth most: scripts/record.sh FOLDER
#
# Steps log to FOLDER/log, one line a step in FOLDER/log/steps; rows go to benchmarks/results, the new map to FOLDER.
# FOLDER is a new one. With two GPUs the second measures the map and the check meanwhile. Kernels are compiled beside the steps;
# the steps' limits add up to half an hour a GPU (one GPU takes both halves). A step that fails or runs out of its time costs the others nothing.
set -u
OUT=$(realpath -m "${1:?a folder for logs and the new map}")
cd "$(dirname "$0")/.."
mkdir -p "$OUT/log"
mkdir "$OUT/work" || exit 1 # what was measured into it before is claimed, and would not be measured again
export PYTHONPATH=src PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} # tests and compilers share the cores with what is timed
PYTHON=${PYTHON:-python3} MAP=$OUT/nvidia-h200.json SEED=${SEED:-20261124}
began=$(date +%s)

step() { # NAME SECONDS COMMAND...
  local name=$1 seconds=$2 start
  shift 2
  start=$(date +%s)
  timeout -k 5 "$seconds" "$@" > "$OUT/log/$name" 2>&1
  echo "$(($(date +%s) - began)) s: $name ended with $? after $(($(date +%s) - start)) s" | tee -a "$OUT/log/steps"
}

proofs_and_rows() {
  step bitwise 90 $PYTHON benchmarks/gemm_bitwise.py --seconds 80
  step memcheck 120 compute-sanitizer --tool memcheck --report-api-errors no $PYTHON tests/gpu/sanitize_packed.py
  for tool in memcheck racecheck; do # both filters: with one alone the tool has died in kernels before
    step "${tool}_bitwise" 120 compute-sanitizer --tool $tool --report-api-errors no \
      --kernel-name regex=bitwise --kernel-name regex=quantize $PYTHON tests/gpu/sanitize.py
  done
  step tests 600 $PYTHON -m pytest -q -p no:cacheprovider tests/gpu tests/integrations/test_generate_gpu.py
  step packed 300 $PYTHON benchmarks/gemm_packed.py --seconds 280
  step steady 150 $PYTHON benchmarks/gemm_packed.py --steady 0.5 --models llama-3-8b --tokens 1024 4096 --seconds 140 --again
  step sweep 60 $PYTHON benchmarks/gemm_packed.py --sweep --seconds 50 \
    --tokens 1 2 3 4 5 7 8 9 15 16 17 31 32 33 63 64 65 127 128 129 255 256 257
  step sweep_steady 120 $PYTHON benchmarks/gemm_packed.py --sweep --steady 0.05 --seconds 110 \
    --tokens 511 512 513 1023 1024 1025 2047 2048 2049 4095 4096
}

map_and_check() {
  $PYTHON benchmarks/dispatch_refresh.py measure --work "$OUT/work" --ahead > "$OUT/log/ahead" 2>&1 &
  local ahead=$!
  nice -n 19 $PYTHON benchmarks/dispatch.py verify --compile --tune-each 16 --seed "$SEED" --plans "$OUT/work/check" \
    > "$OUT/log/spaces" 2>&1 &
  local spaces=$!
  step map 700 $PYTHON benchmarks/dispatch_refresh.py measure --work "$OUT/work" --out "$MAP" --seconds "${MAP_SECONDS:-600}"
  kill $ahead 2> "$OUT/log/kill"
  step model 200 $PYTHON benchmarks/dispatch.py model --map "$MAP" --seconds 180
  step ablate 90 $PYTHON benchmarks/dispatch.py ablate --map "$MAP"
  step look_up 30 $PYTHON benchmarks/dispatch.py look-up
  step generate 150 $PYTHON benchmarks/generate.py --record --seconds 130
  step clock 320 $PYTHON benchmarks/dispatch.py clock
  step check 400 $PYTHON benchmarks/dispatch.py verify --tune-each 16 --seed "$SEED" --plans "$OUT/work/check" --map "$MAP" \
    --verify-seconds 380 --check-rows "$OUT/check.json"
  kill $spaces 2>> "$OUT/log/kill"
}

if [ "$(nvidia-smi -L | wc -l)" -ge 2 ]; then
  (export CUDA_VISIBLE_DEVICES=1; map_and_check) &
  (export CUDA_VISIBLE_DEVICES=0; proofs_and_rows)
  wait
else
  proofs_and_rows
  map_and_check
fi
