"""`python measurements/speed/compiled_start.py`: how long ``policy.compile`` delays the start of a run.

The transformer has the blocks of Stable Diffusion 3.5 Medium with small widths, since the time depends on the number of graphs and
of their operations. A new process samples, updates and evaluates with batches of different sizes: first with an empty cache of
graphs, then with the cache that the first process has left.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig

from retouch.models.kernels import compile_blocks
from retouch_models.sd3 import SD3Model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--start", action="store_true", help="only the start of this process, with the present cache")
    arguments = parser.parse_args()
    if arguments.start:
        print(json.dumps(start(arguments.layers, arguments.backend)))
        return
    words = ["--start", f"--layers={arguments.layers}", f"--backend={arguments.backend}"]
    command = [sys.executable, "-W", "ignore", __file__, *words]
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("empty", "filled"):
            made = subprocess.run(command, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}, stdout=subprocess.PIPE, check=True)
            print(json.dumps({"cache": cache, **json.loads(made.stdout)}), flush=True)


def start(layers: int, backend: str) -> dict[str, float]:
    """The seconds of the first sampling, update and evaluation, and the number of compiled graphs."""
    torch.manual_seed(0)
    sizes = {"sample_size": 8, "attention_head_dim": 16, "num_attention_heads": 2, "pos_embed_max_size": 12}
    widths = {"joint_attention_dim": 48, "caption_projection_dim": 32, "pooled_projection_dim": 40}
    dual = tuple(range((layers + 1) * 13 // 24))
    module = SD3Transformer2DModel(num_layers=layers, dual_attention_layers=dual, qk_norm="rms_norm", **sizes, **widths).eval()
    module.requires_grad_(False).add_adapter(LoraConfig(r=4, target_modules=list(SD3Model.lora_targets)))
    compile_blocks(module, backend=backend)

    def velocity(rows: int, words: int) -> torch.Tensor:
        given = {"hidden_states": torch.randn(rows, 16, 8, 8), "encoder_hidden_states": torch.randn(rows, words, 48)}
        return module(**given, pooled_projections=torch.randn(rows, 40), timestep=torch.full((rows,), 500.0), return_dict=False)[0]

    times = [time.perf_counter()]
    with torch.no_grad():
        velocity(4, 13)
    times.append(time.perf_counter())
    velocity(3, 13).square().mean().backward()
    times.append(time.perf_counter())
    with torch.no_grad():
        velocity(5, 21)
    times.append(time.perf_counter())
    seconds = [round(after - before, 1) for before, after in itertools.pairwise(times)]
    stages = dict(zip(("sampling", "update", "evaluation"), seconds, strict=True))
    return {"graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"], "total": round(times[-1] - times[0], 1), **stages}


if __name__ == "__main__":
    main()
