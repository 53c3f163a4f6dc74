"""From text on disk to the batches of a step.

Text is tokenised once into an indexed dataset (`indexed.py`, `writer.py`); a sample
index (`sample_index.py`) cuts its token stream into overlapping samples; blends mix
several datasets (`blend.py`); `loader.py` hands each data-parallel rank its part of
every global batch. The order of samples is a function of corpus, seed, split and
sequence length alone: layout, micro-batch size and workers never change it.
"""
