"""A model in logical form, between two formats.

A reader declares what it will deliver before it reads: `check_bundle` compares that with
the specification of the architecture, so that nothing is missing, doubled or of another
shape. Readers see to it that every tensor of their source is consumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lite.checkpoint.direct import LogicalTensor
from megatron_lite.config.plan import ModelShape, build_model, build_parallel
from megatron_lite.config.schema import Config
from megatron_lite.errors import DamagedError
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.params import ParamSpec


@dataclass(frozen=True)
class Bundle:
    """A model on its way from one format to another.

    Attributes:
        config: flags that build the architecture; training flags at their defaults.
        vocab_size: true vocabulary, unpadded.
        tensors: by logical name, exactly those of the specification.
        source: what it was, for people, such as "hf LlamaForCausalLM".
        assets: files that go along, tokenizer and generation settings: by file name, the
            path of the file or its content.
        notes: what the user should know, a line each.
    """

    config: Config
    vocab_size: int
    tensors: Mapping[str, LogicalTensor]
    source: str
    assets: Mapping[str, Path | bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> ModelShape:
        return build_model(self.config, self.vocab_size)


def logical_specs(config: Config, vocab_size: int) -> Sequence[ParamSpec]:
    """Return the logical parameters of an architecture, whole and unpadded."""
    return model_spec(build_model(config, vocab_size), build_parallel(config, 1))


def state_names(bundle: Bundle) -> frozenset[str]:
    """Names of what no gradient changes: a router's bias and counts, never in half precision."""
    specs = logical_specs(bundle.config, bundle.vocab_size)
    return frozenset(spec.name for spec in specs if not spec.trained)


def check_bundle(bundle: Bundle) -> None:
    """Raise unless the bundle delivers exactly the parameters of its architecture.

    Raises:
        DamagedError: naming missing and unexpected tensors and wrong shapes.
    """
    wanted = {spec.name: spec.shape for spec in logical_specs(bundle.config, bundle.vocab_size)}
    found = {name: tensor.shape for name, tensor in bundle.tensors.items()}
    lines = [f"missing: {name}" for name in sorted(wanted.keys() - found.keys())]
    lines += [f"unexpected: {name}" for name in sorted(found.keys() - wanted.keys())]
    lines += [
        f"shape: {name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if lines:
        told = "\n  ".join(lines[:20])
        raise DamagedError(f"{bundle.source}: {len(lines)} faults:\n  {told}")
