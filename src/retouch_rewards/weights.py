"""Rewards with one model, and finding its weights on this machine. Nothing is downloaded; only safetensors and JSON are read."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from retouch.models.pretrained import require_complete, snapshot
from retouch.rewards.base import Device, LoadedModel, PathText, RewardSection

_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model")
_TOKENIZERS = ("tokenizer.json", "vocab.json", "spiece.model")
_PROCESSOR = "preprocessor_config.json"
_QWEN_VL = "config.json preprocessor_config.json tokenizer.json tokenizer_config.json vocab.json merges.txt"

# Ids whose repositories have no tokenizer and no image processor: a folder for the weights and the processors of the base model,
# and for each repository the files to put there.
_COMBINED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "yuvalkirstain/PickScore_v1": (
        "weights/pickscore",
        {
            "yuvalkirstain/PickScore_v1": "config.json model.safetensors",
            "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": "preprocessor_config.json tokenizer.json tokenizer_config.json "
            "special_tokens_map.json vocab.json merges.txt",
        },
    ),
    "MizzenAI/HPSv3": (
        "weights/hpsv3",
        {"MizzenAI/HPSv3": "HPSv3.safetensors", "Qwen/Qwen2-VL-7B-Instruct": _QWEN_VL},
    ),
    **{
        name: ("weights/editreward", {name: "--include '*.safetensors*'", base: _QWEN_VL})
        for name, base in (
            ("TIGER-Lab/EditReward-Qwen2.5-VL-7B", "Qwen/Qwen2.5-VL-7B-Instruct"),
            ("TIGER-Lab/EditReward-MiMo-VL-7B-SFT-2508", "XiaomiMiMo/MiMo-VL-7B-SFT-2508"),
        )
    },
}


class MissingWeights(ValueError):
    """The weights of the id ``path``, or files that belong to them, are not on this machine.

    ``command``: downloads them. ``folder``: where the command puts them, which must then be the ``path`` of the reward; None if the
    command puts them into the Hugging Face cache.
    """

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        combined = _COMBINED.get(path)
        self.folder = None if combined is None else combined[0]
        files = {path: ""} if combined is None else combined[1]
        target = "" if self.folder is None else f"--local-dir {self.folder}"
        self.command = " && ".join(" ".join(f"hf download {name} {listed} {target}".split()) for name, listed in files.items())
        after = "or give the folder" if self.folder is None else f"and give this folder as path: {self.folder}"
        super().__init__(f"{problem}; run `{self.command}` on a machine with a network, {after}")


def weights_folder(path: str | Path, *, pattern: str = "model*.safetensors") -> Path:
    """The folder ``path``, or the folder of the model id ``path`` in the Hugging Face cache.

    ``pattern``: the names of the weights' files. Raises MissingWeights, a ValueError, if neither exists, and ValueError if the
    folder has no ``config.json`` or no weights, or if files are missing or damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        try:
            folder = snapshot(str(path), _WANTED, local_files_only=True)
        except (ValueError, FileNotFoundError):
            raise MissingWeights(
                str(path),
                f"the weights of {path} are not on this machine: there is no such folder and no such id in the Hugging Face cache",
            ) from None
    weights, pickles = list(folder.glob(pattern)), [*folder.glob("*.pth"), *folder.glob("*.pt")]
    if not weights and pickles:
        raise ValueError(
            f"{folder} has the pickle {pickles[0].name} and no safetensors file; pickles are not read: if you trust it, convert it "
            f"with safetensors.torch.save_file(torch.load('{pickles[0].name}', weights_only=True), 'model.safetensors')"
        )
    if not (folder / "config.json").is_file() or not weights:
        if str(path) in _COMBINED:
            raise MissingWeights(str(path), f"{folder} has no config.json, which is in another repository")
        raise ValueError(
            f"{folder} has no config.json or no model.safetensors; pickle files of older models are not read: if you trust such a "
            "file, load it once with transformers and save it with save_pretrained"
        )
    require_complete(folder, path=str(path), key="reward")
    return folder


def require_processors(folder: Path, *, path: str | Path) -> None:
    """Raise ValueError if the folder has no tokenizer or no image processor. Without the files of a tokenizer, transformers would
    make one with an empty vocabulary.

    ``path``: the folder or the id that the reward names.
    """
    absent = [] if any((folder / name).is_file() for name in _TOKENIZERS) else [f"no tokenizer ({_TOKENIZERS[0]})"]
    if not (folder / _PROCESSOR).is_file():
        absent.append(f"no image processor ({_PROCESSOR})")
    if not absent:
        return
    problem = f"{folder} has {' and '.join(absent)}"
    if str(path) in _COMBINED:
        raise MissingWeights(str(path), problem)
    raise ValueError(f"{problem}; put the files of the model from which it was trained into a folder with its weights")


def weights_digest(path: str | Path) -> str:
    """16 hexadecimal digits of a hash of the weights and settings in a folder, or of one file; independent of its path."""
    place = Path(path)
    files = sorted({file for pattern in _WANTED for file in place.glob(pattern)}) if place.is_dir() else [place]
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            whole.update(f"{file.name if place.is_dir() else ''}\n".encode() + hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()[:16]


class ModelReward(RewardSection):
    """Base class of rewards with one model that runs in this process."""

    path: PathText
    """Folder of the weights, or a model id in the Hugging Face cache; nothing is downloaded."""
    device: Device = None
    """Device of the model; null uses the run's device for rewards."""

    cli_key: ClassVar[str | None] = "path"

    def loaded_models(self) -> Iterator[LoadedModel]:
        """Yield the model at ``path``."""
        yield LoadedModel(self.path, "float32", self.device)
