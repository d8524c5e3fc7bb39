"""Diffusion DPO (Wallace et al. 2023, arXiv 2311.12908, for flow matching as in Flow-DPO, Liu et al. 2025, arXiv 2501.13918).

A pair is the best and the worst image of a group that the policy sampled, or a chosen and a rejected image of the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.config.section import Positive
from retouch.objectives.nft import AgainstOld, SampledPoints, relative_error, squared_distance
from retouch.protocols import VelocityPolicy
from retouch.types import Batch, Loss, Minibatch, Scores, Trajectory

if TYPE_CHECKING:
    from jaxtyping import Float
    from PIL.Image import Image
    from torch import Tensor

HELDOUT_POINTS = 8
"""Number of points of the forward process at which the margin of a held-out pair is measured."""


class ForwardPreference(SampledPoints):
    """An objective that compares the images of a group by how much their squared errors have fallen relative to the reference."""

    needs_velocities: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = True
    needs_both_signs: ClassVar[bool] = True
    purpose: ClassVar[str]
    """Keys the points of the objective."""

    @property
    def weight_copies(self) -> frozenset[str]:
        return frozenset({"reference"})

    def _improvement(
        self, policy: VelocityPolicy, trajectory: Trajectory, batch: Batch, rows: slice, *, epoch: int, draw: int
    ) -> Float[Tensor, " r"]:
        """How much each row's squared error has fallen relative to the reference, at the point of its group."""
        x0 = trajectory.outputs[rows]
        of_group = replace(batch, slot=(0,) * len(batch))  # the point depends on the group alone
        x, noise, sigma = self.draw_points(x0, of_group, rows, purpose=self.purpose, epoch=epoch, draw=draw)
        velocity = policy.velocity(trajectory, rows, x, sigma, "current")
        reference = policy.velocity(trajectory, rows, x, sigma, "reference")
        return squared_distance(reference, noise - x0) - squared_distance(velocity, noise - x0)


