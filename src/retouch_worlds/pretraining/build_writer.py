"""`retouch playground build --writer`: trains the base writer for the playground's editor, from a seed."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from retouch.models.qwen_image.model import QwenImageEdit, ResponseEncoder
from retouch.models.qwen_image.responses import QwenResponses, writer_for
from retouch.policies.autoregressive.demonstrations import has_completion
from retouch.policies.autoregressive.policy import AutoregressivePolicy
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.policies.weights import WeightCopies
from retouch.renderers.responses import ResponseRenderer, ResponseSampler
from retouch.run.evaluation import score_table
from retouch_worlds.data.indirect import IndirectPlaygroundData
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.playground import playground_weights
from retouch_worlds.pretraining.networks import qwen_parts
from retouch_worlds.pretraining.networks.writer import LONGEST, WriterRound, WriterTraining, train_writer
from retouch_worlds.pretraining.record import BuildRecord, held_out, log, one_thread
from retouch_worlds.rewards.edit_judge import PlaygroundReward

WRITER = WriterTraining(
    rounds=(
        WriterRound(800, 2e-3, (1,)),
        WriterRound(1500, 2e-3, (1, 2, 3)),
        WriterRound(1200, 1e-3, (1, 2, 3), distillation=1.0),
        WriterRound(2000, 1e-3, (1, 2, 3), distillation=3.0),
    ),
)
HELD_OUT = 330
EVAL_STEPS = 6


def build_writer(out: Path | None, *, seed: int, writer: WriterTraining = WRITER) -> dict[str, float]:
    """Train the writer for the packaged editor and write it to ``out`` (None: into the package). Returns held-out means.

    It takes about 25 minutes on one core of a laptop. It uses one thread, so that the bits do not depend on the number of cores.
    """
    record = BuildRecord(seed=seed)
    folder = playground_weights("writer") if out is None else out
    with one_thread():
        editor = PlaygroundModel(kind="playground").build(device=torch.device("cpu"))
        assert isinstance(editor, QwenImageEdit)
        module = train_writer(editor, replace(writer, seed=seed), log.info)
    module.save_pretrained(folder)
    editor.text.tokenizer.save_pretrained(folder)
    qwen_parts.image_processor().save_pretrained(folder)
    scores = measure(editor, module)
    record.finish(scores, folder)
    return scores


def measure(editor: QwenImageEdit, module: Qwen2_5_VLForConditionalGeneration) -> dict[str, float]:
    """Held-out means of the edited images for the writer's greedy completions and for the correct completions, by the encoder that
    reads the completion and by complexity."""
    tasks = IndirectPlaygroundData(seed=1, count=HELD_OUT, complexity=[1, 2, 3], split="test").tasks(in_turn=True)
    policy = AutoregressivePolicy(
        writer_for(editor, module),
        sampling=TokenRollout(max_new_tokens=LONGEST),
        microbatch=HELD_OUT,
        copies=WeightCopies(module),
    )
    config = ResponseRenderer(
        model=PlaygroundModel(), encoder="frozen", num_steps=EVAL_STEPS, encoder_batch=HELD_OUT, batch=HELD_OUT
    )
    scores: dict[str, float] = {}
    for reader, encoder in (("the editor's encoder", editor.text.encoder), ("the writer", module)):
        right, own = held_out(
            policy,
            tasks=tasks,
            renderer=ResponseSampler(QwenResponses(editor, ResponseEncoder.frozen(encoder)), config),
            reward=PlaygroundReward(),
            column="overall",
            demonstrates=has_completion,
        )
        for said, found in (("right words", right), ("its own words", own)):
            rows = {row: means for row, means in score_table(found)[0].items() if "kinds" not in row}
            scores |= {f"{said}, read by {reader}, {row}": float(means["overall"]) for row, means in rows.items()}
    return scores
