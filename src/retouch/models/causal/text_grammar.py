"""The grammar of completions that are text, and their tokens."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedTokenizerBase

from retouch.models.causal import decoding
from retouch.models.common.recompute import recomputing
from retouch.types import Kind, Prompts, Task


class TextGrammar:
    """Any text: all tokens of the tokenizer except image and video placeholders (implements ``Grammar``; nothing is forced).

    The output embedding has more rows than the tokenizer has tokens; the ids of the additional rows are excluded too.
    """

    kinds: tuple[int, ...] = (Kind.TEXT_TOKEN,)
    forces = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, device: torch.device) -> None:
        self.vocabularies = torch.arange(vocabulary, device=device)[None] < len(tokenizer)
        named = [token for token in tokenizer.get_added_vocab() if "vision" in token or "image" in token or "video" in token]
        self.vocabularies[:, [tokenizer.convert_tokens_to_ids(token) for token in named]] = False

    def parse(self, prompts: Prompts, ids: Int[Tensor, "r k"]) -> tuple[Int[Tensor, "r k1"], Int[Tensor, "r k1"]]:
        sets = ids.new_zeros(ids.shape[0], ids.shape[1] + 1)
        return sets, sets - 1


class CausalText:
    """The methods of ``retouch.protocols.AutoregressiveModel`` that depend only on the decoder; positions have one axis.

    ``gradient_checkpointing``: an update keeps only each layer's input, and computes the prompt once per row instead of once per
    task."""

    def __init__(self, module: nn.Module, *, gradient_checkpointing: bool = False) -> None:
        self.module: nn.Module = module
        self.gradient_checkpointing = gradient_checkpointing
        self.shares_prompts = not gradient_checkpointing

    @staticmethod
    @abstractmethod
    def decoder(module: nn.Module) -> nn.Module:
        """The model without its output head."""
        ...

    def embed(self, module: nn.Module, ids: Int[Tensor, "r k"]) -> Float[Tensor, "r k d"]:
        """Return the embeddings of generated tokens. Prompts always use the module's input embeddings."""
        return decoding.embeddings(module, ids)

    def prompts(self, rows: Sequence[Sequence[int]]) -> Prompts:
        """Build prompts from rows of token ids, padded on the left."""
        device = next(self.module.parameters()).device
        ids, mask = decoding.padded_left([torch.tensor(row, device=device) for row in rows])
        return Prompts(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)[..., None], tuple({} for _ in rows))

    def prefill(self, module: nn.Module, prompts: Prompts) -> tuple[Float[Tensor, "p d"], Cache]:
        assert not (self.gradient_checkpointing and torch.is_grad_enabled())  # its layers would not fill the cache
        decoder = self.decoder(module)
        cache = decoding.new_cache(decoder)
        embeds = decoding.embeddings(module, prompts.ids)
        states = decoding.run(decoder, embeds, mask=prompts.mask, positions=prompts.positions, cache=cache)
        return states[:, -1], cache

    def extend(
        self, module: nn.Module, ids: Int[Tensor, "r k"], *, mask: Bool[Tensor, "r l"], positions: Int[Tensor, "r k"], cache: Cache
    ) -> Float[Tensor, "r k d"]:
        return decoding.run(self.decoder(module), self.embed(module, ids), mask=mask, positions=positions[..., None], cache=cache)

    def select(self, cache: Cache, rows: Int[Tensor, " r"]) -> Cache:
        return decoding.select(cache, rows)

    def static_cache(self, cache: Cache, rows: Int[Tensor, " r"], *, room: int) -> Cache:
        """See ``retouch.policies.autoregressive.decoding.HasStaticCache``."""
        return decoding.static_cache(self.decoder(self.module), cache, rows, room=room)

    def states(
        self, module: nn.Module, prompts: Prompts, ids: Int[Tensor, "r k"], mask: Bool[Tensor, "r k"]
    ) -> Float[Tensor, "r k d"]:
        more = ids.shape[1] - 1  # the state after the last token is not used
        new = prompts.next_positions()[:, None] + torch.arange(more, device=ids.device)
        positions = torch.cat([prompts.positions, new[..., None]], dim=1)
        row_mask = torch.cat([prompts.mask, mask[:, :more]], dim=1)
        with recomputing(module, on=self.gradient_checkpointing and torch.is_grad_enabled()):
            embeds = torch.cat([decoding.embeddings(module, prompts.ids), self.embed(module, ids[:, :more])], dim=1)
            states = decoding.run(self.decoder(module), embeds, mask=row_mask, positions=positions)
        return states[:, -ids.shape[1] :]

    def logits(self, module: nn.Module, states: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        return decoding.logits(module, states)


def require_no_special_tokens(tasks: Sequence[Task], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if an instruction contains a special token, which would be read as an image or a turn of the dialogue."""
    special = set(tokenizer.get_added_vocab())
    for task in tasks:
        if found := [token for token in special if token in task.instruction]:
            raise ValueError(f"the instruction of task {task.id!r} contains the special token {found[0]}; remove it")
