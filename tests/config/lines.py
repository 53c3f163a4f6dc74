"""A small legal command line that the tests of this package vary."""

BASE = {
    "--num-layers": "4",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--max-position-embeddings": "64",
    "--micro-batch-size": "2",
    "--train-iters": "10",
    "--lr": "1e-3",
    "--mock-data": None,
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "512",
}


def line(text: str = "", *, drop: str = "") -> list[str]:
    """Return the words of BASE without the flags in `drop`, followed by `text`."""
    dropped = drop.split()
    words = []
    for name, value in BASE.items():
        if name not in dropped:
            words += [name] if value is None else [name, value]
    return words + text.split()
