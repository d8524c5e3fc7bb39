"""Tiny policies that generate text, and batches, for tests of the code that uses such a policy."""

import torch

import tiny_models
import tiny_writers
from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.rollout import TokenRollout
from retouch.types import Kind

STOPS = tuple("abcdefghijklmnopqrstuvwxyz")  # many stop tokens, so that random completions have different lengths
LONGEST = 7


def policy(
    kind="qwen2.5-vl", *, writer=None, train="lora", copies=("reference",), sampling=None, microbatch=4, share=True, **options
):
    """Make a new policy whose weights equal the reference. ``writer``: its model; by default a new one of this ``kind``."""
    model = tiny_writers.writer(kind, train=train, stop=STOPS) if writer is None else writer
    model.shares_prompts = model.shares_prompts and share
    kept = tiny_models.weight_copies(model.module, copies, train)
    sampling = TokenRollout(**{"max_new_tokens": LONGEST, **(sampling or {})})
    return AutoregressivePolicy(model, sampling=sampling, microbatch=microbatch, copies=kept, **{"logits_at_once": 5, **options})


def batch(tasks=None, group_size=2, *, seed=3, step=5):
    """Make a batch with a group of ``group_size`` rows per task."""
    return tiny_models.batch(tiny_writers.tasks() if tasks is None else tasks, group_size, seed=seed, step=step)


class ForcedGrammar:
    """A grammar: the second token is ``forced[0]``, the third is a digit, the fifth is ``forced[1]``; all others are free."""

    kinds = (Kind.TEXT_TOKEN, Kind.IMAGE_TOKEN)

    def __init__(self, writer, forced=(65, 66)):
        digits = torch.zeros_like(writer.grammar.vocabularies)
        digits[:, [writer.template.tokenizer.convert_tokens_to_ids(sign) for sign in "0123456789"]] = True
        self.vocabularies = torch.cat([writer.grammar.vocabularies, digits])
        self.forced = forced

    def parse(self, prompts, ids):
        assert len(prompts) == len(ids)
        places = torch.arange(ids.shape[1] + 1).expand(len(ids), -1)
        forced = torch.full_like(places, -1)
        forced[places == 1], forced[places == 4] = self.forced
        return (places == 2).long(), forced
