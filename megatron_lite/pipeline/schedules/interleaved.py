"""Interleaved 1F1B and interleaved zero-bubble: v stages per rank, visited in turn.

Forwards take groups of g microbatches through chunk 0, 1, ..., v-1; backwards take the same
groups through the chunks in reverse (Narayanan et al., 2021; g is Megatron's
`--microbatch-group-size-per-virtual-pipeline-stage`, p by default). The bubble shrinks to
(p-1)(F+I+W)/v, with split backwards to (p-1)(F+I-W)/v at v p activations. Paired 1F1B has
one more warm-up forward, so that each forward runs beside the backward before it.
"""

from megatron_lite.pipeline.actions import Action, Kind
from megatron_lite.pipeline.passes import Order, drop_padding, pair_up
from megatron_lite.pipeline.placement import looping
from megatron_lite.pipeline.schedules.options import Options
from megatron_lite.pipeline.schedules.refuse import check_sizes


def interleaved(num_ranks: int, chunks: int, num_microbatches: int, options: Options) -> Order:
    """Order interleaved 1F1B; any number of chunks and microbatches."""
    check_sizes("interleaved", num_ranks, chunks, num_microbatches)
    group = _group_size("interleaved", num_ranks, num_microbatches, options)
    padded = _padded(num_ranks, num_microbatches, group)
    visits = _visits(chunks, padded, group)
    rows, bounds = [], []
    for rank in range(num_ranks):
        warm_up = 2 * (num_ranks - 1 - rank) + (chunks - 1) * group + options.paired
        warm_up = min(len(visits), warm_up)
        row = [_at(Kind.F, num_ranks, rank, *visit) for visit in visits[:warm_up]]
        for k, (chunk, mb) in enumerate(visits):
            backward = _at(Kind.B, num_ranks, rank, chunks - 1 - chunk, mb)
            if k + warm_up < len(visits):
                forward = _at(Kind.F, num_ranks, rank, *visits[k + warm_up])
                row += pair_up(forward, backward) if options.paired else [forward, backward]
            else:
                row.append(backward)
        rows.append(row)
        bounds.append(min(num_microbatches * chunks, warm_up + 1))
    rows = drop_padding(rows, num_microbatches)
    return Order(looping(num_ranks, chunks), rows, tuple(bounds))


def interleaved_zb(num_ranks: int, chunks: int, num_microbatches: int, options: Options) -> Order:
    """Order interleaved zero-bubble: a shorter warm-up, W as late as memory allows."""
    check_sizes("interleaved-zb", num_ranks, chunks, num_microbatches)
    group = _group_size("interleaved-zb", num_ranks, num_microbatches, options)
    padded = _padded(num_ranks, num_microbatches, group)
    visits = _visits(chunks, padded, group)
    rows = []
    for rank in range(num_ranks):
        warm_up = min(len(visits), (num_ranks - 1 - rank) + (chunks - 1) * group)
        row = [_at(Kind.F, num_ranks, rank, *visit) for visit in visits[:warm_up]]
        backwards = [(chunks - 1 - chunk, mb) for chunk, mb in visits]
        for k, backward in enumerate(backwards):
            if k + warm_up < len(visits):
                row.append(_at(Kind.F, num_ranks, rank, *visits[k + warm_up]))
            row.append(_at(Kind.I, num_ranks, rank, *backward))
            if k >= rank:
                row.append(_at(Kind.W, num_ranks, rank, *backwards[k - rank]))
        late = backwards[max(0, len(backwards) - rank) :]
        row += [_at(Kind.W, num_ranks, rank, *backward) for backward in late]
        rows.append(row)
    rows = drop_padding(rows, num_microbatches)
    bound = min(num_microbatches * chunks, (chunks - 1) * group + num_ranks)
    return Order(looping(num_ranks, chunks), rows, (bound,) * num_ranks)


def _at(kind: Kind, num_ranks: int, rank: int, chunk: int, microbatch: int) -> Action:
    return Action(kind, chunk * num_ranks + rank, microbatch)


def _group_size(name: str, num_ranks: int, num_microbatches: int, options: Options) -> int:
    group = num_ranks if options.group_size is None else options.group_size
    if group < num_ranks:
        raise ValueError(
            f"schedule {name}: groups of {group} microbatches per virtual stage "
            f"(--microbatch-group-size-per-virtual-pipeline-stage); {num_ranks}, the number of "
            "ranks, is the least"
        )
    return max(num_ranks, min(group, num_microbatches))


def _padded(num_ranks: int, num_microbatches: int, group: int) -> int:
    """The next number whose last group is full or has a microbatch for every rank."""
    rest = num_microbatches % group
    return num_microbatches if rest == 0 or rest >= num_ranks else num_microbatches + group - rest


def _visits(chunks: int, num_microbatches: int, group: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) in the order in which every rank forwards them."""
    return [
        (chunk, mb)
        for first in range(0, num_microbatches, group)
        for chunk in range(chunks)
        for mb in range(first, min(first + group, num_microbatches))
    ]
