"""Runs one step of the loop on real ranks; started by torchrun. Argument: the folder where rank 0 writes gradient and metrics."""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file

import tiny_loop
import tiny_policies as tiny
from retouch.distributed.ranks import init_distributed
from retouch.run.step import train


def main(folder: Path) -> None:
    ranks = init_distributed("cpu")
    policy = tiny.policy(mode="window", microbatch=2)
    run = tiny_loop.run(policy, judge=tiny_loop.RandomJudge(missing=[(1, 1)]), ranks=ranks, chunk=2)
    phase = tiny_loop.phase(count=3, group_size=2, ranks=ranks, steps=range(1))
    ((_, collected, metrics),) = train(run, phase, start=0)
    assert len(collected.batch) == 3
    if ranks.is_main:
        save_file({name: tensor.contiguous() for name, tensor in tiny_loop.gradient(run).items()}, folder / "gradient.safetensors")
        (folder / "metrics.json").write_text(json.dumps(metrics))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
