"""Memory plans of published models, from the configurations in the folders of their model families."""

from retouch.memory.plan import MemoryPlan, Setup, plan_parts
from retouch.models.base import DiffusersModel


def plan(model: DiffusersModel, setup: Setup) -> MemoryPlan:
    described = model.published()
    assert described is not None
    return plan_parts(described, setup, shape=model.shape(described["transformer"]))
