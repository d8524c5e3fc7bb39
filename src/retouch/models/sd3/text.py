"""Stable Diffusion 3's text encoding of a prompt, by two CLIP encoders and T5.

embeds (r, 77 + max_sequence_length, 4096): the next-to-last hidden states of both CLIP encoders, concatenated along the channels
and padded with zeros, followed along the sequence by T5's last hidden states. pooled (r, 2048): the projected pooled outputs of
both CLIP encoders. An encoder that is left out gives zeros.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase, T5EncoderModel

CLIP_LENGTH = 77


class SD3Text:
    """Two CLIP encoders and T5, each with its tokenizer; None for one that is left out. Raises ValueError if all are None.

    ``joint_dim`` and ``pooled_dim``: widths of embeds and pooled that the transformer takes. ``max_sequence_length``: T5's number
    of tokens, up to 512.

    Source: diffusers' StableDiffusion3Pipeline (``encode_prompt``).
    """

    def __init__(
        self,
        encoders: tuple[CLIPTextModelWithProjection | None, CLIPTextModelWithProjection | None, T5EncoderModel | None],
        tokenizers: Sequence[PreTrainedTokenizerBase | None],
        *,
        joint_dim: int,
        pooled_dim: int,
        max_sequence_length: int,
    ) -> None:
        if all(encoder is None for encoder in encoders):
            raise ValueError("all three text encoders are left out; a prompt needs at least one")
        if [encoder is None for encoder in encoders] != [tokenizer is None for tokenizer in tokenizers]:
            raise ValueError("give three tokenizers in the order of the text encoders, and None for an encoder that is None")
        if not 1 <= max_sequence_length <= 512:
            raise ValueError(f"max_sequence_length is {max_sequence_length}; T5 takes 1 to 512 tokens here")
        *self.clips, self.t5 = encoders
        self.tokenizers = list(tokenizers)
        self.joint_dim = joint_dim
        self.widths = _clip_widths(self.clips, pooled_dim)
        clip_length = CLIP_LENGTH if tokenizers[0] is None else tokenizers[0].model_max_length
        self.lengths = (clip_length, clip_length, max_sequence_length)

    @property
    def encoders(self) -> list[nn.Module]:
        """The encoders that are not left out."""
        return [encoder for encoder in (*self.clips, self.t5) if encoder is not None]

    def check(self, prompt: str, task: str) -> None:
        """Raise ValueError if all encoders would truncate the prompt. (As in the pipeline, CLIP alone may truncate it.)"""
        pairs = [(tokenizer, most) for tokenizer, most in zip(self.tokenizers, self.lengths, strict=True) if tokenizer is not None]
        tokens = [len(tokenizer(prompt, verbose=False)["input_ids"]) for tokenizer, _ in pairs]
        if all(count > most for count, (_, most) in zip(tokens, pairs, strict=True)):
            limits = [most for _, most in pairs]
            raise ValueError(f"the prompt of task {task!r} has {tokens} tokens, but the text encoders read {limits}; shorten it")

    def embed(self, prompts: Sequence[str]) -> tuple[Float[Tensor, "r l d"], Float[Tensor, "r e"]]:
        """Return embeds and pooled in fp32, on the first encoder's device; with gradient if gradients are enabled."""
        device = next(self.encoders[0].parameters()).device
        states, summaries = [], []
        for clip, tokenizer, width in zip(self.clips, self.tokenizers, self.widths, strict=False):
            if clip is None:
                states.append(torch.zeros(len(prompts), self.lengths[0], width, device=device))
                summaries.append(torch.zeros(len(prompts), width, device=device))
                continue
            output = clip(self._ids(tokenizer, prompts, self.lengths[0]).to(clip.device), output_hidden_states=True)
            states.append(output.hidden_states[-2].to(device, torch.float32))
            summaries.append(output.text_embeds.to(device, torch.float32))
        words = torch.cat(states, dim=-1)
        words = nn.functional.pad(words, (0, self.joint_dim - words.shape[-1]))
        return torch.cat([words, self._t5(prompts).to(device)], dim=1), torch.cat(summaries, dim=-1)

    def _t5(self, prompts: Sequence[str]) -> Tensor:
        length = self.lengths[2]
        if self.t5 is None:
            return torch.zeros(len(prompts), length, self.joint_dim)
        ids = self._ids(self.tokenizers[2], prompts, length)
        states: Tensor = self.t5(ids.to(self.t5.device)).last_hidden_state.float()
        return states

    @staticmethod
    def _ids(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], length: int) -> Tensor:
        tokens = tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        ids: Tensor = tokens["input_ids"]
        return ids


def _clip_widths(clips: Sequence[CLIPTextModelWithProjection | None], pooled_dim: int) -> tuple[int, int]:
    """Return the channels of both CLIP encoders; one that is left out has the remaining channels of the pooled vector."""
    first, second = (None if clip is None else int(clip.config.projection_dim) for clip in clips)
    if first is None:
        return (pooled_dim, 0) if second is None else (pooled_dim - second, second)
    if second is None:
        return first, pooled_dim - first
    if first + second != pooled_dim:
        raise ValueError(f"the CLIP encoders give {first} + {second} pooled channels, but the transformer takes {pooled_dim}")
    return first, second
