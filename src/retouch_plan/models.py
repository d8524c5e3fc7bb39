"""The models of a dry run: the real classes, built from their configurations on the fake accelerator, without weights.

For a published model, a folder with configurations but no weights is written, and models are built from it. Everything else is the
code of a run: the recipe's loaders, adapters and checks.

A dry run uses few blocks of the denoiser and the writer; other parts, such as text encoders, are whole. Work, kernels, waits, and
the memory at one kind of allocation are affine in the number of equal blocks, so two dry runs with different depths give the
numbers of the whole model. The peak of a stage is the largest over all kinds of allocations, each of which is extrapolated.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias
from unittest.mock import patch

import diffusers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import Emu3VQVAE, PreTrainedTokenizerFast

from retouch.config.section import LIVE, Section, live_object
from retouch.models import quantized
from retouch.models.any_pipeline import DiffusersPipeline
from retouch.models.base import Bits, DiffusersModel, PartConfigs, PretrainedLanguageModel, packaged_config
from retouch.models.offloading import EmbeddingStore
from retouch.models.pretrained import find_encoder, snapshot
from retouch.recipe.recipe import Recipe
from retouch.records.files import read_json
from retouch.run.build import teachers
from retouch_models import emu3
from retouch_models.language import Emu3Model
from retouch_plan.accelerator import CPU, META, FakeTensor, is_dry_run
from retouch_plan.meter import Event, Peaks, Stage, Work

_VISION_TOWERS = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}
FEWEST = 4
"""The smallest number of blocks of a stack: the first, the last, and two inner ones with inner neighbours. With fewer blocks, the
memory held while a block runs differs from that of a deep model."""
_KEYS = ("num_layers", "num_single_layers", "num_hidden_layers", "n_layers")
_DUAL = "dual_attention_layers"
"""The key of the blocks with a second attention in SD3.5; these blocks come first."""
Counts: TypeAlias = Mapping[tuple[str, str], int]
"""The number of blocks by (folder of a model's part, key of its configuration)."""


@dataclass(frozen=True, slots=True)
class Depths:
    """Two depths: numbers of blocks for each stack. The whole model has ``first + times * (second - first)`` blocks. ``swapped``:
    the number of swapped blocks at each depth."""

    first: Counts
    second: Counts
    times: int
    swapped: tuple[int, int] = (0, 0)


def choose_depths(stacks: Counts, *, swap_blocks: int = 0) -> Depths | None:
    """Return the two depths with the fewest blocks in total; None if no two depths have fewer blocks than the whole model. From the
    first depth to the whole model, all stacks grow in proportion, so that two dry runs are enough. ``swap_blocks``: the number of
    the last blocks that are swapped (``devices.swap_blocks``), which grows in proportion too."""
    best, fewest, left = None, sum(stacks.values()), swap_blocks
    waiting = {}
    for stack in sorted(stacks, key=lambda each: (_DUAL, *_KEYS).index(each[1]), reverse=True):
        waiting[stack] = min(left, stacks[stack])
        left -= waiting[stack]
    if left:
        return None
    for times in range(1, max(stacks.values(), default=0)):
        steps = {stack: max(count - FEWEST, 0) // times for stack, count in stacks.items()}
        first = {stack: count - times * steps[stack] for stack, count in stacks.items()}
        blocks = sum(2 * first[stack] + steps[stack] for stack in stacks)
        # With three swapped blocks, two are on the device at a time, as in the whole model.
        more = {stack: min(steps[stack], max(count - 3, 0) // times) for stack, count in waiting.items()}
        swapped = {stack: count - times * more[stack] for stack, count in waiting.items()}
        if any(steps.values()) and blocks < fewest and all(swapped[stack] <= first[stack] for stack in stacks):
            second = {stack: first[stack] + steps[stack] for stack in stacks}
            counts = sum(swapped.values()), sum(swapped.values()) + sum(more.values())
            best, fewest = Depths(first, second, times, counts), blocks
    return best


def stacks_of(recipe: Recipe) -> Counts:
    """Return the stacks of blocks of the model that is trained, of models that teach it, and of the image model that receives a
    writer's prompts. A model without a folder of configurations is built whole."""
    renderer = recipe.renderer
    parts: list[Path] = []
    others = [recipe.policy.model.model_copy(update={"path": path}) for path in teachers(recipe, "model").values()]
    for model in (recipe.policy.model, None if renderer is None else renderer.image_model, *others):
        folder = model.find_weights()[0] if isinstance(model, DiffusersModel | PretrainedLanguageModel) else None
        if folder is None:
            continue
        parts.append(folder / "transformer" if isinstance(model, DiffusersModel) else folder)
        if renderer is not None and renderer.responses_at_once is not None and isinstance(model, DiffusersModel):
            parts.append(folder / "text_encoder")  # shares its weights with the writer if they are the same model
    found: dict[tuple[str, str], int] = {}
    for part in parts:
        if not (part / "config.json").is_file():
            continue
        config = read_json(part / "config.json")
        config = config.get("text_config") or config
        dual = config.get(_DUAL) or ()
        if list(dual) == list(range(len(dual))):
            found |= {(str(part), key): config[key] - len(dual) for key in _KEYS if isinstance(config.get(key), int)}
            found |= {(str(part), _DUAL): len(dual)} if dual else {}
    return found


def with_blocks(config: Mapping[str, Any], blocks: Mapping[str, int]) -> dict[str, Any]:
    """Return the configuration of a model with the given number of blocks in each stack."""
    changed = {**config, **{key: count + blocks.get(_DUAL, 0) for key, count in blocks.items() if key != _DUAL}}
    return {**changed, _DUAL: list(range(blocks[_DUAL]))} if _DUAL in blocks else changed


# Extrapolation


def extrapolated(first: Mapping[str, Stage], second: Mapping[str, Stage], times: int) -> dict[str, Stage]:
    """Extrapolate the stages of the whole model from the stages of two depths."""
    return {
        name: Stage(
            extrapolated_work(stage.work, second[name].work, times), _extrapolate_peaks(stage.most, second[name].most, times)
        )
        for name, stage in first.items()
    }


def extrapolated_work(first: Work, second: Work, times: int) -> Work:
    """Extrapolate the work of the whole model from the work of two depths."""
    made = first.copy()
    made.add(second.since(first), times)
    return made


def _extrapolate_peaks(first: Peaks, second: Peaks, times: int) -> Peaks:
    """Extrapolate the peak of each kind of allocation, and return the largest on each device. Allocations whose size depends on the
    depth, such as a buffer for all gradients, are paired in the order of their size, if an operation has the same number of them at
    both depths."""
    both = first.keys() & second.keys()
    pairs = [(each, each) for each in both]
    ones, others = (_by_operation(each.keys() - both) for each in (first, second))
    for operation, keys in ones.items():
        if len(keys) == len(others.get(operation, ())):
            pairs += zip(keys, others[operation], strict=True)
    found: dict[int, tuple[Event, int, Counter[str]]] = {}
    for one, other in pairs:
        (where, event), (size, held), (more, held_then) = one, first[one], second[other]
        total = size + (more - size) * times
        if where not in found or total > found[where][1]:
            labels = held.keys() | held_then.keys()
            found[where] = event, total, Counter({each: held[each] + (held_then[each] - held[each]) * times for each in labels})
    return {(where, event): (total, held) for where, (event, total, held) in found.items()}


def _by_operation(keys: Iterable[tuple[int, Event]]) -> dict[Any, list[tuple[int, Event]]]:
    """Group allocations by device, operation and pass (forward or backward), in the order of their size."""
    found: dict[Any, list[tuple[int, Event]]] = {}
    for where, event in sorted(keys, key=lambda key: key[1][1]):
        operation, _, backward = event
        found.setdefault((where, operation, backward), []).append((where, event))
    return found


# Tokenizers


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


def _tokenizer(
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


SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
_PROCESSOR = {
    "do_resize": True,
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


class UnknownConfiguration(ValueError):
    """The configuration of a model is not known, so a dry run of the recipe is impossible."""


def without_live(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with a folder of configurations in place of each loaded pipeline."""

    def described(model: Any, name: str) -> Any:
        if not isinstance(model, DiffusersModel) or not model.path.startswith(LIVE):
            return model
        pipe = live_object(model.path, key=name)
        configs: dict[str, dict[str, Any]] = {}
        for part, module in pipe.components.items():
            if isinstance(module, nn.Module):
                config: Any = module.config
                plain = config.to_dict() if hasattr(config, "to_dict") else dict(config)
                configs[part] = {"class": type(module).__name__, "config": plain}
        target = write_folder(folder / name, configs)
        if isinstance(model, DiffusersPipeline):
            if not hasattr(diffusers, type(pipe).__name__):
                raise UnknownConfiguration(f"{name}: a dry run does not know how to build {type(pipe).__name__}")
            pipe.to_json_file(target / "model_index.json")
            for part, other in pipe.components.items():
                if isinstance(other, nn.Module):
                    save_file({}, target / part / "model.safetensors")
                elif other is not None:
                    other.save_pretrained(target / part)
        return model.model_copy(update={"path": str(target)})

    return _with_models(recipe, described)


def _with_models(recipe: Recipe, change: Callable[[Any, str], Any]) -> Recipe:
    """Return the recipe with ``change(model, key)`` in place of each model that has a key."""
    policy, renderer = recipe.policy, recipe.renderer
    changed: dict[str, Any] = {"policy": policy.model_copy(update={"model": change(policy.model, "policy.model")})}
    if renderer is not None and renderer.image_model is not None:
        changed["renderer"] = renderer.model_copy(update={"model": change(renderer.image_model, "renderer.model")})
    teacher = policy.model.model_copy  # another path of the same section
    paths = {path: change(teacher(update={"path": path}), "objective").path for path in teachers(recipe, "model").values()}
    if paths:
        changed["objective"] = _renamed(recipe.objective, paths)
        changed["phases"] = recipe.phases and [_renamed(phase, paths) for phase in recipe.phases]
    return recipe.model_copy(update=changed)


def _renamed(value: Any, paths: Mapping[str, str]) -> Any:
    """A section, or a value in one, with other paths."""
    if isinstance(value, Section):
        return type(value).model_validate(_renamed(value.model_dump(), paths))
    if isinstance(value, dict):
        return {key: _renamed(each, paths) for key, each in value.items()}
    return paths.get(value, value) if isinstance(value, str) else value


def build_meta(part: Mapping[str, Any]) -> nn.Module:
    """Build the part on the meta device, without storage. Raises ValueError for a class of neither diffusers nor transformers."""
    return _build(json.dumps(part, sort_keys=True))


def parameter_count(part: Mapping[str, Any]) -> int:
    """Number of parameters of a part; shared parameters count once."""
    return sum(weight.numel() for weight in build_meta(part).parameters())


def stored_count(part: Mapping[str, Any]) -> int:
    """Number of values in a part's checkpoint: parameters and persistent buffers (such as SD3's position table)."""
    module = build_meta(part)
    saved = module.state_dict()
    return parameter_count(part) + sum(tensor.numel() for name, tensor in module.named_buffers() if name in saved)


@cache
def _build(part: str) -> nn.Module:
    described = json.loads(part)
    config = described["config"]
    name = described["class"]
    found: Any = getattr(diffusers, name, None) or getattr(transformers, name, None)
    bases = getattr(found, "__mro__", ())
    with torch.device("meta"):
        if diffusers.ModelMixin in bases:
            made: nn.Module = found.from_config(config)  # it ignores keys of other versions, as from_pretrained does
        elif transformers.PreTrainedModel in bases:
            made = found(found.config_class(**config))
        else:
            raise ValueError(f"the size of class {name!r} is not known: it is neither a diffusers nor a transformers model")
    return made


def vision_part(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class and configuration of the part of a described encoder that is loaded: the vision tower of a two-tower model
    (CLIP, SigLIP), else the whole model."""
    if described["class"] not in _VISION_TOWERS:
        return dict(described)
    config = described["config"]
    projection = {"projection_dim": config["projection_dim"]} if "projection_dim" in config else {}
    return {"class": _VISION_TOWERS[described["class"]], "config": {**config["vision_config"], **projection}}


def without_paths(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with folders of configurations instead of paths of weights that are not on this machine. Raises
    UnknownConfiguration if the configuration of a model is not known."""
    train, encoder = recipe.policy.train, getattr(recipe.policy.train, "encoder", None)
    if encoder is not None and find_encoder(encoder) is None:
        described = packaged_config("encoders", encoder)
        if described is None:
            message = f"policy.train.encoder: the configuration of {encoder} is not known; download its configuration files"
            raise UnknownConfiguration(message)
        target = write_single(folder / "encoder" / Path(encoder).name, vision_part(described))
        train = train.model_copy(update={"encoder": str(target), "init_from": None})
    elif hasattr(train, "init_from"):
        train = train.model_copy(update={"init_from": None})
    # The fake accelerator replaces attention and compiles nothing: the speed of compiled blocks is modelled instead.
    policy = recipe.policy.for_inference().model_copy(update={"train": train})
    changed = recipe.model_copy(update={"policy": policy})
    return _with_models(changed, lambda model, key: _described(model, folder, key))


def _described(model: Any, folder: Path, key: str) -> Any:
    if not isinstance(model, DiffusersModel | PretrainedLanguageModel):
        return model
    if isinstance(model, DiffusersModel):
        model = model.model_copy(update={"weights": None, "loras": {}})  # other weights, of the same shapes
    with suppress(ValueError):  # the path may be the folder of a run that does not exist yet
        if model.find_weights()[0] is not None:
            return model
    if isinstance(model, DiffusersPipeline):
        # The configurations and tokenizers of a Hub id, some MB, with an empty file of weights next to each
        try:
            found = snapshot(model.path, ("*.json", "*.txt", "*.model", "*.jinja"), ignore_patterns=["*.index.json"])
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            message = f"{key}.path: the configuration files of {model.path} could not be downloaded: {reason}"
            raise UnknownConfiguration(message) from error
        shutil.copytree(found, folder / key)
        for config in (folder / key).glob("*/config.json"):
            save_file({}, config.with_name("model.safetensors"))
        return model.model_copy(update={"path": str(folder / key)})
    described = model.published() if isinstance(model, DiffusersModel) else model.describe(None)
    if described is None:
        message = f"{key}.path: the configuration of {model.source} is not known; download its configuration files"
        raise UnknownConfiguration(message)
    target = folder / key / Path(model.path).name
    if isinstance(model, DiffusersModel):
        write_folder(target, described)
        return model.model_copy(update={"path": str(target)})
    write_single(target, described["writer"])
    if not isinstance(model, Emu3Model):
        return model.model_copy(update={"path": str(target)})
    autoencoder = write_single(folder / "autoencoder", described["autoencoder"])
    visual = {f"<|visual token {code:06d}|>": 151854 + code for code in range(_VISUAL_TOKENS)}
    _tokenizer(EMU3, size=151643, pad="<|endoftext|>", end=None, more=visual).save_pretrained(folder / "tokenizer")
    paths = {"path": target, "tokenizer": folder / "tokenizer", "autoencoder": autoencoder}
    return model.model_copy(update={name: str(path) for name, path in paths.items()})


def write_folder(folder: Path, described: PartConfigs) -> Path:
    """Write a folder in the layout of a diffusers pipeline, with the configurations of these parts and without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "DiffusionPipeline"}), encoding="utf-8")
    for name, part in {**described, "scheduler": {"config": SCHEDULER}}.items():
        (folder / name).mkdir(exist_ok=True)
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        (folder / name / file).write_text(json.dumps(_with_class(part)), encoding="utf-8")
    if "transformer" in described:
        save_file({}, folder / "transformer" / "model.safetensors")
    (folder / "processor").mkdir(exist_ok=True)
    (folder / "processor" / "preprocessor_config.json").write_text(json.dumps(_processor(described)), encoding="utf-8")
    return folder


def write_single(folder: Path, part: Mapping[str, Any]) -> Path:
    """Write a folder in transformers' layout, with the configuration of one model and an empty file of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_with_class(part)), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(_processor({"writer": part})), encoding="utf-8")
    return folder


def _with_class(part: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(part["config"])
    name = part.get("class")
    found: Any = getattr(transformers, name, None) if name else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        configuration: Any = found.config_class  # type: ignore[attr-defined]
        return {"model_type": configuration.model_type, **config, "architectures": [name]}
    return config if name is None else {**config, "_class_name": name}


def _processor(described: PartConfigs) -> dict[str, Any]:
    """Return the configuration of the image processor, with the patch or image size of the vision model that reads its images."""
    encoders = [part["config"]["image_size"] for part in described.values() if isinstance(part["config"].get("image_size"), int)]
    if encoders:
        square = {"height": encoders[0], "width": encoders[0]}
        return {"do_resize": True, "size": square, "do_center_crop": True, "crop_size": square}
    towers = [part["config"]["vision_config"] for part in described.values() if "vision_config" in part["config"]]
    vision = towers[0] if towers else {}
    found = {name: vision[name] for name in ("patch_size", "temporal_patch_size") if name in vision}
    merge = {"merge_size": vision["spatial_merge_size"]} if "spatial_merge_size" in vision else {}
    return {**_PROCESSOR, **found, **merge}


@contextmanager
def without_weights(
    device: torch.device, *, on_module: Callable[[str, nn.Module], None], blocks: Counts = MappingProxyType({})
) -> Iterator[None]:
    """Inside the context, ``from_pretrained`` builds models from their configurations, with fake weights on ``device``, which may
    be the host.

    ``blocks``: the number of blocks of the stacks that are not built whole. ``on_module``: called with the folder's name and the
    module of each model that is built or moved.
    """
    loaded: dict[nn.Module, str] = {}

    def blocks_of(folder: Any) -> dict[str, int]:
        return {key: count for (part, key), count in blocks.items() if part == str(folder)}

    def diffusers_model(cls: Any, folder: Any, **options: Any) -> nn.Module:
        dtype = options.get("torch_dtype") or torch.float32
        with fake_parameters(device, dtype):
            module = cls.from_config(with_blocks(cls.load_config(folder), blocks_of(folder)))
        return finished(module, folder, dtype, fp32=getattr(cls, "_keep_in_fp32_modules", None))

    def transformers_model(cls: Any, folder: Any, **options: Any) -> nn.Module:
        config = options.get("config") or cls.config_class.from_pretrained(folder)
        text = config.get_text_config()
        for key, count in blocks_of(folder).items():
            setattr(text, key, count)
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:count]
        if options.get("attn_implementation"):
            config._attn_implementation = options["attn_implementation"]
        dtype = options.get("dtype") or torch.float32
        with fake_parameters(device, dtype):
            module = cls(config)
        return finished(module, folder, dtype, fp32=getattr(cls, "_keep_in_fp32_modules_strict", None))

    def finished(module: nn.Module, folder: Any, dtype: torch.dtype, *, fp32: Sequence[str] | None = None) -> nn.Module:
        """Finish a module. Buffers that a checkpoint stores get the dtype of the weights; other buffers keep their dtype. ``fp32``:
        the layers that the model's class keeps in fp32 when it is loaded in bfloat16."""
        for name, parameter in module.named_parameters() if fp32 else ():
            if set(name.split(".")) & set(fp32 or ()):
                parameter.data = parameter.data.float()
        stored = module.state_dict().keys()
        for name, buffer in module.named_buffers():
            if name in stored and buffer.dtype.is_floating_point:
                buffer.data = buffer.data.to(dtype)
        loaded[module] = Path(folder).name
        on_module(loaded[module], module)
        return module.eval()

    def autoencoder(folder: Path) -> nn.Module:
        with fake_parameters(device, torch.float32):
            module = Emu3VQVAE(Emu3VQVAE.config_class.from_pretrained(folder))
        return finished(module, Path(folder), torch.float32)

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Like ``nn.Module.to``, which cannot move the data of a fake tensor to another device."""
        target = torch._C._nn._parse_to(*args, **kwargs)[0]
        shared: dict[int, Any] = {}  # shared weights stay shared
        for each in module.modules() if target is not None else ():
            for table in (each._parameters, each._buffers):
                for name, tensor in table.items():
                    if isinstance(tensor, FakeTensor) and tensor.device != target:
                        if id(tensor) not in shared:
                            data = _empty(tensor.shape, tensor.dtype, target)
                            shared[id(tensor)] = nn.Parameter(data, tensor.requires_grad) if table is each._parameters else data
                        table[name] = shared[id(tensor)]
        for each in module.modules() if shared else ():
            if each in loaded:
                on_module(loaded[each], each)
        moved: nn.Module = _TO(module, *args, **kwargs)
        return moved

    def tokenizer(cls: Any, folder: Any, **options: Any) -> Any:
        if any((Path(folder) / name).is_file() for name in ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")):
            return _TOKENIZER(cls, folder, **options)
        # About one token per word, split with the pattern of Qwen's tokenizer, so that the official templates have their official
        # lengths; the special tokens have their real ids.
        kind = cls.__name__
        if "CLIP" in kind:
            return _tokenizer(_CLIP, size=49408, pad="<|endoftext|>", end="<|endoftext|>", start="<|startoftext|>", most=77)
        if "T5" in kind:
            return _tokenizer(_T5, size=32100, pad="<pad>", end="</s>")
        if "Qwen" in kind:
            return _tokenizer(QWEN, size=151657, pad="<|endoftext|>", end=None)
        raise ValueError(f"{folder}: a dry run has no tokenizer in place of {kind}; download the model's tokenizer files")

    with ExitStack() as stack:
        replacements: tuple[tuple[type, Any], ...] = (
            (diffusers.ModelMixin, diffusers_model),
            (transformers.PreTrainedModel, transformers_model),
            (transformers.PreTrainedTokenizerBase, tokenizer),
        )
        for target, replacement in replacements:
            stack.enter_context(patch.object(target, "from_pretrained", classmethod(replacement)))
        stack.enter_context(patch.object(transformers.PreTrainedModel, "initialize_weights", lambda *_, **__: None))
        stack.enter_context(patch.object(EmbeddingStore, "of_user", classmethod(lambda cls: _InMemory())))
        stack.enter_context(patch("retouch.models.offloading.describe", lambda text: None))
        stack.enter_context(patch.object(emu3, "load_autoencoder", autoencoder))
        stack.enter_context(patch.object(nn.Module, "to", to))
        stack.enter_context(patch.object(quantized, "quantized_layer", QuantizedLinear))
        yield


class _InMemory(EmbeddingStore):
    """Keeps the prompt embeddings of a dry run in memory: tensors without data must not be stored on disk."""

    def __init__(self) -> None:
        super().__init__(Path(), limit=0)
        self._kept: dict[str, dict[str, Tensor]] = {}

    def read(self, key: str) -> dict[str, Tensor] | None:
        return self._kept.get(key)

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        self._kept[key] = dict(tensors)


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor on ``device``; on the host of a dry run, one without data."""
    if device.type == "cpu" and is_dry_run():
        return FakeTensor(torch.empty(shape, dtype=dtype, device=META), CPU)
    return torch.empty(shape, dtype=dtype, device=device)


class QuantizedLinear(nn.Linear):
    """The fake of a layer of ``retouch.models.quantized.quantized_layer``: codes and scales, and the same weights for one product.

    The scales are those of torchao's int8, with zero points, and of bitsandbytes' NF4, which are quantised twice.
    """

    scales: nn.Parameter

    def __init__(self, layer: nn.Linear, bits: Bits, *, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bits = layer.in_features, layer.out_features, bits
        count = layer.weight.numel()
        halves, scales = (2, count // 64 + count // 4096 + 2048) if bits == "4bit" else (1, 5 * len(layer.weight))
        for name, shape in {"weight": (count // halves,) if halves == 2 else layer.weight.shape, "scales": (scales,)}.items():
            codes = _empty(torch.Size(shape), torch.uint8, device)
            self.register_parameter(name, nn.Parameter(codes, requires_grad=False))
        self.bias = layer.bias
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        if self.bits == "4bit":
            made: Tensor = _DequantizedProduct.apply(x, self.weight, self.bias, self.out_features)  # type: ignore[no-untyped-call]
            return made
        # torchao's product keeps the 16-bit weights for the backward pass.
        product = torch.mm(x.reshape(-1, self.in_features), self.weight.t().to(x.dtype))
        scaled = (product * self.scales[: 4 * self.out_features].view(torch.float32).to(x.dtype)).reshape(*x.shape[:-1], -1)
        return scaled if self.bias is None else scaled.add_(self.bias)


class _DequantizedProduct(torch.autograd.Function):
    """A product with 4-bit weights, which are dequantised again in the backward pass (``MatMul4Bit`` of bitsandbytes)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        ctx.codes, ctx.rows = codes, rows
        return nn.functional.linear(x, _dequantized(codes, rows, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient @ _dequantized(ctx.codes, ctx.rows, gradient.dtype), None, None, None


def _dequantized(codes: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    return codes.expand(2, -1).to(dtype, memory_format=torch.contiguous_format).view(rows, -1)


_INITIALISERS = (
    *("uniform_", "normal_", "trunc_normal_", "constant_", "ones_", "zeros_", "eye_", "orthogonal_"),
    *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
)
_TOKENIZER = transformers.PreTrainedTokenizerBase.from_pretrained.__func__
_TO = nn.Module.to


@contextmanager
def fake_parameters(device: torch.device, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inside the context, parameters of new modules are fake, on ``device`` and in ``dtype`` (None: their own dtype); buffers are
    real and on the host."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not isinstance(parameter, FakeTensor):
            kind = dtype if dtype is not None and parameter.dtype.is_floating_point else parameter.dtype
            data = _empty(parameter.shape, kind, device)
            parameter = nn.Parameter(data, requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "register_parameter", registered))
        for name in _INITIALISERS:
            stack.enter_context(patch.object(nn.init, name, lambda tensor, *_, **__: tensor))
        yield
