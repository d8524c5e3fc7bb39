"""SGLang's own ``/rollout/generate`` on a CPU: its endpoint, sampling parameters, scheduler, rollout hooks and response.

Only two parts of a server are replaced: the queue between the endpoint and the worker, and the models. A velocity that is computed
from the latents stands for the transformer, and the decoded images are zeros.

The modules are imported inside the functions, so that tests of this file can be collected in an environment without SGLang.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import loopback

OWN_ENVIRONMENT = Path(sys.prefix).name == ".venv-sglang"
MARKS = (
    pytest.mark.slow,
    pytest.mark.engines,
    # In the environment that is built for these tests, they are never skipped.
    pytest.mark.skipif(
        not OWN_ENVIRONMENT and importlib.util.find_spec("sglang") is None,
        reason="SGLang is not installed: `make engines-sglang` builds .venv-sglang, and runs these tests",
    ),
    pytest.mark.filterwarnings("ignore"),  # SGLang's modules use deprecated functions of torch, and warn that there is no GPU
)
PIPELINES = {
    "sd3": ("stabilityai/stable-diffusion-3.5-medium", "stablediffusion3:StableDiffusion3PipelineConfig"),
    "flux": ("black-forest-labs/FLUX.1-dev", "flux:FluxPipelineConfig"),
    "qwen-image": ("Qwen/Qwen-Image", "qwen_image:QwenImagePipelineConfig"),
}
"""The model's name, from which SGLang finds its sampling parameters, and the configuration of its pipeline."""


@contextmanager
def one_process() -> Iterator[None]:
    """SGLang's process groups, with this process as their only member."""
    from sglang.multimodal_gen.runtime.distributed import parallel_state

    address = f"tcp://127.0.0.1:{loopback.free_port()}"
    group = {"world_size": 1, "rank": 0, "local_rank": 0, "distributed_init_method": address, "backend": "gloo"}
    parallel_state.init_distributed_environment(**group)
    parallel_state.initialize_model_parallel(sequence_parallel_degree=1, backend="gloo")
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def scheduler(steps: int) -> Any:
    """SGLang's scheduler of flow matching with a shift of 3, for ``steps`` denoising steps."""
    from sglang.multimodal_gen.runtime.models.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    made = FlowMatchEulerDiscreteScheduler(shift=3.0)
    made.set_timesteps(steps)
    return made


class Server:
    """Answers rollout requests. ``shape``: of the latents of one image. ``velocity``: called with latents (1, ...) and a sigma.

    ``family``: the key of ``PIPELINES`` whose sampling parameters SGLang uses. ``requests`` receives SGLang's internal request of
    each body. The block of ``one_process`` must be active.
    """

    def __init__(
        self,
        velocity: Callable[[Tensor, Tensor], Tensor],
        *,
        shape: tuple[int, ...],
        family: str = "sd3",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.velocity = velocity
        self.shape = shape
        self.dtype = dtype
        self.requests: list[Any] = []
        self.model_path, config = PIPELINES[family]
        file, _, name = config.partition(":")
        self.config = getattr(importlib.import_module(f"sglang.multimodal_gen.configs.pipeline_configs.{file}"), name)()

    def post(self, body: dict[str, Any]) -> Any:
        """Return the HTTP response to the JSON ``body``."""
        from fastapi import FastAPI
        from fastapi.testclient import TestClient
        from sglang.multimodal_gen.runtime.entrypoints.post_training import rollout_api
        from sglang.multimodal_gen.runtime.server_args import set_global_server_args

        settings = SimpleNamespace(
            model_path=self.model_path,
            pipeline_class_name=None,
            backend=None,
            model_id=None,
            pipeline_config=self.config,
            output_path=None,
            attention_backend_config=None,
            enable_trace=False,
            comfyui_mode=False,
        )
        set_global_server_args(settings)
        app = FastAPI()
        app.include_router(rollout_api.router)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollout_api, "async_scheduler_client", SimpleNamespace(forward=self._forward))
            return TestClient(app).post("/rollout/generate", json=body)

    async def _forward(self, request: Any) -> Any:
        """The output of a worker: the images are sampled one by one, and SGLang joins them."""
        from sglang.multimodal_gen.runtime.managers.gpu_worker import GPUWorker
        from sglang.multimodal_gen.runtime.pipelines_core.request_utils import expand_request_outputs

        self.requests.append(request)
        done = [self._sample(each) for each in expand_request_outputs(request)]
        return GPUWorker._merge_expanded_output_batches([GPUWorker._req_to_output_batch(each) for each in done])

    def _sample(self, batch: Any) -> Any:
        from sglang.multimodal_gen.runtime.post_training import rollout_hooks

        batch.generator = torch.Generator().manual_seed(batch.seed)
        batch.latents = x = torch.randn((1, *self.shape), generator=batch.generator).to(self.dtype)
        batch.scheduler = steps = scheduler(batch.num_inference_steps)
        rollout_hooks.prepare_rollout_if_enabled(batch=batch, pipeline_config=self.config)
        rollout_hooks.init_rollout_env_if_enabled(
            batch=batch, image_kwargs={}, pos_cond_kwargs={}, neg_cond_kwargs={}, guidance=None
        )
        for index, time in enumerate(steps.timesteps):
            velocity = self.velocity(x.float(), steps.sigmas[index]).to(self.dtype)
            x = steps.step(velocity, time, x, return_dict=False, **rollout_hooks.rollout_step_kwargs(batch))[0]
        rollout_hooks.finalize_rollout_if_enabled(
            batch=batch,
            latents=x,
            num_inference_steps=batch.num_inference_steps,
            final_timestep=steps.timesteps.new_zeros(()),
            pipeline_config=self.config,
        )
        batch.output = torch.zeros(1, 3, 8, 8)
        return batch
