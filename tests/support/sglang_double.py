"""A double of an SGLang-Diffusion server with the schema of 0.5.23: a tiny model that loads LoRA folders and samples chains.

It rejects fields that ``RolloutRequest`` does not have, merges adapters into its own copy of the weights by hand, and can inject
faults. ``tests/engines_real/test_sglang_wheel.py`` compares its requests and answers with SGLang's own classes.
"""

import copy
import hashlib
import json
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import load_file, save

import loopback
from retouch.core.transitions import transition
from retouch.types import Task

GENERATE, SET_LORA, LIST_LORAS = "/rollout/generate", "/v1/set_lora", "/v1/list_loras"
UPDATE, CHECKSUM = "/update_weights_from_disk", "/get_weights_checksum"


class RolloutRequest(BaseModel):
    """The fields of SGLang's request; other fields are rejected."""

    model_config = ConfigDict(extra="forbid")

    prompt: str
    negative_prompt: str | None = None
    seed: int | None = None
    generator_device: str = "cuda"
    width: int | None = None
    height: int | None = None
    num_inference_steps: int | None = None
    num_outputs_per_prompt: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    num_frames: int | None = None
    fps: int | None = None
    rollout: bool = True
    rollout_sde_type: str = "sde"
    rollout_noise_level: float = 0.7
    rollout_log_prob_no_const: bool = False
    rollout_debug_mode: bool = True
    rollout_return_denoising_env: bool = False
    rollout_return_dit_trajectory: bool = False
    rollout_sde_step_indices: list[int] | None = None
    rollout_return_step_indices: list[int] | None = None
    image_path: list[str] | None = None
    suppress_logs: bool = False
    extra_sampling_params: dict[str, Any] | None = None


