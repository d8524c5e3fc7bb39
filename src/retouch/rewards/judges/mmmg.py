"""Knowledge fidelity of MMMG (arXiv 2506.10963): the elements and dependencies of a knowledge graph that an image shows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retouch.rewards.judges.base import JudgeReward
from retouch.rewards.judges.rubrics import Prompt, Verdict, image_parts, quoted, rubric
from retouch.rewards.vlm.answers.wording import Scale
from retouch.rewards.vlm.forms import ScoresForm
from retouch.types import Column, Sample, Scores, Task

if TYPE_CHECKING:
    from torch import Tensor

GRAPHS = ("Knowledge_Graph", "Visual Components")
"""The keys of the graph in a task's ``meta``: the first in MMMG's test set, the second in its training set."""
NOTES = ("Annotation", "Key Knowledge")
"""The keys of the notes on the graph in a task's ``meta``."""
_YES = Scale(0, 1, whole=True)


class MmmgReward(JudgeReward):
    """The part of a task's knowledge graph that the image shows. Columns, each 0 to 1:

    ``fidelity``: 1 - GED / (nodes + edges of both graphs), where GED is the edit distance between the shown graph and the task's
    graph. ``elements``, ``dependencies``: the share of the elements and of the dependencies that the image shows; ``dependencies``
    is missing if the graph has none. An edge counts only if both of its elements are shown too. The judge answers 1 or 0 for each
    element and each dependency.

    Source: MMMG (arXiv 2506.10963). Its code uses networkx's first approximation of the distance, an upper bound; this reward
    computes the exact distance. MMMG's score multiplies the fidelity by a readability, computed from regions of SAM 2.1; this
    factor is not included.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.Mmmg(judge=judge).columns)
        ['fidelity', 'elements', 'dependencies']
    """

    kind: Literal["mmmg"] = "mmmg"

    columns: ClassVar[Mapping[str, Column]] = {
        "fidelity": Column(0.0, 1.0),
        "elements": Column(0.0, 1.0),
        "dependencies": Column(0.0, 1.0, diagnostic=True),
    }
    rubrics: ClassVar[tuple[str, ...]] = ("mmmg",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("mmmg", 1),)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError if a task has no knowledge graph in its ``meta``."""
        import torch

        if not samples:
            return {name: torch.zeros(0) for name in self.columns}
        graphs = [KnowledgeGraph.of(sample.task) for sample in samples]
        verdicts = self.panel.judge([_prompt(sample, graph) for sample, graph in zip(samples, graphs, strict=True)])
        table = torch.stack([_columns(graph, verdict) for graph, verdict in zip(graphs, verdicts, strict=True)])
        return dict(zip(self.columns, table.float().unbind(dim=1), strict=True))


@dataclass(frozen=True, slots=True)
class KnowledgeGraph:
    """A knowledge graph. ``elements``: their names. ``dependencies``: in MMMG's notation, ``Causes(rain, river)``. ``notes``:
    explanations of the elements and dependencies."""

    elements: tuple[str, ...]
    dependencies: tuple[str, ...]
    notes: Any = None

    @classmethod
    def of(cls, task: Task) -> KnowledgeGraph:
        """Read the graph in a task's ``meta``, which is JSON text or an object. Raises ValueError if there is none."""
        found = next((task.meta[key] for key in GRAPHS if task.meta.get(key)), None)
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except json.JSONDecodeError:
                found = None
        elements, dependencies = (_names(found, key) for key in ("elements", "dependencies"))
        if not elements or dependencies is None:
            raise ValueError(f"task {task.id!r} has no knowledge graph; its meta needs {GRAPHS[0]} with elements and dependencies")
        return cls(elements, dependencies, next((task.meta[key] for key in NOTES if task.meta.get(key)), None))

    @property
    def names(self) -> dict[str, str]:
        """The elements and dependencies by their short names (``e1``, ``d1``), which the judge uses in its answer."""
        elements = {f"e{k}": element for k, element in enumerate(self.elements, start=1)}
        return elements | {f"d{k}": dependency for k, dependency in enumerate(self.dependencies, start=1)}

    def size(self, shown: Sequence[bool]) -> int:
        """Return the number of nodes and edges of the shown graph. ``shown``: for each element, then for each dependency."""
        nodes = {element.lower() for element, seen in zip(self.elements, shown, strict=False) if seen}
        known = {element.lower() for element in self.elements}
        edges = set()
        for dependency, seen in zip(self.dependencies, shown[len(self.elements) :], strict=True):
            if seen:
                edges |= {edge for edge in _edges(dependency, known) if nodes.issuperset(edge)}
        return len(nodes) + len(edges)

    def fidelity(self, shown: Sequence[bool]) -> float:
        """Return 1 - the normalised edit distance. The shown graph is a subgraph, so the distance is the difference in size."""
        whole, part = self.size([True] * len(self.names)), self.size(shown)
        return 1 - (whole - part) / (whole + part)


def _names(graph: Any, key: str) -> tuple[str, ...] | None:
    """Return the distinct names in the list under ``key``; None if the graph has no such list."""
    names = graph.get(key) if isinstance(graph, Mapping) else None
    return tuple(dict.fromkeys(names)) if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def _edges(dependency: str, elements: set[str]) -> set[tuple[str, str]]:
    """Return the edges of ``Relation(one, other)`` between known elements: from one to other; for ``Requires`` from other to one;
    for ``Defines`` in both directions."""
    relation, _, inside = dependency.partition("(")
    ends = [_element(end.strip().lower(), elements) for end in inside.removesuffix(")").split(",", 1)]
    if len(ends) != 2:
        return set()
    one, other = ends
    if one is None or other is None:
        return set()
    match relation.strip().lower():
        case "requires":
            return {(other, one)}
        case "defines":
            return {(one, other), (other, one)}
    return {(one, other)}


def _element(name: str, elements: set[str]) -> str | None:
    """Return the element with this name; otherwise the only element whose name contains it or, if the name has several words, is
    contained in it. None if there is no such element, or more than one."""
    if name.startswith("change("):
        name = name.removeprefix("change(").removesuffix(")").strip()
    if name in elements:
        return name
    near = [element for element in elements if name in element or (" " in name and element in name)]
    return near[0] if len(near) == 1 else None


def _prompt(sample: Sample, graph: KnowledgeGraph) -> Prompt:
    facts = [quoted("Elements and dependencies", dict(graph.names))]
    if graph.notes is not None:
        facts.append(quoted("Notes on them", graph.notes))
    form = ScoresForm(dict.fromkeys(graph.names, _YES), max_tokens=2048)
    return Prompt(rubric("mmmg"), image_parts(sample, *facts), form)


def _columns(graph: KnowledgeGraph, verdict: Verdict) -> Tensor:
    """Return the three columns of a sample, (3,): means over the answers; NaN if an answer is missing."""
    import torch

    missing = torch.full((3,), float("nan"), dtype=torch.float64)
    if any(name not in verdict.scores for name in graph.names):
        return missing
    answers = torch.stack([verdict.scores[name] for name in graph.names])
    if answers.isnan().any():
        return missing
    count = len(graph.elements)
    fidelity = [graph.fidelity([bool(seen) for seen in answer]) for answer in answers.unbind(dim=1)]
    shares = [part.mean() for part in (answers[:count], answers[count:])]
    return torch.stack([torch.tensor(fidelity, dtype=torch.float64).mean(), *shares])
