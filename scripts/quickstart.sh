#!/usr/bin/env bash
# From a fresh checkout to a trained language model: environment, corpus, tokenizer, dataset,
# training on two processes, loss curve, sample. Uses the Python sources found on this machine.
#
#   ./scripts/quickstart.sh [--steps N] [--corpus DIR]... [--] [PRETRAIN FLAGS]
#
#   --steps N      training iterations (default 400)
#   --corpus DIR   further folder of text or source files for the corpus; may be repeated
#   all others     passed to pretrain.py, e.g. -- --tensor-model-parallel-size 2 --sequence-parallel
#
#   QUICKSTART_DIR=DIR   where everything goes (default: runs/quickstart)
#   MLITE_VENV=DIR       use an existing environment instead of making .venv (see scripts/setup.sh)
#
# Finished stages are reused; an interrupted training continues from its checkpoint; other
# flags train in a folder of their own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' scripts/quickstart.sh; }
fail() { echo "quickstart: $*" >&2; exit 2; }

steps=400
corpus_dirs=()
flags=()
while [ $# -gt 0 ]; do
    case "$1" in
        --steps) [ $# -ge 2 ] || fail "--steps needs a number"; steps="$2"; shift 2 ;;
        --steps=*) steps="${1#*=}"; shift ;;
        --corpus) [ $# -ge 2 ] || fail "--corpus needs a folder"; corpus_dirs+=("$2"); shift 2 ;;
        --corpus=*) corpus_dirs+=("${1#*=}"); shift ;;
        -h | --help) usage; exit 0 ;;
        --) shift; flags+=("$@"); break ;;
        *) flags+=("$1"); shift ;;
    esac
done
case "$steps" in
    '' | *[!0-9]* | 0*) fail "--steps '$steps' is not a positive whole number" ;;
esac
for folder in ${corpus_dirs[@]+"${corpus_dirs[@]}"}; do
    [ -d "$folder" ] || fail "--corpus $folder: no such folder"
done

work="${QUICKSTART_DIR:-runs/quickstart}"
corpus="$work/corpus.jsonl"
tokenizer="$work/tokenizer"
dataset="$work/corpus_text_document"
mkdir -p "$work"

step() { echo; echo "[$1/7] $2"; }

hash_of() {
    if command -v sha256sum >/dev/null; then sha256sum "$@"; else shasum -a 256 "$@"; fi | cut -c1-64
}

# reuse OUTPUT INPUTS: true when OUTPUT was finished from the same INPUTS (any describing text).
reuse() { [ -e "$1" ] && [ -f "$1.stamp" ] && [ "$(cat "$1.stamp")" = "$2" ]; }

# finish OUTPUT INPUTS: record what OUTPUT was made from.
finish() { echo "$2" >"$1.stamp.new" && mv "$1.stamp.new" "$1.stamp"; }

# torchrun without its traceback: the ranks have told what happened.
torchrun='
import sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
try:
    main()
except SignalException:
    sys.exit(75)
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    print(f"rank {rank} ended with status {failure.exitcode}", file=sys.stderr)
    sys.exit(failure.exitcode if failure.exitcode > 0 else 1)
'

# set_pretrain RUN: the training command, its results in RUN.
set_pretrain() {
    pretrain=(
        pretrain.py
        --num-layers 4 --hidden-size 192 --ffn-hidden-size 512
        --num-attention-heads 4 --group-query-attention --num-query-groups 2
        --seq-length 256 --max-position-embeddings 256
        --normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --micro-batch-size 4 --global-batch-size 8 --train-iters "$steps"
        --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters "$((steps / 20))"
        --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
        --data-path "$dataset" --split 98,2,0 --data-cache-path "$work/cache"
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$tokenizer.model"
        --eval-interval 100 --eval-iters 20 --log-interval 10 --log-throughput
        --save "$1/checkpoints" --load "$1/checkpoints" --save-interval 100
        --metrics-jsonl "$1/metrics.jsonl" --device cpu
        ${flags[@]+"${flags[@]}"}
    )
}

