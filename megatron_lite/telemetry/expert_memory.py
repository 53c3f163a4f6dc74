"""What a mixture of experts keeps for its backward pass, in closed form.

How many rows a rank's experts get depends on the routing; counted is each rank's equal share,
so that the sum over an expert block is exact and a rank's figure an estimate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_lite.telemetry.memory import ActivationShape

_INT32, _INT64 = 4, 8


def replicated_elements(shape: ActivationShape) -> int:
    """Elements of the hot experts' weights and biases that come to a rank, per layer."""
    model, parallel, experts = shape.model, shape.parallel, shape.model.experts
    assert experts is not None
    if parallel.ep == 1:
        return 0
    firsts, width = 2 if model.gated else 1, experts.ffn_hidden_size // parallel.etp
    each = (firsts + 1) * width * model.hidden_size
    if model.linear_bias:
        each += firsts * width + model.hidden_size
    return experts.replicated * each


def replica_gradient_bytes(shape: ActivationShape) -> int:
    """The hot experts' gradients while one layer is differentiated."""
    return replicated_elements(shape) * shape.wide


def expert_channels(shape: ActivationShape) -> int:
    """Channels of one row inside an expert: outputs of its first linears and their activation."""
    experts = shape.model.experts
    assert experts is not None
    first = 2 if shape.model.gated else 1
    return (first + 1) * experts.ffn_hidden_size // shape.parallel.etp


def routed_rows(shape: ActivationShape) -> int:
    """Rows of a rank's experts, on average: each of its tokens k times, and etp times."""
    experts, parallel = shape.model.experts, shape.parallel
    assert experts is not None
    return shape.tokens // parallel.tp * experts.topk * parallel.etp


def experts_bytes(shape: ActivationShape) -> int:
    """What router and experts of one layer keep for one microbatch.

    Rows of the experts' inputs (sent by other ranks; on one rank they are packed again), what
    is inside the experts, their results; scores, choices and index maps; the weights of hot
    experts. With native operations: without them combining keeps rows in the accumulation
    dtype, too.
    """
    model, parallel, experts = shape.model, shape.parallel, shape.model.experts
    assert experts is not None
    tokens, rows = shape.tokens // parallel.tp, routed_rows(shape)
    moves = parallel.etp * parallel.ep > 1
    elements = rows * (expert_channels(shape) + model.hidden_size * (2 if moves else 1))
    elements += replicated_elements(shape)
    # Logits, scores and mixture of all experts, those of the chosen ones; choices; where each
    # row comes from, and where it goes on.
    wide = tokens * (3 * experts.num_experts + 2 * experts.topk) * shape.wide
    maps = tokens * experts.topk * (_INT32 + _INT64) + rows * _INT32 * (3 if moves else 1)
    return elements * shape.narrow + wide + maps


def deferred_expert_bytes(shape: ActivationShape) -> int:
    """What router and experts of one layer leave between I and W."""
    model, experts = shape.model, shape.model.experts
    assert experts is not None
    channels = 2 * model.hidden_size + expert_channels(shape)
    tokens = shape.tokens // shape.parallel.tp
    router = tokens * (model.hidden_size * shape.narrow + experts.num_experts * shape.wide)
    return routed_rows(shape) * channels * shape.narrow + router
