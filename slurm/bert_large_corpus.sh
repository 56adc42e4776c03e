#!/usr/bin/env bash
# Wikipedia and books for BERT-Large: three array jobs, each waiting for the one before. Run it on a login node; run it
# again when tasks have failed: what is done is not done again.
#   slurm/bert_large_corpus.sh [--partition=cpu --account=me ...]   (options of sbatch)
set -euo pipefail

# --- settings --------------------------------------------------------------------------------------------------------
out=${OUT:-data/bert_large}
tasks=${TASKS:-16}
cores=${CORES:-16}
python=${PYTHON:-.venv/bin/python}
# what `ds-vcycle prepare` takes: names for datasets.load_dataset, or files; one configuration holds for all names
read -r -a sources <<<"${SOURCES:-wikimedia/wikipedia}"
config=${DATASET_CONFIG:-20231101.en}
# files or a directory of books; BookCorpus is no longer distributed by its authors
books=${BOOKS:-}
tokenizer=${TOKENIZER:-models/bert-large-uncased}
split=${SPLIT:-0.99,0.005,0.005}
# ---------------------------------------------------------------------------------------------------------------------

common=(--parsable --requeue --nodes=1 --ntasks=1 --array="0-$((tasks - 1))" --open-mode=append)
common+=(--output="$out/logs/%x-%a.out" "$@")
mkdir -p "$out/logs"

submit() { # name, cores, dependency or nothing, command
  local wait=()
  [[ -z $3 ]] || wait=(--dependency="afterok:$3")
  sbatch "${common[@]}" --job-name="$1" --cpus-per-task="$2" ${wait[@]+"${wait[@]}"} --wrap "$4"
}

quoted=$(printf '%q ' "${sources[@]}" ${books:+"$books"})
verb="$python -m ds_vcycle"
scattered=$(submit scatter 1 "" "$verb shuffle scatter $quoted --dataset-config $config --out $out")
gathered=$(submit gather 1 "$scattered" "$verb shuffle gather --out $out")
# each bucket becomes a corpus of its own, complete or not there at all
# shellcheck disable=SC2016 # the array task's number is known there
bucket='$(printf %04d "$SLURM_ARRAY_TASK_ID")'
prepared=$(submit prepare "$cores" "$gathered" "test -e $out/corpus/$bucket/prepare.json || \
  $verb prepare $out/shuffled/$bucket.jsonl.gz --out $out/corpus/$bucket --architecture bert \
  --tokenizer $tokenizer --split $split --workers $cores")

echo "jobs $scattered, $gathered, $prepared; when they are done, train with"
paths=$(for ((task = 0; task < tasks; task++)); do printf '{path: %s/corpus/%04d},' "$out" "$task"; done)
echo "  'data.path=[${paths%,}]'"