step 1 "environment"
./scripts/setup.sh train
venv="${MLITE_VENV:-$PWD/.venv}"
export PATH="$venv/bin:$PATH"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# One thread per process on two cores; more where the machine has more.
cores="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > 3 ? cores / 2 : 1))}"
echo "      $(python -c 'import platform, importlib.metadata as m
print("Python", platform.python_version(), "torch", m.version("torch"))'), 2 processes"
# Flags that training would refuse are told now, not after minutes of preparation.
set_pretrain "$work"
WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 python "${pretrain[@]}" --print-config >/dev/null

# The interpreter's own library first, installed packages to fill up.
sources=(${corpus_dirs[@]+"${corpus_dirs[@]}"})
for kind in stdlib purelib; do
    sources+=("$(python -c "import sysconfig; print(sysconfig.get_path('$kind'))")")
done

step 2 "corpus: $corpus"
inputs="${sources[*]} $(python -V) 32 MB"
if reuse "$corpus" "$inputs"; then
    echo "      reused"
else
    python tools/collect_corpus.py "${sources[@]}" --output "$corpus" --max-bytes 32000000
    bytes="$(wc -c <"$corpus")"
    [ "$bytes" -ge 20000000 ] || fail "only $bytes bytes of text were found (20,000,000 are" \
        "needed); name a folder of text or source files: ./scripts/quickstart.sh --corpus DIR"
    finish "$corpus" "$inputs"
fi

step 3 "tokenizer: $tokenizer.model"
inputs="$(hash_of <"$corpus") 4096"
if reuse "$tokenizer.model" "$inputs"; then
    echo "      reused"
else
    python tools/train_tokenizer.py --input "$corpus" --vocab-size 4096 --output-prefix "$tokenizer"
    finish "$tokenizer.model" "$inputs"
fi

step 4 "dataset: $dataset.bin, .idx"
inputs="$(hash_of <"$corpus") $(hash_of <"$tokenizer.model")"
if reuse "$dataset.idx" "$inputs"; then
    echo "      reused"
else
    python tools/preprocess_data.py --input "$corpus" --output-prefix "$work/corpus" \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$tokenizer.model" \
        --append-eod --workers 2
    finish "$dataset.idx" "$inputs"
fi

run_key="$(printf '%s\0' "$(hash_of <"$dataset.idx")" ${flags[@]+"${flags[@]}"} | hash_of)"
run="$work/steps-$steps-${run_key:0:8}"
mkdir -p "$run"
step 5 "training: $steps steps in $run"
set_pretrain "$run"
if reuse "$run/metrics.jsonl" "$run_key"; then
    echo "      reused"
else
    # A rendezvous of its own on a free port: several quickstarts can share a machine.
    launch=(-c "$torchrun" --nproc-per-node 2 --rdzv-backend c10d
        --rdzv-endpoint localhost:0 --local-addr localhost)
    # In a process group of its own, so that Ctrl-C arrives as SIGTERM, which saves.
    set -m
    python "${launch[@]}" "${pretrain[@]}" &
    training=$!
    set +m
    trap 'kill -TERM "$training" 2>/dev/null || true' INT TERM
    status=0
    wait "$training" || status=$?
    # A signal ends `wait`, not the training: it is saving now.
    while kill -0 "$training" 2>/dev/null; do wait "$training" || status=$?; done
    trap - INT TERM
    case "$status" in
        0) ;;
        2) exit 2 ;; # refused, and told: the same command would be refused again
        *) echo "quickstart: training did not finish; the same command continues it" >&2; exit 1 ;;
    esac
    finish "$run/metrics.jsonl" "$run_key"
fi

step 6 "loss curve: $work/loss.png"
python tools/plot_loss.py "$run/metrics.jsonl" --output "$run/loss.png" --dataset "$dataset"
cp "$run/loss.png" "$work/loss.png"

step 7 "sample"
python tools/generate.py --load "$run/checkpoints" --tokenizer-model "$tokenizer.model" \
    --prompt "def " --max-new-tokens 120 --temperature 0.7 --device cpu
