"""The small run of the cases: 4 layers, hidden 64, 8 query heads on 2 KV heads, 256 words.

Eight query heads on two KV heads, because a group of four differs from two KV heads: with
equal numbers the classic layout fault is invisible. fp64 and plain SGD show what a loss
curve hides. The flags of a case come last and win.
"""

import atexit
import shutil
import tempfile
from pathlib import Path

from megatron_lite.verify.tiny_data import write_tiny_dataset

VOCABULARY, SEQ_LENGTH, GLOBAL_BATCH = 256, 32, 8

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 2 --swiglu --ffn-hidden-size 128 --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights"
)
RUN = (
    f"--vocab-size {VOCABULARY} --tokenizer-type NullTokenizer --seq-length {SEQ_LENGTH} "
    f"--max-position-embeddings {SEQ_LENGTH} --micro-batch-size 1 "
    f"--global-batch-size {GLOBAL_BATCH} --seed 1234 --hidden-dropout 0 --attention-dropout 0 "
    "--split 1 --eval-iters 0 --num-workers 0 --device cpu --lr 0.1 --lr-decay-style constant "
    "--weight-decay 0"
)
SGD = "--fp64 --optimizer sgd --sgd-momentum 0"

# Made in the pytest process, so all ranks of all tests share the data and its index.
DATA = Path(tempfile.mkdtemp(prefix="cases-"))
atexit.register(shutil.rmtree, DATA, ignore_errors=True)


def data_flags(vocabulary: int = VOCABULARY, *, masked: bool = True) -> list[str]:
    """Flags of real documents; with `masked` their samples differ in valid tokens."""
    prefix = DATA / f"documents-{vocabulary}"
    write_tiny_dataset(prefix, vocabulary, SEQ_LENGTH, samples=120)
    mask = ["--eod-mask-loss"] if masked else []
    return ["--data-path", str(prefix), "--data-cache-path", str(DATA / "cache"), *mask]


def flags(text: str = "", *, steps: int = 5, vocabulary: int = VOCABULARY) -> list[str]:
    """A whole command line but for the layout."""
    words = [*MODEL.split(), *RUN.split(), "--train-iters", str(steps)]
    return [*words, *data_flags(vocabulary), "--vocab-size", str(vocabulary), *text.split()]
