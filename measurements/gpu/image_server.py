"""A rollout by an SGLang-Diffusion server: how far its steps are from the policy's steps, before and after the adapter changes.

The server is a separate process. It serves four blocks of Stable Diffusion 3.5 Medium with the same random weights as the policy.
A dry run uses the double of the server from the tests instead.
"""

import importlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from cases import SD3_SHORT, build
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from findings import Finding, NotRun, at_least, at_most, measured
from target import Target

from retouch.policies.denoising import DenoisingTrajectory, squared_deviations
from retouch.policies.rollout import ChainEngineSection
from retouch.types import Needs

SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"
LIMIT: float = ChainEngineSection.model_fields["max_mismatch"].default
TIMES = 3.0
"""The distance must be at least this many times larger if the adapter is switched off in the policy but not in the server."""
STD, TINY_STD = 0.1, 3.0
"""Standard deviations of the changed adapter weights. The tiny model needs larger ones: its random gates are nearly closed."""
STARTING_SECONDS = 200.0
APPLIED = re.compile(r"LoRA adapter\(s\) .* applied to (\d+) layers")
"""The line that the server logs after it has loaded an adapter."""


def run(target: Target) -> Iterator[Finding]:
    """Compare rollouts by the server to the policy, with a new, a changed and a disabled adapter."""
    if importlib.util.find_spec("httpx") is None:
        raise NotRun("httpx is not installed: pip install httpx")
    if not target.tiny and shutil.which("sglang") is None:
        raise NotRun("there is no sglang command: pip install 'sglang[diffusion]==0.5.23', in an environment of its own")
    target.require_memory(30e9)
    port = _free_port()
    section = f'{{"kind": "sglang", "url": "http://127.0.0.1:{port}", "max_mismatch": 1e6}}'  # this check applies LIMIT itself
    built = build(SD3_SHORT, target, (f"rollout.engine={section}", f"out={target.scratch}"))
    served = build(SD3_SHORT, target, ('policy.train={"kind": "full"}',)).parts.model
    policy: Any = built.run.policy
    batch = built.phase.batch(0)
    log = target.scratch / "server.txt"
    with _double(served, port) if target.tiny else _server(served, target.scratch, log, port):
        try:
            fresh = policy.rollout(batch)
            yield at_most("distance of the server's steps from the policy's, new adapter", _distance(fresh.deviations), LIMIT)
            _change_adapter(policy.copies.parameters, std=TINY_STD if target.tiny else STD)
            policy.rollout(batch)  # the server loads the adapter
            started = time.perf_counter()
            trajectory = policy.rollout(batch)
            yield measured("a rollout, its adapter loaded", time.perf_counter() - started, "s")
            off = _distance(trajectory.deviations)
            yield at_most("distance, changed adapter", off, LIMIT)
            yield at_least("distance, adapter switched off in the policy", _without_adapter(policy, trajectory), TIMES * off)
            if not target.tiny:
                expected = sum("lora_A" in name for name in policy.copies.parameters)
                yield at_least("layers to which the server applies the adapter", _layers(log), expected)
        finally:
            built.parts.close_engines()


def _distance(deviations: Any) -> float:
    """The root mean square deviation, in standard deviations of the step's noise, like ``max_mismatch`` of the engine."""
    return float(deviations.mean().sqrt())


@torch.no_grad()
def _change_adapter(parameters: dict[str, torch.Tensor], *, std: float) -> None:
    random = torch.Generator().manual_seed(0)
    for name, parameter in parameters.items():
        if "lora_B" in name:
            parameter.copy_(std * torch.randn(parameter.shape, generator=random))


@torch.no_grad()
def _without_adapter(policy: Any, trajectory: DenoisingTrajectory) -> float:
    assert policy.sampling.reduction == "mean"
    assert policy.sampling.transition.kind == "sde"
    log_probs = torch.empty_like(trajectory.log_probs)
    with policy.copies.using("reference"):
        for part in policy.microbatches(trajectory):
            log_probs[part.rows, part.actions] = policy.evaluate(trajectory, part, Needs()).log_probs
    reported, ones = trajectory.behaviour_log_probs, log_probs.new_ones(log_probs.shape[1])
    assert reported is not None
    return _distance(squared_deviations(log_probs, reported, step_std=ones, with_variance=True))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


@contextmanager
def _double(model: Any, port: int) -> Iterator[None]:
    sys.path.insert(0, str(SUPPORT))
    try:
        double = importlib.import_module("sglang_double")
    finally:
        sys.path.remove(str(SUPPORT))
    with double.serving(double.double_of(model), port=port):
        yield


@contextmanager
def _server(model: Any, scratch: Path, log: Path, port: int) -> Iterator[None]:
    """Start a server of this model and wait until it is ready. The suite kills its processes with the group of this process."""
    folder = scratch / "pipeline"
    _save(model, folder)
    command = ["sglang", "serve", "--model-path", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it has this library's packages
    with log.open("wb") as printed:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, env=environment)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}/health", log)
        yield
    finally:
        print(log.read_text(errors="replace")[-4000:])
        process.kill()
        process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
            raise RuntimeError(f"the server ended with exit code {process.returncode}; its last line was: {last}")
        with suppress(OSError), urlopen(url, timeout=5) as response:
            if response.status == 200:
                return
        time.sleep(1)
    raise RuntimeError(f"the server was not ready within {STARTING_SECONDS:.0f} s; see log.txt")


def _save(model: Any, folder: Path) -> None:
    """Save the model in the format of a diffusers pipeline."""
    clip, other_clip, t5 = (*model.text.clips, model.text.t5)
    tokenizer, other_tokenizer, t5_tokenizer = model.text.tokenizers
    StableDiffusion3Pipeline(
        transformer=model.module,
        scheduler=FlowMatchEulerDiscreteScheduler.from_config(model.scheduler.config),
        vae=model.latents.vae,
        text_encoder=clip,
        tokenizer=tokenizer,
        text_encoder_2=other_clip,
        tokenizer_2=other_tokenizer,
        text_encoder_3=t5,
        tokenizer_3=t5_tokenizer,
    ).save_pretrained(folder)


def _layers(log: Path) -> int:
    """The number of layers in the last log line that matches `APPLIED`; 0 without such a line."""
    found = APPLIED.findall(log.read_text(errors="replace"))
    return int(found[-1]) if found else 0
