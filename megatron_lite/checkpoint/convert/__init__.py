"""Weights of other formats: Hugging Face directories and Megatron-LM's layouts, in and out.

Every reader returns a `Bundle` (bundle.py), a model in logical form; every writer takes
one. So any format converts into any other, one tensor in memory at a time.
"""
