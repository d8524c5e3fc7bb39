"""Distillation, image codes and the image encoder of the playground."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor

from retouch.core.random import generator
from retouch.data.tasks import MappedTasks
from retouch.models.ip_adapter import ImageEncoder
from retouch.models.pretrained import fetch_encoder
from retouch_models.qwen_image.model import QwenImageEdit
from retouch_models.qwen_image.responses import QwenResponses, ResponseEncoder
from retouch_worlds.data import PlaygroundData, WordData, indirect
from retouch_worlds.measuring import paper_and_ink
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.playground.words import INKS, PAPERS
from retouch_worlds.pretraining import emu3 as image_codes
from retouch_worlds.pretraining.emu3 import CodesTraining, decoded, encoded, exchanged, k_means, train_codes, untrained_codes
from retouch_worlds.pretraining.writer import HiddenStateDistillation, untrained_writer

# The distance between a writer's hidden states and those that the editor reads

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


# The playground's autoencoder of image codes

SETTINGS = CodesTraining(steps=3, free_steps=2, batch=4)


def test_k_means_gives_rare_points_their_own_centre():
    random = generator(0, "points")
    places = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    counts = (200, 3, 2, 1)
    points = torch.cat([p + 0.01 * torch.randn(n, 2, generator=random) for p, n in zip(places, counts, strict=True)])
    found = k_means(points, 4)
    assert torch.cdist(places, found).min(1).values.max() < 0.05
    assert k_means(points[:5].repeat(3, 1), 8).isfinite().all()  # more centres than points


def test_chosen_cells_are_exchanged_between_images():
    pictures = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 24, 24)
    chosen = torch.zeros(2, 9, dtype=torch.bool)
    chosen[0, 4] = chosen[1, 0] = True
    mixed = exchanged(pictures, chosen)
    assert mixed[0, 0, 8:16, 8:16].unique().tolist() == [2.0]
    assert mixed[2, 0, 8:16, 8:16].unique().tolist() == [0.0]
    assert (mixed[0] == 2).sum() == (mixed[2] == 0).sum() == 3 * 64
    assert mixed[1, 0, :8, :8].unique().tolist() == [3.0]
    assert torch.equal(exchanged(mixed, chosen), pictures)


def test_encoded_and_decoded_match_the_methods_of_the_model():
    torch.manual_seed(0)
    vq = untrained_codes().eval()
    pictures = torch.rand(2, 3, 24, 24) * 2 - 1
    with torch.no_grad():
        codes = torch.stack(list(vq.encode(pictures, torch.tensor([[24, 24]] * 2), return_dict=True).image_tokens))
        latents = encoded(vq, pictures)
        nearest = torch.cdist(latents.permute(0, 2, 3, 1).reshape(-1, 8), vq.quantize.embedding.weight).argmin(1)
        assert torch.equal(nearest.view(2, 3, 3), codes)
        shown = decoded(vq, vq.quantize.embedding(codes).permute(0, 3, 1, 2))
        assert torch.allclose(shown, vq.decode(codes), atol=1e-5)


@pytest.mark.slow
def test_training_is_deterministic_for_a_seed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="retouch")
    first, again = train_codes(SETTINGS), train_codes(SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))
    assert caplog.messages[0].startswith("codes step 0/3")
    assert not first.training
    torch.manual_seed(SETTINGS.seed)
    start = untrained_codes()
    assert not torch.equal(first.encoder.conv_in.weight, start.encoder.conv_in.weight)
    assert not torch.equal(first.quantize.embedding.weight, start.quantize.embedding.weight)
    assert len(first.quantize.embedding.weight) == image_codes.CODES


# The playground's image encoder

SIGNS = WordData(seed=0, count=900).tasks()
HELD_OUT = 200


@pytest.mark.parametrize(("which", "palette", "least"), [(0, PAPERS, 0.85), (1, INKS, 0.9)])
def test_embeddings_linearly_predict_paper_and_ink(which: int, palette: tuple[tuple[int, int, int], ...], least: float) -> None:
    encoder = ImageEncoder.from_pretrained(fetch_encoder("playground"), dtype=torch.float32, device="cpu")
    references = [task.reference for task in SIGNS if task.reference is not None]
    seen = encoder.embed(references).double().numpy()
    seen = np.column_stack([(seen - seen.mean(0)) / seen.std(0), np.ones(len(seen))])
    known = np.array(palette, dtype=np.float64)

    def nearest(colours: np.ndarray) -> np.ndarray:
        return np.linalg.norm(colours[:, None] - known, axis=-1).argmin(1)

    right = nearest(np.array([paper_and_ink(np.asarray(sign).reshape(-1, 3).astype(np.int64))[which] for sign in references]))
    taught, told = seen[:-HELD_OUT], known[right[:-HELD_OUT]]
    weights = np.linalg.solve(taught.T @ taught + 1e-2 * np.eye(taught.shape[1]), taught.T @ told)
    assert (nearest(seen[-HELD_OUT:] @ weights) == right[-HELD_OUT:]).mean() >= least
    shuffled = np.random.default_rng(0).permutation(len(told))
    weights = np.linalg.solve(taught.T @ taught + 1e-2 * np.eye(taught.shape[1]), taught.T @ told[shuffled])
    assert (nearest(seen[-HELD_OUT:] @ weights) == right[-HELD_OUT:]).mean() <= 0.45
