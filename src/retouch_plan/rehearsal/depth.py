"""Rehearsals with few blocks of a model. Two rehearsals with different depths give the numbers of the whole model.

Work, kernels, waits, and the memory at one kind of allocation are affine in the number of equal blocks. The peak of a stage is the
largest over all kinds of allocations, each of which is extrapolated separately. The denoiser and the writer are reduced; other
parts, such as text encoders, are rehearsed whole.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from retouch.models.base import DiffusersModel
from retouch.models.language import PretrainedLanguageModel
from retouch.recipe.recipe import Recipe
from retouch.records.files import read_json
from retouch_plan.rehearsal.counting.stages import Event, Peaks, Stage, Work

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
    """Two depths: numbers of blocks for each stack. The whole model has ``first + times * (second - first)`` blocks."""

    first: Counts
    second: Counts
    times: int


def choose_depths(stacks: Counts) -> Depths | None:
    """Return the two depths with the fewest blocks in total; None if no two depths have fewer blocks than the whole model.

    From the first depth to the whole model, all stacks grow in proportion, so that two rehearsals are enough.
    """
    best, fewest = None, sum(stacks.values())
    for times in range(1, max(stacks.values(), default=0)):
        steps = {stack: max(count - FEWEST, 0) // times for stack, count in stacks.items()}
        first = {stack: count - times * steps[stack] for stack, count in stacks.items()}
        blocks = sum(2 * first[stack] + steps[stack] for stack in stacks)
        if any(steps.values()) and blocks < fewest:
            second = {stack: first[stack] + steps[stack] for stack in stacks}
            best, fewest = Depths(first, second, times), blocks
    return best


def stacks_of(recipe: Recipe) -> Counts:
    """Return the stacks of blocks of the model that is trained, and of the image model that receives a writer's prompts.

    A model without a folder of configurations is rehearsed whole.
    """
    found: dict[tuple[str, str], int] = {}
    for part in _parts(recipe):
        file = part / "config.json"
        if file.is_file():
            config = read_json(file)
            found |= {(str(part), key): count for key, count in _stacks(config.get("text_config") or config)}
    return found


def _parts(recipe: Recipe) -> Iterator[Path]:
    renderer = recipe.renderer
    for model in (recipe.policy.model, None if renderer is None else renderer.image_model):
        folder = model.find_weights()[0] if isinstance(model, DiffusersModel | PretrainedLanguageModel) else None
        if folder is None:
            continue
        yield folder / "transformer" if isinstance(model, DiffusersModel) else folder
        if renderer is not None and renderer.responses_at_once is not None and isinstance(model, DiffusersModel):
            yield folder / "text_encoder"  # shares its weights with the writer if they are the same model


def _stacks(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    dual = config.get(_DUAL) or ()
    if list(dual) != list(range(len(dual))):
        return
    for key in _KEYS:
        if isinstance(config.get(key), int):
            yield key, config[key] - len(dual)
    if dual:
        yield _DUAL, len(dual)


def with_blocks(config: Mapping[str, Any], blocks: Mapping[str, int]) -> dict[str, Any]:
    """Return the configuration of a model with the given number of blocks in each stack."""
    changed = {**config, **{key: count + blocks.get(_DUAL, 0) for key, count in blocks.items() if key != _DUAL}}
    return {**changed, _DUAL: list(range(blocks[_DUAL]))} if _DUAL in blocks else changed


def reduce_layers(config: Any, blocks: Mapping[str, int]) -> None:
    """Reduce a configuration of transformers to the given numbers of layers, in place."""
    text = config.get_text_config()
    for key, count in blocks.items():
        setattr(text, key, count)
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:count]


# Extrapolation


def extrapolated(first: Mapping[str, Stage], second: Mapping[str, Stage], times: int) -> dict[str, Stage]:
    """Extrapolate the stages of the whole model from the stages of two depths."""
    return {
        name: Stage(extrapolated_work(stage.work, second[name].work, times), _peaks(stage.most, second[name].most, times))
        for name, stage in first.items()
    }


def extrapolated_work(first: Work, second: Work, times: int) -> Work:
    """Extrapolate the work of the whole model from the work of two depths."""
    made = first.copy()
    made.add(second.since(first), times)
    return made


def _peaks(first: Peaks, second: Peaks, times: int) -> Peaks:
    """Extrapolate the peak of each kind of allocation, and return the largest on each device."""
    found: dict[int, tuple[Event, int, Counter[str]]] = {}
    for one, other in _pairs(first, second):
        (where, event), (size, held), (more, held_then) = one, first[one], second[other]
        total = size + (more - size) * times
        if where not in found or total > found[where][1]:
            labels = held.keys() | held_then.keys()
            found[where] = event, total, Counter({each: held[each] + (held_then[each] - held[each]) * times for each in labels})
    return {(where, event): (total, held) for where, (event, total, held) in found.items()}


def _pairs(first: Peaks, second: Peaks) -> Iterator[tuple[tuple[int, Event], tuple[int, Event]]]:
    """Yield pairs of the same kind of allocation at both depths.

    Allocations whose size depends on the depth, such as a buffer for all gradients, are paired in the order of their size, if an
    operation has the same number of them at both depths.
    """
    both = first.keys() & second.keys()
    yield from ((each, each) for each in both)
    ones, others = (_by_operation(each.keys() - both) for each in (first, second))
    for operation, keys in ones.items():
        if len(keys) == len(others.get(operation, ())):
            yield from zip(keys, others[operation], strict=True)


def _by_operation(keys: Iterable[tuple[int, Event]]) -> dict[Any, list[tuple[int, Event]]]:
    """Group allocations by device, operation and pass (forward or backward), in the order of their size."""
    found: dict[Any, list[tuple[int, Event]]] = {}
    for where, event in sorted(keys, key=lambda key: key[1][1]):
        operation, _, backward = event
        found.setdefault((where, operation, backward), []).append((where, event))
    return found
