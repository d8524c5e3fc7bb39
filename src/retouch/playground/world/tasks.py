"""Playground tasks: a source picture, an instruction and the exact target picture, made when they are asked for.

Splits differ in their scenes and in what their instructions ask for (whatever the words): each is hashed to one of ten buckets, of
which test has the first, validation the second and train the rest, and a draw from another split is drawn again.
"""

import hashlib
import json
from collections.abc import Sequence

import torch

from retouch.core.random import generator
from retouch.playground.world.drawn import DrawnTasks, Mixture, Split, drawn_number, require_mixture
from retouch.playground.world.draws import Draws
from retouch.playground.world.edits import MOST_EDITS, Edit, apply, edits_of_kinds, random_kinds, things_needed, vain_edit
from retouch.playground.world.instructions import content, instruction, untouched
from retouch.playground.world.scenes import Scene, random_scene, render
from retouch.types import Task

# Chosen so that every kind of single edit, also removals with only 18 contents, has several in every split.
_SALT = "retouch playground 818"


def split_of(text: str) -> Split:
    """The split that a scene's canonical JSON or an instruction's content belongs to: a tenth each for test and validation."""
    bucket = int.from_bytes(hashlib.sha256(f"{_SALT} {text}".encode()).digest()[:8], "big") % 10
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def canonical(scene: Scene) -> str:
    """The scene's JSON without spaces, keys sorted: what its split hangs on."""
    return json.dumps(scene.to_json(), sort_keys=True, separators=(",", ":"))


class PlaygroundTasks(DrawnTasks):
    """``count`` tasks; task i depends on (seed, split, i) and on ``complexity`` and ``filler`` alone.

    ``complexity``: the numbers of edits in an instruction, 1 to 4: a sequence is cycled through, a mapping gives drawing weights.
    ``filler``: the share of instructions with words that ask for nothing; ``vain``: of those that also ask for one or two edits of
    things that are not there. A task has the source in ``images``, the exact ``target``, the tags ``complexity`` ("2") and
    ``kinds`` ("add+move"), and in ``meta`` the ``scene`` and the ``edits`` as JSON.

    Example: ``PlaygroundTasks(seed=0, count=1000, complexity=[1], split="train", filler=0.25)[0].instruction``
    """

    def __init__(
        self,
        *,
        seed: int,
        count: int,
        complexity: Mixture,
        split: Split,
        filler: float = 0.0,
        vain: float = 0.0,
    ) -> None:
        super().__init__(seed=seed, count=count, split=split)
        if not 0.0 <= filler <= 1.0 or not 0.0 <= vain <= 1.0:
            raise ValueError(f"filler and vain lie in 0 to 1, not {filler} and {vain}")
        require_mixture(complexity, most=MOST_EDITS, of="edits")
        self.filler, self.vain, self.complexity = filler, vain, complexity

    def _draw(self, index: int) -> tuple[Scene, tuple[Edit, ...], str]:
        """A scene, edits and text of this split."""
        random = generator(self.seed, "playground", self.split, index)
        draws = Draws(random)
        filler = draws.uniform() < self.filler
        kinds = random_kinds(drawn_number(self.complexity, index, draws), random)
        while True:
            scene = random_scene(random, least=things_needed(kinds))
            if split_of(canonical(scene)) != self.split:
                continue
            for _ in range(8):
                edits = edits_of_kinds(scene, kinds, random)
                if edits is not None and split_of(content(edits)) == self.split:
                    vain = self._vain(scene, edits, random)
                    return scene, edits, instruction(edits, untouched(scene, edits), random, filler=filler, vain=vain)

    def _vain(self, scene: Scene, edits: Sequence[Edit], random: torch.Generator) -> list[Edit]:
        """One or two edits of things that are not there, as far as ``MOST_EDITS`` clauses allow, for some instructions."""
        if self.vain == 0.0:
            return []
        draws = Draws(random)
        if draws.uniform() >= self.vain:
            return []
        made: list[Edit] = []
        wanted = min(1 + draws.below(2), MOST_EDITS - len(edits))
        while len(made) < wanted:
            edit = vain_edit(scene, edits, random)
            if split_of(content([edit])) == self.split and edit.thing not in [other.thing for other in made]:
                made.append(edit)
        return made

    def _task(self, index: int) -> Task:
        scene, edits, text = self._draw(index)
        digest = hashlib.sha256(f"{canonical(scene)} {text}".encode()).hexdigest()[:8]
        return Task(
            id=f"playground/{self.split}/seed{self.seed}/{index:06d}-{digest}",
            instruction=text,
            images=(render(scene),),
            target=render(apply(scene, edits)),
            tags={"complexity": str(len(edits)), "kinds": "+".join(sorted(edit.kind for edit in edits))},
            meta={"scene": scene.to_json(), "edits": [edit.to_json() for edit in edits]},
        )
