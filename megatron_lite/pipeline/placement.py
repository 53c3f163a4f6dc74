"""Which rank holds which stage. The placement belongs to the schedule.

Looping: stage s on rank s mod p, the activations go round v times. V: with two chunks,
stage s on rank s on the way down and on rank 2p - 1 - s on the way up, so that the first
and the last stage share rank 0 and the turn on rank p - 1 needs no message.
"""


def looping(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Place chunk c of rank r at stage c * p + r."""
    return tuple(range(num_ranks)) * chunks


def v_shape(num_ranks: int) -> tuple[int, ...]:
    """Place stages r and 2p - 1 - r on rank r."""
    return (*range(num_ranks), *reversed(range(num_ranks)))
