"""Attention of image tokens to the tokens of a reference image with separate keys and values (decoupled cross-attention of
IP-Adapter, arXiv 2308.06721), in the layout of the larger adapters for FLUX.1: no bias, normed keys, and an output that is added
before the output projection.

In single blocks, where text and image are one sequence, text attends to the reference too. The smaller layout, which diffusers can
load, uses diffusers' own class.
"""

from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import rms_norm


class Float32Linear(nn.Linear):
    """A linear layer with fp32 weights, so that small updates are not rounded away, and an output of ``output_dtype``."""

    def __init__(self, width: int, out_width: int, *, bias: bool, output_dtype: torch.dtype) -> None:
        super().__init__(width, out_width, bias=bias, dtype=torch.float32)
        self.output_dtype = output_dtype

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float()).to(self.output_dtype)


class ReferenceAttention(nn.Module):
    """Base class of both families' attention processors. ``base``: the original processor, which is used alone if ``scale`` is 0 or
    there is no reference. A processor gets its attention module as an argument and does not contain the module's weights.

    Source: IP-Adapter (Ye et al. 2023, arXiv 2308.06721), decoupled cross-attention.
    """

    def __init__(self, base: Any, *, width: int, heads: int, head_width: int, scale: float, output_dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.scale = scale
        self.heads = (heads, head_width)
        self.to_k_ip = Float32Linear(width, heads * head_width, bias=False, output_dtype=output_dtype)
        self.to_v_ip = Float32Linear(width, heads * head_width, bias=False, output_dtype=output_dtype)
        self.backend: AttentionBackendName | None = None

    @property
    def _attention_backend(self) -> AttentionBackendName | None:
        """The attribute that diffusers' ``set_attention_backend`` sets on a processor."""
        return self.backend

    @_attention_backend.setter
    def _attention_backend(self, backend: AttentionBackendName | None) -> None:
        self.backend = self.base._attention_backend = backend

    def attend(self, query: Float[Tensor, "r s h d"], reference: Float[Tensor, "r 1 n w"]) -> Float[Tensor, "r s hd"]:
        """Return the scaled attention output for the reference tokens; queries are normed and not rotated."""
        tokens = reference.flatten(1, 2)
        key = rms_norm(self.to_k_ip(tokens).unflatten(-1, self.heads).float(), self.heads[1:], eps=1e-5).to(query.dtype)
        value = self.to_v_ip(tokens).unflatten(-1, self.heads)
        found: Tensor = dispatch_attention_fn(query, key, value, backend=self.backend)
        return self.scale * found.flatten(2).to(query.dtype)


class FluxReferenceAttention(ReferenceAttention):
    """Attention to a reference in Flux; the queries are the image stream in double blocks, the whole sequence in single blocks."""

    def __call__(  # diffusers reads the names of a processor's arguments here
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        ip_hidden_states: list[Tensor] | None = None,
    ) -> Any:
        if ip_hidden_states is None or self.scale == 0:
            return self.base(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(-1, self.heads))
        key = attn.norm_k(attn.to_k(hidden_states).unflatten(-1, self.heads))
        value = attn.to_v(hidden_states).unflatten(-1, self.heads)
        found = self.attend(query, ip_hidden_states[0])
        if encoder_hidden_states is not None:
            text = attn.add_q_proj(encoder_hidden_states), attn.add_k_proj(encoder_hidden_states)
            query = torch.cat([attn.norm_added_q(text[0].unflatten(-1, self.heads)), query], dim=1)
            key = torch.cat([attn.norm_added_k(text[1].unflatten(-1, self.heads)), key], dim=1)
            value = torch.cat([attn.add_v_proj(encoder_hidden_states).unflatten(-1, self.heads), value], dim=1)
        if image_rotary_emb is not None:
            query, key = (apply_rotary_emb(each, image_rotary_emb, sequence_dim=1) for each in (query, key))
        output = dispatch_attention_fn(query, key, value, attn_mask=attention_mask, backend=self.backend).flatten(2).to(query.dtype)
        if encoder_hidden_states is None:
            return output + found
        text_output, image = output.tensor_split([encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](image + found)), attn.to_add_out(text_output.contiguous())


class QwenReferenceAttention(ReferenceAttention):
    """Attention to a reference in Qwen-Image; the queries are the image stream, including the tokens of source images."""

    def __call__(  # diffusers reads the names of a processor's arguments here
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        ip_hidden_states: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if ip_hidden_states is None or self.scale == 0:
            return self.base(
                attn, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, attention_mask, image_rotary_emb
            )
        queries = [attn.norm_added_q(attn.add_q_proj(encoder_hidden_states).unflatten(-1, self.heads))]
        queries.append(attn.norm_q(attn.to_q(hidden_states).unflatten(-1, self.heads)))
        keys = [attn.norm_added_k(attn.add_k_proj(encoder_hidden_states).unflatten(-1, self.heads))]
        keys.append(attn.norm_k(attn.to_k(hidden_states).unflatten(-1, self.heads)))
        values = [attn.add_v_proj(encoder_hidden_states), attn.to_v(hidden_states)]
        found = self.attend(queries[1], ip_hidden_states[0])
        if image_rotary_emb is not None:
            angles = image_rotary_emb[::-1]  # diffusers passes (image, text)
            queries = [apply_rotary_emb_qwen(each, of, use_real=False) for each, of in zip(queries, angles, strict=True)]
            keys = [apply_rotary_emb_qwen(each, of, use_real=False) for each, of in zip(keys, angles, strict=True)]
        mask = None
        if encoder_hidden_states_mask is not None:
            image_mask = encoder_hidden_states_mask.new_ones(hidden_states.shape[:2], dtype=torch.bool)
            mask = torch.cat([encoder_hidden_states_mask.bool(), image_mask], dim=1)[:, None, None]
        value = torch.cat(values, dim=1).unflatten(-1, self.heads)
        output = dispatch_attention_fn(
            torch.cat(queries, dim=1), torch.cat(keys, dim=1), value, attn_mask=mask, backend=self.backend
        )
        text, image = output.flatten(2).to(values[0].dtype).tensor_split([encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](image + found)), attn.to_add_out(text.contiguous())
