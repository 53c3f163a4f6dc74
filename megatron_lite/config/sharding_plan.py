"""What the data axis shards, resolved from its flags.

The stages are ZeRO's (Rajbhandari et al., arXiv 1910.02054): nothing, optimizer state,
gradients too, parameters too. A shard is cut over consecutive data ranks, all of them or
one of several equal instances, which then hold copies (hybrid sharding).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.schema import Config

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True)
class ShardingShape:
    """Sharding of one run.

    Attributes:
        strategy: one of `STRATEGIES`.
        instances: groups of data ranks that each hold a whole set of shards.
        overlap_reduce: reduce gradients during the backward pass, not after it.
        overlap_gather: gather parameters while others are used, not before.
        sharded_accumulation: gradients are reduced after every microbatch and only the
            shard accumulates; else whole gradients accumulate and are reduced once.
        reshard_after: gathered parameters are dropped after each "forward" and again after
            the backward pass, after the "backward" pass only, or after the "step".
    """

    strategy: str = "no_shard"
    instances: int = 1
    overlap_reduce: bool = True
    overlap_gather: bool = False
    sharded_accumulation: bool = False
    reshard_after: str = "forward"

    @property
    def stage(self) -> int:
        """ZeRO's number: 0 to 3."""
        return STRATEGIES.index(self.strategy)


def sharding_strategy(config: Config) -> str:
    """Resolve the strategy with Megatron's older switches."""
    if config.data_parallel_sharding_strategy is not None:
        return config.data_parallel_sharding_strategy
    if config.use_megatron_fsdp or config.use_torch_fsdp2:
        return "optim_grads_params"
    return "optim" if config.use_distributed_optimizer else "no_shard"


def plan_sharding(config: Config) -> ShardingShape:
    """Resolve the flags of the data axis."""
    strategy = sharding_strategy(config)
    gradients = strategy in ("optim_grads", "optim_grads_params")
    return ShardingShape(
        strategy=strategy,
        instances=config.num_distributed_optimizer_instances,
        overlap_gather=config.overlap_param_gather,
        sharded_accumulation=gradients and config.gradient_accumulation == "sharded",
        reshard_after=config.reshard_after,
    )
