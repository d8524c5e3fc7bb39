"""`retouch playground build --emu3`: trains the base editors that generate image tokens and their autoencoder, from a seed."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from retouch.models.emu3.family import Emu3Model
from retouch.models.emu3.load import language_model
from retouch.models.emu3.model import Emu3Editor
from retouch.policies.autoregressive.policy import AutoregressivePolicy
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.policies.weights import WeightCopies
from retouch.renderers.decoders import CodesDecoder
from retouch.run.evaluation import score_table
from retouch_worlds.data.tasks import PlaygroundData
from retouch_worlds.playground import playground_weights
from retouch_worlds.playground.world.scenes import SIZE
from retouch_worlds.pretraining.networks.emu3 import LONGEST, Emu3Training, emu3_tokenizer, train_emu3, train_rounds
from retouch_worlds.pretraining.networks.image_codes import CodesTraining, train_codes
from retouch_worlds.pretraining.record import BuildRecord, halved, held_out, log, one_thread
from retouch_worlds.rewards.edit_judge import PlaygroundReward

COMMAND = "retouch playground build --emu3"
HELD_OUT = 330
CODES = CodesTraining(steps=1500, free_steps=700)
STARTS = {
    "s": Emu3Training(complexity={1: 1.0}, rounds=(2200, 2200)),
    "sc": Emu3Training(complexity={1: 0.75, 2: 0.125, 3: 0.125}, rounds=(2200, 2200)),
}
"""Two base editors: "s" is trained on single edits, "sc" also on some instructions with two or three edits."""
FURTHER = {
    "s-distractors": ("s", replace(STARTS["s"], rounds=(2200, 2200), before=2, learning_rate=1.5e-3, impossible=0.5)),
    "sc-unfinished": ("sc", replace(STARTS["sc"], rounds=(500,), before=2, learning_rate=5e-4, warmup=50, unfinished=0.9)),
}
"""Base editors that continue from another one: its name, and the settings. "s-distractors" is trained on single edits, and half of
its instructions also request edits of things that are not in the image, which the targets ignore. "sc-unfinished" is trained on
complex edits, and most of their targets lack one of the edits."""


def build_emu3(
    out: Path | None,
    *,
    seed: int,
    codes: CodesTraining = CODES,
    starts: Mapping[str, Emu3Training] = STARTS,
    further: Mapping[str, tuple[str, Emu3Training]] = FURTHER,
) -> dict[str, float]:
    """Train the autoencoder and the editors and write them to ``out`` (None: into the package). Returns held-out means.

    It uses one thread, so that the bits do not depend on the number of cores.
    """
    record = BuildRecord(seed=seed, command=COMMAND)
    folder = playground_weights("emu3") if out is None else out
    with one_thread():
        vq = train_codes(replace(codes, seed=seed), log.info)
        words = emu3_tokenizer(seed)
        halved(vq).save_pretrained(folder / "autoencoder")
        words.save_pretrained(folder / "tokenizer")
        scores: dict[str, float] = {}
        for name, settings in starts.items():
            whole = train_emu3(vq, words, replace(settings, seed=seed), _named(name))
            halved(language_model(whole)).save_pretrained(folder / name)
            editor = Emu3Editor(language_model(whole), words, vq=whole.model.vqmodel, size=(SIZE, SIZE))
            scores |= {f"{name}, {what}": value for what, value in measure(editor).items()}
        for name, (start, settings) in further.items():
            scores |= build_further(folder, name, start, replace(settings, seed=seed))
    record.finish(scores, folder)
    return scores


def build_further(folder: Path, name: str, start: str, settings: Emu3Training) -> dict[str, float]:
    """Continue to train the base editor ``start`` in ``folder``, and write the result there as ``name``. Returns held-out means."""
    section = Emu3Model(
        path=str(folder / start),
        tokenizer=str(folder / "tokenizer"),
        autoencoder=str(folder / "autoencoder"),
        size=(SIZE, SIZE),
        dtype="float32",
    )
    editor = section.build(device=torch.device("cpu"), gradient_checkpointing=False)
    assert isinstance(editor, Emu3Editor)
    train_rounds(editor, settings, _named(name))
    halved(editor.module).save_pretrained(folder / name)
    return {f"{name}, {what}": value for what, value in measure(editor).items()}


def measure(editor: Emu3Editor) -> dict[str, float]:
    """Held-out means of greedily generated images by complexity, and of the true targets after encoding and decoding them (the
    ceiling)."""
    sampling = TokenRollout(max_new_tokens=LONGEST)
    policy = AutoregressivePolicy(editor, sampling=sampling, microbatch=HELD_OUT, copies=WeightCopies(editor.module))
    ceiling, edited = held_out(
        policy,
        tasks=PlaygroundData(seed=1, count=HELD_OUT, complexity=[1, 2, 3], split="test").tasks(in_turn=True),
        renderer=CodesDecoder(editor, batch=HELD_OUT),
        reward=PlaygroundReward(),
        column="overall",
    )
    found = {
        f"ceiling {name}": float(value) for name, value in score_table(ceiling)[0]["all"].items() if name in ("overall", "exact")
    }
    for row, means in score_table(edited)[0].items():
        if "kinds" not in row:
            found |= {f"{row} {name}": float(means[name]) for name in ("overall", "IF", "IP", "PQ", "exact")}
    return found


def _named(name: str) -> Callable[[str], None]:
    return lambda line: log.info("%s %s", name, line)
