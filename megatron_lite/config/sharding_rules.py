"""Rules of the data axis: what is sharded, over how many ranks, in how many copies."""

from __future__ import annotations

import math

from megatron_lite.config.facts import Facts, Rule
from megatron_lite.config.legal import nearest_divisors
from megatron_lite.config.sharding_plan import sharding_strategy

STRATEGY = "--data-parallel-sharding-strategy"
INSTANCES = "--num-distributed-optimizer-instances"


def switches(f: Facts) -> list[str]:
    """Megatron's older switches that are on, with the strategy that each means."""
    config = f.config
    found = []
    if config.use_distributed_optimizer:
        found.append("--use-distributed-optimizer (optim)")
    if config.use_megatron_fsdp:
        found.append("--use-megatron-fsdp (optim_grads_params)")
    if config.use_torch_fsdp2:
        found.append("--use-torch-fsdp2 (optim_grads_params)")
    return found


def contradicts(f: Facts) -> bool:
    """Say whether a switch asks for other sharding than the strategy that is given.

    Megatron's scripts give --use-distributed-optimizer beside every strategy that shards.
    """
    config, given = f.config, f.config.data_parallel_sharding_strategy
    if given is None:
        return config.use_distributed_optimizer and config.use_torch_fsdp2
    is_other = config.use_torch_fsdp2 and given != "optim_grads_params"
    return is_other or (config.use_distributed_optimizer and given == "no_shard")


def contradiction_message(f: Facts) -> str:
    """Tell which flags ask for different things."""
    strategy = f.config.data_parallel_sharding_strategy
    given = f"{STRATEGY} {strategy} and " if strategy is not None else ""
    return (
        f"{given}{', '.join(switches(f))} ask for different sharding of the data axis: "
        f"give {STRATEGY} alone"
    )


def data_ranks(f: Facts) -> int:
    """Ranks that hold the same part of the model; 0 where the world does not divide."""
    return f.dp * f.cp


def expert_data_ranks(f: Facts) -> int:
    """Count the ranks that hold the same experts; without experts those of the data axis."""
    if f.config.num_experts is None:
        return data_ranks(f)
    return f.world_size // max(f.etp * f.ep * f.pp, 1)


def instances_broken(f: Facts) -> bool:
    """Say whether the copies do not divide the data ranks, of experts too."""
    instances = f.config.num_distributed_optimizer_instances
    if instances < 1 or data_ranks(f) == 0:
        return False  # other rules tell
    return data_ranks(f) % instances != 0 or expert_data_ranks(f) % instances != 0


def instances_message(f: Facts) -> str:
    """Tell which numbers of copies would divide."""
    instances, ranks = f.config.num_distributed_optimizer_instances, data_ranks(f)
    experts = max(expert_data_ranks(f), 1)
    of_experts = f" and the {experts} of each expert" if f.config.num_experts is not None else ""
    legal = nearest_divisors(math.gcd(ranks, experts), instances)
    return (
        f"{INSTANCES} {instances} must divide the {ranks} data-parallel ranks (DP x CP)"
        f"{of_experts}: every copy is sharded over as many; nearest legal: {legal}"
    )


def idle_rule(field: str, default: str, needs: tuple[str, ...]) -> Rule:
    """A flag that would change nothing below its strategy."""
    name = f"--{field.replace('_', '-')}"
    return Rule(
        f"{name[2:]}-needs-shards",
        lambda f: getattr(f.config, field) != default and sharding_strategy(f.config) not in needs,
        lambda f: (
            f"{name} {getattr(f.config, field)} changes nothing with {STRATEGY} "
            f"{sharding_strategy(f.config)}; legal with: {', '.join(needs)}"
        ),
    )


SHARDING_RULES: tuple[Rule, ...] = (
    idle_rule("gradient_accumulation", "sharded", ("optim_grads", "optim_grads_params")),
    idle_rule("reshard_after", "forward", ("optim_grads_params",)),
    Rule("sharding-agrees", contradicts, contradiction_message),
    Rule("instances-divide", instances_broken, instances_message),
    Rule(
        "gather-needs-shards",
        lambda f: f.config.overlap_param_gather and sharding_strategy(f.config) == "no_shard",
        lambda f: (
            "--overlap-param-gather: nothing is gathered without sharding; add "
            f"--use-distributed-optimizer or {STRATEGY}"
        ),
    ),
)
