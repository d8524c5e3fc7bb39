"""Emu3 (arXiv 2409.18869) as an image editor, as in EARL (arXiv 2508.01119): it reads source image and instruction as tokens and
generates the edited image as tokens.

A prompt consists of bos, the tokens of the source image, the instruction, and the prefill, the first tokens of the answer. An image
of h x w codes is the sequence boi "h*w" img, then h rows of w visual tokens, each followed by eol, then eof eoi. Only text and
visual tokens are sampled; the tokens that give an image its structure are forced: they have no log-probability and no gradient, in
sampling and in evaluation. (EARL forces them in sampling but still computes their gradient.)

Models are loaded from local folders in transformers' layout or the original one of BAAI and EARL, in which language model and
autoencoder have separate folders, and the autoencoder's weights other names: safetensors only, no code.
"""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from PIL.Image import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoTokenizer,
    Emu3ForCausalLM,
    Emu3ForConditionalGeneration,
    Emu3TextConfig,
    Emu3VQVAE,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)
from transformers.models.emu3.configuration_emu3 import Emu3VQVAEConfig

from retouch.models.base import Attention
from retouch.models.parts import LOCAL, evaluating
from retouch.protocols import Grammar
from retouch.records.files import read_json
from retouch.types import Codes, Kind, Prompts, Task
from retouch_models.causal import CausalText, require_no_special_tokens, to_images, to_pixels

if TYPE_CHECKING:
    from retouch.models.loaded import LoadedLanguageModel

DRAW = "<|image start|>"
THINK = " Let's think step by step. <|start thinking|>"
END_OF_THOUGHT = "<|end thinking|>"
THOUGHT = Codes.THOUGHT
BOS, EOS, PAD = "<|extra_203|>", "<|extra_204|>", "<|endoftext|>"
BOI, IMG, EOL, EOF, EOI = "<|image start|>", "<|image token|>", "<|extra_200|>", "<|extra_201|>", "<|image end|>"
_VISUAL = re.compile(r"<\|visual token (\d{6})\|>")
TEXT, VISUAL = 0, 1
KEYS = (
    (r"\.(q|k|v)\.(weight|bias)$", r".\1_proj.\2"),
    (r"\.proj_out\.", ".out_proj."),
    (r"\.mid\.attn_1\.norm\.", ".mid.attn_norm."),
    (r"\.attn\.(\d+)\.norm\.", r".attn_norms.\1."),
    (r"\.down\.(?=\d)", ".down_block.down."),
    (r"\.up\.(?=\d)", ".up_block.up."),
    (r"\.mid\.", ".middle_block."),
)
"""Patterns that change the original names of the autoencoder's weights into transformers' names. The language model's weights have
the same names in both layouts."""
_OWN_FIELDS = ("model_type", "architectures", "transformers_version")
_AUTOENCODER_FIELDS = {
    "ch": "base_channels",
    "ch_mult": "channel_multiplier",
    "z_channels": "latent_channels",
    "double_z": "double_latent",
}


