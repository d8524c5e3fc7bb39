"""The policy that writes tokens: a causal language model samples completions and is evaluated on the same ids.

Action ``j`` of a row is its j-th new token. t is ``max_new_tokens`` for every row, so that rows of different batches can be
concatenated. The mask is True for sampled tokens, and False for tokens that the grammar forced and after the end of a row. The
sampled ids are stored and never computed from the text, because tokenizing the text again may give other ids.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from PIL.Image import Image
from torch import Tensor, nn

from retouch.core.surrogates import bernoulli_kl, importance_weights, k3
from retouch.policies.decoding import (
    AutoregressiveTrajectory,
    CachedDecoding,
    allowed_log_probs,
    log_prob_difference,
    scatter,
    token_kl,
    token_log_probs,
)
from retouch.policies.engine import EngineFault, Generation
from retouch.policies.rollout import CachedEngine, Engine, TokenRollout
from retouch.policies.value_heads import TokenValues
from retouch.policies.weights import WeightCopies
from retouch.protocols import AutoregressiveModel, DecodesCodes
from retouch.types import Batch, Completion, Evaluation, Lesson, Needs, Prompts, Slice, Task


def check_mismatch(
    policy: Float[Tensor, "b t"],
    engine: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    limit: float,
    any_rank: Callable[[bool], bool] = bool,
) -> None:
    """Raise EngineFault on all ranks if on any rank the mean absolute difference, in nats per token, is NaN or above ``limit``.

    ``any_rank``: tells whether a flag is true on at least one rank; all ranks must call it.
    """
    difference = log_prob_difference(policy, engine, mask).abs()
    mean = difference.mean().item() if len(difference) else 0.0
    if any_rank(not mean <= limit):
        raise EngineFault(
            f"the engine's log-probabilities are off from the policy's own by {mean:.3g} nats a token on this rank, and the "
            f"recipe allows {limit:g} (rollout.engine.max_mismatch). It may have other weights, another temperature or another "
            "number type than the policy; a vLLM server needs --logprobs-mode processed_logprobs"
        )


COMPLETION = "completion"
"""The key of a task's completion in its ``meta``."""


@runtime_checkable
class TokenizesText(Protocol):
    """A model that can tokenize a text."""

    def text_ids(self, text: str) -> list[int]: ...


@runtime_checkable
class TokenizesTargets(Protocol):
    """A model of image tokens that can tokenize the target images of tasks."""

    def target_ids(self, tasks: Sequence[Task]) -> list[list[int]]: ...


