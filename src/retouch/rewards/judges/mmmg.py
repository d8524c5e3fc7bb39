"""Knowledge fidelity of MMMG (arXiv 2506.10963): which elements and dependencies of a knowledge graph an image shows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retouch.rewards.judges.base import JudgeReward
from retouch.rewards.judges.panel import Prompt, Verdict
from retouch.rewards.judges.rubrics import image_parts, quoted, rubric
from retouch.rewards.vlm.answers.scales import Scale
from retouch.rewards.vlm.forms import ScoresForm
from retouch.types import Column, Sample, Scores, Task

if TYPE_CHECKING:
    from torch import Tensor

GRAPHS = ("Knowledge_Graph", "Visual Components")
"""The key of the graph in a task's ``meta``: in MMMG's test set, and in its training set."""
NOTES = ("Annotation", "Key Knowledge")
_YES = Scale(0, 1, whole=True)


class MmmgReward(JudgeReward):
    """How much of a task's knowledge graph the image shows. Columns, each 0 to 1:

    ``fidelity``: 1 - GED / (nodes + edges of both graphs), where GED is the edit distance of the graph of what is shown to the
    task's graph. ``elements``, ``dependencies``: the shares of them that are shown; ``dependencies`` is missing where the graph has
    none. An edge is counted where both of its elements are shown too. The judge answers 1 or 0 for each of them.

    Source: MMMG (arXiv 2506.10963). Its code takes networkx's first approximation of the distance, an upper bound; here it is
    exact. Its score multiplies this by a readability, from regions of SAM 2.1, which is not included.

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
        """Each column, (b,), float32. ValueError: a task without a knowledge graph in its ``meta``."""
        import torch

        if not samples:
            return {name: torch.zeros(0) for name in self.columns}
        graphs = [KnowledgeGraph.of(sample.task) for sample in samples]
        verdicts = self.panel.judge([_prompt(sample, graph) for sample, graph in zip(samples, graphs, strict=True)])
        table = torch.stack([_columns(graph, verdict) for graph, verdict in zip(graphs, verdicts, strict=True)])
        return dict(zip(self.columns, table.float().unbind(dim=1), strict=True))


@dataclass(frozen=True, slots=True)
class KnowledgeGraph:
    """``elements``: names. ``dependencies``: as MMMG writes them, ``Causes(rain, river)``. ``notes``: on their meaning."""

    elements: tuple[str, ...]
    dependencies: tuple[str, ...]
    notes: Any = None

    @classmethod
    def of(cls, task: Task) -> KnowledgeGraph:
        """The graph in a task's ``meta``, as JSON text or as a map. Raises ValueError if there is none."""
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
        """A short name for every element and dependency, by which the judge answers."""
        elements = {f"e{k}": element for k, element in enumerate(self.elements, start=1)}
        return elements | {f"d{k}": dependency for k, dependency in enumerate(self.dependencies, start=1)}

    def size(self, shown: Sequence[bool]) -> int:
        """The nodes and edges of the graph of what is shown: first each element, then each dependency."""
        nodes = {element.lower() for element, seen in zip(self.elements, shown, strict=False) if seen}
        known = {element.lower() for element in self.elements}
        edges = set()
        for dependency, seen in zip(self.dependencies, shown[len(self.elements) :], strict=True):
            if seen:
                edges |= {edge for edge in _edges(dependency, known) if nodes.issuperset(edge)}
        return len(nodes) + len(edges)

    def fidelity(self, shown: Sequence[bool]) -> float:
        """1 - the normalised edit distance. The shown graph is a part of the whole, so the distance is the difference in size."""
        whole, part = self.size([True] * len(self.names)), self.size(shown)
        return 1 - (whole - part) / (whole + part)


def _names(graph: Any, key: str) -> tuple[str, ...] | None:
    """The distinct names in a list of the graph; None if it has no such list."""
    names = graph.get(key) if isinstance(graph, Mapping) else None
    return tuple(dict.fromkeys(names)) if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def _edges(dependency: str, elements: set[str]) -> set[tuple[str, str]]:
    """The edges of ``Relation(one, other)`` between known elements: of ``Requires`` from the other, of ``Defines`` both ways."""
    relation, _, inside = dependency.partition("(")
    ends = [_element(end.strip().lower(), elements) for end in inside.removesuffix(")").split(",", 1)]
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        return set()
    one, other = ends
    match relation.strip().lower():
        case "requires":
            return {(other, one)}
        case "defines":
            return {(one, other), (other, one)}
    return {(one, other)}


def _element(name: str, elements: set[str]) -> str | None:
    """The element of that name; else the only one whose name contains it, or of which it contains the name as one of its words."""
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
    """The three columns of a sample, (3,): means over the answers, NaN if one is missing."""
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
