"""Decoding with fixed shapes and few reads by the host: the same tokens and log-probabilities."""

from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny_emu3
import tiny_janus
import tiny_models
import tiny_writers
import tiny_writing
from retouch.models.emu3 import DRAW, THINK
from retouch.models.qwen_vl import QwenWriter
from retouch.policies.decoding import CachedDecoding
from retouch.policies.rollout import CachedEngine, EngineContext, TokenRollout
from retouch.types import Task
from slow_params import slow_after

READS = ("aten::_local_scalar_dense", "aten::nonzero")
"""The operations for which the host waits for a GPU: they read a value, or a number of elements."""

GROUP = 4


@cache
def op_name(func):
    return func._overloadpacket._qualified_op_name


class Calls(TorchDispatchMode):
    """Counts what the host reads, and collects the shapes of the queries, keys and values of attention."""

    def __init__(self):
        super().__init__()
        self.reads, self.shapes = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = op_name(func)
        self.reads += name in READS
        if "scaled_dot_product" in name:
            self.shapes.append(tuple(tuple(each.shape) for each in args[:3]))
        return func(*args, **(kwargs or {}))


def qwen():
    return tiny_writers.writer("qwen2.5-vl", stop=tiny_writing.STOPS), tiny_writers.tasks(), 20


def emu3(prefill):
    model = tiny_emu3.editor(prefill=prefill)
    names = ("one", "make it red"), ("two", "no"), ("three", "add a blue circle")
    tasks = tuple(tiny_models.task(name, text, tiny_models.image(k, 16, 24)) for k, (name, text) in enumerate(names))
    return model, tasks, len(model.grammar.form) + (0 if prefill == DRAW else 12)


def janus():
    model = tiny_janus.image_model()
    texts = ("a red circle", "no", "two blue cats")
    return model, tuple(Task(id=text, instruction=text) for text in texts), tiny_janus.SIDE**2 + 1


MODELS = {"qwen2.5-vl": qwen, "emu3": lambda: emu3(DRAW), "emu3-thinking": lambda: emu3(THINK), "janus": janus}


@pytest.fixture(params=MODELS, scope="module")
def made(request):
    return MODELS[request.param]()


def decode(made, *, length=None, greedy=False, sampling=None, counted_by=None, **options):
    model, tasks, longest = made
    batch, prompts = tiny_writing.batch(tasks, GROUP), model.encode(tasks)
    how = TokenRollout(**{"max_new_tokens": length or longest, **(sampling or {})})
    with counted_by or nullcontext():
        return CachedDecoding(model, **options)(batch, prompts, how, greedy=greedy)


def calls(made, **options):
    counted = Calls()
    decode(made, counted_by=counted, **options)
    return counted


def same(one, other):
    assert torch.equal(one.ids, other.ids)
    assert torch.equal(one.lengths, other.lengths)
    torch.testing.assert_close(one.log_probs, other.log_probs, rtol=0, atol=1e-4)
    assert (one.support is None) == (other.support is None)
    if one.support is not None:
        sampled = one.log_probs != 0
        assert sampled.any()
        for mine, theirs in zip(one.support[sampled].tolist(), other.support[sampled].tolist(), strict=True):
            assert [each for each in mine if each >= 0] == [each for each in theirs if each >= 0]


@pytest.mark.parametrize(
    "sampling", slow_after(2, [{}, {"top_k": 5, "temperature": 1.2}, {"top_p": 0.8}]), ids=["all", "top-k", "top-p"]
)
def test_static_decoding_equals_dynamic_decoding(made, sampling):
    same(decode(made, sampling=sampling), decode(made, sampling=sampling, static=True, check_every=4))


def test_static_decoding_uses_the_same_shapes_for_every_token(made):
    fixed, growing = (calls(made, static=static).shapes for static in (True, False))
    assert len(fixed) > 16
    assert len(set(fixed)) == 2  # that of the prompts, and that of all tokens
    assert len(set(growing)) > 6


@pytest.mark.parametrize("sampling", slow_after(1, [{}, {"top_k": 5}]), ids=["all", "top-k"])
def test_check_every_limits_the_host_reads_of_static_decoding(made, sampling):
    model, longest = made[0], made[2]
    stop, model.stop = model.stop, ()  # no row ends early
    try:
        reads = {}
        for name, options in {"one": {}, "static": {"static": True, "check_every": 4}}.items():
            counts = [calls(made, length=length, sampling=sampling, **options).reads for length in (1, longest)]
            reads[name] = (counts[1] - counts[0]) / (longest - 1)
    finally:
        model.stop = stop
    # The host reads at every fourth token: whether rows have ended, and with top-k how many ids were kept, and which.
    assert reads["static"] <= (3 if sampling else 1) / 4 + 1 / longest
    assert reads["one"] >= (3 if sampling else 1)


def test_cached_engine_section_sets_static_and_check_every(tmp_path):
    model = qwen()[0]
    context = EngineContext(weights={}, save=lambda folder: None, folder=tmp_path)
    engine = CachedEngine(static=True, check_every=3).build(model, context)
    assert (engine.static, engine.check_every) == (True, 3)
    assert not {"static", "check_every"} & CachedEngine().model_dump().keys()


class WithoutStaticCache(QwenWriter):
    static_cache = None


def test_static_decoding_raises_for_unsupported_models():
    text = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 0}
    windowed = tiny_writers.writer("qwen2.5-vl", text=text), tiny_writers.tasks(), 7
    with pytest.raises(ValueError, match=r"rollout\.engine\.static: the model attends to a sliding window"):
        decode(windowed, static=True)
    windowed[0].__class__ = WithoutStaticCache
    with pytest.raises(ValueError, match=r"rollout\.engine\.static: WithoutStaticCache has no method static_cache"):
        CachedDecoding(windowed[0], static=True)
