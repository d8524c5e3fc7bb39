"""From what a writer answered to an edited picture: the states of the whole dialogue condition a frozen editor (system A).

The encoder reads every row, usable or not, in ceil(rows / encoder_rows) calls: ranks with equally many rows call it equally often,
as they must where its weights are sharded. How often the image model is called depends on the rows; it is whole on each rank.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.protocols import DenoisingModel
from retouch.renderers.sampling import Completed, CutOff, OdeSampler, batches, by_length, noise, once
from retouch.types import Conditioning, Task

States: TypeAlias = Float[Tensor, "_ d"]


@runtime_checkable
class Question(Protocol):
    """A task, ready for a response. ``size``: those of one size can be drawn together. ``length``: tokens before a response."""

    @property
    def size(self) -> Hashable: ...

    @property
    def length(self) -> int: ...


@runtime_checkable
class ResponseEditor(Protocol):
    """A frozen editor that is told a task and a response to it, through an encoder that is not its own."""

    model: DenoisingModel

    def prepare(self, task: Task) -> Any:
        """A ``Question``, which only this editor looks into."""
        ...

    def takes(self, question: Any, response: Sequence[int]) -> bool:
        """Whether the response can be read."""
        ...

    def read(self, questions: Sequence[Any], responses: Sequence[Sequence[int]]) -> list[States]:
        """The states of each row, by one call of the encoder in eval mode, without gradient. Sizes may differ."""
        ...

    def read_negative(self, tasks: Sequence[Task]) -> list[States]:
        """The same for the negative branch, under weights that do not train; it may depend on the pictures alone."""
        ...

    def condition(self, questions: Sequence[Any], states: Sequence[States]) -> Conditioning:
        """A conditioning of rows of one size."""
        ...


class ResponseRenderer:
    """Draws each row's task, edited as its response says (implements ``retouch.protocols.Renderer``).

    ``encoder_rows`` and ``rows``: most rows in one call of the encoder and of the image model. ``cut_off``: a response that
    reached the longest length is drawn as it is, or is the policy's own fault. ``shared_noise``: the samples of a group start
    alike, so that their pictures differ by what was written alone. ``sharded``: the encoder's weights are spread over ranks, so
    the negative branch is read in step with the responses and not remembered; else that of the last ``remembered`` tasks is.

    A response that cannot be read, or whose picture is not finite, gives None; an empty one is the instruction alone, and legal.
    """

    def __init__(
        self,
        editor: ResponseEditor,
        *,
        num_steps: int,
        cut_off: CutOff,
        guidance_scale: float = 1.0,
        shared_noise: bool = True,
        encoder_rows: int = 8,
        rows: int = 8,
        sharded: bool = False,
        remembered: int = 64,
    ) -> None:
        if min(encoder_rows, rows, remembered) < 1:
            raise ValueError(f"encoder_rows {encoder_rows}, rows {rows}, remembered {remembered}: give at least 1 of each")
        self.editor = editor
        self.sampler = OdeSampler(editor.model, num_steps=num_steps, guidance_scale=guidance_scale)
        self.cut_off = cut_off
        self.shared_noise = shared_noise
        self.encoder_rows = encoder_rows
        self.rows = rows
        self.sharded = sharded
        self._negatives = Remembered(lambda task: editor.read_negative([task])[0], most=remembered)

    @torch.no_grad()
    def __call__(self, tasks: Sequence[Task], trajectory: Completed) -> list[Image | None]:
        outputs = trajectory.outputs
        generators = noise(outputs, shared=self.shared_noise)
        distinct, index = once(tasks)
        prepared = [self.editor.prepare(task) for task in distinct]
        questions = [prepared[number] for number in index]
        usable = [
            not (output.cut_off and self.cut_off == "fault") and self.editor.takes(question, output.ids)
            for output, question in zip(outputs, questions, strict=True)
        ]
        responses = [output.ids if drawn else () for output, drawn in zip(outputs, usable, strict=True)]
        states, negatives = self._read(tasks, questions, responses)
        images: list[Image | None] = [None] * len(outputs)
        rows = [row for row, drawn in enumerate(usable) if drawn]
        for batch in batches(rows, size=lambda row: questions[row].size, length=lambda row: len(states[row]), at_most=self.rows):
            asked = [questions[row] for row in batch]
            conditioning = self.editor.condition(asked, [states[row] for row in batch])
            if self.sampler.guided:
                negative = self.editor.condition(asked, [negatives[row] for row in batch])
                conditioning = replace(conditioning, negative=negative)
            for row, image in zip(batch, self.sampler(conditioning, [generators[row] for row in batch]), strict=True):
                images[row] = image
        return images

    def _read(
        self, tasks: Sequence[Task], questions: Sequence[Question], responses: Sequence[Sequence[int]]
    ) -> tuple[dict[int, States], dict[int, States]]:
        """Each row's states, and under guidance its negative's."""
        states: dict[int, States] = {}
        negatives: dict[int, States] = {}
        length = [question.length + len(response) for question, response in zip(questions, responses, strict=True)]
        for batch in by_length(range(len(tasks)), length=length.__getitem__, at_most=self.encoder_rows):
            read = self.editor.read([questions[row] for row in batch], [responses[row] for row in batch])
            states.update(zip(batch, read, strict=True))
            if self.sampler.guided and self.sharded:
                distinct, index = once([tasks[row] for row in batch])
                read = self.editor.read_negative(distinct)
                negatives.update((row, read[number]) for row, number in zip(batch, index, strict=True))
        if self.sampler.guided and not self.sharded:
            negatives = {row: self._negatives(task) for row, task in enumerate(tasks)}
        return states, negatives


class Remembered:
    """What ``read`` gave for the pictures of the last ``most`` tasks; each is read alone, so no bit depends on what is known."""

    def __init__(self, read: Callable[[Task], States], *, most: int) -> None:
        self._read = read
        self._most = most
        self._known: OrderedDict[bytes, States] = OrderedDict()

    def __call__(self, task: Task) -> States:
        digest = sha256()
        for image in task.images:
            digest.update(repr((image.mode, image.size)).encode())
            digest.update(image.tobytes())
        key = digest.digest()
        if key not in self._known:
            self._known[key] = self._read(task)
        self._known.move_to_end(key)
        states = self._known[key]
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return states
