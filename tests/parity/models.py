"""The model families of the parity tests, small, with every trap that size allows.

Eight query heads on two KV heads where heads are grouped: a group of four differs from two
KV heads, and TP=4 and 8 replicate them. 101 words: the last ranks hold padding rows, or
nothing else. Documents are short and their ends masked (verify/tiny_data.py).
"""

from collections.abc import Mapping
from pathlib import Path

from megatron_lite.config.flags import parse_config
from megatron_lite.verify.axes import Axis, Case
from megatron_lite.verify.scale import equal_tokens_tie, run_flags

SEQ_LENGTH = 24
GLOBAL_BATCH_SIZE = 8

_SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 8 --kv-channels 8 "
    "--make-vocab-size-divisible-by 8"
)
_GROUPED = "--group-query-attention --num-query-groups 2"
_LLAMA = (
    f"{_SIZES} {_GROUPED} --ffn-hidden-size 48 --max-position-embeddings {SEQ_LENGTH} "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--hidden-dropout 0 --attention-dropout 0"
)
MODELS: Mapping[str, str] = {
    "gpt2": f"{_SIZES} --ffn-hidden-size 64 --max-position-embeddings 32 --openai-gelu",
    "llama": f"{_LLAMA} --untie-embeddings-and-output-weights",
    "qwen2": f"{_LLAMA} --add-qkv-bias",
    "qwen3": f"{_LLAMA} --qk-layernorm",
}
# What the attention of newer families adds; dense, each beside the families above.
VARIANTS: Mapping[str, str] = {
    "gptoss-dense": (
        f"{_LLAMA.replace('--swiglu', '--quick-geglu')} --untie-embeddings-and-output-weights "
        "--add-qkv-bias --softmax-type learnable --window-size 5,0 --window-attn-skip-freq 2 "
        "--activation-func-clamp-value 0.05 --glu-linear-offset 1.0 "
        "--position-embedding-type yarn --rotary-scaling-factor 4 "
        "--yarn-original-max-position-embeddings 6 --yarn-beta-fast 2"
    ),
    "mla": (
        f"{_LLAMA.replace(_GROUPED, '').replace('--kv-channels 8', '')} "
        "--untie-embeddings-and-output-weights --multi-latent-attention --q-lora-rank 12 "
        "--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --qk-layernorm "
        "--rotary-scaling-factor 4 --yarn-original-max-position-embeddings 6 --yarn-beta-fast 2 "
        "--mscale 1.0 --mscale-all-dim 0.7"
    ),
}
_MIXTURE = (
    f"{_LLAMA} --untie-embeddings-and-output-weights --num-experts 8 --moe-ffn-hidden-size 24"
)
# Mixtures of experts, with every kind of router; layers 0, 2, ... or all are MoE layers.
MIXTURES: Mapping[str, str] = {
    "mixtral": f"{_MIXTURE} --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001",
    "qwen3-moe": (
        f"{_MIXTURE} --num-experts 16 --moe-router-topk 8 --moe-router-pre-softmax --qk-layernorm "
        "--moe-router-load-balancing-type seq_aux_loss global_aux_loss "
        "--moe-aux-loss-coeff 0.02 0.01 --moe-layer-freq 2"
    ),
    "deepseek": (
        f"{_MIXTURE} --moe-router-topk 2 --moe-router-score-function sigmoid "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
        "--moe-shared-expert-intermediate-size 16 --mtp-num-layers 1 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001"
    ),
    "biased": (  # biases of experts, a gated shared expert, capacity with rerouting
        f"{_SIZES} {_GROUPED} --ffn-hidden-size 48 --max-position-embeddings 32 --openai-gelu "
        "--hidden-dropout 0.1 --attention-dropout 0 --num-experts 8 --moe-ffn-hidden-size 24 "
        "--moe-router-topk 1 --moe-router-pre-softmax --moe-expert-capacity-factor 1.0 "
        "--moe-reroute-candidates 2 "
        "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate "
        "--moe-input-jitter-eps 0.01 --moe-aux-loss-coeff 0.01"
    ),
}

# Whole families: their attention and their experts in one model.
FAMILIES: Mapping[str, str] = {
    "deepseek-v3": (
        f"{VARIANTS['mla']} --num-experts 8 --moe-ffn-hidden-size 24 --moe-layer-freq [0]+[1]*3 "
        "--moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-num-groups 4 "
        "--moe-router-group-topk 2 --moe-router-enable-expert-bias "
        "--moe-shared-expert-intermediate-size 16 --mtp-num-layers 1 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001"
    ),
    "gpt-oss": (
        f"{VARIANTS['gptoss-dense'].replace('--disable-bias-linear', '')} --num-experts 8 "
        "--moe-ffn-hidden-size 24 --moe-router-topk 4 --moe-aux-loss-coeff 0.01"
    ),
}


def parity_case(
    model: str,
    data: Path,
    *axes: Axis,
    precision: str = "fp64",
    steps: int = 5,
    extra: str = "",
    batch: int = GLOBAL_BATCH_SIZE,
    micro: int | None = None,
) -> Case:
    """The case of a family with these axes; `extra` flags come last and win.

    `micro` fixes the micro-batch size of the reference too.
    """
    words = {**MODELS, **VARIANTS, **MIXTURES, **FAMILIES}[model].split()
    runs = not equal_tokens_tie(parse_config([*words, *extra.split()], {}))
    return Case(
        flags=(
            *words,
            *run_flags(data, seq_length=SEQ_LENGTH, steps=steps, precision=precision, runs=runs),
            "--global-batch-size",
            str(batch),
            *extra.split(),
        ),
        global_batch_size=batch,
        axes=axes,
        micro_batch_size=micro,
    )
