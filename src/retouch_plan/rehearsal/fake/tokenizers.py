"""Replacements for tokenizers that are not on this machine: about one token per word, and the special tokens with their real ids.

Words are split with the pattern of Qwen's tokenizer, so the official templates have their official lengths.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = {
    **{"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645},
    **{"<|object_ref_start|>": 151646, "<|object_ref_end|>": 151647, "<|box_start|>": 151648, "<|box_end|>": 151649},
    **{"<|quad_start|>": 151650, "<|quad_end|>": 151651, "<|vision_start|>": 151652, "<|vision_end|>": 151653},
    **{"<|vision_pad|>": 151654, "<|image_pad|>": 151655, "<|video_pad|>": 151656},
}
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CLIP = {"<|startoftext|>": 49406, "<|endoftext|>": 49407}
EMU3 = {
    **{"<|endoftext|>": 151643, "<|extra_200|>": 151846, "<|extra_201|>": 151847, "<|extra_203|>": 151849},
    **{"<|extra_204|>": 151850, "<|image token|>": 151851, "<|image start|>": 151852, "<|image end|>": 151853},
}
_VISUAL_TOKENS = 32768
_T5 = {"<pad>": 0, "</s>": 1, "<unk>": 2}


def tokenizer_files(folder: Path) -> bool:
    """Return whether the folder contains a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model"))


def stand_in(cls: Any, folder: Path) -> PreTrainedTokenizerBase:
    """Return a replacement for a tokenizer of this class. Raises ValueError if there is none. ``folder``: named in the error."""
    kind = cls.__name__
    if "CLIP" in kind:
        return _made(_CLIP, size=49408, pad="<|endoftext|>", end="<|endoftext|>", start="<|startoftext|>", most=77)
    if "T5" in kind:
        return _made(_T5, size=32100, pad="<pad>", end="</s>")
    if "Qwen" in kind:
        return _made(QWEN, size=151657, pad="<|endoftext|>", end=None)
    raise ValueError(f"{folder}: a rehearsal has no tokenizer in place of {kind}; download the model's tokenizer files")


def write_emu3(folder: Path) -> Path:
    """Write a replacement for Emu3's tokenizer into the folder, and return the folder."""
    visual = {f"<|visual token {code:06d}|>": 151854 + code for code in range(_VISUAL_TOKENS)}
    _made(EMU3, size=151643, pad="<|endoftext|>", end=None, more=visual).save_pretrained(folder)
    return folder


def _made(
    special: dict[str, int],
    *,
    size: int,
    pad: str,
    end: str | None,
    start: str | None = None,
    most: int = 131072,
    more: Mapping[str, int] | None = None,
) -> Any:
    words = {f"{number}": number for number in range(size) if number not in special.values()}
    made = Tokenizer(models.WordLevel({**words, **(more or {}), **special}, unk_token=next(iter(words))))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    made.add_special_tokens(list(special))
    if end is not None:
        template = f"{start} $A {end}" if start else f"$A {end}"
        named = [(token, special[token]) for token in (start, end) if token]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=pad,
        eos_token=end or "<|im_end|>",
        bos_token=start,
        model_max_length=most,
        chat_template=None if end else _CHAT,
    )
