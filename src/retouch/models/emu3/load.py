"""Loads Emu3 (arXiv 2409.18869) from local folders in transformers' layout or the original one of BAAI and EARL: safetensors only,
no code.

In the original layout, language model and autoencoder have separate folders, and the autoencoder's weights have other names.
"""

import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
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

from retouch.models.common.loaded import LoadedLanguageModel
from retouch.models.common.parts import LOCAL
from retouch.models.emu3.model import Emu3Editor
from retouch.models.language import Attention
from retouch.records.files import read_json

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


def load_emu3(
    source: Path | str | LoadedLanguageModel,
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
    if isinstance(source, LoadedLanguageModel):
        module, words, vq = language_model(source.base()), source.tokenizer, source.in_fp32(source.module.model.vqmodel)
    else:
        path = Path(source)
        words = _tokenizer(path if tokenizer is None else Path(tokenizer))
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
            weights = _own(weights, r"^(model\.)?vqmodel\.")
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


def _own(weights: Mapping[str, Tensor], begin: str) -> dict[str, Tensor]:
    """Return the weights of one part without its prefix, which the pattern ``begin`` matches."""
    return {re.sub(begin, "", name): tensor for name, tensor in weights.items() if re.match(begin, name)}


def _autoencoder_config(path: Path) -> dict[str, Any]:
    config = _json(path / "config.json")
    match config.get("model_type"):
        case "emu3":
            return dict(config["vq_config"])
        case "emu3_vqgan":
            return config
        case "Emu3VisionVQ":
            return _autoencoder_fields(config)
    raise ValueError(
        f"{path} contains no autoencoder of Emu3; in the original layout it is a separate model: set policy.model.autoencoder, for "
        "example to BAAI/Emu3-VisionTokenizer"
    )


def _autoencoder_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    known = set(Emu3VQVAEConfig().to_dict())
    named = {_AUTOENCODER_FIELDS.get(name, name): value for name, value in fields.items()}
    made = {name: value for name, value in named.items() if name in known and name != "model_type"}
    return made | {"hidden_size": made["base_channels"] * made["channel_multiplier"][-1]}


def _tokenizer(path: Path) -> PreTrainedTokenizerBase:
    if not (path / "tokenizer.json").is_file():
        raise ValueError(
            f"{path} has no tokenizer.json; Emu3's original tokenizer is Python code, which is not executed: set "
            "policy.model.tokenizer to the folder of a converted one (Emu3-community/Emu3-Gen-hf has it)"
        )
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return found


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
