"""A Qwen-VL whose hidden state at the token ``<|Reward|>`` is read by small heads, as HPSv3 and EditReward store it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen2VLModel,
)

from retouch.models.base import Bits
from retouch.models.quantized import quantize, require_quantizer
from retouch.records.files import read_json
from retouch_rewards.weights import require_processors, weights_digest, weights_folder

_CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen2_vl": (Qwen2VLModel, Qwen2VLConfig),
    "qwen2_5_vl": (Qwen2_5_VLModel, Qwen2_5_VLConfig),
}
_REWARD = "<|Reward|>"
_PIXELS = 256 * 28 * 28  # the published lower and upper limit of an image's pixels
_TURN = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"  # of Qwen2-VL and Qwen2.5-VL
_TEXT = "{text}"


class RewardHeads:
    """A Qwen2-VL or Qwen2.5-VL in ``dtype`` and its heads in fp32, from a folder with the model's weights (either layout of names:
    of transformers before and since 4.52), its ``config.json``, tokenizer and image processor.

    A head has the layers ``{name}.{n}.weight`` and ``bias``, with a ReLU between them, and two outputs, of which the first is the
    score (mu) and the second belongs to its uncertainty. Raises ValueError if files are missing or do not fit together.
    """

    def __init__(
        self, path: str | Path, heads: Sequence[str], *, device: torch.device | str, dtype: torch.dtype, bits: Bits | None = None
    ) -> None:
        folder = weights_folder(path, pattern="*.safetensors")
        require_processors(folder, path=path)
        kind = read_json(folder / "config.json").get("model_type")
        if kind not in _CLASSES:
            raise ValueError(f"{path} is a model of type {kind!r}; choose one of type {' or '.join(_CLASSES)}")
        place = torch.device(device)
        if bits is not None:
            require_quantizer(bits, device=place, dtype=str(dtype).removeprefix("torch."), key="reward.quantize")
        weights = {_name(name): tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        rows = weights.get("language_model.embed_tokens.weight", torch.empty(0, 0))
        self.tokenizer = Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
        self.tokenizer.add_tokens([_REWARD], special_tokens=True)
        self._reward = int(self.tokenizer.convert_tokens_to_ids(_REWARD))
        if self._reward >= len(rows):
            raise ValueError(
                f"{path}: the weights have {len(rows)} embeddings, but the tokenizer gives {_REWARD} the id {self._reward}; put "
                "the tokenizer of the model that was trained into the folder"
            )
        model_class, config_class = _CLASSES[kind]
        config = config_class.from_pretrained(folder, local_files_only=True)
        config.text_config.vocab_size = len(rows)
        own = {name: tensor for name, tensor in weights.items() if name.startswith(("visual.", "language_model."))}
        model, report = model_class.from_pretrained(None, config=config, state_dict=own, dtype=dtype, output_loading_info=True)
        if absent := sorted(report["missing_keys"]):
            raise ValueError(f"{path} has no weights {', '.join(absent[:3])} ({len(absent)} in all); they are of another model")
        if bits is not None:
            quantize(model, bits, device=place, key="reward.quantize")
        self.model = model.requires_grad_(False).eval().to(place)
        self.heads = [_layers(weights, head, width=rows.shape[1], path=path, device=place) for head in heads]
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        self.turn = _TURN
        if self.tokenizer.chat_template is not None:  # MiMo-VL's has another system message
            user = [{"role": "user", "content": _TEXT}]
            self.turn = str(self.tokenizer.apply_chat_template(user, tokenize=False)).partition(_TEXT)[0]
        self._folder = folder

    @property
    def fingerprint(self) -> str:
        """Digest of the weights."""
        return f"weights {weights_digest(self._folder)}, {self.model.dtype}"

    @torch.no_grad()
    def score(self, images: Sequence[Image.Image], prompt: str, *, head: int = 0) -> float:
        """Return mu of a head for a prompt that ends before the token ``<|Reward|>``; the images come before the prompt.

        Each image is resized (bicubic) to about 256 * 28 * 28 pixels, with sides that are multiples of 28, as published. The
        published inputs continue after the token, which cannot change its hidden state.
        """
        seen = self.processor(
            images=[image.convert("RGB") for image in images],
            size={"shortest_edge": _PIXELS, "longest_edge": _PIXELS},
            return_tensors="pt",
        )
        counts = (seen["image_grid_thw"].prod(-1) // self.processor.merge_size**2).tolist()
        shown = "".join(f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in counts)
        ids = self.tokenizer(self.turn + shown, add_special_tokens=False)["input_ids"]
        ids += self.tokenizer(prompt, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        tokens = torch.tensor([[*ids, self._reward]], device=self.model.device)
        given = self.model(
            input_ids=tokens,
            pixel_values=seen["pixel_values"].to(self.model.device, self.model.dtype),
            image_grid_thw=seen["image_grid_thw"].to(self.model.device),
            # The models were trained with the positions of plain text, also for images: never with those of Qwen-VL in 3 axes.
            position_ids=torch.arange(tokens.shape[1], device=tokens.device).expand(3, 1, -1),
            use_cache=False,
        )
        state = given.last_hidden_state[0, -1].float()
        for number, (weight, bias) in enumerate(self.heads[head]):
            state = nn.functional.linear(state.relu() if number else state, weight, bias)
        return float(state[0])


def _name(name: str) -> str:
    """The name of a weight in the model without its language head; names of transformers before 4.52 have no ``language_model``."""
    inner = name.removeprefix("model.")
    kept = inner.startswith(("visual.", "language_model.", "rm_head", "lm_head."))
    return inner if kept else f"language_model.{inner}"


def _layers(
    weights: dict[str, Tensor], head: str, *, width: int, path: str | Path, device: torch.device
) -> list[tuple[Float[Tensor, "o i"], Float[Tensor, " o"]]]:
    """The layers of a head, in order, in fp32. Raises ValueError if they do not map a state of ``width`` to two numbers."""
    own = {
        name.removeprefix(f"{head}."): tensor.to(device, torch.float32)
        for name, tensor in weights.items()
        if name.startswith(f"{head}.")
    }
    numbers = sorted({int(name.split(".")[0]) for name in own if name.split(".")[0].isdecimal()})
    layers = [(own[f"{n}.weight"], own[f"{n}.bias"]) for n in numbers if {f"{n}.weight", f"{n}.bias"} <= {*own}]
    ends = [width, *(side for weight, _ in layers for side in weight.shape[::-1]), 2]  # in, in, out, in, out, ..., out
    if not layers or len(own) != 2 * len(layers) or ends[::2] != ends[1::2]:
        raise ValueError(
            f"{path}: the head {head} has the weights {', '.join(sorted(own)) or '(none)'}, which are no layers from {width} "
            "values to 2; use the published weights of this reward"
        )
    return layers
