"""The made-up tasks of a dry run have the sizes of the recipe's own."""

import pytest

from retouch.recipe.recipe import load
from retouch_plan.dry_run import made_up_task


@pytest.mark.parametrize(
    ("recipe", "changes", "size"),
    [
        ("recipes/quickstart.jsonnet", [], (24, 24)),
        ("recipes/qwen-image-edit/flow-grpo.jsonnet", ["policy.model.size=[512,768]"], (768, 512)),
        ("recipes/qwen-image-edit/flow-grpo.jsonnet", ["policy.model.size=null"], (1024, 1024)),
    ],
)
def test_source_images_have_the_size_that_the_memory_plan_counts(recipe, changes, size):
    task = made_up_task(load(recipe, changes))
    assert [image.size for image in task.images] == [size]


def test_tasks_have_a_target_if_a_reward_with_gradient_compares_with_it():
    assert made_up_task(load("playground/draft")).target is not None
    assert made_up_task(load("quickstart")).target is None
