"""megatron_lite: pretraining of Transformer language models, the same numbers in any layout."""

__version__ = "0.1.0"
