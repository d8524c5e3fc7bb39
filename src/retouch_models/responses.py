"""Renders responses: a frozen editor is conditioned on the hidden states of the whole dialogue, and makes the edited image.

The encoder reads every row, usable or not, in ceil(rows / encoder_batch) calls. So ranks with equally many rows call the encoder
equally often, which is necessary if its weights are sharded. The number of calls of the image model depends on the rows; every rank
has all weights of the image model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from retouch.config.section import Count
from retouch.models.base import LanguageModel
from retouch.models.kinds import IMAGE_MODELS
from retouch.renderers.base import (
    HasCompletions,
    IgnoreCompletionsRenderer,
    ImageModelRenderer,
    OdeSampler,
    WeightContext,
    bucket,
    no_gradient,
    noise_generators,
    sort_by_length,
    unique_objects,
)

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from PIL.Image import Image
    from torch import Tensor

    from retouch.protocols import AutoregressiveModel, DenoisingModel, Renderer
    from retouch.types import Task
    from retouch_models.qwen_image.model import QwenFlow
    from retouch_models.qwen_image.responses import QwenContext, QwenResponses
    from retouch_models.qwen_vl import QwenWriter


class ResponseRenderer(ImageModelRenderer):
    """An editor that is conditioned on the hidden states of one dialogue: the task and the policy's response."""

    kind: Literal["response"] = "response"
    encoder: Literal["policy", "frozen"]
    """The encoder of the dialogue: the policy's current weights, or the editor's own text encoder, which is frozen."""
    encoder_batch: Count = 8
    """Number of responses that are encoded at once."""

    keeps_first_reference: ClassVar[bool] = True
    loads_on_cpu: ClassVar[bool] = True

    @property
    def policy_encodes(self) -> bool:  # type: ignore[override]
        return self.encoder == "policy"

    @property
    def responses_at_once(self) -> int:  # type: ignore[override]
        return self.encoder_batch

    @property
    def weight_copies(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"reference"} if self.policy_encodes and self.guided else ())

    def problems(self, writer: LanguageModel) -> Iterator[str]:
        if self.model.takes is None or not self.model.takes.responses:
            takes = {kind: getattr(IMAGE_MODELS.load(kind), "takes", None) for kind in IMAGE_MODELS}
            editors = ", ".join(kind for kind, inputs in takes.items() if inputs is not None and inputs.responses)
            yield f"renderer.model.kind: {self.model.kind} reads no responses; use one of {editors}, or kind prompt"
        yield from writer.editor_problems()

    def load_writer(self, build_writer: Callable[[], AutoregressiveModel]) -> AutoregressiveModel:
        return self._load_on_cpu(build_writer)[0]

    def _load_on_cpu(self, build_writer: Callable[[], AutoregressiveModel]) -> tuple[QwenWriter, QwenFlow]:
        """Return the policy's model with the editor's prompts, and the editor on the CPU."""
        import torch

        from retouch_models.qwen_image.responses import with_prompts_of

        # The recipe's checks ensure both types.
        editor = cast("QwenFlow", self.model.build(device=torch.device("cpu")))
        return with_prompts_of(editor, cast("QwenWriter", build_writer())), editor

    def load(
        self, build_writer: Callable[[], AutoregressiveModel], *, device: torch.device, base_frozen: bool
    ) -> tuple[AutoregressiveModel, DenoisingModel | AutoregressiveModel]:
        from retouch_models.qwen_image.responses import share_encoder

        writer, editor = self._load_on_cpu(build_writer)
        share_encoder(editor, writer.module, policy_encodes=self.policy_encodes, base_frozen=base_frozen, device=device)
        return writer, editor

    def build(
        self,
        image_model: DenoisingModel | AutoregressiveModel,
        writer: AutoregressiveModel,
        *,
        published: WeightContext | None = None,
        sharded: bool = False,
    ) -> Renderer:
        from retouch.models.offloading import parts_of
        from retouch_models.qwen_image.responses import QwenResponses, encoder_for

        frozen = not self.policy_encodes
        editor = cast("QwenFlow", image_model)  # the recipe is checked for it
        encoder = encoder_for(editor, writer.module, frozen=frozen, guided=self.guided, published=published)
        sampler = ResponseSampler(QwenResponses(editor, encoder), self, sharded=sharded and writer.module in parts_of(image_model))
        return IgnoreCompletionsRenderer(sampler) if self.ignore_completions else sampler