class Emu3Tokens:
    """The ids of Emu3's special tokens. Raises ValueError if the tokenizer lacks one, or the visual tokens' numbers have gaps."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        known = tokenizer.get_vocab()
        missing = [token for token in (BOS, EOS, PAD, BOI, IMG, EOL, EOF, EOI) if token not in known]
        if missing:
            raise ValueError(f"the tokenizer has no token {missing}; use Emu3's own (for example BAAI/Emu3-Gen)")
        self.tokenizer = tokenizer
        self.bos, self.eos, self.pad = (known[token] for token in (BOS, EOS, PAD))
        self.boi, self.img, self.eol, self.eof, self.eoi = (known[token] for token in (BOI, IMG, EOL, EOF, EOI))
        codes = {int(match[1]): index for token, index in known.items() if (match := _VISUAL.fullmatch(token))}
        if not codes or max(codes) + 1 != len(codes):
            raise ValueError(
                f"the tokenizer has {len(codes)} visual tokens, numbered up to {max(codes, default=-1)}; some are missing"
            )
        self.visual: Int[Tensor, " codes"] = torch.tensor([codes[code] for code in range(len(codes))])
        """The id of each code."""
        self._codes = {index: code for code, index in codes.items()}

    def header(self, height: int, width: int) -> list[int]:
        """The ids between boi and the first row: the size and img."""
        return [*self.text_ids(f"{height}*{width}"), self.img]

    def image_ids(self, codes: Int[Tensor, "h w"]) -> list[int]:
        """The ids of an image, from boi to eoi."""
        rows = [[*self.visual[row.cpu()].tolist(), self.eol] for row in codes]
        return [self.boi, *self.header(*codes.shape), *(each for row in rows for each in row), self.eof, self.eoi]

    def codes(self, ids: Sequence[int], *, height: int, width: int) -> Int[Tensor, "h w"] | None:
        """The codes of the only image in a completion; None if there is not exactly one, or it has another structure."""
        if list(ids).count(self.img) != 1:
            return None
        start = list(ids).index(self.img) + 1
        body = list(ids)[start : start + height * (width + 1)]
        if len(body) < height * (width + 1) or any(each != self.eol for each in body[width :: width + 1]):
            return None
        visual = [each for position, each in enumerate(body) if position % (width + 1) != width]
        if any(each not in self._codes for each in visual):
            return None
        return torch.tensor([self._codes[each] for each in visual]).reshape(height, width)

    def text_ids(self, text: str) -> list[int]:
        """The ids of a text, in which special tokens may be spelled out."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


class GridGrammar:
    """Images of ``height`` x ``width`` codes (implements ``Grammar``). ``vocabulary``: rows of the output embedding.

    A prompt that ends with boi (begin of image) has already started the image. Text may also end without an image.
    ``begin``: id of boi. ``form``: for each number of tokens since boi, the forced id, or -1 if a visual token is sampled.

    Source: the image format of Emu3 (arXiv 2409.18869).
    """

    kinds: tuple[int, ...] = (Kind.TEXT_TOKEN, Kind.IMAGE_TOKEN)

    def __init__(self, words: Emu3Tokens, *, height: int, width: int, vocabulary: int, device: torch.device) -> None:
        self.begin = words.boi
        visual = torch.zeros(vocabulary, dtype=torch.bool)
        visual[words.visual] = True
        text = (torch.arange(vocabulary) < len(words.tokenizer)) & ~visual
        text[[words.img, words.eol, words.eof, words.eoi, words.bos, words.pad]] = False
        self.vocabularies = torch.stack([text, visual]).to(device)
        body = ([VISUAL] * width + [words.eol]) * height
        form = [*words.header(height, width), *(-1 if each == VISUAL else each for each in body), words.eof, words.eoi, words.eos]
        self.form = torch.tensor([*form, words.pad], device=device)

    def parse(self, prompts: Prompts, ids: Int[Tensor, "r k"]) -> tuple[Int[Tensor, "r k1"], Int[Tensor, "r k1"]]:
        rows, count = ids.shape
        positions = torch.arange(count + 1, device=ids.device).expand(rows, -1)
        begun = torch.cat([prompts.ids[:, -1:] == self.begin, ids == self.begin], dim=1)  # position k follows begun[k]
        first = torch.where(begun.any(1), begun.int().argmax(1), count + 1)
        since = positions - first[:, None]
        in_image = since >= 0
        forced = torch.where(in_image, self.form[since.clamp(0, len(self.form) - 1)], -1)
        return in_image.long() * VISUAL, forced