class Double:
    """The server. ``model``: generates the samples; its module is not shared. ``fault``: returns the fault for a request to a path.

    ``changes``: applied to the rows of a response before they are sent. ``drift``: added to every velocity.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.base = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
        self.active: dict[str, Any] | None = None
        self.asked: list[tuple[str, Any]] = []
        self.fault: Callable[[str], int | str | None] = lambda path: None
        self.changes: Callable[[list[dict[str, Any]]], Any] = lambda rows: rows
        self.drift = 0.0
        self.after: Callable[[], None] = lambda: None
        self.lock = threading.Lock()

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]

    def restart(self) -> None:
        self.active = None
        self.model.module.load_state_dict(self.base)

    def set_lora(self, body: dict[str, Any]) -> Any:
        folder = Path(body["lora_path"])
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        merged = dict(self.base)
        for name, down in tensors.items():
            if name.endswith(".lora_A.weight"):
                layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                up = tensors[name.replace("lora_A", "lora_B")]
                merged[f"{layer}.weight"] = self.base[f"{layer}.weight"] + config["lora_alpha"] / config["r"] * up @ down
        self.model.module.load_state_dict(merged)
        self.active = {
            "nickname": body["lora_nickname"],
            "nicknames": [body["lora_nickname"]],
            "path": body["lora_path"],
            "merged": body["merge_mode"] != "dynamic",
            "mode": "unmerged" if body["merge_mode"] == "dynamic" else "merged",
            "strength": body["strength"],
            "strengths": [body["strength"]],
        }
        return {"status": "ok", "message": "Successfully set LoRA adapter(s)"}

    def list_loras(self) -> Any:
        active = {} if self.active is None else {"transformer": [self.active]}
        return {"loaded_adapters": [], "active": active}

    def update(self, body: dict[str, Any]) -> Any:
        assert body["target_modules"] == ["transformer"]
        (file,) = (Path(body["model_path"]) / "transformer").glob("*.safetensors")
        self.model.module.load_state_dict(load_file(file))
        return {"success": True, "message": "Updated 1 modules (transformer)."}

    def checksum(self, body: dict[str, Any]) -> Any:
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.module.state_dict().items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return {name: digest.hexdigest() for name in body["module_names"]}

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> list[dict[str, Any]]:
        model, count = self.model, request.num_outputs_per_prompt or 1
        conditioning = model.encode([Task(id="one", instruction=request.prompt)])
        if request.guidance_scale != 1:
            assert request.negative_prompt is not None
            negative = model.condition([Task(id="one", instruction="")], [request.negative_prompt])
        sigmas = model.sigmas(request.num_inference_steps, conditioning)
        rows = []
        for number in range(count):
            random = torch.Generator().manual_seed(request.seed + number)
            x = model.initial_noise(conditioning, [random])
            states, log_probs = [x], []
            for step in range(request.num_inference_steps):
                sigma, sigma_next = sigmas[step : step + 1], sigmas[step + 1 : step + 2]
                velocity = model.velocity(model.module, x, sigma, conditioning)
                if request.guidance_scale != 1:
                    unconditional = model.velocity(model.module, x, sigma, negative)
                    velocity = model.combine(velocity, unconditional, request.guidance_scale)
                velocity = velocity + self.drift
                if step in request.rollout_sde_step_indices:
                    made = transition(
                        request.rollout_sde_type,
                        x,
                        velocity,
                        sigma,
                        sigma_next,
                        noise_level=request.rollout_noise_level,
                        sigma_max=sigmas[1],
                        reduction="mean",
                        noise=torch.randn(x.shape, generator=random),
                    )
                    x = made.next
                    log_probs.append(made.log_prob[0])
                else:
                    x = x + (sigma_next - sigma) * velocity
                    log_probs.append(torch.zeros(()))
                states.append(x)
            kept = request.rollout_return_step_indices
            rows.append(
                {
                    "request_id": "double",
                    "prompt": request.prompt,
                    "seed": request.seed,
                    "generated_output": torch.zeros(3, request.height, request.width),
                    "rollout_log_probs": torch.stack(log_probs),
                    "rollout_debug_tensors": None,
                    "denoising_env": None,
                    "dit_trajectory": {
                        "latents": torch.stack([states[step][0] for step in kept]),
                        "timesteps": sigmas[kept] * 1000,
                        "sigmas": sigmas,
                    },
                    "inference_time_s": 0.5,
                    "peak_memory_mb": None,
                }
            )
        return rows

    def answer(self, path: str, body: Any) -> tuple[int, bytes]:
        with self.lock:
            self.asked.append((path, body))
            fault = self.fault(path)
            if isinstance(fault, int):
                return fault, json.dumps({"detail": "told to fail"}).encode()
            if path == "/health":
                return 200, b"{}"
            if path == "/server_info":
                return 200, json.dumps({"model_path": "base", "version": "0.5.23"}).encode()
            if path == GENERATE:
                try:
                    request = RolloutRequest.model_validate(body)
                except ValidationError as error:
                    return 422, str(error).encode()
                rows = self.changes(self.generate(request))
                self.after()
                return 200, fault.encode() if fault else pack(rows)
            handlers = {SET_LORA: self.set_lora, UPDATE: self.update, CHECKSUM: self.checksum}
            found = self.list_loras() if path == LIST_LORAS else handlers[path](body)
            return 200, json.dumps(found).encode()


def pack(value: Any) -> bytes:
    """Encode a value as MessagePack, with tensors as SGLang serializes them."""
    if isinstance(value, torch.Tensor):
        data = save({"t": value.detach().contiguous()})
        return pack({"__tensor__": True, "data": data, "shape": list(value.shape), "dtype": str(value.dtype)})
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return b"\xcf" + struct.pack(">Q", value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"\xdb" + struct.pack(">I", len(value.encode())) + value.encode()
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    if isinstance(value, list):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(pack, value))
    return b"\xdf" + struct.pack(">I", len(value)) + b"".join(pack(key) + pack(each) for key, each in value.items())


@contextmanager
def serving(double: Double, *, port: int = 0) -> Iterator[str]:
    """Run the double and yield its address. ``port``: 0 for a free port."""

    def answer(request: loopback.Request) -> tuple[int, bytes]:
        return double.answer(request.path, json.loads(request.body) if request.method == "POST" else None)

    with loopback.scripted(answer, port=port) as server:
        yield server.url


def double_of(model: Any) -> Double:
    """Make a double with its own copy of the model's weights."""
    other = copy.copy(model)
    other.module = copy.deepcopy(model.module)
    return Double(other)
