"""Refusal of sizes that a schedule is not made for, in the user's words."""


def check_sizes(
    name: str,
    num_ranks: int,
    chunks: int,
    num_microbatches: int,
    legal_chunks: int | None = None,
) -> None:
    """Check the arguments that every generator has.

    Args:
        legal_chunks: the only number of stages per rank that the schedule knows.

    Raises:
        ValueError: what, which value and what is legal.
    """
    if num_ranks < 1:
        raise ValueError(f"schedule {name}: {num_ranks} ranks; at least 1")
    if num_microbatches < 1:
        raise ValueError(
            f"schedule {name}: {num_microbatches} microbatches; a step needs at least one"
        )
    if chunks < 1 or (legal_chunks is not None and chunks != legal_chunks):
        legal = "at least 1" if legal_chunks is None else f"{legal_chunks} is legal"
        raise ValueError(f"schedule {name}: {chunks} stages per rank; {legal}")
