"""MMMG's knowledge fidelity: the edit distance of small graphs is exact, and a missing answer gives missing scores."""

import itertools
import json

import pytest
from PIL import Image

from judge_double import on_panel
from retouch.types import Sample, Task
from retouch_judge.base import Panel
from retouch_judge.questions import Answer
from retouch_judge.rewards import KnowledgeGraph, MmmgReward

GRAPH = {
    "elements": ["Sun", "Water cycle", "rain", "river"],
    "dependencies": ["Causes(Sun, rain)", "Requires(river, rain)", "Defines(water, river)", "Contains(moon, sun)"],
}
# The edges of each dependency. "water" matches "Water cycle", the only element with this word; no element matches "moon".
EDGES = ([("sun", "rain")], [("rain", "river")], [("water cycle", "river"), ("river", "water cycle")], [])


def task(graph=GRAPH):
    return Task("t", "the water cycle", meta={"Knowledge_Graph": graph, "Annotation": {"Causes(Sun, rain)": "heat lifts water"}})


def graph_of(shown):
    """Nodes and edges of what is shown, as MMMG's code builds them."""
    nodes = [element.lower() for element, seen in zip(GRAPH["elements"], shown[:4], strict=True) if seen]
    return nodes, {edge for edges, seen in zip(EDGES, shown[4:], strict=True) for edge in edges if seen and set(edge) <= set(nodes)}


def distance(one, other):
    """The edit distance of unlabelled graphs: the least over all ways to match nodes, or to leave them unmatched."""
    (nodes, edges), (others, other_edges) = one, other
    found = []
    for matched in itertools.permutations([*others, *[None] * len(nodes)], len(nodes)):
        pairs = dict(zip(nodes, matched, strict=True))
        kept = {(pairs[first], pairs[second]) for first, second in edges} & other_edges
        alike = sum(match is not None for match in matched)
        found.append(len(nodes) + len(others) - 2 * alike + len(edges) + len(other_edges) - 2 * len(kept))
    return min(found)


@pytest.mark.parametrize("kind", [dict, str])
def test_fidelity_is_one_minus_the_normalised_edit_distance(kind):
    graph = KnowledgeGraph.of(task(GRAPH if kind is dict else json.dumps(GRAPH)))
    whole = graph_of((True,) * 8)
    assert graph.size([True] * 8) == 4 + 4
    for shown in itertools.islice(itertools.product([True, False], repeat=8), 0, 256, 23):
        part = graph_of(shown)
        size = sum(len(each) for each in (*whole, *part))
        assert graph.fidelity(shown) == pytest.approx(1 - distance(whole, part) / size), shown


class Client:
    """Gives the same answers to every question."""

    identity = "client"

    def __init__(self, scores):
        self.scores = scores
        self.questions: list[object] = []

    def ask(self, questions):
        self.questions += questions
        return [Answer(scores=self.scores) for _ in questions]


def test_columns_are_computed_from_the_answered_graph():
    answers = {"e1": 1.0, "e2": 1.0, "e3": 1.0, "e4": 0.0, "d1": 1.0, "d2": 1.0, "d3": 0.0, "d4": 0.0}
    client = Client(answers)
    reward = on_panel(MmmgReward, Panel(client, repeats=1))
    scores = reward([Sample(task(), Image.new("RGB", (8, 8)))])
    assert scores["fidelity"].item() == pytest.approx(2 * 4 / (8 + 4))  # 3 of 4 elements and 1 of 4 edges
    assert (scores["elements"].item(), scores["dependencies"].item()) == (0.75, 0.5)
    (question,) = client.questions
    assert "Requires(river, rain)" in str(question.parts)
    assert "heat lifts water" in str(question.parts)
    assert reward([])["fidelity"].shape == (0,)
    del client.scores["d4"]
    assert all(column.isnan().all() for column in reward([Sample(task(), Image.new("RGB", (8, 8)))]).values())


def test_a_task_without_a_graph_is_refused():
    for graph in (None, "{", {}, {"elements": []}, {"elements": ["sun"], "dependencies": "none"}):
        with pytest.raises(ValueError, match="'t' has no knowledge graph"):
            KnowledgeGraph.of(task(graph))
