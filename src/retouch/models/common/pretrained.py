"""Where the weights of a published model lie: in a folder, or in the cache of the Hugging Face hub, which is filled when training
starts. Safetensors and JSON only."""

from importlib.resources import files
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

_PARTS = (
    *("transformer", "vae", "scheduler", "processor"),
    *("text_encoder", "text_encoder_2", "text_encoder_3"),
    *("tokenizer", "tokenizer_2", "tokenizer_3"),
)
_WANTED = ["model_index.json", *(f"{part}/*" for part in _PARTS)]
_WANTED_OF_WRITERS = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
_ENCODER = "policy.train.encoder"
_UNWANTED = ["*.bin", "*.fp16.*", "*.msgpack", "*.py"]


def find_weights(path: str) -> Path | None:
    """The folder of that name, or the hub's cached copy of that id; None where the weights are not on this machine.

    Asks no network. ValueError for what is neither a folder nor an id.
    """
    return _find(path, _WANTED)


def fetch_weights(path: str) -> Path:
    """As ``find_weights``, and what is not there is downloaded. ValueError where that does not work."""
    return _fetch(path, _WANTED)


def find_writer(path: str) -> Path | None:
    """As ``find_weights``, for a language model in transformers' layout."""
    return _find(path, _WANTED_OF_WRITERS)


def fetch_writer(path: str) -> Path:
    """As ``fetch_weights``, for a language model in transformers' layout."""
    return _fetch(path, _WANTED_OF_WRITERS)


def find_encoder(path: str) -> Path | None:
    """As ``find_weights``, for the image encoder of an IP-Adapter, in transformers' layout; ``playground`` is the built-in one."""
    if path == "playground":
        return Path(str(files("retouch.playground"))) / "weights" / "sight"
    return _find(path, _WANTED_OF_WRITERS, at=_ENCODER)


def fetch_encoder(path: str) -> Path:
    """As ``find_encoder``, and what is not there is downloaded. ValueError where that does not work."""
    return find_encoder(path) or _fetch(path, _WANTED_OF_WRITERS, at=_ENCODER)


def _find(path: str, wanted: list[str], *, at: str = "policy.model.path") -> Path | None:
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=wanted, ignore_patterns=_UNWANTED, local_files_only=True))
    except HFValidationError:
        raise ValueError(f'{at}: no folder {path}, and no Hugging Face id ("owner/name") either') from None
    except LocalEntryNotFoundError:
        return None


def _fetch(path: str, wanted: list[str], *, at: str = "policy.model.path") -> Path:
    found = _find(path, wanted, at=at)
    if found is not None:
        return found
    try:
        return Path(snapshot_download(path, allow_patterns=wanted, ignore_patterns=_UNWANTED))
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{at}: the weights of {path} could not be downloaded: {reason}. Log in with `hf auth login` where they "
            "are gated, or download them elsewhere and give the folder"
        ) from error
