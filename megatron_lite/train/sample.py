"""A stage for sampling: built from a checkpoint's configuration, weights read in place.

No optimizer, no gradients, no data: the parameters of this rank and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from megatron_lite.checkpoint.catalog import Found
from megatron_lite.checkpoint.reader import Checkpoint
from megatron_lite.config.plan import build_plan
from megatron_lite.config.rules import check_config
from megatron_lite.config.schema import Config
from megatron_lite.data.tokenizer import Tokenizer, build_tokenizer
from megatron_lite.errors import UserError
from megatron_lite.mesh.grid import build_grids
from megatron_lite.mesh.groups import build_groups
from megatron_lite.mesh.launch import RunStatus, WorldInfo, finish_distributed, init_distributed
from megatron_lite.model.gpt import GPTStage
from megatron_lite.model.sampling import StageChain, open_chain
from megatron_lite.spec.model import model_spec
from megatron_lite.spec.physical import logical_piece
from megatron_lite.spec.shards import local_box
from megatron_lite.spec.stages import specs_on_rank
from megatron_lite.train.build import build_stage, pick_device, set_threads


class Loaded(NamedTuple):
    """A stage with its weights, the run's tokenizer, and the other stages."""

    stage: GPTStage
    tokenizer: Tokenizer
    chain: StageChain


@contextmanager
def load_stage(
    config: Config, found: Found, info: WorldInfo, status: RunStatus
) -> Iterator[Loaded]:
    """Build this rank's stage with the checkpoint's weights.

    Args:
        config: the checkpoint's, in the layout wanted now, without sequence parallelism.
        found: the checkpoint.
        info: this rank's place; all ranks are one replica of the model.
        status: of the run.

    Raises:
        UserError: the layout does not fit the model, or the tokenizer is another one.
        DamagedError: a tensor does not verify.
    """
    check_config(config, info.world_size)
    tokenizer = build_tokenizer(config)
    # A converted checkpoint does not say; its vocabulary is then compared by the tensors.
    trained_with = found.manifest.state["facts"].get("tokenizer_type", tokenizer.fingerprint())
    if tokenizer.fingerprint() != trained_with:
        raise UserError(
            f"the tokenizer {tokenizer.fingerprint()!r} is not the one of the checkpoint, "
            f"{trained_with!r}; --tokenizer-model names its file"
        )
    plan = build_plan(config, info.world_size, tokenizer.vocab_size)
    set_threads(info)
    device = pick_device(config)
    init_distributed(info, device, status=status)
    grids = build_grids(plan.parallel)
    groups = build_groups(grids, info.rank, plan.model.num_query_groups)
    places = {
        "dense": grids.dense.coordinate(info.rank),
        "expert": grids.expert.coordinate(info.rank),
    }
    shape, pp_rank = plan.pipeline, groups.pp.rank
    specs = specs_on_rank(
        model_spec(plan.model, plan.parallel), shape.parts, shape.placement, pp_rank
    )
    parts = [part for part in shape.parts if shape.placement[part.stage] == pp_rank]
    stage = build_stage(config, plan, specs, groups, places["dense"], torch.device(device), parts)
    stage.allocate()
    checkpoint = Checkpoint(found)
    for name, physical in stage.physical.items():
        for view in physical.views:
            box = local_box(view.spec, places[view.spec.grid], plan.parallel)
            piece = logical_piece(stage.param(name).data, view, box)
            piece.copy_(checkpoint.read(view.spec.name, box.offset, box.shape))
    yield Loaded(stage, tokenizer, open_chain(shape.placement, groups.pp))
    finish_distributed()