class AutoregressivePolicy:
    """A language model as policy (implements ``retouch.protocols.Policy``).

    ``sampling``: the rollout section of the recipe; of its ``engine``, only ``max_mismatch`` and ``truncate_at`` are read here.
    ``engine``: generates the completions of rollouts, built from that section; None means decoding with the model and a cache.
    ``microbatch``: rows per forward pass with gradient. ``logits_at_once``: number of tokens whose logits are in memory at once.
    ``mask_truncated``: completions that were truncated at ``max_new_tokens`` are not trained on. ``copies`` may contain
    ``reference`` and ``average`` weights. ``any_rank``: tells whether a flag is true on at least one rank. ``sharded``: all ranks
    must call the model equally often, because its weights are sharded. ``head``: the value head, which predicts the return before
    each token.
    """

    def __init__(
        self,
        model: AutoregressiveModel,
        *,
        sampling: TokenRollout,
        microbatch: int,
        copies: WeightCopies,
        logits_at_once: int = 256,
        mask_truncated: bool = False,
        engine: Engine | None = None,
        any_rank: Callable[[bool], bool] = bool,
        sharded: bool = False,
        head: TokenValues | None = None,
    ) -> None:
        self.model = model
        self.module: nn.Module = model.module
        self.sampling = sampling
        self.microbatch = microbatch
        self.copies = copies
        self.logits_at_once = logits_at_once
        self.mask_truncated = mask_truncated
        self.decoder = CachedDecoding(model, any_rank=any_rank if sharded else bool)
        self.engine: Engine = self.decoder if engine is None else engine
        # Without an engine the policy decodes itself, and perhaps only this rank calls ``rollout``.
        self.limits = CachedEngine() if engine is None or sampling.engine is None else sampling.engine
        self.any_rank = bool if engine is None else any_rank
        self.head = head

    # Acting

    @torch.no_grad()
    def rollout(self, batch: Batch) -> AutoregressiveTrajectory:
        """Sample a completion for each row; ``outputs`` has one ``Completion`` per row.

        Raises EngineFault if the engine fails, or if its log-probabilities differ too much from the policy's.
        """
        prompts = self.model.encode(batch.tasks)
        generation = self.engine(batch, prompts, self.sampling)
        if self.sampling.truncates and generation.support is None:
            raise ValueError("this engine does not report which ids top_k and top_p kept; use top_k null and top_p null")
        trajectory = self._trajectory(batch, prompts, generation)
        slices = list(self.microbatches(trajectory))
        if self.head is not None:
            states = [self._sampled_states(self.model.module, trajectory, part) for part in slices]
            masks = [trajectory.mask[part.rows, part.actions] for part in slices]
            values = [scatter(self.head(each), mask) for each, mask in zip(states, masks, strict=True)]
            trajectory = replace(trajectory, values=torch.cat(values))
        if self.engine.exact:
            return trajectory
        log_probs = torch.cat([self._log_probs(self.model.module, trajectory, part) for part in slices])
        engine_log_probs = trajectory.log_probs
        check_mismatch(log_probs, engine_log_probs, trajectory.mask, limit=self.limits.max_mismatch, any_rank=self.any_rank)
        return replace(trajectory, log_probs=log_probs, behaviour_log_probs=engine_log_probs)

    @torch.no_grad()
    def sample(self, batch: Batch) -> AutoregressiveTrajectory:
        """Take the most likely token at each position, under the average weights if there are any; ``log_probs`` are NaN."""
        with self.copies.using("average") if "average" in self.copies.copies else nullcontext():
            prompts = self.model.encode(batch.tasks)
            return self._trajectory(batch, prompts, self.decoder(batch, prompts, self.sampling, greedy=True))

    @torch.no_grad()
    def demonstrate(self, batch: Batch) -> AutoregressiveTrajectory:
        """The completions of the tasks (``completion`` in their meta) as a trajectory; ``log_probs`` are NaN.

        Raises ValueError if a task has no completion, if a completion does not fit in ``max_new_tokens``, or if the model has no
        ``text_ids``.
        """
        model, longest, prompts = self.model, self.sampling.max_new_tokens, self.model.encode(batch.tasks)
        device = prompts.ids.device
        if isinstance(model, TokenizesTargets):
            ids_of_tasks = model.target_ids(batch.tasks)
        elif not isinstance(model, TokenizesText):
            raise ValueError(f"{type(model).__name__} has no `text_ids(text)`, which tokenizes the completions of the data")
        else:
            ids_of_tasks = []
            for task in batch.tasks:
                text = task.meta.get(COMPLETION)
                if not isinstance(text, str):
                    raise ValueError(
                        f"task {task.id!r} has no text in meta['{COMPLETION}'], which supervised learning needs; add it"
                    )
                ids_of_tasks.append(model.text_ids(text))
        for task, ids in zip(batch.tasks, ids_of_tasks, strict=True):
            if len(ids) >= longest:
                raise ValueError(
                    f"the completion of task {task.id!r} has {len(ids)} tokens and an end token; "
                    f"raise rollout.max_new_tokens above {len(ids)}"
                )
        ended = [torch.tensor([*ids, self.model.stop[0]], device=device) for ids in ids_of_tasks]
        padded = torch.full((len(batch), longest), self.model.pad, device=device)
        for row, group in enumerate(batch.group):
            padded[row, : len(ended[group])] = ended[group]
        lengths = torch.tensor([len(ended[group]) for group in batch.group], device=device)
        unsampled = torch.full(padded.shape, torch.nan, device=device)
        return self._trajectory(batch, prompts, Generation(ids=padded, lengths=lengths, log_probs=unsampled))

    def _trajectory(self, batch: Batch, prompts: Prompts, generation: Generation) -> AutoregressiveTrajectory:
        grammar, ids, lengths = self.model.grammar, generation.ids, generation.lengths
        group = torch.tensor(batch.group, device=ids.device)
        vocabulary, forced = (column[:, :-1] for column in grammar.parse(prompts.take(group), ids))
        real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        last = ids.gather(1, lengths[:, None] - 1)[:, 0]
        truncated = ~torch.isin(last, torch.tensor(self.model.stop, device=ids.device))
        mask = real & (forced < 0)
        if self.mask_truncated:
            mask = mask & ~truncated[:, None]
        keys = [(batch.seed, batch.step, batch.group_ids[k], slot) for k, slot in zip(batch.group, batch.slot, strict=True)]
        outputs = []
        for row, length, cut_off, key in zip(ids.tolist(), lengths.tolist(), truncated.tolist(), keys, strict=True):
            completion_ids = tuple(row[: length if cut_off else length - 1])
            outputs.append(Completion(completion_ids, self.model.decode(completion_ids), cut_off, key))
        return AutoregressiveTrajectory(
            log_probs=generation.log_probs,
            mask=mask,
            kind=torch.tensor(grammar.kinds, device=ids.device)[vocabulary],
            outputs=tuple(outputs),
            ids=ids,
            lengths=lengths,
            vocabulary=vocabulary,
            support=generation.support,
            prompts=prompts,
            group=group,
        )

    # Evaluating

    def microbatches(self, trajectory: AutoregressiveTrajectory) -> Iterator[Slice]:
        """Slices with all actions of ``microbatch`` rows. Ranks with equally many rows have equally many slices."""
        rows, actions = trajectory.mask.shape
        for row in range(0, rows, self.microbatch):
            yield Slice(slice(row, min(row + self.microbatch, rows)), slice(0, actions))

    def order_by_length(self, trajectory: AutoregressiveTrajectory) -> Int[Tensor, " b"]:
        """An order of the rows in which neighbours have similar lengths, so that a microbatch has little padding.

        Rows that fit into one microbatch stay as they are.
        """
        if len(trajectory) <= self.microbatch:
            return torch.arange(len(trajectory), device=trajectory.lengths.device)
        lengths, prompts = trajectory.lengths.tolist(), trajectory.prompts.mask.sum(1)[trajectory.group].tolist()
        keys = list(zip(lengths, prompts, trajectory.group.tolist(), strict=True))  # rows of one task share its prompt
        return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), device=trajectory.lengths.device)

    def evaluate(self, trajectory: AutoregressiveTrajectory, part: Slice, needs: Needs) -> Evaluation:
        """Log-probabilities of the stored ids under the current weights; entropy, values and k3 KL to the reference if needed.

        ``scale``: the importance weights of tokens that another engine sampled. Raises ValueError for needs that a policy that
        writes tokens does not support."""
        if needs.kl not in (None, "k3") or needs.log_ratio != "plain" or (needs.values and self.head is None):
            raise ValueError(f"{needs}: tokens have only the k3 KL and the plain ratio, and values only if the policy has a head")
        mask = trajectory.mask[part.rows, part.actions]
        reference = None
        if needs.kl is not None:  # first, so that a copy fetched from the CPU is freed before there are activations
            with torch.no_grad(), self.copies.using("reference"):
                reference = self._log_probs(self.model.module, trajectory, part)
        states = self._sampled_states(self.module, trajectory, part)
        log_probs, entropy = self._head(self.module, states, trajectory, part, with_entropy=needs.entropy)
        values = scatter(self.head(states), mask) if needs.values and self.head is not None else None
        # The stored log-probability of a masked action may be any value.
        acted = trajectory.log_probs[part.rows, part.actions].masked_fill(~mask, 0.0)
        kl = None if reference is None else k3(log_probs, reference, mask=mask)
        scale = None
        if trajectory.behaviour_log_probs is not None and self.limits.truncate_at is not None:
            behaviour = trajectory.behaviour_log_probs[part.rows, part.actions]
            scale = importance_weights(acted, behaviour, mask, cap=self.limits.truncate_at)
        divergence = bernoulli_kl(acted, log_probs, mask=mask) if needs.divergence else None
        log_ratio = log_probs - acted
        return Evaluation(log_probs, log_ratio, divergence=divergence, kl=kl, values=values, entropy=entropy, scale=scale)

    @torch.no_grad()
    def teacher_images(self, batch: Batch, *, weights: str, guidance_scale: float | None) -> list[Image | None]:
        """The most likely image of each row under the teacher's weights. Raises ValueError if the model writes no images."""
        own = self.model
        if not isinstance(own, DecodesCodes):
            raise ValueError(
                "objective.teachers: there are several instructions, and the policy makes no image in between; give one text"
            )
        with self.copies.model_with(weights, own) as model:
            decoder = self.decoder if model is own else CachedDecoding(model)
            made = decoder(batch, model.encode(batch.tasks), self.sampling, greedy=True)
        found = [own.codes_in(row[:end]) for row, end in zip(made.ids.tolist(), made.lengths.tolist(), strict=True)]
        return [None if codes is None else own.decode_codes(codes[None])[0] for codes in found]

    @torch.no_grad()
    def teacher_inputs(self, tasks: Sequence[Task], *, weights: str, guidance_scale: float | None) -> Prompts:
        """The prompts of the tasks, in which the features of images are those of the teacher; tokens have no guidance."""
        with self.copies.model_with(weights, self.model) as model:
            prompts: Prompts = model.encode(tasks)
        return prompts

    def teach(self, trajectory: AutoregressiveTrajectory, lessons: Sequence[Lesson]) -> Sequence[Lesson]:
        """The lessons: the teachers' log-probabilities of all tokens are too large, so ``divergence`` computes them in parts."""
        return lessons

    def divergence(
        self, trajectory: AutoregressiveTrajectory, part: Slice, taught: Sequence[Lesson], *, forward: bool
    ) -> Float[Tensor, "r t"]:
        """The KL of each token over all ids that may follow, with gradient; 0 where no token was sampled.

        The teacher's log-probabilities of a microbatch are in memory at once: its tokens times the vocabulary. A teacher that is
        another model is copied to the device for each microbatch.
        """
        columns = _used_columns(trajectory, part)
        sampled, vocabulary = trajectory.mask[part.rows, columns], trajectory.vocabulary[part.rows, columns]
        row, temperature = sampled.nonzero()[:, 0], self.sampling.temperature
        targets, teacher = None, copy(self)
        for lesson in taught:
            places = lesson.places[trajectory.group[part.rows]]
            chosen = (places >= 0).nonzero()[:, 0]
            if len(chosen):
                theirs = replace(trajectory.take(chosen + part.rows.start), prompts=lesson.inputs, group=places[chosen])
                where, wanted = Slice(slice(0, len(chosen)), part.actions), vocabulary[chosen][sampled[chosen]]
                with torch.no_grad(), self.copies.model_with(lesson.weights, self.model) as teacher.model:
                    module = teacher.model.module
                    states = teacher._sampled_states(module, theirs, where)
                    log_probs = allowed_log_probs(
                        teacher.model, module, states, grammar=self.model.grammar, vocabulary=wanted, temperature=temperature
                    )
                if targets is None:
                    targets = log_probs.new_full((len(row), log_probs.shape[1]), torch.nan)
                targets[torch.isin(row, chosen)] = log_probs
        assert targets is not None, "each task has a teacher"
        states = self._sampled_states(self.module, trajectory, part)
        kl = token_kl(
            self.model,
            self.module,
            states,
            targets,
            vocabulary=vocabulary[sampled],
            temperature=temperature,
            chunk=self.logits_at_once,
            forward=forward,
        )
        return scatter(kl, trajectory.mask[part.rows, part.actions])

    def _log_probs(self, module: nn.Module, trajectory: AutoregressiveTrajectory, part: Slice) -> Float[Tensor, "r t"]:
        """The log-probabilities of a slice, without entropies."""
        return self._head(module, self._sampled_states(module, trajectory, part), trajectory, part)[0]

    def _head(
        self,
        module: nn.Module,
        states: Float[Tensor, "n d"],
        trajectory: AutoregressiveTrajectory,
        part: Slice,
        *,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies (r, t) from the ``_sampled_states``, 0 where no token was sampled."""
        mask = trajectory.mask[part.rows, part.actions]
        columns = _used_columns(trajectory, part)
        sampled = trajectory.mask[part.rows, columns]
        log_probs, entropy = token_log_probs(
            self.model,
            module,
            states,
            trajectory.ids[part.rows, columns][sampled],
            vocabulary=trajectory.vocabulary[part.rows, columns][sampled],
            support=None if trajectory.support is None else trajectory.support[part.rows, columns][sampled],
            temperature=self.sampling.temperature,
            chunk=self.logits_at_once,
            with_entropy=with_entropy,
        )
        return scatter(log_probs, mask), None if entropy is None else scatter(entropy, mask)

    def _sampled_states(self, module: nn.Module, trajectory: AutoregressiveTrajectory, part: Slice) -> Float[Tensor, "n d"]:
        """The states before the tokens that were sampled."""
        columns = _used_columns(trajectory, part)
        ids, group, end = trajectory.ids[part.rows, : columns.stop], trajectory.group[part.rows], columns.stop
        real = torch.arange(end, device=ids.device) < trajectory.lengths[part.rows, None]
        if self.model.shares_prompts:
            tasks, index = group.unique(return_inverse=True)
            prompts = trajectory.prompts.take(tasks)
            first, cache = self.model.prefill(module, prompts)
            # All tokens but the last; but the first token even if it is the last, so that all ranks run equally many forwards.
            before = max(end - 1, 1)
            rest = self.model.extend(
                module,
                ids[:, :before],
                mask=torch.cat([prompts.mask[index], real[:, :before]], dim=1),
                positions=prompts.next_positions()[index, None] + torch.arange(before, device=ids.device),
                cache=self.model.select(cache, index),
            )
            states = torch.cat([first[index, None], rest], dim=1)[:, :end]
        else:
            states = self.model.states(module, trajectory.prompts.take(group), ids, real)
        return states[:, columns][trajectory.mask[part.rows, columns]]


def _used_columns(trajectory: AutoregressiveTrajectory, part: Slice) -> slice:
    """The columns of the slice, without columns at its end in which all its rows have ended."""
    end = min(part.actions.stop, int(trajectory.lengths[part.rows].max()))
    return slice(part.actions.start, max(part.actions.start, end))
