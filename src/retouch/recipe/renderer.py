"""Sections of a recipe about the renderer: the frozen way from what a policy wrote to a picture."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from retouch.config.section import Count, Section
from retouch.recipe.policy import Model


class RendererSection(Section):
    """What the renderers of text have in common."""

    model: Model
    """The image model, which does not train."""
    num_steps: Count
    """Denoising steps of a picture; there is no noise on the way."""
    guidance_scale: Annotated[float, Field(ge=1.0)] = 1.0
    """Classifier-free guidance; 1 is none, anything more doubles the forwards."""
    shared_noise: bool = True
    """All samples of a group start from the same noise, so that their pictures differ by what was written alone."""
    cut_off: Literal["draw", "fault"] = "fault"
    """A completion that reached ``rollout.max_new_tokens`` is drawn, or is the policy's own fault: the reward's minimum."""
    batch: Count = 8
    """Pictures drawn at once."""


class ResponseRenderer(RendererSection):
    """An editor that reads the task and the writer's response to it as one dialogue (hidden states to image model)."""

    kind: Literal["response"]
    encoder: Literal["policy", "frozen"]
    """Who reads them for the editor: the policy itself, with what it has learnt, or the editor's own text encoder, which stands
    still."""
    encoder_batch: Count = 8
    """Responses read at once."""
    blind: bool = False
    """A control: draw as if nothing had been written, so that nothing can be learnt from the reward."""


class PromptRenderer(RendererSection):
    """A text-to-image model that draws the prompt that the writer wrote."""

    kind: Literal["prompt"]
    blind: bool = False
    """A control: draw the prompt that was asked for whatever was written, so that nothing can be learnt from the reward."""


class CodesRenderer(Section):
    """The autoencoder of the policy itself, which makes a picture of the codes that it wrote."""

    kind: Literal["codes"]
    batch: Count = 8
    """Pictures decoded at once."""


Renderer: TypeAlias = Annotated[ResponseRenderer | PromptRenderer | CodesRenderer, Field(discriminator="kind")]
