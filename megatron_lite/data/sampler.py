"""Which samples a data-parallel rank reads in a step: pure arithmetic on the cursor.

Step k consumes samples [consumed, consumed + global batch size) in every layout; how they
fall on ranks and microbatches is Megatron's order. The cursor (consumed samples) is the
whole state.
"""

import numpy as np
from numpy.typing import NDArray


def step_sample_ids(
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
) -> NDArray[np.int64]:
    """List the samples of one rank in one step.

    Args:
        consumed_samples: samples consumed before this step.
        global_batch_size: samples of the step; a multiple of micro_batch_size * dp_size.
        micro_batch_size: b.
        dp_rank: this rank's place on the data axis.
        dp_size: size of the data axis.

    Returns:
        [microbatches, b]; item [m, j] is consumed + m * (b * dp_size) + dp_rank * b + j.
    """
    per_round = micro_batch_size * dp_size
    if global_batch_size % per_round or not 0 <= dp_rank < dp_size:
        raise ValueError(
            f"global batch {global_batch_size} over {dp_size} ranks (this one {dp_rank}) of "
            f"micro-batch {micro_batch_size}"
        )
    rounds = np.arange(global_batch_size // per_round, dtype=np.int64)[:, None]
    items = np.arange(micro_batch_size, dtype=np.int64)[None, :]
    return consumed_samples + rounds * per_round + dp_rank * micro_batch_size + items
