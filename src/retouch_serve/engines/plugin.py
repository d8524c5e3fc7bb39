"""The grammar of image tokens inside a vLLM server: a custom logits processor (``vllm serve --logits-processors``).

vLLM loads this file in its own environment; no other module of Retouch imports it. It is for model runner V2 of vLLM 0.32 and 0.33,
and was tested with vLLM 0.32.0 on a CPU. Requests without a grammar are not changed.

The allowed ids depend only on the tokens of the request and are computed again at each step. So no state is lost or left over when
vLLM moves, preempts or resumes a request.
"""

import json
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from retouch_serve.engines.grammar import KEY, GrammarMask, check_grammar


class GrammarProcessor(LogitsProcessor):
    """Applies the grammar in a request's ``extra_args`` (see ``grammar_to_json``). Raises ValueError with speculative decoding.

    ``vllm_config`` is a ``vllm.config.VllmConfig``, ``sampling_params`` a ``vllm.SamplingParams``.
    """

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        if vllm_config.speculative_config is not None:
            raise ValueError("retouch's grammar does not read drafted tokens; start the server without speculative decoding")
        self._states = req_states
        self._masks: dict[str, GrammarMask] = {}
        self._by_slot: dict[int, GrammarMask] = {}

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError if the grammar is invalid; the server then answers with HTTP 400."""
        document = (sampling_params.extra_args or {}).get(KEY)
        if document is not None:
            check_grammar(document)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Register the request in this slot; returns whether it has a grammar. Slots are reused, so an old entry is replaced."""
        document = (sampling_params.extra_args or {}).get(KEY)
        if document is None:
            self._by_slot.pop(req_idx, None)
            return False
        key = json.dumps(document, sort_keys=True)
        if key not in self._masks:  # all requests of a run share one mask
            self._masks[key] = GrammarMask(document, vocabulary=self._states.vocab_size, device=self._states.device)
        self._by_slot[req_idx] = self._masks[key]
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        slots = ctx.idx_mapping_np.tolist()
        for mask in {id(self._by_slot[slot]): self._by_slot[slot] for slot in slots if slot in self._by_slot}.values():
            rows = [row for row, slot in enumerate(slots) if self._by_slot.get(slot) is mask]
            index = torch.tensor(rows, device=logits.device)
            logits[index] = mask(logits[index], self._tokens_since(mask.begin, rows, index, ctx))
        return logits

    def _tokens_since(self, begin: int, rows: list[int], index: Tensor, ctx: LogitsContext) -> Tensor:
        """(n,) number of tokens since the first ``begin`` at or after the prompt's last token; below 0 if there is none."""
        prompts = torch.from_numpy(self._states.prompt_len.np[ctx.idx_mapping_np[rows]]).long()
        first = int(prompts.min()) - 1
        # At least one column: if all prompts are prefilled in chunks, perhaps no row has reached the end of its prompt.
        after = max(first + 1, int(ctx.seq_lens_upper_bound_np[rows].max()))
        # The history may be in CPU memory. It consists mostly of prompts, so only the columns from ``first`` on are read.
        ids = self._states.all_token_ids.gpu[:, first:after][ctx.expanded_idx_mapping[index].long()]
        places, last = torch.arange(first, first + ids.shape[1], device=ids.device), ctx.pos[index].long()
        # A match after the last token is left over from another request; its distance is below 0.
        begun = (ids == begin) & (places >= prompts.to(ids.device)[:, None] - 1)
        start = torch.where(begun.any(1), first + begun.int().argmax(1), last + 1)
        return last - start
