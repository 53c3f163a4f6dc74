"""The mesh: which rank sits where, how ranks start, and every collective they run.

`grid.py` is pure arithmetic and needs no torch; `groups.py` turns it into process groups
that are passed explicitly; `collectives.py` is the only door to torch.distributed.
"""
