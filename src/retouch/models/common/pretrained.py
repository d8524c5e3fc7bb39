"""Finds the weights of a published model in a local folder or in the cache of the Hugging Face Hub, or downloads them. Safetensors
and JSON only."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from retouch.config import wings
from retouch.models.common.complete import PARTS, find_problems, require_complete

_PIPELINE_FILES = ["model_index.json", *(f"{part}/*" for part in PARTS)]
_TOKENIZER_FILES = ["*.json", "*.txt", "*.jinja"]
_MODEL_FILES = ["*.safetensors", *_TOKENIZER_FILES]
_ENCODER_KEY = "policy.train.encoder"
_IGNORED_FILES = ["*.bin", "*.fp16.*", "*.msgpack", "*.py"]


def find_weights(path: str) -> Path | None:
    """The folder ``path``, or the complete cached copy of the Hub id ``path``; None if the weights are not on this machine.

    Does not use the network. Raises ValueError if ``path`` is neither a folder nor a Hub id.
    """
    return _find(path, _PIPELINE_FILES)


def fetch_weights(path: str) -> Path:
    """Like ``find_weights``, but downloads missing weights, and requires that all files are complete.

    Raises ValueError if the download fails or if files are missing or damaged.
    """
    return _fetch(path, _PIPELINE_FILES)


def find_language_model(path: str) -> Path | None:
    """Like ``find_weights``, for a language model in transformers' layout."""
    return _find(path, _MODEL_FILES)


def fetch_language_model(path: str) -> Path:
    """Like ``fetch_weights``, for a language model in transformers' layout."""
    return _fetch(path, _MODEL_FILES)


def find_tokenizer(path: str) -> Path | None:
    """Like ``find_language_model``, for the tokenizer or the processor alone: weights may be missing."""
    return _find(path, _TOKENIZER_FILES)


def fetch_tokenizer(path: str) -> Path:
    """Like ``find_tokenizer``, but downloads missing files. Raises ValueError if the download fails."""
    return find_tokenizer(path) or _download(path, _TOKENIZER_FILES)


def find_encoder(path: str) -> Path | None:
    """Like ``find_weights``, for the image encoder of an IP-Adapter in transformers' layout; ``playground`` is the built-in one."""
    if path == "playground":
        return Path(wings.load("part.playground_weights")("sight"))
    return _find(path, _MODEL_FILES, key=_ENCODER_KEY)


def fetch_encoder(path: str) -> Path:
    """Like ``fetch_weights``, for the encoder of ``find_encoder``."""
    if path == "playground":
        return Path(str(find_encoder(path)))
    return _fetch(path, _MODEL_FILES, key=_ENCODER_KEY)


def _find(path: str, patterns: list[str], *, key: str = "policy.model.path") -> Path | None:
    if Path(path).is_dir():
        return Path(path)
    try:
        cached = Path(snapshot_download(path, allow_patterns=patterns, ignore_patterns=_IGNORED_FILES, local_files_only=True))
    except HFValidationError:
        raise ValueError(f'{key}: {path} is neither a folder nor a Hugging Face id ("owner/name")') from None
    except LocalEntryNotFoundError:
        return None
    # An interrupted download is continued.
    return None if patterns != _TOKENIZER_FILES and find_problems(cached) else cached


def _fetch(path: str, patterns: list[str], *, key: str = "policy.model.path") -> Path:
    folder = _find(path, patterns, key=key)
    if folder is None or Path(path).is_dir():  # a cached copy that was found is complete
        folder = folder or _download(path, patterns, key=key)
        require_complete(folder, path=path, key=key)
    return folder


def _download(path: str, patterns: list[str], *, key: str = "policy.model.path") -> Path:
    try:
        return Path(snapshot_download(path, allow_patterns=patterns, ignore_patterns=_IGNORED_FILES))
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{key}: the weights of {path} could not be downloaded: {reason}. Log in with `hf auth login` if they are gated, or "
            "download them elsewhere and set the local folder"
        ) from error
