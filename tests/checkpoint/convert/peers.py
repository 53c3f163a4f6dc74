"""Models of transformers with random weights, and our logits from a converted directory.

Eight heads on two key/value heads where the family has such, so that the two numbers and
their ratio differ; a vocabulary of 100, which no padding divides.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.checkpoint.catalog import find_checkpoint
from megatron_lite.checkpoint.convert.hf_read import read_hf
from megatron_lite.checkpoint.convert.native import write_native
from megatron_lite.checkpoint.tensors import read_safetensors, write_safetensors
from megatron_lite.data.writer import DatasetWriter
from megatron_lite.mesh.launch import RunStatus, WorldInfo
from megatron_lite.model.sampling import _context
from megatron_lite.train.sample import load_stage
from tests.checkpoint.tiny import same_bits
from tools.generate import build_parser, saved_config

transformers = pytest.importorskip("transformers", reason="needs the [convert] extra")

VOCABULARY, POSITIONS = 100, 64
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4}
_GPT2 |= {"n_positions": POSITIONS, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}


def _rope(kind: str, theta: float = 10000.0, **more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DEEPSEEK = {
    **_SIZES,
    "num_key_value_heads": 8,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    **_rope(
        "yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.7, original_max_position_embeddings=16
    ),
}
MIXTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {**_SIZES, "num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            **_SIZES,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-plain": (
        "Qwen3MoeConfig",
        {**_SIZES, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24},
    ),
    "deepseek-v3": ("DeepseekV3Config", _DEEPSEEK),
    "deepseek-v3-plain": (
        "DeepseekV3Config",
        {**_DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            **_SIZES,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "intermediate_size": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            **_rope(
                "yarn", 150000.0, factor=4.0, truncate=False, original_max_position_embeddings=16
            ),
        },
    ),
    "deepseek-v3-dense": ("DeepseekV3Config", {**_DEEPSEEK, "first_k_dense_replace": 3}),
}
# name -> (transformers' configuration class, its arguments)
PEERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_SIZES}),
    "llama-kv8": ("LlamaConfig", {**_SIZES, "num_key_value_heads": 8}),
    "llama-kv1": ("LlamaConfig", {**_SIZES, "num_key_value_heads": 1}),
    "llama-tied-biased": (
        "LlamaConfig",
        {**_SIZES, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3": (
        "LlamaConfig",
        {
            **_SIZES,
            "vocab_size": 128,
            "max_position_embeddings": 131072,
            **_rope("llama3", 500000.0, **_LLAMA3),
        },
    ),
    "llama-linear": ("LlamaConfig", {**_SIZES, **_rope("linear", factor=4.0)}),
    "mistral": (
        "MistralConfig",
        {**_SIZES, "sliding_window": None, "head_dim": 16, **_rope("default", 1e6)},
    ),
    "qwen2": ("Qwen2Config", {**_SIZES, "tie_word_embeddings": True, **_rope("default", 1e6)}),
    "qwen2-untied": ("Qwen2Config", {**_SIZES}),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 16, "tie_word_embeddings": True}),
    "llama-yarn": (
        "LlamaConfig",
        {
            **_SIZES,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
        },
    ),
    **MIXTURES,
    "gpt2": ("GPT2Config", {**_GPT2}),
    "gpt2-untied-gelu": (
        "GPT2Config",
        {**_GPT2, "tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 160},
    ),
}


def build_peer(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> torch.nn.Module:
    """A transformers model with weights large enough that an error shows in the logits."""
    config_class, arguments = PEERS[kind]
    config = getattr(transformers, config_class)(**{**arguments, **changes})
    config._attn_implementation = "eager" if kind == "gpt-oss" else "sdpa"
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, param in peer.named_parameters():
            is_norm = ("norm" in name or ".ln_" in name) and name.endswith("weight")
            param.copy_((1.0 if is_norm else 0.0) + 0.1 * torch.randn(param.shape))
        for name, buffer in peer.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape))
    return peer


def save_peer(directory: Path, kind: str, **changes: Any) -> torch.nn.Module:
    """Build a model and save it as transformers does."""
    peer = build_peer(kind, **changes)
    peer.save_pretrained(directory)
    return peer


def to_native(source: Path, target: Path) -> Path:
    """Convert a Hugging Face directory to a checkpoint of ours."""
    write_native(read_hf(source), target)
    return target


def weight_files(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files of a directory."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= read_safetensors(path)
    return tensors


def differing(left: Path, right: Path) -> list[str]:
    """Names of tensors that are not bit for bit the same in two directories."""
    a, b = weight_files(left), weight_files(right)
    assert a
    return sorted(a.keys() ^ b.keys()) + [n for n in a if n in b and not same_bits(a[n], b[n])]


def prompt(length: int = 16, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """[1, length] fixed tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocabulary, (1, length), generator=generator)


def peer_logits(peer: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """[s, v] of the transformers model."""
    with torch.no_grad():
        logits: torch.Tensor = peer(input_ids=tokens).logits[0]
    return logits


def logits_rank(
    root: str, tokens: Sequence[int], out: str, rank: int = 0, world_size: int = 1
) -> None:
    """Load a checkpoint in tensor-parallel size `world_size`; rank 0 writes its logits."""
    found = find_checkpoint(root)
    args = build_parser().parse_args(["--load", root, "--prompt", "", "--device", "cpu"])
    config = saved_config(found.manifest.state, args, world_size)
    info = WorldInfo(rank, world_size, rank, world_size, "", "test")
    with load_stage(config, found, info, RunStatus()) as (stage, _, _):
        context = _context(0, len(tokens), torch.device("cpu"))
        logits = stage.logits(torch.tensor(tokens).unsqueeze(1), context, None)[:, 0]
    if rank == 0:
        write_safetensors(out, {"logits": logits})


def our_logits(
    root: Path, tokens: torch.Tensor, rank_pool: Any = None, tp: int = 1
) -> torch.Tensor:
    """[s, v] of a checkpoint of ours, on `tp` ranks."""
    out = root.with_name(f"{root.name}-logits-{tp}-{tokens.numel()}.safetensors")
    arguments = {"root": str(root), "tokens": tokens[0].tolist(), "out": str(out)}
    if tp == 1:
        logits_rank(**arguments)
    else:
        rank_pool.run(tp, logits_rank, **arguments)
    return read_safetensors(out)["logits"]


def flags(load: Path, folder: Path, tp: int) -> list[str]:
    """A command line that trains a converted checkpoint for a step; the model comes from it.

    Every sample of its data set is `prompt()`: one document of one period. The learning
    rate is 0, so the weights stay what they were.
    """
    data = folder / "data"
    if not data.with_name("data.idx").exists():
        with DatasetWriter(data, np.uint16) as writer:
            writer.add_document(np.array(prompt()[0].tolist() * 40))
            writer.finalize()
    words = (
        f"--load {load} --use-checkpoint-args --seq-length 16 --micro-batch-size 1 "
        "--global-batch-size 2 --train-iters 1 --lr 0.0 --weight-decay 0 --eval-iters 0 "
        "--lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --split 1 "
        f"--data-path {data} --data-cache-path {folder / 'cache'} --num-workers 0 --device cpu "
        f"--tensor-model-parallel-size {tp}"
    )
    return words.split()
