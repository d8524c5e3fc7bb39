"""The autoregressive kernel: a causal language model acts by writing tokens, and is evaluated on the same ids.

Conventions: action ``j`` of a row is its j-th new token, and t is ``max_new_tokens`` for every row, so that rows of different
batches line up. The mask is True where a token was drawn: not where the grammar forced it, not from the end of a row on. Ids are
stored and never made from text again.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from retouch.core.divergences import k3
from retouch.policies.autoregressive.decoding import CachedDecoding, Decoding, Engine, Generation
from retouch.policies.autoregressive.demonstrating import demonstrated
from retouch.policies.autoregressive.measuring import measure, spread
from retouch.policies.autoregressive.mismatch import Tolerance, importance
from retouch.policies.autoregressive.trajectory import AutoregressiveTrajectory
from retouch.policies.value_heads import TokenValues
from retouch.policies.weights import WeightCopies
from retouch.protocols import AutoregressiveModel
from retouch.types import Batch, Completion, Evaluation, Needs, Prompts, Slice


class AutoregressivePolicy:
    """A language model as policy (implements ``retouch.protocols.Policy``).

    ``microbatch``: rows per forward with gradient. ``chunk``: places whose logits exist at once. ``mask_truncated``: completions
    that were cut off at ``max_new_tokens`` teach nothing. ``copies`` may hold ``reference`` and ``average`` weights. ``engine``
    writes in a rollout: ``CachedDecoding`` unless another is given; ``tolerance`` says how far off it may be. The policy's own goes
    on until it is done on ``any_rank`` (see ``CachedDecoding``). ``head``: says before each token what reward is to be expected.
    ValueError at temperature 0.
    """

    def __init__(
        self,
        model: AutoregressiveModel,
        *,
        decoding: Decoding,
        microbatch: int,
        copies: WeightCopies,
        chunk: int = 256,
        mask_truncated: bool = False,
        engine: Engine | None = None,
        tolerance: Tolerance = Tolerance(),  # noqa: B008, it is frozen
        any_rank: Callable[[bool], bool] = bool,
        head: TokenValues | None = None,
    ) -> None:
        if decoding.temperature == 0:
            raise ValueError("a rollout at temperature 0 does not explore and has no log-probabilities; give a temperature above 0")
        self.model = model
        self.module: nn.Module = model.module
        self.decoding = decoding
        self.microbatch = microbatch
        self.copies = copies
        self.chunk = chunk
        self.mask_truncated = mask_truncated
        self.decoder = CachedDecoding(model, any_rank=any_rank)
        self.engine: Engine = self.decoder if engine is None else engine
        self.tolerance = tolerance
        self.head = head

    # Acting

    @torch.no_grad()
    def rollout(self, batch: Batch) -> AutoregressiveTrajectory:
        """Write a completion for each row. ``outputs``: (b,) of ``Completion``. EngineFault: the engine failed, or
        its log-probabilities differ too much from the policy's."""
        prompts = self.model.encode(batch.tasks)
        completion = self.engine(batch, prompts, self.decoding)
        if self.decoding.truncates and completion.support is None:
            raise ValueError("this engine does not say which ids top_k and top_p left; sample with top_k None and top_p 1.0")
        trajectory = self._trajectory(batch, prompts, completion)
        slices = list(self.microbatches(trajectory))
        if self.head is not None:
            values = [self._values(self._chosen(self.model.module, trajectory, part), trajectory, part) for part in slices]
            trajectory = replace(trajectory, values=torch.cat(values))
        if self.engine.exact:
            return trajectory
        parts = [self._measure(self.model.module, trajectory, part) for part in slices]
        ours, theirs = torch.cat(parts), trajectory.log_probs
        self.tolerance.check(ours, theirs, trajectory.mask)
        return replace(trajectory, log_probs=ours, behaviour_log_probs=theirs)

    @torch.no_grad()
    def sample(self, batch: Batch) -> AutoregressiveTrajectory:
        """Write the likeliest token each time, by the averaged weights where there are any; ``log_probs`` are NaN."""
        greedy = replace(self.decoding, temperature=0.0)
        with self.copies.using("average") if "average" in self.copies.copies else nullcontext():
            prompts = self.model.encode(batch.tasks)
            return self._trajectory(batch, prompts, self.decoder(batch, prompts, greedy))

    @torch.no_grad()
    def demonstrate(self, batch: Batch) -> AutoregressiveTrajectory:
        """The tasks' own completions (``completion`` in their meta), as if they had been written; ``log_probs`` are NaN."""
        prompts = self.model.encode(batch.tasks)
        told = demonstrated(self.model, batch, longest=self.decoding.max_new_tokens, device=prompts.ids.device)
        return self._trajectory(batch, prompts, told)

    def _trajectory(self, batch: Batch, prompts: Prompts, completion: Generation) -> AutoregressiveTrajectory:
        grammar, ids = self.model.grammar, completion.ids
        group = torch.tensor(batch.group, device=ids.device)
        vocabulary, forced = (column[:, :-1] for column in grammar.parse(prompts.take(group), ids))
        written = torch.arange(ids.shape[1], device=ids.device) < completion.lengths[:, None]
        cut_off = ~torch.isin(
            ids.gather(1, completion.lengths[:, None] - 1)[:, 0], torch.tensor(self.model.stop, device=ids.device)
        )
        mask = written & (forced < 0)
        if self.mask_truncated:
            mask = mask & ~cut_off[:, None]
        return AutoregressiveTrajectory(
            log_probs=completion.log_probs,
            mask=mask,
            kind=torch.tensor(grammar.kinds, device=ids.device)[vocabulary],
            outputs=self._outputs(batch, ids, completion.lengths, cut_off),
            ids=ids,
            lengths=completion.lengths,
            vocabulary=vocabulary,
            support=completion.support,
            prompts=prompts,
            group=group,
            behaviour_log_probs=None,
        )

    def _outputs(self, batch: Batch, ids: Tensor, lengths: Tensor, cut_off: Tensor) -> tuple[Completion, ...]:
        outputs = []
        keys = [(batch.seed, batch.step, batch.group_ids[k], slot) for k, slot in zip(batch.group, batch.slot, strict=True)]
        for row, length, cut, key in zip(ids.tolist(), lengths.tolist(), cut_off.tolist(), keys, strict=True):
            said = tuple(row[: length if cut else length - 1])
            outputs.append(Completion(said, self.model.decode(said), cut, key))
        return tuple(outputs)

    # Evaluating

    def microbatches(self, trajectory: AutoregressiveTrajectory) -> Iterator[Slice]:
        """All actions of a few rows: as many slices on every rank as there are equally many rows."""
        rows, actions = trajectory.mask.shape
        for row in range(0, rows, self.microbatch):
            yield Slice(slice(row, min(row + self.microbatch, rows)), slice(0, actions))

    def order_by_length(self, trajectory: AutoregressiveTrajectory) -> Int[Tensor, " b"]:
        """An order of the rows in which neighbours have alike many tokens to read, so that a microbatch is padded little.

        Rows that fit into one microbatch stay as they are.
        """
        if len(trajectory) <= self.microbatch:
            return torch.arange(len(trajectory), device=trajectory.lengths.device)
        lengths, prompts = trajectory.lengths.tolist(), trajectory.prompts.mask.sum(1)[trajectory.group].tolist()
        keys = list(zip(lengths, prompts, trajectory.group.tolist(), strict=True))  # rows of one task share its prompt
        return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), device=trajectory.lengths.device)

    def evaluate(self, trajectory: AutoregressiveTrajectory, part: Slice, needs: Needs) -> Evaluation:
        """Log-probabilities of the stored ids under the current weights; entropy, and k3 KL to the reference where asked for.

        ``scale``: what the tokens of another engine weigh, where the tolerance weights them.
        """
        if needs.kl not in (None, "k3") or needs.log_ratio != "plain" or (needs.values and self.head is None):
            raise ValueError(f"{needs}: tokens have the k3 KL and the plain ratio, and values where the policy has a head")
        mask = trajectory.mask[part.rows, part.actions]
        reference = None
        if needs.kl is not None:  # first: a copy that waits elsewhere is gone again before the activations come
            with torch.no_grad(), self.copies.using("reference"):
                reference = self._measure(self.model.module, trajectory, part)
        states = self._chosen(self.module, trajectory, part)
        log_probs, entropy = self._measured(self.module, states, trajectory, part, with_entropy=needs.entropy)
        values = self._values(states, trajectory, part) if needs.values else None
        # What is stored for a masked action may be anything.
        acted = trajectory.log_probs[part.rows, part.actions].masked_fill(~mask, 0.0)
        kl = None if reference is None else k3(log_probs, reference, mask=mask)
        scale = None
        if trajectory.behaviour_log_probs is not None and self.tolerance.cap is not None:
            theirs = trajectory.behaviour_log_probs[part.rows, part.actions]
            scale = importance(acted, theirs, mask, cap=self.tolerance.cap)
        return Evaluation(log_probs, log_probs - acted, kl=kl, values=values, entropy=entropy, scale=scale)

    def _values(self, states: Tensor, trajectory: AutoregressiveTrajectory, part: Slice) -> Float[Tensor, "r t"]:
        """What the head expects before each token, 0 where there was no choice."""
        assert self.head is not None, "values are asked of a policy with a value head"
        return spread(self.head(states), trajectory.mask[part.rows, part.actions])

    def _measure(self, module: nn.Module, trajectory: AutoregressiveTrajectory, part: Slice) -> Float[Tensor, "r t"]:
        """Log-probabilities alone."""
        return self._measured(module, self._chosen(module, trajectory, part), trajectory, part)[0]

    def _measured(
        self,
        module: nn.Module,
        states: Float[Tensor, "n d"],
        trajectory: AutoregressiveTrajectory,
        part: Slice,
        *,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(r, t) log-probabilities and entropies, 0 where there was no choice, from the ``_chosen`` states."""
        mask = trajectory.mask[part.rows, part.actions]
        columns = _written(trajectory, part)
        choice = trajectory.mask[part.rows, columns]
        support = None if trajectory.support is None else trajectory.support[part.rows, columns][choice]
        log_probs, entropy = measure(
            self.model,
            module,
            states,
            trajectory.ids[part.rows, columns][choice],
            vocabulary=trajectory.vocabulary[part.rows, columns][choice],
            support=support,
            temperature=self.decoding.temperature,
            chunk=self.chunk,
            with_entropy=with_entropy,
        )
        return spread(log_probs, mask), None if entropy is None else spread(entropy, mask)

    def _chosen(self, module: nn.Module, trajectory: AutoregressiveTrajectory, part: Slice) -> Float[Tensor, "n d"]:
        """The states before the tokens that were a choice."""
        columns = _written(trajectory, part)
        states = self._states(module, trajectory, part.rows, columns.stop)[:, columns]
        return states[trajectory.mask[part.rows, columns]]

    def _states(self, module: nn.Module, trajectory: AutoregressiveTrajectory, rows: slice, end: int) -> Float[Tensor, "r end d"]:
        """The states before the first ``end`` tokens of each row."""
        ids, group = trajectory.ids[rows, :end], trajectory.group[rows]
        written = torch.arange(end, device=ids.device) < trajectory.lengths[rows, None]
        if not self.model.shares_prompts:
            return self.model.states(module, trajectory.prompts.take(group), ids, written)
        tasks, index = group.unique(return_inverse=True)
        prompts = trajectory.prompts.take(tasks)
        first, cache = self.model.prefill(module, prompts)
        # All but the last token; the first also where it is the last, so that ranks make equal numbers of forwards.
        before = max(end - 1, 1)
        rest = self.model.extend(
            module,
            ids[:, :before],
            mask=torch.cat([prompts.mask[index], written[:, :before]], dim=1),
            positions=prompts.next_positions()[index, None] + torch.arange(before, device=ids.device),
            cache=self.model.select(cache, index),
        )
        return torch.cat([first[index, None], rest], dim=1)[:, :end]


def _written(trajectory: AutoregressiveTrajectory, part: Slice) -> slice:
    """The slice's columns, without those at its end in which none of its rows has written."""
    end = min(part.actions.stop, int(trajectory.lengths[part.rows].max()))
    return slice(part.actions.start, max(part.actions.start, end))
