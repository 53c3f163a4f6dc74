"""Pretrain a language model: parse -> check -> build -> train."""

import os
import sys

from megatron_lite.checkpoint.arguments import complete_config
from megatron_lite.checkpoint.places import check_save_place
from megatron_lite.checkpoint.stores import is_url, local_path
from megatron_lite.config.flags import parse_config
from megatron_lite.config.resolve import resolved_yaml
from megatron_lite.config.rules import check_config
from megatron_lite.mesh.launch import RunStatus, WorldInfo, run_program


def run(info: WorldInfo, status: RunStatus) -> int:
    """Run this rank; refusals come before torch is imported."""
    config = parse_config(sys.argv[1:], os.environ)
    config = complete_config(config, sys.argv[1:], info.world_size)
    check_config(config, info.world_size)
    if config.print_config:
        sys.stdout.write(resolved_yaml(config, info.world_size) if info.rank == 0 else "")
        return 0
    if config.save is not None and not is_url(config.save):
        # Before anything is written there, the reason of a refusal too.
        check_save_place(local_path(config.save))
        status.save_dir = local_path(config.save)

    from megatron_lite.train.build import build_run
    from megatron_lite.train.loop import train

    with build_run(config, info, status) as (parts, state):
        return train(parts, state, status)


def main() -> int:
    """Find this process's place among the ranks and run it guarded."""
    return run_program(run, os.environ)


if __name__ == "__main__":
    sys.exit(main())
