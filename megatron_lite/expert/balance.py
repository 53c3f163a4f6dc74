"""What a step does about balance: counts of all its microbatches, once, over all ranks.

The bias in the choice of experts moves by a fixed rate towards the experts that were chosen
less often than the mean, once per update; the global loss keeps the counts for the next
step. Skipped steps and evaluations move nothing, and a frozen router keeps its bias. One
all-reduce carries the counts of all layers and the figures for the log. Source: Wang et al.,
"Auxiliary-loss-free load balancing strategy for mixture-of-experts" (2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config.expert_plan import ExpertShape
from megatron_lite.expert.capacity import expert_capacity
from megatron_lite.expert.losses import loss_terms
from megatron_lite.expert.parts import ExpertParts
from megatron_lite.expert.replicas import hot_experts
from megatron_lite.mesh import collectives
from megatron_lite.mesh.collectives import Work
from megatron_lite.mesh.groups import Group
from megatron_lite.microbatch import LossSink, RoutingRecord

# Of one layer: itself, sums over tokens and the bytes of a step, its busiest expert's load.
FIGURES = ("layers", "chosen", "dropped", "rerouted", "entropy", "dispatch_bytes", "busiest")
REPLICATED = "moe/replicated"


@dataclass(eq=False)
class Balance:
    """The routing of a step, summed over the ranks of a stage.

    Attributes:
        shape: the mixture.
        parts: the MoE layers of this rank.
        stage: the ranks that hold other tokens of the same layers.
        sums: [layers, columns] fp64 (columns: counts and drops per expert, rerouted choices,
            entropy, bytes, one per loss term), on its way until `work` is waited for.
    """

    shape: ExpertShape
    parts: Sequence[ExpertParts]
    stage: Group
    sums: Tensor
    work: Work | None

    @property
    def counts(self) -> Tensor:
        """[layers, E] fp64: how often experts were chosen in the step, before dropping."""
        return self._ready()[:, : self.shape.num_experts]

    @torch.no_grad()
    def update(self) -> None:
        """Move the bias of every router that trains, and keep the counts of all.

        Call after a successful update.
        """
        rate = self.shape.bias_update_rate
        for part, counts in zip(self.parts, self.counts, strict=True):
            bias, kept = part.state("expert_bias"), part.state("expert_counts")
            if bias is not None and part.params["router.weight"].requires_grad:
                # Whole numbers: compared with the mean without rounding it.
                direction = torch.sign(counts.sum() - counts * self.shape.num_experts)
                bias.add_(direction.to(bias.dtype), alpha=rate)
            if kept is not None:
                kept.copy_(counts)

    def log_sums(self, layers: Sequence[int] = ()) -> dict[str, Tensor]:
        """What is to be summed over all ranks for the log, the same keys on all ranks.

        Args:
            layers: numbers of those whose own figures and loads are wanted too.

        Returns:
            key -> 0-dim fp64, 0 on all ranks of a stage but the first.
        """
        figures = self._figures() * (self.stage.rank == 0)
        names = _columns(self.shape, with_load=True)
        few = len(_columns(self.shape))
        found = dict(zip(names[:few], figures[:, :few].sum(0).unbind(), strict=True))
        mine = {part.layer: row for part, row in zip(self.parts, figures, strict=True)}
        nothing = figures.new_zeros(len(names))
        for layer in layers:
            row = mine.get(layer, nothing).unbind()
            found |= {_of(name, layer): value for name, value in zip(names, row, strict=True)}
        if self.shape.replicated:
            found[REPLICATED] = self._replicated() * (self.stage.rank == 0)
        return found

    def _replicated(self) -> Tensor:
        """Choices of the experts that were hot in this step; call before `update`, 0-dim."""
        counts = self.counts
        pairs = zip(self.parts, counts, strict=True)
        return torch.stack(
            [counts.new_zeros(()), *(c[hot_experts(p)].sum() for p, c in pairs)]
        ).sum()

    def _figures(self) -> Tensor:
        """[layers, columns]: what the log shows of a layer, as sums."""
        e = self.shape.num_experts
        sums, counts = self._ready(), self.counts
        if not len(self.parts):
            return sums.new_zeros(0, len(_columns(self.shape, with_load=True)))
        chosen = counts.sum(1)
        busiest = counts.amax(1) * e / chosen.clamp(min=1)
        dropped = sums[:, e : 2 * e].sum(1)
        others = sums[:, 2 * e : 2 * e + 3].unbind(1)
        columns = [torch.ones_like(chosen), chosen, dropped, *others, busiest]
        return torch.cat([sums[:, 2 * e + 3 :], torch.stack(columns, dim=1), counts], dim=1)

    def _ready(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.sums


def start_balance(
    shape: ExpertShape,
    parts: Sequence[ExpertParts],
    sinks: Iterable[LossSink],
    stage: Group,
    device: torch.device | str,
) -> Balance:
    """Sum a step's routing over the ranks of a stage; call once, after the last pass.

    Args:
        parts: the MoE layers of this rank, in the order of all ranks of the stage.
        sinks: what every pass of the step left, in any order.
        stage: the group of that name.
        device: of the parameters.

    Comm: one asynchronous all-reduce over stage of 2 E + 3 + terms fp64 elements per MoE layer
        of this rank; none without such layers.
    """
    terms = loss_terms(shape)
    by_layer: dict[int, list[RoutingRecord]] = {part.layer: [] for part in parts}
    sent = {part.layer: 0 for part in parts}
    for sink in sinks:
        for layer, record in sink.routing.items():
            by_layer[layer].append(record)
            sent[layer] += sink.dispatched.get(layer, 0)
    width = 2 * shape.num_experts + 3 + len(terms)
    rows = [_sum_records(by_layer[part.layer], terms, width, device) for part in parts]
    if not rows:
        nothing = torch.zeros(0, width, dtype=torch.float64, device=device)
        return Balance(shape, parts, stage, nothing, None)
    sums = torch.stack(rows)
    # Known to the host: one copy for all layers.
    sums[:, 2 * shape.num_experts + 2] = torch.tensor([*sent.values()]).to(sums)
    return Balance(shape, parts, stage, sums, collectives.all_reduce(sums, stage, async_op=True))


def log_scalars(
    shape: ExpertShape,
    sums: Mapping[str, float],
    microbatches: float,
    layers: Sequence[int] = (),
) -> dict[str, float]:
    """Turn the summed figures into what the log shows.

    Args:
        sums: of `Balance.log_sums`, over all ranks.
        microbatches: of the global batch (its size / micro-batch size).
        layers: as for `log_sums`.

    Returns:
        "moe_<term>": the loss term as the training loss has it, all layers added up;
        "moe/dropped_share" of all choices, and "moe/rerouted_share" where they may be;
        "moe/padded_share" of the rows of experts that are filled up; "moe/dispatch_bytes" that
        all ranks together send others on the way to the experts, in a step's forward passes;
        "moe/entropy": mean over tokens and layers of the scores' entropy, in nats;
        "moe/busiest_over_mean": load of the busiest expert against the mean one, mean over
        layers; "moe/replicated_share" of all choices, where experts are replicated. Of a layer
        "moe/<term>_layer_<number>" and so on, and "moe/load_expert_<e>_layer_<number>", the
        share of its choices.
    """
    found = dict(_scalars(shape, sums, microbatches, None))
    if shape.replicated:
        found["moe/replicated_share"] = sums[REPLICATED] / max(sums["moe/chosen"], 1.0)
    for layer in layers:
        found |= _scalars(shape, sums, microbatches, layer)
        chosen = max(sums[_of("moe/chosen", layer)], 1.0)
        for expert in range(shape.num_experts):
            name = _of(_load(expert), layer)
            found[name] = sums[name] / chosen
    return found


def _scalars(
    shape: ExpertShape, sums: Mapping[str, float], microbatches: float, at: int | None
) -> Iterator[tuple[str, float]]:
    figures = {name: sums[_of(f"moe/{name}", at)] for name in FIGURES}
    chosen, dropped = figures["chosen"], figures["dropped"]
    layers, total = max(figures["layers"], 1.0), max(chosen, 1.0)
    for term in loss_terms(shape):
        # A loss of all layers goes to the log line, where a name with a slash does not.
        yield (
            (_term(term) if at is None else _of(f"moe/{term}", at)),
            (sums[_of(_term(term), at)] / microbatches),
        )
    yield _of("moe/dropped_share", at), dropped / total
    if shape.reroute_candidates:
        yield _of("moe/rerouted_share", at), figures["rerouted"] / total
    if shape.pad_to_capacity:
        tokens = round(chosen / (layers * shape.topk * microbatches))
        rows = expert_capacity(shape, tokens) * shape.num_experts * layers * microbatches
        yield _of("moe/padded_share", at), 1 - (chosen - dropped) / max(rows, 1.0)
    yield _of("moe/dispatch_bytes", at), figures["dispatch_bytes"]
    yield _of("moe/entropy", at), figures["entropy"] * shape.topk / total
    yield _of("moe/busiest_over_mean", at), figures["busiest"] / layers


def _term(term: str) -> str:
    return f"moe_{term}"


def _load(expert: int) -> str:
    return f"moe/load_expert_{expert}"


def _columns(shape: ExpertShape, with_load: bool = False) -> tuple[str, ...]:
    losses = (_term(term) for term in loss_terms(shape))
    loads = (_load(expert) for expert in range(shape.num_experts if with_load else 0))
    return (*losses, *(f"moe/{name}" for name in FIGURES), *loads)


def _of(name: str, layer: int | None) -> str:
    return name if layer is None else f"{name}_layer_{layer}"


def _sum_records(
    records: Sequence[RoutingRecord],
    terms: Sequence[str],
    width: int,
    device: torch.device | str,
) -> Tensor:
    """One row of `Balance.sums`, without bytes: one layer in all microbatches of this rank."""
    if not records:
        return torch.zeros(width, dtype=torch.float64, device=device)
    counts = torch.stack([record.counts for record in records]).sum(0)
    dropped = torch.stack([record.dropped for record in records]).sum(0)
    figures = [
        [
            *(record.rerouted, record.entropy, torch.zeros_like(record.entropy)),
            *(record.losses[term] for term in terms),
        ]
        for record in records
    ]
    by_record = torch.stack([torch.stack([value.double() for value in row]) for row in figures])
    return torch.cat([counts.double(), dropped.double(), by_record.sum(0)])