class DPO(ForwardPreference):
    """Diffusion DPO: one image of a pair is preferred to the other. Loss of a pair:
    - log sigmoid(- beta [ (e(best) - e_ref(best)) - (e(worst) - e_ref(worst)) ]).

    e is the squared error of the velocity, a mean over a latent's elements, at one point of the forward process; both images of a
    pair use the same noise and sigma. A pair has the weight of its group. A group has weight 0 if its advantages are equal, or if
    it has fewer than two scored images. Such groups still count in the mean over groups: ``policy/pairs`` is the share of the
    groups that have a pair, and the loss, its gradient and ``policy/preferred`` are proportional to it.

    With ``pairs: 'data'`` nothing is sampled and no reward is needed: ``group_size`` is 2, and each task must have a ``chosen`` and
    a ``rejected`` image. Evaluation then reports ``pairs/preferred``, the share of held-out pairs in the right order, and
    ``pairs/margin``, the mean difference of the implicit rewards.

    Example::

        >>> retouch.DPO(beta=1000.0).beta
        1000.0
    """

    kind: Literal["dpo"] = "dpo"
    beta: Positive = 2000.0
    """The paper's beta T: larger values stay closer to the reference."""
    pairs: Literal["group", "data"] = "group"
    """Which images are compared. ``group``: the best and the worst image of each group of samples. ``data``: the images ``chosen``
    and ``rejected`` of the data."""

    purpose: ClassVar[str] = "dpo"

    @property
    def imitates(self) -> bool:  # type: ignore[override]
        return self.needs_pairs

    @property
    def needs_pairs(self) -> bool:  # type: ignore[override]
        return self.pairs == "data"

    @property
    def heldout_columns(self) -> Mapping[str, Literal["share", "mean"]]:
        return {"pairs/preferred": "share", "pairs/margin": "mean"} if self.needs_pairs else {}

    def measure(self, policy: VelocityPolicy, batch: Batch) -> Scores:
        """Whether the implicit reward of each pair's chosen image is larger than that of its rejected image, and by how much.

        The implicit reward of an image (Rafailov et al. 2023, arXiv 2305.18290) is, up to a constant, beta (e_ref - e), a mean over
        ``HELDOUT_POINTS`` points. The points depend only on the batch, so all evaluations of a run use the same points.
        """
        import torch

        with torch.no_grad():
            trajectory = self.demonstrate(policy, batch)
            margins = torch.zeros(len(batch) // 2)
            for draw in range(HELDOUT_POINTS):
                for rows in _whole_pairs(policy, trajectory):
                    improvement = self._improvement(policy, trajectory, batch, rows, epoch=0, draw=draw).cpu()
                    margins[rows.start // 2 : rows.stop // 2] += improvement[0::2] - improvement[1::2]
        return {"pairs/preferred": (margins.sign() + 1) / 2, "pairs/margin": self.beta * margins / HELDOUT_POINTS}

    def demonstrate(self, policy: VelocityPolicy, batch: Batch) -> Trajectory:
        """Encode the chosen (slot 0) and the rejected image (slot 1) of each task. Raises ValueError if a task lacks one."""
        found: list[Image] = []
        for group, slot in zip(batch.group, batch.slot, strict=True):
            task = batch.tasks[group]
            if task.chosen is None or task.rejected is None:
                advice = "add both to the data, or use objective.pairs group"
                raise ValueError(f"task {task.id} has no chosen and rejected image; {advice}")
            found.append(task.rejected if slot else task.chosen)
        return policy.demonstrate(batch, images=found)

    def losses(self, policy: VelocityPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        """Yield one share per group and draw, even for a group without a pair, so that all ranks yield equally many. With ``pairs:
        'data'``, yield one share per microbatch and draw."""
        from torch.nn.functional import logsigmoid

        improvement_of = partial(self._improvement, policy, minibatch.trajectory, minibatch.batch, epoch=minibatch.epoch)
        if self.needs_pairs:  # rows in the order chosen, rejected, chosen, ...; a forward pass computes several pairs
            assert minibatch.batch.slot == (0, 1) * (len(minibatch.batch) // 2), "check_ranks keeps pairs whole"
            weights = minibatch.weights.sum(dim=1).view(-1, 2).sum(dim=1) / self.samples
            for draw in range(self.samples):
                for rows in _whole_pairs(policy, minibatch.trajectory):
                    improvement = improvement_of(rows, draw=draw)
                    margin = improvement[0::2] - improvement[1::2]
                    weight = weights[rows.start // 2 : rows.stop // 2]
                    value = -(weight * logsigmoid(self.beta * margin)).sum()
                    sums = {
                        "policy/loss": value.detach(),
                        "policy/preferred": (weight * (margin.detach() > 0)).sum(),
                        "policy/margin": (weight * self.beta * margin.detach()).sum(),
                    }
                    yield Loss(value, sums)
            return
        weights = minibatch.weights.sum(dim=1)
        for draw in range(self.samples):
            for members in [
                [row for row, of in enumerate(minibatch.batch.group) if of == number]
                for number in sorted(set(minibatch.batch.group))
            ]:
                # The rows with the largest and the smallest advantage among those with weight; the same row twice if all are equal.
                counted = [row for row in members if minibatch.weights[row].sum() > 0] or [members[0]]
                advantages = minibatch.advantages[counted, 0]
                best, worst = counted[int(advantages.argmax())], counted[int(advantages.argmin())]
                weight = weights[members].sum() / self.samples * float(best != worst)
                # How much more the error of the best image has fallen, relative to the reference, than that of the worst image.
                low, high = sorted((best, worst))
                rows = slice(low, high + 1, max(1, high - low))
                improvement = improvement_of(rows, draw=draw)
                margin = improvement[0 if best == low else -1] - improvement[0 if worst == low else -1]
                value = -weight * logsigmoid(self.beta * margin)
                sums = {"policy/loss": value.detach(), "policy/preferred": weight * (margin.detach() > 0), "policy/pairs": weight}
                yield Loss(value, sums)


class WholeGroups(SampledPoints):
    """An objective whose loss of a group depends on one gain of each of its images: how much better the image fits the policy."""

    needs_velocities: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = True
    needs_both_signs: ClassVar[bool] = True

    def losses(self, policy: VelocityPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        """Yield one share per draw and microbatch of a group.

        The slope of the loss in a row's gain depends on the whole group. It is computed first, without gradient if the group has
        several microbatches; then the loss of a row is linear in its gain. The gradient equals that of the loss of the group.
        """
        import torch

        size = next(iter(policy.row_slices(minibatch.trajectory))).stop
        row_weights = minibatch.weights.sum(dim=1) / self.samples
        for draw in range(self.samples):
            for number in sorted(set(minibatch.batch.group)):
                members = [row for row, of in enumerate(minibatch.batch.group) if of == number]
                group = slice(members[0], members[-1] + 1)
                parts = [slice(row, min(row + size, group.stop)) for row in range(group.start, group.stop, size)]
                with torch.set_grad_enabled(len(parts) == 1):
                    found = [self._gain(policy, minibatch, rows, draw) for rows in parts]
                weights, advantages = row_weights[group], minibatch.advantages[group, 0]
                gains = torch.cat([gain for gain, *_ in found]).detach()
                loss, slopes, told = self._group_loss(gains, advantages, (weights > 0).to(weights.dtype))
                for rows, first in zip(parts, found, strict=True):
                    gain, penalty, of_rows = first if len(parts) == 1 else self._gain(policy, minibatch, rows, draw)
                    slope = slopes[rows.start - group.start : rows.stop - group.start]
                    linear = (weights.sum() * slope * gain).sum()
                    value = weights.sum() * loss / len(parts) + linear - linear.detach() + (row_weights[rows] * penalty).sum()
                    sums = {"policy/loss": value.detach()}
                    sums |= {name: weights.sum() * each / len(parts) for name, each in told.items()}
                    sums |= {name: (row_weights[rows] * each).sum() for name, each in of_rows.items()}
                    yield Loss(value, sums)

    def _gain(
        self, policy: VelocityPolicy, minibatch: Minibatch, rows: slice, draw: int
    ) -> tuple[Float[Tensor, " r"], Float[Tensor, " r"], dict[str, Float[Tensor, " r"]]]:
        """The gain of each row, a penalty that is added to the loss of the row, and metrics of the penalty."""
        raise NotImplementedError

    def _group_loss(
        self, gains: Float[Tensor, " n"], advantages: Float[Tensor, " n"], scored: Float[Tensor, " n"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " n"], dict[str, Float[Tensor, ""]]]:
        """The loss of a group, its derivative by each gain, and metrics. ``scored``: 1 for an image with a score, else 0."""
        raise NotImplementedError


class DGPO(ForwardPreference, WholeGroups):
    """Direct group preference optimisation: the good images of a group are preferred to its bad ones. Loss of a group:
    - log sigmoid(- beta mean_i A_i (e_i - e_ref_i)).

    A_i is the advantage; its sign puts an image among the good or the bad ones, and its size is the image's weight. e is as in
    ``DPO``, at one noise and sigma for the whole group; the mean is over the scored images. So, unlike in ``DPO``, all images of a
    group train. A group has the weight of its scored images, and 0 if its advantages are equal; ``policy/pairs`` and
    ``policy/preferred`` are as in ``DPO``. Images can be sampled by transition ``ode``.

    Source: Luo et al. 2025 (arXiv 2510.08425); the mean over the group is that of their code, whose optional clip is left out.

    Example::

        >>> retouch.DGPO(beta=100.0).samples
        1
    """

    kind: Literal["dgpo"] = "dgpo"
    beta: Positive = 100.0
    """Larger values stay closer to the reference; the published code uses 10 to 100."""

    purpose: ClassVar[str] = "dgpo"

    def _gain(
        self, policy: VelocityPolicy, minibatch: Minibatch, rows: slice, draw: int
    ) -> tuple[Float[Tensor, " r"], Float[Tensor, " r"], dict[str, Float[Tensor, " r"]]]:
        gain = self._improvement(policy, minibatch.trajectory, minibatch.batch, rows, epoch=minibatch.epoch, draw=draw)
        return gain, gain.new_zeros(gain.shape), {}

    def _group_loss(
        self, gains: Float[Tensor, " n"], advantages: Float[Tensor, " n"], scored: Float[Tensor, " n"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " n"], dict[str, Float[Tensor, ""]]]:
        from torch.nn.functional import softplus

        pull = self.beta * advantages * scored / scored.sum().clamp(min=1)
        margin, differ = (pull * gains).sum(), pull.any().to(pull.dtype)
        told = {"policy/preferred": differ * (margin > 0), "policy/pairs": differ}
        return differ * softplus(-margin), -(-margin).sigmoid() * pull, told  # softplus(-x) = -log sigmoid(x)


class CRD(AgainstOld, WholeGroups):
    """Centred reward distillation: the implicit rewards of a group follow its rewards. Loss of a group:
    mean_i (beta (r_i - mean r) - (R_i - mean R))^2 advantage_clip / beta, a mean over the scored images, and for each of them
    reference_weight |v - v_ref|^2.

    r_i = e_old_i / |e_old_i| - e_i / |e_i| is the implicit reward of an image: e is the squared error of the current velocity and
    e_old that of the old one, at one point of the forward process that is the image's own, and |e| the mean absolute error,
    detached and at least 1e-5; all are means over a latent's elements. R = clip(A / (2 advantage_clip) + 1/2, 0, 1) as in ``NFT``.
    The constant that implicit rewards of one prompt share cancels in the differences to the mean. Images are sampled by the current
    policy. Equal rewards pull the policy towards the old one. ``policy/preferred``: the share of the groups whose implicit rewards
    rise with their rewards.

    Source: Zhu et al. 2026 (arXiv 2603.14128), with equal weights in the means; there the reference has guidance, and the weight of
    its distance grows with the reward.

    Example::

        >>> retouch.CRD(beta=1.0).advantage_clip
        5.0
    """

    kind: Literal["crd"] = "crd"
    beta: Positive = 1.0
    """Scale of the implicit rewards; larger values stay closer to the old policy."""

    def _gain(
        self, policy: VelocityPolicy, minibatch: Minibatch, rows: slice, draw: int
    ) -> tuple[Float[Tensor, " r"], Float[Tensor, " r"], dict[str, Float[Tensor, " r"]]]:
        x0 = minibatch.trajectory.outputs[rows]
        x, noise, sigma = self.draw_points(x0, minibatch.batch, rows, purpose="crd", epoch=minibatch.epoch, draw=draw)
        now, old = (policy.velocity(minibatch.trajectory, rows, x, sigma, which) for which in ("current", "old"))
        gain = relative_error(old - (noise - x0)) - relative_error(now - (noise - x0))
        if not self.compares_reference:
            return gain, gain.new_zeros(gain.shape), {}
        return gain, *self.penalty(now, policy.velocity(minibatch.trajectory, rows, x, sigma, "reference"))

    def _group_loss(
        self, gains: Float[Tensor, " n"], advantages: Float[Tensor, " n"], scored: Float[Tensor, " n"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " n"], dict[str, Float[Tensor, ""]]]:
        share, scale = scored / scored.sum().clamp(min=1), self.advantage_clip / self.beta
        wanted = self.goodness(advantages)
        wanted = wanted - (share * wanted).sum()
        error = self.beta * (gains - (share * gains).sum()) - wanted
        told = {"policy/preferred": ((share * gains * wanted).sum() > 0).to(share.dtype)}
        return scale * (share * error.square()).sum(), 2 * scale * self.beta * share * error, told


def _whole_pairs(policy: VelocityPolicy, trajectory: Trajectory) -> Iterator[slice]:
    """Slices of whole pairs, each with at most as many rows as the policy's microbatch, but at least one pair."""
    first = next(iter(policy.row_slices(trajectory)))
    rows = max(2, (first.stop - first.start) // 2 * 2)
    for start in range(0, len(trajectory), rows):
        yield slice(start, min(start + rows, len(trajectory)))
