"""Optimizers on flat buffers, the global gradient norm, and the schedules of their rates.

`optimizer.py` is what a training step sees; `adamw.py` and `sgd.py` are its update rules;
`groups.py`, `norm.py` and `schedule.py` are the parts a reader asks for by name.
"""
