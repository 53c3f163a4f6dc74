"""The data axis: where parameters and main gradients lie in flat buffers, and who reduces them.

`flat.py` is the layout as arithmetic, `pieces.py` finds the logical parameters in it,
`buffers.py` holds the tensors, `buckets.py` accumulates and reduces the main gradients.
"""
