"""Decoding with growing and with fixed shapes: comparison with transformers' generate, keys of rows, grammars and reads."""

from collections import Counter
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig

import tiny_emu3
import tiny_janus
import tiny_models
import tiny_writers
import tiny_writing
from retouch.core.tokens import sample_tokens
from retouch.policies.decoding import CAPTURES, CachedDecoding, uniforms
from retouch.policies.rollout import CachedEngine, EngineContext, TokenRollout
from retouch.types import Task
from retouch_models.emu3 import THINK
from retouch_models.qwen_vl import QwenWriter
from slow_params import slow_after

# Decoding


def write(writer, batch, *, greedy=False, **how):
    with torch.no_grad():
        prompts = writer.encode(batch.tasks)
        return CachedDecoding(writer)(batch, prompts, TokenRollout(**{"max_new_tokens": 7, **how}), greedy=greedy)


def generate(writer, tasks, longest):
    """transformers' greedy generation from the same prompts."""
    prompts = writer.encode(tasks)
    inputs = {"input_ids": prompts.ids, "attention_mask": prompts.mask.long()}
    if any(task.images for task in tasks):
        texts = [writer.image_block * len(task.images) + task.instruction for task in tasks]
        tokens = writer.template.tokenise(texts, [task.images for task in tasks])
        types = (prompts.ids == writer.image_token).int()
        inputs |= {"mm_token_type_ids": types, "pixel_values": tokens["pixel_values"], "image_grid_thw": tokens["image_grid_thw"]}
    banned = (~writer.grammar.vocabularies[0]).nonzero()[:, 0].tolist()
    settings = {"eos_token_id": list(writer.stop), "pad_token_id": writer.pad, "suppress_tokens": banned, "do_sample": False}
    made = writer.module.generate(**inputs, generation_config=GenerationConfig(max_new_tokens=longest, **settings))
    return made[:, prompts.ids.shape[1] :]


READS = ("aten::_local_scalar_dense", "aten::nonzero")
"""The operations for which the host waits for a GPU: they read a value, or a number of elements."""


@cache
def op_name(func):
    return func._overloadpacket._qualified_op_name