class NoGrammar:
    """Any token may follow any other (implements ``Grammar``). Nothing is forced, so a completion may contain no complete image."""

    kinds: tuple[int, ...] = (Kind.TEXT_TOKEN, Kind.IMAGE_TOKEN)

    def __init__(self, words: Emu3Tokens, *, vocabulary: int, device: torch.device) -> None:
        self._img = words.img
        known = torch.arange(vocabulary, device=device) < len(words.tokenizer)
        self.vocabularies = known.expand(2, -1).clone()

    def parse(self, prompts: Prompts, ids: Int[Tensor, "r k"]) -> tuple[Int[Tensor, "r k1"], Int[Tensor, "r k1"]]:
        rows, count = ids.shape
        in_image = torch.cat([ids.new_zeros(rows, 1, dtype=torch.bool), (ids == self._img).cumsum(1) > 0], dim=1)
        return in_image.long() * VISUAL, ids.new_full((rows, count + 1), -1)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Inside the block, a GPU computes fp32 products and convolutions without TF32, which can change a nearest neighbour."""
    kept = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = kept


class Emu3ImageTokenizer:
    """A frozen image tokenizer for images of one ``size``, (height, width) in pixels.

    ``grid``: (height, width) in codes: the size divided by the autoencoder's factor (8). Raises ValueError if the size is not a
    multiple of this factor.

    Source: Emu3 (arXiv 2409.18869), whose tokenizer extends MoVQGAN (arXiv 2209.09002).
    """

    def __init__(self, vq: Emu3VQVAE, size: tuple[int, int]) -> None:
        self.vq = vq.requires_grad_(False).eval()
        self.size = size
        factor = self.vq.spatial_scale_factor
        if size[0] % factor or size[1] % factor:
            raise ValueError(f"size {size}: sides must be multiples of {factor} px, the autoencoder's factor")
        self.grid = (size[0] // factor, size[1] // factor)

    def encode(self, images: Sequence[Image]) -> Int[Tensor, "r h w"]:
        """Encode images, which are first resized to ``size`` (Lanczos), to codes. Computes in fp32 without TF32."""
        sizes = torch.tensor([self.size] * len(images))
        with evaluating(self.vq), without_tf32():
            codes = self.vq.encode(to_pixels(images, self.size, self.vq.device), sizes, return_dict=True).image_tokens
        return torch.stack(list(codes)).long()

    def decode(self, codes: Int[Tensor, "r h w"]) -> list[Image]:
        """Decode codes to images."""
        with evaluating(self.vq):
            return to_images(self.vq.decode(codes.to(self.vq.device)))


class Emu3Editor(CausalText):
    """Emu3's language model, which can be trained, and its frozen autoencoder (implements
    ``retouch.protocols.AutoregressiveModel``).

    Images are part of the prompt's token ids, so an engine of ``policies/engines`` can generate the completions.

    ``size``: (height, width) of all images in pixels, multiples of the autoencoder's factor (8). ``prefill``: ``DRAW`` starts the
    image at once, ``THINK`` generates text first. ``grammar``: False does not enforce the structure of an image.
    Raises ValueError if the tokenizer does not have exactly one visual token for each code.

    Source: Emu3 (arXiv 2409.18869) and EARL (arXiv 2508.01119).
    """

    def __init__(
        self,
        module: Emu3ForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vq: Emu3VQVAE,
        size: tuple[int, int],
        prefill: str = DRAW,
        grammar: bool = True,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__(module, gradient_checkpointing=gradient_checkpointing)
        self.words = Emu3Tokens(tokenizer)
        self.image_tokenizer = Emu3ImageTokenizer(vq, size)
        self.vq, self.size, self.grid = self.image_tokenizer.vq, size, self.image_tokenizer.grid
        self.prefill_ids = self.words.text_ids(prefill)
        self.thinks = self.prefill_ids[-1:] != [self.words.boi]
        tokens, codes = len(self.words.visual), self.vq.config.codebook_size
        if tokens != codes:
            raise ValueError(
                f"the tokenizer has {tokens} visual tokens but the autoencoder has {codes} codes; use those of one model"
            )
        self.codebook_size = codes
        rows = module.get_output_embeddings().weight.shape[0]
        self.grammar: Grammar = (
            GridGrammar(self.words, height=self.grid[0], width=self.grid[1], vocabulary=rows, device=module.device)
            if grammar
            else NoGrammar(self.words, vocabulary=rows, device=module.device)
        )
        self.stop: tuple[int, ...] = (self.words.eos,)
        self.pad = self.words.pad

    image_token: int | None = None

    def resized_images(self, task: Task) -> tuple[Image, ...]:
        """Empty: source images are part of the prompt's token ids, so an engine gets no images in addition."""
        return ()

    def encode(self, tasks: Sequence[Task]) -> Prompts:
        """Encode the tasks' prompts.

        Raises ValueError for a task without exactly one image, or with a special token in its instruction.
        """
        require_no_special_tokens(tasks, self.words.tokenizer)
        for task in tasks:
            if len(task.images) != 1 and Codes.SOURCE not in task.meta:
                raise ValueError(f"task {task.id!r} has {len(task.images)} images; Emu3Editor takes one")
        sources = self._codes(tasks, Codes.SOURCE)
        rows = [
            [self.words.bos, *self.words.image_ids(codes), *self.words.text_ids(task.instruction), *self.prefill_ids]
            for task, codes in zip(tasks, sources, strict=True)
        ]
        return self.prompts(rows)

    def _codes(self, tasks: Sequence[Task], key: str) -> list[Int[Tensor, "h w"]]:
        """Return each task's codes from ``task.meta[key]``; the images of tasks without stored codes are encoded in one batch."""
        codes = {row: self._checked(task, key) for row, task in enumerate(tasks) if key in task.meta}
        to_encode = {
            row: task.images[0] if key == Codes.SOURCE else task.target for row, task in enumerate(tasks) if row not in codes
        }
        images = [image for image in to_encode.values() if image is not None]
        codes |= zip(to_encode, self.encode_codes(images) if images else (), strict=True)
        return [codes[row] for row in range(len(tasks))]

    def _checked(self, task: Task, key: str) -> Int[Tensor, "h w"]:
        codes = torch.tensor(task.meta[key])
        if tuple(codes.shape) != self.grid or not 0 <= int(codes.min()) <= int(codes.max()) < self.codebook_size:
            raise ValueError(
                f"task {task.id!r} has {key} of shape {tuple(codes.shape)} and values up to {int(codes.max())}, but this model has "
                f"{self.codebook_size} codes in grids of {self.grid}; tokenize the data again"
            )
        return codes

    def encode_codes(self, images: Sequence[Image]) -> Int[Tensor, "r h w"]:
        """Encode images, which are first resized to ``size`` (Lanczos), to codes."""
        return self.image_tokenizer.encode(images)

    def decode_codes(self, codes: Int[Tensor, "r h w"]) -> list[Image]:
        """Decode codes to images."""
        return self.image_tokenizer.decode(codes)

    def codes_in(self, ids: Sequence[int]) -> Int[Tensor, "h w"] | None:
        """The codes of the image in a completion; None if it contains no complete image of this size."""
        begun = [] if self.thinks else [self.words.boi]
        return self.words.codes([*begun, *ids], height=self.grid[0], width=self.grid[1])

    def target_ids(self, tasks: Sequence[Task]) -> list[list[int]]:
        """Return the completion that each task demonstrates: the target image. With ``THINK``, the reasoning text in the task's
        meta (``thought``) comes before the image.

        Raises ValueError for a task without a target, or without the reasoning text.
        """
        for task in tasks:
            if task.target is None and Codes.TARGET not in task.meta:
                raise ValueError(f"task {task.id!r} has no target image, which supervised learning needs")
            if self.thinks and not isinstance(task.meta.get(THOUGHT), str):
                raise ValueError(f"task {task.id!r} has no reasoning text in meta['{THOUGHT}'], which policy.model.think needs")
        targets = [self.words.image_ids(codes) for codes in self._codes(tasks, Codes.TARGET)]
        if not self.thinks:
            return [ids[1:] for ids in targets]  # the first token is in the prefill
        return [
            [*self.words.text_ids(f"{task.meta[THOUGHT]}{END_OF_THOUGHT}"), *ids] for task, ids in zip(tasks, targets, strict=True)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without the image and the tokens that give its size."""
        structure = {*self.words.visual.tolist(), self.words.eol, self.words.img}
        header = self.words.header(*self.grid)
        text: list[int] = []
        size = iter(() if self.thinks else header)  # the ids of the header that are still expected
        for each in ids:
            if each == self.words.boi:
                size = iter(header)
            elif each != next(size, None):
                size = iter(())
                text += [] if each in structure else [each]
        decoded: str = self.words.tokenizer.decode(text, skip_special_tokens=True)
        return decoded


def load_emu3(
    source: "Path | str | LoadedLanguageModel",
    *,
    tokenizer: Path | str | None = None,
    autoencoder: Path | str | None = None,
    size: tuple[int, int],
    prefill: str,
    grammar: bool = True,
    dtype: torch.dtype,
    device: torch.device | str,
    attention: Attention = "sdpa",
    gradient_checkpointing: bool = False,
) -> Emu3Editor:
    """Load the editor with all weights frozen: the language model in ``dtype``, the autoencoder in fp32, because codes come from a
    nearest-neighbour search.

    ``source``: a folder, or a loaded complete Emu3, which keeps its dtype. ``size``: (height, width) of images in pixels.
    ``tokenizer``, ``autoencoder``: their folders; None is ``source``. In the original layout both have separate folders. Raises
    ValueError for a folder with another model, and for missing or unexpected weights.
    """
    if not isinstance(source, Path | str):
        module, words, vq = language_model(source.base()), source.tokenizer, source.in_fp32(source.module.model.vqmodel)
    else:
        path = Path(source)
        words_path = path if tokenizer is None else Path(tokenizer)
        if not (words_path / "tokenizer.json").is_file():
            raise ValueError(
                f"{words_path} has no tokenizer.json; Emu3's original tokenizer is Python code, which is not executed: set "
                "policy.model.tokenizer to the folder of a converted one (Emu3-community/Emu3-Gen-hf has it)"
            )
        words = AutoTokenizer.from_pretrained(words_path, local_files_only=True)
        module = _language(path, dtype=dtype, attention=attention)
        vq = load_autoencoder(path if autoencoder is None else Path(autoencoder))
    return Emu3Editor(
        module.requires_grad_(False).eval().to(device),
        words,
        vq=vq.to(device),
        size=size,
        prefill=prefill,
        grammar=grammar,
        gradient_checkpointing=gradient_checkpointing,
    )


def parts_of_emu3(path: Path, *, autoencoder: Path) -> dict[str, dict[str, Any]]:
    """Classes and configurations of language model and autoencoder, without weights. Raises ValueError for another model."""
    config = _json(path / "config.json")
    if config.get("model_type") not in ("emu3", "emu3_text_model", "Emu3"):
        raise ValueError(_no_model(path, config))
    text = _text_config(config["text_config"] if config["model_type"] == "emu3" else config)
    vq = Emu3VQVAEConfig(**_autoencoder_config(autoencoder))
    return {
        "writer": {"class": "Emu3ForCausalLM", "config": text.to_dict()},
        "autoencoder": {"class": "Emu3VQVAE", "config": vq.to_dict()},
    }


def _language(path: Path, *, dtype: torch.dtype, attention: Attention) -> Any:
    """Load the language model from a complete Emu3, or from its own folder with transformers' configuration or the original one."""
    config = _json(path / "config.json")
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    match config.get("model_type"):
        case "emu3":
            return language_model(Emu3ForConditionalGeneration.from_pretrained(path, **settings, **LOCAL))
        case "emu3_text_model":
            return Emu3ForCausalLM.from_pretrained(path, **settings, **LOCAL)
        case "Emu3":
            text, weights = _text_config(config), _weights(path)
            with torch.device("meta"):
                expected = Emu3ForCausalLM(text).state_dict().keys()
            _check(path, weights.keys(), expected)
            return Emu3ForCausalLM.from_pretrained(None, config=text, state_dict=weights, **settings)
    raise ValueError(_no_model(path, config))


def _text_config(config: Mapping[str, Any]) -> Emu3TextConfig:
    """The configuration without the fields that transformers does not know."""
    known = {*Emu3TextConfig().to_dict(), "rope_theta"} - {"model_type"}
    return Emu3TextConfig(**{name: value for name, value in config.items() if name in known})


def _no_model(path: Path, config: Mapping[str, Any]) -> str:
    found = f"a model of type {config['model_type']!r}" if "model_type" in config else "no config.json"
    return f"{path} contains {found}; set the local folder of an Emu3 model, in transformers' layout or the original one"


def load_autoencoder(path: Path) -> Emu3VQVAE:
    """Load the autoencoder in fp32, from the folder of a complete Emu3 or from its own folder."""
    fields, weights = _autoencoder_config(path), _weights(path)
    match _json(path / "config.json")["model_type"]:
        case "emu3":
            begin = r"^(model\.)?vqmodel\."
            weights = {re.sub(begin, "", name): tensor for name, tensor in weights.items() if re.match(begin, name)}
        case "Emu3VisionVQ":
            weights = renamed(weights)
    vq = Emu3VQVAE(Emu3VQVAEConfig(**fields))
    _check(path, weights.keys(), vq.state_dict().keys())
    vq.load_state_dict({name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()})
    return vq


def language_model(whole: Emu3ForConditionalGeneration) -> Emu3ForCausalLM:
    """Return the language model of a complete Emu3; both share their weights."""
    with torch.device("meta"):
        module = Emu3ForCausalLM(whole.config.text_config)
    module.model, module.lm_head = whole.model.text_model, whole.lm_head
    return module


def save_for_vllm(editor: Emu3Editor, folder: Path | str) -> None:
    """Write the language model and its tokenizer for ``vllm serve``, as a Llama.

    Emu3's language model has the layers and the weight names of Llama, and vLLM does not know the class of Emu3's own
    configuration. The logits are the same, and so are the names in a LoRA.
    """
    module = editor.module
    described: Any = module.config
    own = described.to_dict()
    config = LlamaConfig(**{name: own[name] for name in LlamaConfig().to_dict() if name in own and name not in _OWN_FIELDS})
    with torch.device("meta"):
        made = LlamaForCausalLM(config)
    made.load_state_dict(module.state_dict(), assign=True)
    made.save_pretrained(folder)
    editor.words.tokenizer.save_pretrained(folder)


def _check(path: Path, found: Set[str], expected: Set[str]) -> None:
    if found != expected:
        missing, unexpected = sorted(expected - found), sorted(found - expected)
        raise ValueError(f"{path} does not match this part of Emu3: missing {missing[:3]}, unexpected {unexpected[:3]}")


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the autoencoder's weights to transformers' names; the 1 x 1 convolutions of attention become linear layers."""
    found = {}
    for name, tensor in weights.items():
        for pattern, replacement in KEYS:
            name = re.sub(pattern, replacement, name)
        linear = re.search(r"\.(q|k|v|out)_proj\.weight$", name) and tensor.ndim == 4
        found[name] = tensor[:, :, 0, 0] if linear else tensor
    return found


def _autoencoder_config(path: Path) -> dict[str, Any]:
    config = _json(path / "config.json")
    match config.get("model_type"):
        case "emu3":
            return dict(config["vq_config"])
        case "emu3_vqgan":
            return config
        case "Emu3VisionVQ":
            known = set(Emu3VQVAEConfig().to_dict())
            named = {_AUTOENCODER_FIELDS.get(name, name): value for name, value in config.items()}
            made = {name: value for name, value in named.items() if name in known and name != "model_type"}
            return made | {"hidden_size": made["base_channels"] * made["channel_multiplier"][-1]}
    raise ValueError(
        f"{path} contains no autoencoder of Emu3; in the original layout it is a separate model: set policy.model.autoencoder, for "
        "example to BAAI/Emu3-VisionTokenizer"
    )


def _weights(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    if not found:
        raise ValueError(f"{path} contains no safetensors files; other weight formats are not read")
    return found


def _json(file: Path) -> dict[str, Any]:
    read: dict[str, Any] = read_json(file) if file.is_file() else {}
    return read
