"""What is done to routers inside the ranks; see `faults.py`."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_lite.expert import router
from megatron_lite.verify.classes import MATCH32


@contextmanager
def scores_off_by_rounding() -> Iterator[None]:
    """No bug: what is compared is off by as much as an activation may be."""
    original = router.largest

    def planted(scores: Tensor, k: int, further: int = 0) -> Tensor:
        extent = scores.amax(-1, keepdim=True) - scores.amin(-1, keepdim=True)
        signs = torch.randint(2, scores.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
        return original(scores + signs * extent * MATCH32.activation * 0.99, k, further)

    with patch.object(router, "largest", planted):
        yield
