"""Which architectures of Hugging Face convert, and which are known and do not. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_lite.checkpoint.convert.hf_families import GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, Family
from megatron_lite.checkpoint.convert.hf_mixtures import DEEPSEEK_V3, MIXTRAL, QWEN3_MOE

# In the order in which an export looks for a family that can express the model.
FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (LLAMA, QWEN2, QWEN3, GPT2, MISTRAL, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3)
}
# Known and not convertible yet, with what is missing.
REFUSED: Mapping[str, str] = {"GptOssForCausalLM": "a bias of the router"}
