"""Frozen parts of an image model that are on its device only while they are used, and prompt embeddings that are kept on disk.

The store has one safetensors file per entry, whose name is the digest of everything that it was computed from. Several processes
may use one folder: a complete file gets its name by a rename, and two processes that write the same entry write the same content. A
damaged file is reported and counts as missing, so files are not flushed to disk with fsync.
"""

import copy
import hashlib
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL.Image import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from retouch.config.consent import user_folder
from retouch.models.base import ImageModel
from retouch.models.parts import LOCAL, bits_hash, evaluating, frozen_hashes, repeated_blocks, to_device
from retouch.models.pipeline import ModelWrapper, PipelineModel
from retouch.models.pretrained import DENOISER, fetch_weights
from retouch.models.quantized import compute_dtype, plain_tensors, quantize
from retouch.protocols import DenoisingModel
from retouch.records import files
from retouch.records.files import read_json
from retouch.types import Conditioning, Task

BUFFER_BYTES = 2**30
_ALIGNMENT = 256
_CPU = torch.device("cpu")
FOLDER_VARIABLE = "RETOUCH_PROMPT_CACHE"
LIMIT_VARIABLE = "RETOUCH_PROMPT_CACHE_GB"
DEFAULT_LIMIT_GB = 100.0
_SUFFIX = ".safetensors"
_CHECKSUM, _WIDENED = "crc32", "widened"
_KEPT_SHARE = 0.9
"""When the limit is exceeded, entries are deleted until this share of the limit is left."""
_ABANDONED_SECONDS = 24 * 3600
_VERSION = 2
_VOLATILE = ("_name_or_path", "transformers_version", "architectures")
_INNER = frozenset(
    {
        *("num_layers", "num_single_layers", "n_layers", "n_refiner_layers", "dual_attention_layers"),
        *("num_attention_heads", "n_heads", "n_kv_heads", "attention_head_dim", "dim", "caption_projection_dim", "mlp_ratio"),
        *("axes_dims_rope", "axes_dims", "pos_embed_max_size", "sample_size", "qk_norm", "eps", "norm_eps"),
    }
)
"""Settings of a denoiser that leave its inputs and outputs as they are: depth, widths and norms."""
_UNIMPORTANT = frozenset({*_VOLATILE, "_diffusers_version", "torch_dtype", "dtype"})
_log = logging.getLogger("retouch")


