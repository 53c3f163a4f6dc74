"""`--check-weights-hash`: one hash of the logical weights, equal in every layout.

The same function of names, shapes and bytes as a checkpoint's logical hash over the
weights, so that the start of a run, its checkpoint and another layout can be compared by
eye.
"""

from __future__ import annotations

import hashlib

import torch

from megatron_lite.checkpoint.strict_json import encode_json
from megatron_lite.checkpoint.tensors import DTYPE_NAMES, tensor_bytes
from megatron_lite.mesh.collectives import all_reduce
from megatron_lite.shard.pieces import StatePiece
from megatron_lite.train.parts import Core


def hash_weights(core: Core) -> str:
    """Hash the weights in the compute dtype, one gathered tensor after the other.

    Comm: per logical tensor one all-reduce of its bytes over the world.
    """
    digest = hashlib.sha256()
    pieces: dict[str, list[StatePiece]] = {}
    for piece in core.optimizer.state_pieces():
        if piece.kind == "param" and piece.owned:
            pieces.setdefault(piece.spec.name, []).append(piece)
    for spec in sorted(core.specs, key=lambda spec: spec.name):
        whole = torch.zeros(spec.shape, dtype=core.stage.dtype, device=core.device)
        for piece in pieces.get(spec.name, ()):
            region = tuple(
                slice(low, low + size)
                for low, size in zip(piece.box.offset, piece.box.shape, strict=True)
            )
            whole[region] = piece.tensor
        # One rank owns each element, the others add zero bytes: the sum is exact.
        all_reduce(whole.view(torch.uint8), core.groups.world)
        digest.update(encode_json([spec.name, DTYPE_NAMES[whole.dtype], list(spec.shape)]))
        digest.update(tensor_bytes(whole))
    return digest.hexdigest()
