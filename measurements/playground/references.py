"""How much an IP-Adapter uses its reference images: compares the held-out scores of a run under three conditions.

    python measurements/playground/references.py runs/flux-fill-ip-adapter-grpo-playground

The conditions: the trained model as it is; with the adapter switched off; and with the references exchanged between the tasks,
while the judge still uses the right reference of each task.
"""

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from retouch.inference.opening import open_recipe, read_target
from retouch.models import ip_adapter
from retouch.rewards.judging import BatchScorer, ScoredBatch
from retouch.run.build import Assembly
from retouch.run.evaluation import Evaluator, build_evaluator, score_table
from retouch.types import Batch, Sample, Task


@dataclass(frozen=True)
class ByOwn:
    """Calls a scorer with the original tasks (``own``, by id) instead of the changed tasks that the policy was shown."""

    judge: BatchScorer
    own: Mapping[str, Task]

    def __call__(self, batch: Batch, samples: Sequence[Sample]) -> Future[ScoredBatch]:
        return self.judge(batch, [replace(sample, task=self.own[sample.task.id]) for sample in samples])


def exchanged(evaluate: Evaluator) -> Evaluator:
    """The same evaluation, but the policy gets the reference of the next task for each task."""
    tasks = evaluate.tasks
    shown = [replace(task, reference=other.reference) for task, other in zip(tasks, [*tasks[1:], tasks[0]], strict=True)]
    return replace(evaluate, tasks=shown, judge=ByOwn(evaluate.judge, {task.id: task for task in tasks}))


def switch_off(parts: Assembly) -> None:
    """Set the scale of all IP-Adapter layers to 0."""
    for part in ip_adapter.modules(parts.model.module):
        if hasattr(part, "to_k_ip"):
            part.scale = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the folder of a run with an IP-Adapter, or its recipe")
    recipe, folder = read_target(parser.parse_args().run)
    parts, step = open_recipe(recipe, folder, trained=folder is not None)
    evaluate, policy = build_evaluator(parts, parts.judge.for_split("heldout", 0)), parts.policy(parts.recipe.rollout)
    found = {f"as it is (step {step})": evaluate(policy), "another's reference": exchanged(evaluate)(policy)}
    switch_off(parts)
    found["switched off"] = evaluate(policy)
    ceiling = evaluate.ceiling(policy)
    if ceiling is not None:
        found["right picture"] = ceiling
    parts.judge.close()
    for name, evaluated in found.items():
        means = score_table(evaluated)[0]["all"]
        print(f"{name:24}" + "  ".join(f"{column} {value:.3f}" for column, value in means.items() if isinstance(value, float)))


if __name__ == "__main__":
    main()
