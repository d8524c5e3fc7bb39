"""The distance between a writer's hidden states and those that the editor reads."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from retouch.data.tasks import MappedTasks
from retouch.models.qwen_image.model import QwenImageEdit
from retouch.models.qwen_image.responses import QwenResponses, ResponseEncoder
from retouch_worlds.data import PlaygroundData, indirect
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.pretraining.writer import HiddenStateDistillation, untrained_writer

TASKS = tuple(MappedTasks(PlaygroundData(seed=0, count=6, complexity=[1, 2, 3]).tasks(in_turn=True), indirect)[:])


@pytest.fixture(scope="module")
def editor() -> QwenImageEdit:
    made = PlaygroundModel(kind="playground").build(device=torch.device("cpu"))
    assert isinstance(made, QwenImageEdit)
    return made


def states(editor: QwenImageEdit, encoder: ResponseEncoder) -> list[Tensor]:
    reads = QwenResponses(editor, encoder)
    responses = [editor.text.tokenizer(str(task.meta["completion"]))["input_ids"] for task in TASKS]
    with torch.no_grad():
        return reads.encode([reads.prepare(task) for task in TASKS], responses)


def test_the_distance_of_the_editors_own_encoder_is_0(editor: QwenImageEdit) -> None:
    assert HiddenStateDistillation(editor, deepcopy(editor.text.encoder), weight=1.0).distance(TASKS) == 0


def test_the_distance_is_the_normalized_error_of_the_editors_text_inputs(editor: QwenImageEdit) -> None:
    torch.manual_seed(0)
    module = untrained_writer(editor.text.tokenizer)
    takes = torch.nn.Sequential(editor.module.get_submodule("txt_norm"), editor.module.get_submodule("txt_in"))
    with torch.no_grad():
        ours = takes(torch.cat(states(editor, ResponseEncoder.frozen(module))))
        theirs = takes(torch.cat(states(editor, ResponseEncoder.frozen(editor.text.encoder))))
    expected = (ours - theirs).square().sum() / (theirs - theirs.mean(dim=0)).square().sum()
    assert expected > 0.1
    found = HiddenStateDistillation(editor, module.requires_grad_(True), weight=1.0).distance(TASKS)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=0)
    found.backward()
    assert all(p.grad is None for p in editor.text.encoder.parameters())
    assert sum(float(p.grad.abs().sum()) for p in module.parameters() if p.grad is not None) > 0
