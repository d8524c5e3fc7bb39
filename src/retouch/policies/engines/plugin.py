"""The grammar of image tokens inside a vLLM server: a custom logits processor (``vllm serve --logits-processors``).

It is loaded by vLLM, in vLLM's environment, and imported by nothing here. Written for the interface of vLLM 0.33.0's model runner
V2 and tested against a strict double of it; never run on vLLM. Requests that bring no grammar are left as they are.

What may stand next follows from the tokens of the request alone, read anew at each step: nothing is remembered that a request which
is moved, set aside or taken up again in another's place could leave behind.
"""

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from retouch.policies.engines.form import KEY, Form, check

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig


class FormProcessor(LogitsProcessor):
    """Keeps to the form that a request's ``extra_args`` tell (see ``form.told``). ValueError where tokens are drafted."""

    def __init__(self, vllm_config: "VllmConfig", req_states: LogitsProcRequestState) -> None:
        if vllm_config.speculative_config is not None:
            raise ValueError("retouch's grammar does not read drafted tokens; start the server without speculative decoding")
        self._states = req_states
        self._forms: dict[str, Form] = {}
        self._of: dict[int, Form] = {}  # by slot

    @classmethod
    def validate_params(cls, sampling_params: "SamplingParams") -> None:
        """ValueError, which the server answers with HTTP 400, for a grammar that is none."""
        said = (sampling_params.extra_args or {}).get(KEY)
        if said is not None:
            check(said)

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        """Slots are used again: whatever was known of this one is forgotten."""
        said = (sampling_params.extra_args or {}).get(KEY)
        if said is None:
            self._of.pop(req_idx, None)
            return False
        self._of[req_idx] = self._form(said)
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        slots = ctx.idx_mapping_np.tolist()
        for form in {id(self._of[slot]): self._of[slot] for slot in slots if slot in self._of}.values():
            rows = [row for row, slot in enumerate(slots) if self._of.get(slot) is form]
            where = torch.tensor(rows, device=logits.device)
            logits[where] = form.restrict(logits[where], self._since(form.begin, rows, where, ctx))
        return logits

    def _since(self, begin: int, rows: list[int], where: Tensor, ctx: LogitsContext) -> Tensor:
        """(n,) tokens since ``begin`` that stands last in the prompt or first in what was written; below 0 where there is none."""
        prompts = torch.from_numpy(self._states.prompt_len.np[ctx.idx_mapping_np[rows]]).long()
        first, after = int(prompts.min()) - 1, int(ctx.seq_lens_upper_bound_np[rows].max())
        # The history may lie in the CPU's memory: prompts, most of it, are not read.
        ids = self._states.all_token_ids.gpu[:, first:after][ctx.expanded_idx_mapping[where].long()]
        places, last = torch.arange(first, first + ids.shape[1], device=ids.device), ctx.pos[where].long()
        # One that stands beyond the last token was left there by another request, and counts as below 0 in any case.
        begun = (ids == begin) & (places >= prompts.to(ids.device)[:, None] - 1)
        start = torch.where(begun.any(1), first + begun.int().argmax(1), last + 1)
        return last - start

    def _form(self, said: dict[str, Any]) -> Form:
        """One for all requests of a run."""
        key = json.dumps(said, sort_keys=True)
        if key not in self._forms:
            self._forms[key] = Form(said, vocabulary=self._states.vocab_size, device=self._states.device)
        return self._forms[key]