class Calls(TorchDispatchMode):
    """Counts what the host reads, and collects the shapes of the queries, keys and values of attention."""

    def __init__(self):
        super().__init__()
        self.counts, self.shapes = Counter(), []

    @property
    def reads(self):
        return sum(self.counts.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = op_name(func)
        if name in READS:
            self.counts[name] += 1
        if "scaled_dot_product" in name:
            self.shapes.append(tuple(tuple(each.shape) for each in args[:3]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stop", [tiny_writing.STOPS, ()], ids=["some-end", "none-ends"])
def test_check_every_reduces_host_reads_and_keeps_the_completions(stop):
    writer = tiny_writers.writer("qwen2.5-vl", stop=stop)
    batch, sampling = tiny_writing.batch(group_size=6), TokenRollout(max_new_tokens=22)
    prompts = writer.encode(batch.tasks)
    made, asked = [], []
    for every in (1, 8):
        decode = CachedDecoding(writer, check_every=every)
        counts = []
        for length in (1, sampling.max_new_tokens):
            with Calls() as questions:
                generation = decode(batch, prompts, sampling.model_copy(update={"max_new_tokens": length}))
            counts.append(questions.counts[READS[0]])
        made.append(generation)
        asked.append(counts[1] - counts[0])
    assert torch.equal(made[0].ids, made[1].ids)
    assert torch.equal(made[0].lengths, made[1].lengths)
    torch.testing.assert_close(made[0].log_probs, made[1].log_probs, rtol=0, atol=1e-4)
    # transformers reads once per token whether its mask has padding; the other reads are ours.
    if not stop:
        assert asked == [21 + 21, 21 + 2]


@pytest.mark.parametrize("kind", tiny_writers.KINDS)
def test_greedy_decoding_equals_transformers_generate(kind):
    writer = tiny_writers.writer(kind, stop=tiny_writing.STOPS)
    tasks = tiny_writers.tasks(6, with_images=kind in tiny_writers.VISION_KINDS)
    theirs = generate(writer, tasks, 12)
    ours = write(writer, tiny_writing.batch(tasks, 1), max_new_tokens=12, greedy=True)
    assert torch.equal(ours.ids[:, : theirs.shape[1]], theirs)
    assert (ours.ids[:, theirs.shape[1] :] == writer.pad).all()


def test_decoding_with_a_sliding_window_equals_transformers_generate():
    text = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 0}
    writer = tiny_writers.writer("qwen2.5-vl", text=text)
    tasks = tiny_writers.tasks()
    theirs = generate(writer, tasks, 12)
    ours = write(writer, tiny_writing.batch(tasks, 1), max_new_tokens=12, greedy=True)
    assert torch.equal(ours.ids[:, : theirs.shape[1]], theirs)
    assert len({tuple(row) for row in theirs.tolist()}) == 3
    full = write(tiny_writers.writer("qwen2.5-vl"), tiny_writing.batch(tasks, 1), max_new_tokens=12, greedy=True)
    assert not torch.equal(full.ids, ours.ids)


def test_banned_tokens_are_sampled_only_if_the_grammar_allows_them():
    """The tiny writers give vision tokens and ids beyond the tokenizer enough probability for the ban to matter."""
    writer = tiny_writers.writer("qwen2.5-vl")
    likes = write(writer, tiny_writing.batch(group_size=40), max_new_tokens=12)
    allowed = writer.grammar.vocabularies[0]
    assert allowed[likes.ids].all()
    assert 0 < (~allowed).sum() < 20
    writer.grammar.vocabularies = torch.ones_like(writer.grammar.vocabularies)
    assert not allowed[write(writer, tiny_writing.batch(group_size=40), max_new_tokens=1).ids].all()


def test_a_completion_depends_on_its_row_key_and_not_on_the_batch():
    writer = tiny_writers.writer(stop=tiny_writing.STOPS)
    batch = tiny_writing.batch(group_size=6)
    together = write(writer, batch)
    for rows in (slice(0, 1), slice(5, 9), slice(17, 18)):
        alone = write(writer, batch.take(rows))
        assert torch.equal(alone.ids, together.ids[rows])
        torch.testing.assert_close(alone.log_probs, together.log_probs[rows], atol=2e-6, rtol=1e-6)
    assert len({tuple(row) for row in together.ids.tolist()}) > 15
    for other in (tiny_writing.batch(group_size=6, seed=4), tiny_writing.batch(group_size=6, step=6)):
        assert not torch.equal(write(writer, other).ids, together.ids)


def test_tokens_are_sampled_with_the_uniforms_from_the_full_forward_distribution():
    writer = tiny_writers.writer(stop=tiny_writing.STOPS)
    batch = tiny_writing.batch()
    made = write(writer, batch, temperature=0.7)
    numbers = uniforms(batch, 7)
    prompts = writer.encode(batch.tasks).take(torch.tensor(batch.group))
    for row in range(len(batch)):
        length = int(made.lengths[row])
        one, ids = prompts.take(torch.tensor([row])), made.ids[row : row + 1, :length]
        with torch.no_grad():
            states = writer.states(writer.module, one, ids, torch.ones_like(ids, dtype=torch.bool))
            logits = writer.logits(writer.module, states[0]).masked_fill(~writer.grammar.vocabularies, -torch.inf) / 0.7
        twin = Categorical(logits=logits)
        torch.testing.assert_close(made.log_probs[row, :length], twin.log_prob(ids[0]), atol=1e-5, rtol=0)
        assert torch.equal(sample_tokens(logits, numbers[row, :length]), ids[0])


def test_a_grammar_forces_and_restricts():
    writer = tiny_writers.writer()
    digits = writer.template.tokenizer.convert_tokens_to_ids(list("0123456789"))
    writer.grammar = tiny_writing.ForcedGrammar(writer)
    made = write(writer, tiny_writing.batch(group_size=4))
    assert (made.ids[:, 1] == 65).all()
    assert (made.ids[:, 4] == 66).all()
    assert set(made.ids[:, 2].tolist()) <= set(digits)
    assert len(set(made.ids[:, 2].tolist())) > 1
    assert (made.log_probs[:, [1, 4]] == 0).all()
    assert (made.log_probs[:, [0, 2, 3, 5, 6]] < 0).all()
    greedy = write(writer, tiny_writing.batch(), greedy=True)
    assert (greedy.ids[:, 1] == 65).all()
    assert set(greedy.ids[:, 2].tolist()) <= set(digits)


def test_forced_tokens_need_no_forward_pass_of_their_own_and_can_end_a_row():
    writer = tiny_writers.writer()
    writer.grammar = tiny_writing.ForcedGrammar(writer)
    read = []
    extend = writer.extend
    writer.extend = lambda module, ids, **given: read.append(ids.shape[1]) or extend(module, ids, **given)
    made = write(writer, tiny_writing.batch())
    assert made.lengths.tolist() == [7] * 6
    assert read == [2, 1, 2, 1]  # positions 0 and 1, 2, 3 and 4, 5; no token is sampled after the last
    writer.grammar = tiny_writing.ForcedGrammar(writer, forced=(65, writer.stop[0]))
    assert write(writer, tiny_writing.batch()).lengths.tolist() == [5] * 6


def test_invalid_sampling_settings_raise():
    for key, values in {"max_new_tokens": [0], "temperature": [0.0, -1.0], "top_k": [0], "top_p": [0.0, 1.5]}.items():
        for value in values:
            with pytest.raises(ValueError, match=key):
                TokenRollout(**{"max_new_tokens": 3, key: value})


@pytest.mark.parametrize(("how", "truncates"), [({}, False), ({"top_p": 1.0}, False), ({"top_p": 0.9}, True), ({"top_k": 5}, True)])
def test_support_is_recorded_only_if_top_k_or_top_p_truncates(how, truncates):
    assert TokenRollout(max_new_tokens=3, **how).truncates is truncates
    writer = tiny_writers.writer(stop=tiny_writing.STOPS)
    assert (write(writer, tiny_writing.batch(), **how).support is not None) is truncates
    assert write(writer, tiny_writing.batch(), greedy=True, **how).support is None


# Decoding with fixed shapes and few reads by the host

GROUP = 4


def qwen():
    return tiny_writers.writer("qwen2.5-vl", stop=tiny_writing.STOPS), tiny_writers.tasks(), 20


def emu3():
    model = tiny_emu3.editor(prefill=THINK)
    names = ("one", "make it red"), ("two", "no"), ("three", "add a blue circle")
    tasks = tuple(tiny_models.task(name, text, tiny_models.image(k, 16, 24)) for k, (name, text) in enumerate(names))
    return model, tasks, len(model.grammar.form) + 12


def janus():
    model = tiny_janus.image_model()
    texts = ("a red circle", "no", "two blue cats")
    return model, tuple(Task(id=text, instruction=text) for text in texts), tiny_janus.SIDE**2 + 1


MODELS = {"qwen2.5-vl": qwen, "emu3-thinking": emu3, "janus": janus}


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
def test_static_decoding_equals_dynamic_decoding(made, sampling, monkeypatch):
    monkeypatch.setattr("retouch.policies.decoding.ROOM", 6)
    same(decode(made, sampling=sampling), decode(made, sampling=sampling, static=True, check_every=4))


class RecordedCall(TorchDispatchMode):
    """Stands for ``torch.cuda.CUDAGraph``: Python runs once, and ``replay`` reads and writes the tensors of that time.

    A capture does not run kernels. Here they run, so what they change in place is put back at the end.
    """

    def __init__(self):
        super().__init__()
        self.operations, self.before, self.replays = [], {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if op_name(func) in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed = args[place] if place < len(args) else kwargs[argument.name]
                self.before.setdefault((changed.data_ptr(), changed.shape), (changed, changed.clone()))
        made = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, made))
        return made

    def replay(self):
        self.replays += 1
        for func, args, kwargs, made in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def record(call, before, device):
    """As ``retouch.policies.decoding.cuda_graph``, on the CPU."""
    recorded = RecordedCall()
    with recorded:
        made = call()
    for tensor, value in recorded.before.values():
        tensor.copy_(value)
    return recorded, made


@pytest.mark.parametrize("sampling", slow_after(1, [{}, {"top_k": 5, "temperature": 1.2}]), ids=["all", "top-k"])
def test_a_captured_decoding_step_gives_the_same_bits(made, sampling, monkeypatch):
    monkeypatch.setattr("retouch.policies.decoding.ROOM", 10)
    plain = decode(made, sampling=sampling, static=True, check_every=4)
    found = []
    monkeypatch.setitem(CAPTURES, "cpu", lambda *given: found.append(record(*given)) or found[-1])
    captured = decode(made, sampling=sampling, check_every=4)
    assert torch.equal(captured.ids, plain.ids)
    assert torch.equal(captured.log_probs, plain.log_probs)
    assert [graph.replays for graph, _ in found[:-1]] == [8, *[10] * (len(found) - 2)]


def test_a_decoding_step_that_cannot_be_captured_is_run_without_a_graph(monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("operation not permitted when stream is capturing")

    plain = decode(qwen(), static=True)
    monkeypatch.setitem(CAPTURES, "cpu", refuse)
    with pytest.warns(UserWarning, match="cannot be captured, so decoding is slower: operation not permitted"):
        assert torch.equal(decode(qwen()).ids, plain.ids)


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
    context = EngineContext(weights={}, save=lambda folder: None, folder=tmp_path)
    engine = CachedEngine(static=True, check_every=3).build(qwen()[0], context)
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
