"""Janus-Pro (arXiv 2501.17811) as a text-to-image policy: it reads a prompt and generates an image as codes, without text.

Codes have their own embeddings and output head, so completions have their own ids: the codes from 0, and one additional id that
ends the image; it is forced after the last code and has no embedding. The published sampler uses classifier-free guidance. Here
guidance is off in sampling and evaluation: the policy is the model's conditional distribution, whose gradient needs one forward
pass.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from PIL.Image import Image
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoTokenizer, JanusForConditionalGeneration, PreTrainedTokenizerBase
from transformers.models.janus.modeling_janus import JanusPreTrainedModel, JanusVQVAE

from retouch.models.base import Attention
from retouch.models.parts import LOCAL, evaluating
from retouch.protocols import Grammar
from retouch.types import Kind, Prompts, Task
from retouch_models.causal import CausalText, require_no_special_tokens, to_images, to_pixels

if TYPE_CHECKING:
    from retouch.models.loaded import LoadedLanguageModel

TEMPLATE = "<|User|>: {}\n\n<|Assistant|>:"
BEGIN = "<begin_of_image>"


class JanusImageModules(JanusPreTrainedModel):
    """The modules of a Janus model that generate images, with unchanged names: language model, embeddings and head of the codes."""

    def __init__(self, whole: JanusForConditionalGeneration) -> None:
        super().__init__(whole.config)
        self.model = nn.Module()
        for name in ("language_model", "generation_embeddings", "generation_aligner", "generation_head"):
            self.model.add_module(name, whole.model.get_submodule(name))

    def get_input_embeddings(self) -> nn.Module:
        """The embeddings of text tokens."""
        embeddings: nn.Module = self.model.get_submodule("language_model").get_input_embeddings()  # type: ignore[operator]
        return embeddings


class FixedLengthGrammar:
    """Exactly ``count`` codes, then the token ``end`` (implements ``Grammar``)."""

    kinds: tuple[int, ...] = (Kind.IMAGE_TOKEN,)

    def __init__(self, *, count: int, codes: int, end: int, device: torch.device) -> None:
        self.vocabularies = torch.ones(1, codes, dtype=torch.bool, device=device)
        self._count, self._end = count, end

    def parse(self, prompts: Prompts, ids: Int[Tensor, "r k"]) -> tuple[Int[Tensor, "r k1"], Int[Tensor, "r k1"]]:
        positions = torch.arange(ids.shape[1] + 1, device=ids.device).expand(ids.shape[0], -1)
        return torch.zeros_like(positions), torch.where(positions < self._count, -1, self._end)


class JanusImageModel(CausalText):
    """The trainable modules and the frozen autoencoder of a Janus-Pro model (implements ``retouch.protocols.AutoregressiveModel``).

    ``template``: the dialogue around the prompt, after which the image starts. ``size``, (height, width) in pixels, and ``grid``,
    in codes, follow from the model. Raises ValueError if the tokenizer has no token that starts an image.

    Source: Janus-Pro (arXiv 2501.17811); weights deepseek-community/Janus-Pro-1B.
    """

    decoder_path = "model.language_model"

    def __init__(
        self,
        module: JanusImageModules,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vq: JanusVQVAE,
        template: str = TEMPLATE,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__(module, gradient_checkpointing=gradient_checkpointing)
        if BEGIN not in tokenizer.get_vocab() or tokenizer.bos_token_id is None:
            raise ValueError(f"the tokenizer has no {BEGIN} or no bos token; use that of Janus")
        self.tokenizer, self.template = tokenizer, template
        self.vq = vq.requires_grad_(False).eval()
        side, factor = vq.config.num_patches, 2 ** (len(vq.config.channel_multiplier) - 1)
        self.grid, self.size = (side, side), (side * factor, side * factor)
        codes = vq.config.num_embeddings
        self.stop: tuple[int, ...] = (codes,)
        self.pad = codes
        self.grammar: Grammar = FixedLengthGrammar(count=side * side, codes=codes, end=codes, device=module.device)

    def embed(self, module: nn.Module, ids: Int[Tensor, "r k"]) -> Float[Tensor, "r k d"]:
        """The embeddings of codes. The id that ends an image gets the embedding of the last code, which is never used."""
        parts: Any = module.get_submodule("model")
        embeds: Tensor = parts.generation_aligner(parts.generation_embeddings(ids.clamp(max=self.pad - 1)))
        return embeds

    def logits(self, module: nn.Module, states: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """The logits of the codes."""
        logits: Tensor = module.get_submodule("model.generation_head")(states)
        return logits.float()

    def encode(self, tasks: Sequence[Task]) -> Prompts:
        """Encode the tasks' prompts. Raises ValueError for a task with an image, or with a special token in its instruction."""
        require_no_special_tokens(tasks, self.tokenizer)
        for task in tasks:
            if task.images:
                raise ValueError(f"task {task.id!r} has a source image, but Janus generates from text only; use an editing model")
        texts = [self.template.format(task.instruction) + BEGIN for task in tasks]
        ids = [self.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        return self.prompts([[self.tokenizer.bos_token_id, *row] for row in ids])

    def encode_codes(self, images: Sequence[Image]) -> Int[Tensor, "r h w"]:
        """Encode images, which are first resized to ``size`` (Lanczos), to codes."""
        with evaluating(self.vq):
            codes = self.vq.encode(to_pixels(images, self.size, self.vq.device), return_dict=True).image_tokens
        return codes.reshape(-1, *self.grid)

    def decode_codes(self, codes: Int[Tensor, "r h w"]) -> list[Image]:
        """Decode codes to images."""
        with evaluating(self.vq):
            return to_images(self.vq.decode(codes.flatten(1).to(self.vq.device)))

    def codes_in(self, ids: Sequence[int]) -> Int[Tensor, "h w"] | None:
        """The codes of the image in a completion; None if the image is not complete."""
        height, width = self.grid
        if len(ids) != height * width or not all(0 <= each < self.pad for each in ids):
            return None
        return torch.tensor(ids).reshape(height, width)

    def target_ids(self, tasks: Sequence[Task]) -> list[list[int]]:
        """The codes of each task's target image, for supervised learning. Raises ValueError for a task without one."""
        targets = [task.target for task in tasks if task.target is not None]
        if len(targets) < len(tasks):
            without = next(task for task in tasks if task.target is None)
            raise ValueError(f"task {without.id!r} has no target image, which supervised learning needs")
        return self.encode_codes(targets).flatten(1).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion: none, because it consists of codes."""
        return ""


_AUTOENCODER = "model.vqmodel."


def load_janus(
    source: "Path | str | LoadedLanguageModel",
    *,
    weights: Path | None = None,
    dtype: torch.dtype,
    device: torch.device | str,
    attention: Attention = "sdpa",
    gradient_checkpointing: bool = False,
) -> JanusImageModel:
    """Load the model with all weights frozen: the trainable modules in ``dtype``, the autoencoder in fp32.

    ``source``: a folder, or a loaded complete Janus, which keeps its dtype. ``weights``: the folder ``writer`` of an export of full
    weights, which replaces the weights of the trainable modules. Raises ValueError for a folder with another model.
    """
    if not isinstance(source, Path | str):
        whole, tokenizer = source.base(), source.tokenizer
        vq = source.in_fp32(whole.model.vqmodel)
    else:
        folder = Path(source)
        if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder} contains no Janus model (config.json and tokenizer.json); set the local folder of one")
        whole = JanusForConditionalGeneration.from_pretrained(folder, dtype=dtype, attn_implementation=attention, **LOCAL)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        vq = JanusVQVAE(whole.config.vq_config)
        # In fp32, because codes come from a nearest-neighbour search.
        stored = {name.removeprefix(_AUTOENCODER): tensor.float() for name, tensor in _stored(folder, _AUTOENCODER)}
        if not stored:
            raise ValueError(f"{folder} contains no weights of Janus' autoencoder ({_AUTOENCODER}*) in safetensors")
        vq.load_state_dict(stored)
        vq.float()
    module = JanusImageModules(whole)
    if weights is not None:
        _load(module, weights)
    module.requires_grad_(False).eval().to(device)
    return JanusImageModel(module, tokenizer, vq=vq.to(device), gradient_checkpointing=gradient_checkpointing)


def _load(module: JanusImageModules, folder: Path) -> None:
    """Load the module's weights. Raises ValueError unless the names and shapes are exactly the same."""
    stored, own = dict(_stored(folder, "")), module.state_dict()
    differing = stored.keys() ^ own.keys() or {name for name in own if own[name].shape != stored[name].shape}
    if differing:
        raise ValueError(
            f"{folder} does not contain the weights of this Janus model's trainable modules ({len(differing)} tensors differ, for "
            f"example {min(differing)}); set the folder writer of an export of full weights"
        )
    module.load_state_dict(stored)


def _stored(folder: Path, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all tensors in the folder's safetensors files whose names have this prefix."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118, not a mapping
            yield from ((name, tensors.get_tensor(name)) for name in names)
