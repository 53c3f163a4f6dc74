"""Which architectures of Hugging Face convert. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_lite.checkpoint.convert.hf_families import GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, Family
from megatron_lite.checkpoint.convert.hf_gpt_oss import GPT_OSS
from megatron_lite.checkpoint.convert.hf_mixtures import DEEPSEEK_V3, MIXTRAL, QWEN3_MOE

# In the order in which an export looks for a family that can express the model.
FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (LLAMA, QWEN2, QWEN3, GPT2, MISTRAL, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS)
}