class ResponseSampler:
    """Samples the edited image for each row's task and response (implements ``retouch.protocols.Renderer``).

    ``sharded``: the encoder's weights are sharded over ranks, so the negative branch is encoded together with the responses and not
    cached; otherwise the negative states of the last ``cached`` tasks are cached. The image of a response that cannot be encoded,
    or whose image is not finite, is None, the policy's own fault. An empty response is valid: the editor reads only the
    instruction.
    """

    def __init__(self, editor: QwenResponses, config: ResponseRenderer, *, sharded: bool = False, cached: int = 64) -> None:
        if cached < 1:
            raise ValueError(f"cached {cached}: give at least 1")
        self.editor = editor
        self.config = config
        editor.model.module.requires_grad_(False)
        self.sampler = OdeSampler(editor.model, num_steps=config.num_steps, guidance_scale=config.guidance_scale)
        self.sharded = sharded
        self._negatives = _NegativeStates(lambda task: editor.encode_negative([task])[0], size=cached)

    @no_gradient()
    def __call__(self, tasks: Sequence[Task], trajectory: HasCompletions) -> list[Image | None]:
        config, completions = self.config, trajectory.outputs
        generators = noise_generators(completions, shared=config.shared_noise)
        distinct, index = unique_objects(tasks)
        prepared = [self.editor.prepare(task) for task in distinct]
        contexts = [prepared[number] for number in index]
        usable = [
            not (completion.truncated and config.cut_off == "fault") and self.editor.accepts(context, completion.ids)
            for completion, context in zip(completions, contexts, strict=True)
        ]
        responses = [completion.ids if used else () for completion, used in zip(completions, usable, strict=True)]
        states, negatives = self._encode(tasks, contexts, responses)
        images: list[Image | None] = [None] * len(completions)
        rows = [row for row, used in enumerate(usable) if used]
        for batch in bucket(rows, size=lambda row: contexts[row].size, length=lambda row: len(states[row]), batch=config.batch):
            batched = [contexts[row] for row in batch]
            conditioning = self.editor.condition(batched, [states[row] for row in batch])
            if self.sampler.guided:
                negative = self.editor.condition(batched, [negatives[row] for row in batch])
                conditioning = replace(conditioning, negative=negative)
            for row, image in zip(batch, self.sampler(conditioning, [generators[row] for row in batch]), strict=True):
                images[row] = image
        return images

    def _encode(
        self, tasks: Sequence[Task], contexts: Sequence[QwenContext], responses: Sequence[Sequence[int]]
    ) -> tuple[dict[int, Float[Tensor, "_ d"]], dict[int, Float[Tensor, "_ d"]]]:
        """Return the states of each row and, with guidance, the states of its negative branch."""
        states: dict[int, Float[Tensor, "_ d"]] = {}
        negatives: dict[int, Float[Tensor, "_ d"]] = {}
        length = [context.length + len(response) for context, response in zip(contexts, responses, strict=True)]
        for batch in sort_by_length(range(len(tasks)), length=length.__getitem__, batch=self.config.encoder_batch):
            encoded = self.editor.encode([contexts[row] for row in batch], [responses[row] for row in batch])
            states.update(zip(batch, encoded, strict=True))
            if self.sampler.guided and self.sharded:
                distinct, index = unique_objects([tasks[row] for row in batch])
                encoded = self.editor.encode_negative(distinct)
                negatives.update((row, encoded[number]) for row, number in zip(batch, index, strict=True))
        if self.sampler.guided and not self.sharded:
            negatives = {row: self._negatives(task) for row, task in enumerate(tasks)}
        return states, negatives


class _NegativeStates:
    """A cache of the results of ``encode`` for the ``size`` sets of source images that were used last.

    Each task is encoded alone, so the bits do not depend on the contents of the cache.
    """

    def __init__(self, encode: Callable[[Task], Float[Tensor, "_ d"]], *, size: int) -> None:
        self._encode = encode
        self._size = size
        self._cache: OrderedDict[bytes, Float[Tensor, "_ d"]] = OrderedDict()

    def __call__(self, task: Task) -> Float[Tensor, "_ d"]:
        digest = sha256()
        for image in task.images:
            digest.update(repr((image.mode, image.size)).encode())
            digest.update(image.tobytes())
        key = digest.digest()
        if key not in self._cache:
            self._cache[key] = self._encode(task)
        self._cache.move_to_end(key)
        states = self._cache[key]
        while len(self._cache) > self._size:
            self._cache.popitem(last=False)
        return states
