"""The playground's image encoder: a linear layer can predict the colours of a sign from its embedding."""

import numpy as np
import pytest
import torch

from retouch.models.ip_adapter import ImageEncoder
from retouch.models.pretrained import fetch_encoder
from retouch_worlds.data import WordData
from retouch_worlds.measuring import paper_and_ink
from retouch_worlds.playground.words import INKS, PAPERS

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