@contextmanager
def on_device(device: torch.device, parts: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block, the parts' parameters and buffers are copies on ``device``; after it, they are the same tensors as before.

    Changes of a copy are lost, so use this for frozen weights only: they stay in CPU memory, and occupy device memory only inside
    the block. The host does not wait for copies from page-locked memory; it never writes to the tensors it copies (``to_device``).
    """
    waiting: list[tuple[dict[str, Any], str, Tensor]] = []
    copies: dict[int, Tensor] = {}
    try:
        for table, name, tensor in _tensors(parts):
            if id(tensor) not in copies:  # shared weights stay shared
                copies[id(tensor)] = _copied(tensor, device)
            waiting.append((table, name, tensor))
            table[name] = copies[id(tensor)]
        yield
    finally:
        for table, name, tensor in waiting:
            table[name] = tensor


def _copied(tensor: Any, device: torch.device) -> Tensor:
    if getattr(tensor, "quant_state", None) is not None:  # bitsandbytes moves the scales of a parameter in place, and waits
        copied: Any = copy.copy(tensor)
        copied.data, copied.quant_state = to_device(tensor.data, device), _copied_state(tensor.quant_state, device)
        return copied
    if type(tensor).__module__.startswith("torchao"):  # its own copies wait
        names, settings = tensor.__tensor_flatten__()
        parts = {name: to_device(getattr(tensor, name), device) for name in names}
        moved = type(tensor).__tensor_unflatten__(parts, settings, tensor.size(), tensor.stride())
    else:
        moved = to_device(tensor.detach(), device)
    return nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved


def _copied_state(state: Any, device: torch.device) -> Any:
    made = copy.copy(state)
    made.absmax, made.code = to_device(state.absmax, device), to_device(state.code, device)
    if state.state2 is not None:
        made.offset, made.state2 = to_device(state.offset, device), _copied_state(state.state2, device)
    return made


def page_lock(parts: Sequence[nn.Module], device: torch.device) -> None:
    """Move the parts' weights to page-locked memory, from which ``on_device`` copies them to a GPU.

    Does nothing if ``device`` is not a CUDA GPU. The weights share large buffers, because torch rounds every piece of page-locked
    memory up to a power of two.
    """
    if device.type == "cuda":
        repack(parts, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))


def repack(parts: Sequence[nn.Module], allocate: Callable[[int], Tensor]) -> None:
    """Move the parts' parameters and buffers into shared buffers of ``BUFFER_BYTES``; larger tensors get a buffer of their size.

    ``allocate``: returns a buffer with the given number of bytes. Tensors that are already in page-locked memory are not moved.
    """
    buffer, used, moved = None, 0, set()
    for tensor in (plain for _, _, whole in _tensors(parts) for plain in plain_tensors(whole)):
        size = tensor.numel() * tensor.element_size()
        if id(tensor) in moved or size == 0 or tensor.is_pinned():
            continue
        moved.add(id(tensor))
        if buffer is None or used + size > len(buffer):
            buffer, used = allocate(max(size, BUFFER_BYTES)), 0
        place = buffer[used : used + size].view(tensor.dtype).view(tensor.shape)
        tensor.data = place.copy_(tensor.data)
        used += -(-size // _ALIGNMENT) * _ALIGNMENT


class SwappedBlocks:
    """The last ``count`` blocks of a transformer: their frozen weights are on ``device`` only while they compute.

    The next block is copied on a stream of its own while a block computes: the block after it or, in a backward pass with gradient
    checkpointing, which recomputes the blocks in reverse, the block before it. So at most two of these blocks are on the device,
    and the results have the same bits. Trained weights are moved to the device, where they stay.
    """

    def __init__(self, module: nn.Module, *, count: int, device: torch.device) -> None:
        self.device = device
        self.stream = None if device.type in ("cpu", "mps") else torch.get_device_module(device).Stream(device)
        blocks = repeated_blocks(module)[-count - 1 :]  # with the block before them, which starts the first copy
        self.frozen: list[list[tuple[dict[str, Any], str, Tensor]]] = []
        self.ahead: dict[int, list[Tensor]] = {}
        for place, block in enumerate(blocks):
            found = list(_tensors([block]))
            for table, name, tensor in found:
                if tensor.requires_grad:
                    table[name] = nn.Parameter(tensor.detach().to(device))
            waits = place >= len(blocks) - count
            self.frozen.append([each for each in found if not each[2].requires_grad] if waits else [])
            block.forward = partial(self.compute, place, partial(type(block).forward, block))

    def compute(self, place: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute a block with its weights on the device."""
        copies = self.ahead.pop(place) if place in self.ahead else self.fetch(place)
        self.wait()
        following = place - 1 if torch._C._current_graph_task_id() != -1 else place + 1
        self.ahead = {following: self.fetch(following)} if 0 <= following < len(self.frozen) else {}
        try:
            for (table, name, tensor), copy in zip(self.frozen[place], copies, strict=True):
                whole = isinstance(copy, nn.Parameter) or not isinstance(tensor, nn.Parameter)
                table[name] = copy if whole else nn.Parameter(copy, requires_grad=False)
            return forward(*args, **kwargs)
        finally:
            for table, name, tensor in self.frozen[place]:
                table[name] = tensor

    def fetch(self, place: int) -> list[Tensor]:
        """Begin to copy the frozen weights of a block to the device."""
        # A race without this order: the memory belongs to the stream that computes, and kernels that still wait there may read what
        # it held before. So the copies begin after everything that was started until now, and ``wait`` is called before their use.
        # Codes and scales are in the memory of this stream; it reuses their memory here only, after the same wait.
        copies = [
            None if len([*plain_tensors(tensor)]) > 1 else torch.empty_like(tensor, device=self.device)
            for _, _, tensor in self.frozen[place]
        ]
        if self.stream is not None:
            self.stream.wait_stream(torch.get_device_module(self.device).current_stream(self.device))
        with nullcontext() if self.stream is None else torch.get_device_module(self.device).stream(self.stream):
            return [
                _copied(tensor, self.device) if made is None else made.copy_(tensor.detach(), non_blocking=self.stream is not None)
                for made, (_, _, tensor) in zip(copies, self.frozen[place], strict=True)
            ]

    def wait(self) -> None:
        """Let later computations wait for all copies. A dry run replaces this."""
        if self.stream is not None:
            torch.get_device_module(self.device).current_stream(self.device).wait_stream(self.stream)


def place_blocks(module: nn.Module, *, count: int, device: torch.device) -> None:
    """Move a transformer to ``device``, except its last ``count`` blocks, which are moved to page-locked memory."""
    blocks = repeated_blocks(module)
    if count > len(blocks):
        raise ValueError(f"devices.swap_blocks: {count}, and the transformer has {len(blocks)} blocks; set at most {len(blocks)}")
    waiting = blocks[len(blocks) - count :]
    page_lock(waiting, device)
    tables = [
        (each._modules, name, inner) for each in module.modules() for name, inner in each._modules.items() if inner in waiting
    ]
    for table, name, _ in tables:
        table[name] = None
    module.to(device)
    for table, name, block in tables:
        table[name] = block


def load_teacher(policy: Any, model: Any, path: str, *, device: torch.device) -> Any:
    """Load a model that teaches, frozen and in CPU memory, for ``on_device``.

    ``policy``: the recipe's section. ``model``: the policy's model. A language model is taught by another one with its vocabulary
    and image tokenizer. A pipeline is taught by itself with the denoiser of another pipeline; the configurations of all parts must
    be equal, except in ``_INNER`` settings of the denoiser. ``device``: where the teacher is quantised. Raises ValueError.
    """
    key = "objective.teachers"
    if policy.is_autoregressive:
        if "path" not in type(policy.model).model_fields:
            raise ValueError(f"{key}: {policy.model.kind} has no path, so no other model can be loaded; use run")
        section = type(policy.model).model_validate({**policy.model.model_dump(exclude={"weights"}), "path": path})
        teacher = policy.model_copy(update={"model": section}).build_model(device=device)
        if _meaning_of_ids(teacher) != _meaning_of_ids(model):
            raise ValueError(f"{key}: {path} has another vocabulary or image tokenizer than the policy's model")
        page_lock([teacher.module.to(_CPU)], device)
        return teacher
    policy_folder, bits = policy.model.find_weights()[0], policy.base and policy.base.quantize
    if policy_folder is None:
        raise ValueError(f"{key}: the policy's model is no folder of a pipeline to compare it with; set policy.model.path to one")
    folder = fetch_weights(path, DENOISER, key=key)
    for file in sorted(folder.glob("*/config.json")):
        part = file.parent.name
        files_of = (policy_folder / part / file.name, file)
        own, theirs = (dict(_settings(read_json(each))) if each.is_file() else {} for each in files_of)
        names = {name for name in own.keys() & theirs.keys() if own[name] != theirs[name]}  # versions write and leave out defaults
        if found := sorted(names - (_INNER if part == "transformer" else set())):
            differing = ", ".join(f"{name} is {theirs[name]!r} and not {own[name]!r}" for name in found)
            raise ValueError(f"{key}: the {part} of {path} has not the inputs and outputs of the policy's model: {differing}")
    dtype = {"torch_dtype": compute_dtype(model.module)}
    made: nn.Module = type(model.module).from_pretrained(folder / "transformer", **dtype, **LOCAL).to(_CPU)
    if bits is not None:
        quantize(made, bits, device=device, home=_CPU)
    page_lock([made], device)
    teacher = copy.copy(model)
    teacher.module = made.requires_grad_(False).eval()
    return teacher


def _meaning_of_ids(model: Any) -> object:
    """What language models share if they write the same texts and images with the same ids."""
    others, allowed = copy.copy(model), [row.nonzero()[:, 0].tolist() for row in model.grammar.vocabularies]
    others.module = None
    return model.stop, model.pad, allowed, [model.decode(ids) for ids in allowed], frozen_hashes(others)


def _settings(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a configuration and of those inside it, such as ("text_config.hidden_size", 4096)."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{path}{name}.")
        elif name not in _UNIMPORTANT:
            yield f"{path}{name}", value


def parts_of(model: Any, *, key: str = "devices.offload") -> list[nn.Module]:
    """Return the modules of an image model, its transformer first. Raises ValueError for a model without a property ``parts``.

    ``key``: the recipe key that needs the modules.
    """
    parts: list[nn.Module] | None = getattr(model, "parts", None)
    if parts is None:
        raise ValueError(f"{key}: the modules of {type(model).__name__} are unknown, it has no property `parts`; remove the key")
    return parts


def _tensors(parts: Sequence[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield (table, name, tensor) for each parameter and buffer; ``table`` is the module's dict that contains the tensor."""
    for module in [module for part in parts for module in part.modules()]:
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    yield table, name, tensor


class EmbeddingStore:
    """Named groups of tensors in ``folder``, at most ``limit`` bytes; the least recently used are deleted first."""

    def __init__(self, folder: Path, *, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._bytes: int | None = None
        self._failed = False

    @classmethod
    def of_user(cls) -> "EmbeddingStore":
        """The user's store: in the folder ``RETOUCH_PROMPT_CACHE`` (default: the user's cache folder), with a limit of
        ``RETOUCH_PROMPT_CACHE_GB`` GB (default: 100).

        Raises ValueError if the limit is not a positive number, or if there is no folder.
        """
        given = os.environ.get(FOLDER_VARIABLE)
        user = user_folder("XDG_CACHE_HOME", ".cache")
        if not given and user is None:
            raise ValueError(f"there is no home folder for prompt embeddings; set {FOLDER_VARIABLE} to a folder")
        folder = Path(given) if given else Path(user or "") / "prompt-embeddings"
        text = os.environ.get(LIMIT_VARIABLE) or str(DEFAULT_LIMIT_GB)
        try:
            limit = float(text)
        except ValueError:
            limit = 0.0
        if not 0 < limit < float("inf"):
            raise ValueError(f"{LIMIT_VARIABLE} is {text!r}; set it to the GB that prompt embeddings may take, for example 100")
        return cls(folder, limit=int(limit * 1e9))

    def read(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors of an entry, on the CPU; None if there is no such entry, or if it is damaged."""
        path = self.folder / f"{key}{_SUFFIX}"
        damage: str | None
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError) as error:
            damage = str(error)
        else:
            damage = None if about.get(_CHECKSUM) == _checksum(tensors) else "its checksum differs"
        if damage is not None:
            _log.warning("the prompt embeddings in %s are damaged (%s); they are computed again", path, damage)
            return None
        with suppress(OSError):
            os.utime(path)  # it is the most recently used now
        widened = json.loads(about[_WIDENED])
        return {name: tensor.float() if name in widened else tensor for name, tensor in tensors.items()}

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Store the tensors. If the disk cannot be written, this is reported once, and the entry is computed again when needed."""
        narrowed = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        for name, tensor in narrowed.items():
            # 16-bit encoders return their states in fp32: stored in bfloat16 if this is exact.
            if tensor.dtype == torch.float32 and torch.equal(tensor.bfloat16().float(), tensor):
                narrowed[name] = tensor.bfloat16()
        widened = sorted(name for name, tensor in narrowed.items() if tensor.dtype != tensors[name].dtype)
        about = {_CHECKSUM: _checksum(narrowed), _WIDENED: json.dumps(widened)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with files.replacing(self.folder / f"{key}{_SUFFIX}", durable=False) as file:
                save_file(narrowed, file.name, metadata=about)
                size = os.path.getsize(file.name)
            self._bytes = size + (self.usage()[1] if self._bytes is None else self._bytes)
            if self._bytes > self.limit:
                self._delete_oldest()
        except (SafetensorError, OSError) as error:
            if not self._failed:
                _log.warning("prompt embeddings cannot be kept in %s: %s", self.folder, error)
            self._failed = True

    def usage(self) -> tuple[int, int]:
        """Return the number of entries and their total bytes."""
        sizes = [size for _, size, _ in self._entries()]
        return len(sizes), sum(sizes)

    def _entries(self) -> list[tuple[float, int, Path]]:
        """(time of the last use, bytes, path) of each entry. Removes temporary files that a killed process left."""
        found: list[tuple[float, int, Path]] = []
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for file in entries:
                with suppress(FileNotFoundError):  # another process may have deleted it
                    state = file.stat()
                    if file.name.endswith(_SUFFIX):
                        found.append((state.st_mtime, state.st_size, Path(file.path)))
                    elif file.name.startswith(files.TEMPORARY) and time.time() - state.st_mtime > _ABANDONED_SECONDS:
                        Path(file.path).unlink(missing_ok=True)
        return found

    def _delete_oldest(self) -> None:
        entries = sorted(self._entries())
        self._bytes = sum(size for _, size, _ in entries)
        if self._bytes <= self.limit:  # another process has deleted some
            return
        _log.warning(
            "prompt embeddings take %.1f GB in %s; the limit is %.1f GB (%s): the least recently used are deleted",
            self._bytes / 1e9,
            self.folder,
            self.limit / 1e9,
            LIMIT_VARIABLE,
        )
        for _, size, path in entries:
            if self._bytes <= _KEPT_SHARE * self.limit:
                return
            path.unlink(missing_ok=True)
            self._bytes -= size


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), value))
    return str(value)


@dataclass(frozen=True, eq=False)
class CachedPrompts:
    """Returns the text encoders' output for prompts, from ``store`` if it is stored there (implements ``ReadsPrompts``).

    An entry is keyed by everything that it depends on: the encoders' weights, configurations and types, the tokenizers, template
    and lengths, the kind of device, the prompt, and the images that the encoders read with it. Each prompt is encoded alone, so an
    entry does not depend on the batch in which the prompt occurred first. Embeddings of a whole batch differ from it by rounding.
    """

    model: PipelineModel
    store: EmbeddingStore
    device: torch.device

    def __call__(self, prompts: Sequence[str], images: Sequence[Sequence[Image]]) -> dict[str, Tensor]:
        keys = []
        for prompt, row in zip(prompts, images, strict=True):
            digest = hashlib.sha256(self._identity)
            pixels = [f"{image.mode} {image.width} {image.height} ".encode() + image.tobytes() for image in row]
            for part in (prompt.encode(), *pixels):
                digest.update(len(part).to_bytes(8, "big") + part)
            keys.append(digest.hexdigest())
        stored = {key: self.store.read(key) for key in dict.fromkeys(keys)}
        rows = {key: row for key, row in stored.items() if row is not None}
        missing = [key for key in stored if key not in rows]
        if missing:
            encoders = self.model.text.encoders
            with on_device(self.device, encoders), evaluating(*encoders):
                for key in missing:
                    index = keys.index(key)
                    encoded = self.model.embed_prompts([prompts[index]], [images[index]])
                    rows[key] = {name: tensor[0].cpu() for name, tensor in encoded.items()}
            for key in missing:
                self.store.write(key, rows[key])
        found = [rows[key] for key in keys]
        batches = {}
        for name in found[0]:
            tensors = [row[name] for row in found]
            equal = all(tensor.shape == tensors[0].shape for tensor in tensors)
            # Padded on the right with zeros if the lengths differ.
            batches[name] = torch.stack(tensors) if equal else pad_sequence(tensors, batch_first=True)
        return {name: to_device(batch, self.device) for name, batch in batches.items()}

    @cached_property
    def _identity(self) -> bytes:
        described = [_VERSION, self.device.type, describe(self.model.text)]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()


def describe(value: Any) -> Any:
    """Return everything that determines a text encoder's output, as JSON: weights, configurations, vocabularies and settings.

    Raises TypeError for a value of an unknown type, so that nothing is left out by accident.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, nn.Module):
        config: Any = getattr(value, "config", None)
        if config is not None:
            settings = {key: inner for key, inner in config.to_dict().items() if key not in _VOLATILE}
            config = json.loads(json.dumps([settings, getattr(config, "_attn_implementation", None)], default=str))
        named = sorted([*value.named_parameters(), *value.named_buffers()], key=itemgetter(0))
        hashes = torch.stack([bits_hash(tensor) for _, tensor in named]).tolist() if named else []
        weights = [[name, str(tensor.dtype), list(tensor.shape), each] for (name, tensor), each in zip(named, hashes, strict=True)]
        return {"class": type(value).__qualname__, "config": repr(value) if config is None else config, "weights": weights}
    if isinstance(value, PreTrainedTokenizerBase):
        words = json.dumps(sorted(value.get_vocab().items())).encode()
        options = (value.model_max_length, value.padding_side, value.truncation_side, value.chat_template)
        special = {name: str(token) for name, token in value.special_tokens_map.items()}
        return {"vocabulary": hashlib.sha256(words).hexdigest(), "special": special, "settings": [str(each) for each in options]}
    if isinstance(value, Mapping):
        return {str(key): describe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [describe(inner) for inner in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if hasattr(value, "to_dict"):  # an image processor
        return {"class": type(value).__qualname__, "settings": json.loads(json.dumps(value.to_dict(), default=str))}
    if type(value).__module__.partition(".")[0] in ("builtins", "torch") or not hasattr(value, "__dict__"):
        raise TypeError(f"{type(value).__name__} in a text encoder: prompt embeddings cannot be keyed by it")
    constants = {name: describe(getattr(type(value), name)) for name in dir(type(value)) if name.isupper()}
    return {"class": type(value).__qualname__, "constants": constants, **describe(vars(value))}


class OffloadedModel(ModelWrapper[DenoisingModel]):
    """Keeps frozen parts of ``model`` in CPU memory while they are not used (implements ``DenoisingModel``).

    It returns the same bits as ``model``.

    ``encoders``: the parts that encode tasks. ``autoencoder``: the parts that encode and decode images, and the sources of tasks.
    """

    def __init__(
        self, model: DenoisingModel, *, device: torch.device, encoders: Sequence[nn.Module], autoencoder: Sequence[nn.Module]
    ) -> None:
        super().__init__(model)
        self.device = device
        self.encoders = list(encoders)
        self.autoencoder = list(autoencoder)

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        with on_device(self.device, [*self.encoders, *self.autoencoder]):
            return super().encode(tasks)

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        with on_device(self.device, [*self.encoders, *self.autoencoder]):
            return super().encode_negative(tasks)

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r ..."]:
        with on_device(self.device, self.autoencoder):
            return super().encode_images(images)

    def decode(self, x: Tensor, conditioning: Conditioning) -> list[Image]:
        with on_device(self.device, self.autoencoder):
            return super().decode(x, conditioning)


def build_offloaded(
    section: ImageModel,
    *,
    device: torch.device,
    offload: bool,
    cache_prompts: bool,
    swap_blocks: int = 0,
    prepare: Callable[[DenoisingModel], None] | None = None,
    base: Any = None,
) -> DenoisingModel:
    """Build the model of a recipe's section with its transformer on ``device`` and frozen parts in CPU memory.

    ``offload``: the text encoders and the autoencoder are in CPU memory while they are not used. ``cache_prompts``: prompt
    embeddings are cached on disk, so that only new prompts need the text encoders, which are in CPU memory. ``swap_blocks``: the
    number of the transformer's last blocks that stay in CPU memory until ``SwappedBlocks`` copies them. ``prepare``: called with
    the model if prompts are cached, with the frozen parts on the device and the transformer still in CPU memory. ``base``:
    ``policy.base``; the transformer is quantised while it is moved. Raises ValueError for a model whose parts are not known, and
    for more blocks than it has.
    """
    keys = {"devices.offload": offload, "policy.prompt_embeddings": cache_prompts, "devices.swap_blocks": swap_blocks}
    key = next((key for key, given in keys.items() if given), "policy.base")
    model = section.build(device=torch.device("cpu"))
    transformer, *frozen = parts_of(model, key=key)
    encoders: list[nn.Module] | None = getattr(model, "encoders", None)
    if encoders is None:
        raise ValueError(f"{key}: {type(model).__name__} does not derive from PipelineModel; remove the key")
    if base is not None and base.text_encoders is not None:
        for encoder in encoders:
            quantize(encoder, base.text_encoders, device=device, home=_CPU, key="policy.base.text_encoders")
    page_lock(frozen if offload else encoders if cache_prompts else [], device)
    autoencoder = [part for part in frozen if all(part is not encoder for encoder in encoders)]
    if cache_prompts:
        assert isinstance(model, PipelineModel), "the recipe's checks ensure it"
        model.prompt_embeddings = CachedPrompts(model, EmbeddingStore.of_user(), device=device)
        if prepare is not None:
            # Before the transformer: encoders and transformer together may not fit.
            with on_device(device, frozen):
                prepare(model)
    if base is not None and base.quantize is not None:
        quantize(transformer, base.quantize, device=device, home=_CPU if swap_blocks else device)
    place_blocks(transformer, count=swap_blocks, device=device)
    if offload and not isinstance(model, PipelineModel):
        return model  # it runs its frozen parts on the device of the trained one
    if offload:
        return OffloadedModel(model, device=device, encoders=[] if cache_prompts else encoders, autoencoder=autoencoder)
    for part in autoencoder if cache_prompts else frozen:
        part.to(device)
    return model
