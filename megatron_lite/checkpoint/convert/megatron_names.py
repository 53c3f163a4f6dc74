"""Names of Megatron-LM's tensors: its older models', Megatron-core's, Transformer Engine's.

All become one spelling, Megatron-core's with separate norms, which is ours but for the
fused tensors (`linear_qkv`, gated `linear_fc1`). Layers in a rank file count from 0 in each
pipeline stage; `global_layers` gives them their place in the model. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megatron_lite.errors import DamagedError

# Kept by modules for themselves: recipes of fp8 scaling, and tables derived from the flags.
DROPPED = re.compile(r".*(\._extra_state(/.*)?|rotary_(pos_)?emb\.inv_freq)")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Applied in this order, each to what the one before has left.
SPELLINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(module\.)+", ""),
        (r"^model\.(?=decoder\.|embedding\.|output_layer\.)", ""),
        (r"^language_model\.(encoder|transformer)\.", "decoder."),
        (r"^language_model\.", ""),
        (r"^word_embeddings_for_head\.", "output_layer."),
        (r"^decoder\.final_(layernorm|norm)\.", "decoder.final_layernorm."),
        (r"\.attention\.", ".self_attention."),
        (r"\.self_attention\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(layernorm|norm)\.", ".pre_mlp_layernorm."),
        (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
        (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
        # Distributed checkpoints may hold the two halves of a gated MLP apart.
        (r"\.mlp\.linear_fc1\.(weight|bias)_w$", r".mlp.linear_gate.\1"),
        (r"\.mlp\.linear_fc1\.(weight|bias)_v$", r".mlp.linear_up.\1"),
    )
)


def core_name(name: str) -> str | None:
    """Return the one spelling of a tensor's name, None for what no model is made of."""
    if DROPPED.fullmatch(name):
        return None
    for pattern, replacement in SPELLINGS:
        name = pattern.sub(replacement, name)
    return name


def fused_name(name: str) -> str:
    """Return the name of the stored tensor that holds a logical tensor of ours."""
    name = re.sub(r"\.linear_[qkv]\.(weight|bias)$", r".linear_qkv.\1", name)
    return re.sub(r"\.linear_(gate|up)\.(weight|bias)$", r".linear_fc1.\2", name)


def global_layers(
    stages: Mapping[tuple[int, int], Sequence[str]], source: str
) -> dict[tuple[int, int], int]:
    """Return the number of the first layer of each virtual stage.

    Virtual stages follow one another chunk by chunk, in each chunk pipeline rank by
    pipeline rank. Their layers are counted, so uneven divisions need no formula.

    Args:
        stages: (chunk, pipeline rank) -> names in the one spelling, with local numbers.

    Raises:
        DamagedError: the numbers of a stage have a gap.
    """
    offsets, first = {}, 0
    for chunk, rank in sorted(stages):
        matches = (LAYER.fullmatch(name) for name in stages[chunk, rank])
        numbers = {int(match[1]) for match in matches if match}
        if numbers != set(range(len(numbers))):
            gap = min(set(range(max(numbers))) - numbers)
            raise DamagedError(
                f"{source}: pipeline rank {rank}, model{chunk}: layer {gap} is missing"
            )
        offsets[chunk, rank] = first
        first += len(numbers)
    return offsets


def renumbered(name: str, first_layer: int) -> str:
    """Return a name with the layer's number in the whole model."""
    match = LAYER.fullmatch(name)
    return f"decoder.layers.{int(match[1]) + first_layer}.{match[2]}" if match else name
