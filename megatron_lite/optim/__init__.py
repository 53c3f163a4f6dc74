"""Optimizers on flat buffers, the global gradient norm, and the schedules of their rates.

`optimizer.py` is what a training step sees and `recipe.py` what the flags come to;
`adamw.py`, `sgd.py`, `muon.py` and `adafactor.py` are the update rules; `groups.py`,
`norm.py`, `average.py`, `frozen.py` and `schedule.py` are parts a reader asks for by name.
"""
