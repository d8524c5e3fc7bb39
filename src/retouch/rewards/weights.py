"""Find the weights of a reward's model on this machine. Nothing is downloaded; only safetensors and JSON are read."""

import hashlib
from pathlib import Path

from retouch.models.common.complete import require_complete

_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model")


def weights_folder(path: str | Path) -> Path:
    """The folder ``path``, or the folder of the model id ``path`` in the Hugging Face cache.

    Raises ValueError if neither exists (the message says how to get it), if the folder has no ``config.json`` or no
    ``model*.safetensors``, or if files are missing or damaged.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    folder = Path(path)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(str(path), allow_patterns=list(_WANTED), local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            raise ValueError(
                f"the weights of {path} are not on this machine: there is no such folder and no such id in the Hugging Face cache; "
                f"run `hf download {path}` on a machine with a network, or give the folder"
            ) from None
    if not (folder / "config.json").is_file() or not list(folder.glob("model*.safetensors")):
        raise ValueError(
            f"{folder} has no config.json or no model.safetensors; pickle files of older models are not read: if you trust such a "
            "file, load it once with transformers and save it with save_pretrained"
        )
    require_complete(folder, path=str(path), key="reward")
    return folder


def weights_digest(path: str | Path) -> str:
    """16 hexadecimal digits of a hash of the weights and settings in a folder, or of one file; independent of its path."""
    place = Path(path)
    files = sorted({file for pattern in _WANTED for file in place.glob(pattern)}) if place.is_dir() else [place]
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            whole.update(f"{file.name if place.is_dir() else ''}\n".encode() + hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()[:16]
