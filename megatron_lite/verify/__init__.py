"""Proof that a layout gives the same numbers: run it, run one process, compare the dumps."""
