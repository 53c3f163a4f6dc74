"""Plain PyTorch models of the sizes that `step.py` measures: what anybody would write first.

`PlainGPT` is the common small GPT (LayerNorm, learned positions, GELU, tied head), `PlainLlama`
the common small Llama (RMSNorm, rotary, SwiGLU); both with torch's fused attention, full
logits and `torch.nn.functional.cross_entropy`. `hf_llama` builds transformers' own class.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """One model size; the same FLOPs for both families."""

    layers: int = 6
    h: int = 384
    heads: int = 6
    s: int = 512
    v: int = 32000

    @property
    def gelu_ffn(self) -> int:
        """Width of the plain MLP."""
        return 4 * self.h

    @property
    def gated_ffn(self) -> int:
        """Width of the gated MLP with as many weights."""
        return 8 * self.h // 3


class _Attention(nn.Module):
    def __init__(self, size: Size, bias: bool) -> None:
        super().__init__()
        self.heads = size.heads  # of this rank
        self.qkv = nn.Linear(size.h, 3 * size.h, bias=bias)
        self.out = nn.Linear(size.h, size.h, bias=bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        b, s, h = x.shape
        q, k, v = (
            t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(h, dim=-1)
        )
        if rotary is not None:
            q, k = _turn(q, *rotary), _turn(k, *rotary)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, s, h))


def _turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class _Layer(nn.Module):
    def __init__(self, size: Size, llama: bool) -> None:
        super().__init__()
        self.llama = llama
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(size.h), norm(size.h)
        self.attention = _Attention(size, bias=not llama)
        if llama:
            self.gate = nn.Linear(size.h, size.gated_ffn, bias=False)
            self.up = nn.Linear(size.h, size.gated_ffn, bias=False)
            self.down = nn.Linear(size.gated_ffn, size.h, bias=False)
        else:
            self.up = nn.Linear(size.h, size.gelu_ffn)
            self.down = nn.Linear(size.gelu_ffn, size.h)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.norm1(x), rotary)
        y = self.norm2(x)
        inner = (
            functional.silu(self.gate(y)) * self.up(y)
            if self.llama
            else functional.gelu(self.up(y))
        )
        return x + self.down(inner)


class PlainModel(nn.Module):
    """Decoder of one of the two families; `forward` returns the mean token loss."""

    def __init__(self, size: Size, llama: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(size.v, size.h)
        self.places = None if llama else nn.Embedding(size.s, size.h)
        self.layers = nn.ModuleList(_Layer(size, llama) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.h) if llama else nn.LayerNorm(size.h)
        self.head = nn.Linear(size.h, size.v, bias=False)
        self.head.weight = self.words.weight
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)
        self.rotary: tuple[Tensor, Tensor] | None = None
        if llama:
            d = size.h // size.heads
            angles = torch.outer(torch.arange(size.s), 10000.0 ** (-torch.arange(0, d, 2) / d))
            angles = torch.cat((angles, angles), dim=-1)
            self.rotary = angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Loss of [b, s] tokens; the logits are widened to fp32 as careful code does."""
        x = self.words(tokens)
        if self.places is not None:
            x = x + self.places.weight
        rotary = None
        if self.rotary is not None:
            rotary = self.rotary[0].to(x.dtype), self.rotary[1].to(x.dtype)
        for layer in self.layers:
            x = layer(x, rotary)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class HfLlama(nn.Module):
    """transformers' LlamaForCausalLM with SDPA attention and tied embeddings."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=size.v,
            hidden_size=size.h,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            intermediate_size=size.gated_ffn,
            max_position_embeddings=size.s,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
            use_cache=False,
        )
        self.model = transformers.AutoModelForCausalLM.from_config(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Loss of [b, s] tokens."""
        logits = self.model(input_ids=tokens).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class _SplitAttention(nn.Module):
    """Attention with separate projections, which a column cut leaves whole heads of."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.d = size.h // size.heads
        self.q, self.k, self.v = (nn.Linear(size.h, size.h, bias=False) for _ in range(3))
        self.out = nn.Linear(size.h, size.h, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            linear(x).view(b, s, -1, self.d).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        q, k = _turn(q, *rotary), _turn(k, *rotary)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, s, -1))


def _dtensor_llama(size: Size, dtype: torch.dtype) -> nn.Module:
    """PlainLlama under torch's own tensor parallelism, vocabulary-parallel loss included."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = PlainModel(size, llama=True)
    model.head = nn.Linear(size.h, size.v, bias=False)
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for index, layer in enumerate(model.layers):
        layer.attention = _SplitAttention(size)
        for name in ("attention.q", "attention.k", "attention.v", "gate", "up"):
            plan[f"layers.{index}.{name}"] = ColwiseParallel()
        for name in ("attention.out", "down"):
            plan[f"layers.{index}.{name}"] = RowwiseParallel()
    model = model.to(dtype)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return parallelize_module(model, mesh, plan)


@contextmanager
def ranks_of_peer(name: str) -> Iterator[None]:
    """Join the ranks of a peer that runs on several."""
    if not name.startswith("dtensor"):
        yield
        return
    torch.distributed.init_process_group(
        "gloo",
        init_method=os.environ["MLITE_RENDEZVOUS"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    yield


def loss_context(name: str) -> AbstractContextManager[object]:
    """What a peer's forward and backward pass run under."""
    if name.startswith("dtensor"):
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()
    if name.endswith("autocast"):
        return torch.autocast("cpu", torch.bfloat16)
    return nullcontext()


def build_peer(name: str, size: Size, dtype: torch.dtype) -> nn.Module:
    """Build "plain-gpt", "plain-llama", "hf-llama" or "dtensor-llama", with their endings."""
    if name.startswith("dtensor"):
        return _dtensor_llama(size, dtype)
    model = HfLlama(size) if name.startswith("hf") else PlainModel(size, "llama" in name)
    model = model.to(dtype)
    return torch.compile(model) if name.endswith("compile") else model  # type: ignore[return-value]
