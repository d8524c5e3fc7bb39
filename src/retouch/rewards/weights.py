"""The weights of a reward's model on this machine. Nothing is downloaded here; only safetensors and JSON are read."""

import hashlib
from pathlib import Path

_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model")


def weights_folder(path: str | Path) -> Path:
    """The folder of that name, or the Hugging Face cache's copy of that id.

    ValueError: neither is there (and how to get it), or it has no ``model.safetensors``.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    folder = Path(path)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(str(path), allow_patterns=list(_WANTED), local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            raise ValueError(
                f"the weights of {path} are not on this machine: there is no such folder, and none in the Hugging Face cache; "
                f"run `hf download {path}` where there is a network, or give the folder"
            ) from None
    if not (folder / "config.json").is_file() or not list(folder.glob("model*.safetensors")):
        raise ValueError(
            f"{folder} has no config.json with a model.safetensors; older models come as a pickle only, which is not read: "
            "load it once with transformers where you trust it, and save_pretrained it"
        )
    return folder


def weights_digest(path: str | Path) -> str:
    """16 hexadecimal digits over the contents of a folder's weights and settings, or of one file; independent of its path."""
    place = Path(path)
    files = sorted({file for pattern in _WANTED for file in place.glob(pattern)}) if place.is_dir() else [place]
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            whole.update(f"{file.name if place.is_dir() else ''}\n".encode() + hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()[:16]
