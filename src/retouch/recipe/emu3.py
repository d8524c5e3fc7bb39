"""Sections of a recipe about a policy that writes a picture as tokens."""

from typing import ClassVar, Literal, TypeAlias

from retouch.config.section import Pixels, Section
from retouch.models.base import Dtype, Takes
from retouch.recipe.policy import Attention


class Emu3(Section):
    """Emu3 as an editor (EARL): it reads the source picture as tokens, and writes the edited one as tokens."""

    kind: Literal["emu3"]
    path: str
    """Folder or Hugging Face id of the model, in transformers' layout or in the original one (BAAI's, EARL's checkpoints)."""
    tokenizer: str | None = None
    """Folder or id of the tokenizer; null takes the model's. The original is code and is not run: Emu3-community/Emu3-Gen-hf."""
    autoencoder: str | None = None
    """Folder or id of the autoencoder, which the original layout has apart: BAAI/Emu3-VisionTokenizer."""
    size: Pixels = (256, 256)
    """Height and width of its pictures in pixels."""
    think: bool = False
    """Let text come before the picture ("Let's think step by step")."""
    grammar: bool = True
    """Only pictures of this size are well-formed and can be written; false leaves it to the model, and a malformed picture is the
    policy's own fault: the reward's minimum."""
    dtype: Dtype = "bfloat16"
    """Type of the frozen weights and of the forward pass; log-probabilities are fp32 in any case, and codes chosen in fp32."""
    attention: Attention = "sdpa"
    """How attention is computed; ``flash_attention_2`` needs the flash-attn package and a GPU."""

    takes: ClassVar[Takes] = Takes(images=(1, 1))


class PlaygroundEmu3(Section):
    """The built-in tiny Emu3, which edits the playground's pictures."""

    kind: Literal["playground-emu3"]
    start: Literal["s", "sc", "sc-unfinished"] = "sc"
    """Which of those that ship with the package: taught single edits (s), or also some of two and three (sc), the latter then by
    demonstrations that mostly leave one out (sc-unfinished)."""
    path: str | None = None
    """Folder of other weights; null takes those that ship with the package."""
    think: bool = False
    """Let text come before the picture."""
    grammar: bool = True
    """Only whole pictures can be written; false leaves it to the model."""
    dtype: Dtype = "float32"
    """Type of the frozen weights and of the forward pass; log-probabilities are fp32 in any case."""
    attention: Attention = "sdpa"
    """How attention is computed."""

    takes: ClassVar[Takes] = Takes(images=(1, 1))

    @property
    def size(self) -> tuple[int, int] | None:
        """The playground's own."""
        return None


TokenModel: TypeAlias = Emu3 | PlaygroundEmu3
