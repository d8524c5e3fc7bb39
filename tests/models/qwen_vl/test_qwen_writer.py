"""Qwen writers: prompts equal those of transformers' processors; padding, attention and the preallocated cache."""

import importlib.util
import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from peft import LoraConfig
from transformers import DynamicCache, ProcessorMixin, Qwen2_5_VLProcessor, Qwen2Tokenizer, Qwen3VLProcessor

import tiny_models
import tiny_writers
from retouch.models.base import TURNS, PretrainedLanguageModel, require_attention
from retouch.models.pipeline import fit
from retouch.recipe.policy import LanguageModelLora
from retouch.types import Prompts, Task
from retouch_models.causal import ROOM, PreallocatedCacheLayer, new_cache
from retouch_models.chat_template import VISION
from retouch_models.qwen_image.model import EDIT, EDIT_PLUS, QwenText
from retouch_models.qwen_vl import QwenWriter, load_writer

# Qwen writers

LORA = LanguageModelLora(kind="lora")


class WithoutVideo(Qwen2_5_VLProcessor):
    """transformers' processor without the video processor, which would need torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        check = ProcessorMixin.check_argument_for_proper_class
        return None if argument_name == "video_processor" else check(self, argument_name, argument)


class Qwen3WithoutVideo(Qwen3VLProcessor):
    check_argument_for_proper_class = WithoutVideo.check_argument_for_proper_class


def single_prompt(prompts, row):
    return prompts.take(torch.tensor([row]))


def more_padding(prompts, columns):
    """The same prompts with ``columns`` more positions of padding on the left, which contain an arbitrary id."""
    rows = len(prompts)
    return Prompts(
        torch.cat([torch.full((rows, columns), 7), prompts.ids], dim=1),
        torch.cat([torch.zeros(rows, columns, dtype=torch.bool), prompts.mask], dim=1),
        torch.cat([torch.zeros(rows, columns, prompts.positions.shape[2], dtype=torch.long), prompts.positions], dim=1),
        prompts.image_inputs,
    )


def prompts_of(kind, writer):
    with torch.no_grad():
        return writer.encode(tiny_writers.tasks(with_images=kind in tiny_writers.VISION_KINDS))


@pytest.mark.parametrize(
    ("kind", "processor"), [("qwen2.5-vl", WithoutVideo), ("qwen2-vl", WithoutVideo), ("qwen3-vl", Qwen3WithoutVideo)]
)
def test_prompts_match_those_of_transformers_processor(kind, processor):
    writer, tasks = tiny_writers.writer(kind, train="full"), tiny_writers.tasks()
    theirs = processor(tiny_writers.image_processor(kind), tiny_writers.tokenizer(), video_processor=None)
    texts = [writer.template.head + VISION * len(task.images) + task.instruction + writer.template.tail for task in tasks]
    images = list(itertools.chain.from_iterable(task.images for task in tasks))
    wanted = theirs(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")
    found = writer.encode(tasks)
    assert torch.equal(found.mask, wanted["attention_mask"].bool())
    assert torch.equal(found.ids[found.mask], wanted["input_ids"][found.mask])
    assert torch.equal(torch.cat([row["pixels"] for row in found.image_inputs if row]), wanted["pixel_values"])
    grids = torch.cat([row["grids"] for row in found.image_inputs if row])
    assert torch.equal(grids, wanted["image_grid_thw"])
    positions, deltas = writer.module.model.get_rope_index(
        wanted["input_ids"], wanted["mm_token_type_ids"], image_grid_thw=grids, attention_mask=wanted["attention_mask"]
    )
    assert torch.equal(found.positions.permute(2, 0, 1), positions)
    assert torch.equal(found.next_positions(), found.mask.sum(1) + deltas[:, 0])


@pytest.mark.parametrize("kind", tiny_writers.KINDS)
def test_padding_and_other_rows_do_not_change_the_states(kind):
    writer = tiny_writers.writer(kind)
    prompts = prompts_of(kind, writer)
    ids = torch.randint(0, 200, (3, 6), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([6, 2, 4])
    mask = torch.arange(6) < ends[:, None]
    with torch.no_grad():
        together = writer.states(writer.module, prompts, ids, mask)
        padded = writer.states(writer.module, more_padding(prompts, 5), ids, mask)
        scribbled = writer.states(writer.module, prompts, ids.where(mask, 11), mask)
        for row, end in enumerate(ends.tolist()):
            single = writer.states(writer.module, single_prompt(prompts, row), ids[row : row + 1, :end], mask[row : row + 1, :end])
            for other in (together, padded, scribbled):
                torch.testing.assert_close(other[row, :end], single[0], atol=2e-6, rtol=1e-6)
        first, _ = writer.prefill(writer.module, more_padding(prompts, 3))
    torch.testing.assert_close(first, together[:, 0], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", tiny_writers.KINDS)
def test_incremental_decoding_matches_the_full_forward_pass(kind):
    """Three tokens at once, then one by one, for repeated and reordered rows; the gradients match too."""
    writer = tiny_writers.writer(kind)
    tiny_writers.perturb(writer.module)
    prompts = prompts_of(kind, writer)
    rows = torch.tensor([2, 0, 0, 1])
    ids = torch.randint(0, 200, (4, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(6) < torch.tensor([6, 3, 6, 5])[:, None]
    whole = writer.states(writer.module, prompts.take(rows), ids, mask)
    first, cache = writer.prefill(writer.module, prompts)
    cache = writer.select(cache, rows)
    parts, done = [first[rows, None]], 0
    for count in (3, 1, 1):
        done += count
        seen = torch.cat([prompts.mask[rows], mask[:, :done]], dim=1)
        positions = prompts.next_positions()[rows, None] + torch.arange(done - count, done)
        parts.append(writer.extend(writer.module, ids[:, done - count : done], mask=seen, positions=positions, cache=cache))
    steps = torch.cat(parts, dim=1)
    torch.testing.assert_close(steps[mask], whole[mask], atol=1e-5, rtol=1e-5)
    parameters = [p for p in writer.module.parameters() if p.requires_grad]
    a, b = (torch.autograd.grad(x[mask].sum(), parameters) for x in (steps, whole))
    assert all(bool(part.any()) for part in a[1::2])  # every B; A has none while B is 0, and it was moved
    for found, wanted in zip(a, b, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", tiny_writers.VISION_KINDS)
def test_frozen_vision_tower_runs_only_when_prompts_are_encoded(kind):
    frozen, training = (tiny_writers.writer(kind, train=train) for train in ("lora", "full"))
    ids, mask = torch.tensor([[1, 2]] * 3), torch.ones(3, 2, dtype=torch.bool)
    kept, looked = (prompts_of(kind, writer) for writer in (frozen, training))
    assert "pixels" not in kept.image_inputs[0]
    assert "pixels" in looked.image_inputs[0]
    calls = []
    frozen.module.model.visual.register_forward_hook(lambda *_: calls.append(0))
    a = frozen.states(frozen.module, kept, ids, mask)
    assert not calls
    b = training.states(training.module, looked, ids, mask)
    torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-6)
    b.sum().backward()
    gradient = training.module.model.visual.patch_embed.proj.weight.grad
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("kind", tiny_writers.KINDS)
def test_grammar_excludes_image_and_video_placeholder_tokens(kind):
    writer = tiny_writers.writer(kind)
    allowed = writer.grammar.vocabularies[0]
    tokenizer = tiny_writers.tokenizer()
    banned = {tokenizer.convert_ids_to_tokens(k) for k in (~allowed[: len(tokenizer)]).nonzero()[:, 0].tolist()}
    assert banned == {"<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"}
    assert allowed.shape[0] == len(tokenizer) + 5
    assert not allowed[len(tokenizer) :].any()
    assert allowed[list(writer.stop)].all()


@pytest.mark.parametrize("kind", tiny_writers.KINDS)
def test_default_lora_adapts_only_the_language_model(kind):
    module = tiny_writers.module(kind)
    module.add_adapter(LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(PretrainedLanguageModel.lora_targets)))
    names = [name for name, _ in module.named_parameters() if "lora_" in name]
    assert len(names) == 2 * 4 * 2  # layers, targets, matrices
    assert not any("visual" in name for name in names)


@pytest.mark.parametrize(("template", "picture"), [(EDIT, ""), (EDIT_PLUS, "Picture {}: " + VISION)])
def test_writer_prompt_equals_the_prompt_of_qwen_image_edit(template, picture, monkeypatch):
    """What the writer reads is, token for token, what Qwen-Image-Edit's encoder would read."""
    monkeypatch.setattr("retouch_models.qwen_image.model.OFFICIAL_PREFIX", {})  # the tiny tokenizer knows bytes only
    module, processor = tiny_writers.module(), tiny_writers.image_processor("qwen2.5-vl")
    writer = QwenWriter(
        module, tiny_writers.tokenizer(), template=template, image_processor=processor, image_block=picture, area=32 * 32
    )
    text = QwenText(module, tiny_writers.tokenizer(), template=template, image_processor=processor)
    image = tiny_models.image(1, 40, 56)
    prompts = writer.encode([Task(id="a", instruction="red", images=(image,))])
    seen = image.resize(fit(image, 32 * 32)[::-1], 1)
    tokens = text.tokenise(["Picture 1: " * bool(picture) + VISION * bool(picture) + "red"], [[seen]])
    assert torch.equal(prompts.ids, tokens["input_ids"])
    embeds, _ = text.embed(tokens)
    with torch.no_grad():
        state, _ = writer.prefill(module, prompts)
    torch.testing.assert_close(state[0], embeds[0, -1], atol=2e-6, rtol=1e-6)


def save(kind, folder):
    tiny_writers.module(kind).save_pretrained(folder)
    tiny_writers.tokenizer().save_pretrained(folder)
    if kind in tiny_writers.VISION_KINDS:
        tiny_writers.image_processor(kind).save_pretrained(folder)


@pytest.mark.parametrize("kind", tiny_writers.KINDS)
def test_saved_writer_is_loaded_with_equal_states(kind, tmp_path):
    writer = tiny_writers.writer(kind, train="none")
    save(kind, tmp_path)
    read = load_writer(tmp_path, template=tiny_writers.TEMPLATE, dtype=torch.float32, device="cpu")
    assert not any(parameter.requires_grad for parameter in read.module.parameters())
    assert not read.module.training
    with torch.no_grad():
        states = [each.prefill(each.module, prompts_of(kind, each))[0] for each in (read, writer)]
    assert torch.equal(*states)
    assert isinstance(read.template.tokenizer, Qwen2Tokenizer)


def test_other_folders_invalid_settings_and_tasks_raise(tmp_path):
    module, tokenizer = tiny_writers.module("qwen3"), tiny_writers.tokenizer()
    processor = tiny_writers.image_processor("qwen2.5-vl")
    writer = QwenWriter(module, tokenizer, template=tiny_writers.TEMPLATE)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    read = partial(load_writer, template=tiny_writers.TEMPLATE, dtype=torch.float32, device="cpu")
    make = partial(QwenWriter, module, tokenizer)
    for message, call in (
        (r"no config\.json", lambda: read(tmp_path)),
        (r"a model of type 'llama'; set the local folder of a model of type qwen2_vl", lambda: read(tmp_path / "llama")),
        ("reads no images", lambda: make(template=tiny_writers.TEMPLATE, image_processor=processor)),
        (r"no token \['<end>'\]", lambda: make(template=tiny_writers.TEMPLATE, stop=("<end>",))),
        ("exactly one placeholder", lambda: make(template=TURNS.format(system="a", user="b"))),
        ("no image_processor", lambda: writer.encode(tiny_writers.tasks())),
        ("special token", lambda: writer.encode([Task(id="a", instruction="<|im_end|>")])),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# The attention implementation of a writer

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("kind", ["qwen2.5-vl", "qwen2.5"])
def test_sdpa_and_eager_attention_give_close_logits(kind, tmp_path):
    save(kind, tmp_path)
    states = []
    for attention in ("sdpa", "eager"):
        writer = load_writer(tmp_path, template=tiny_writers.TEMPLATE, dtype=torch.float32, device="cpu", attention=attention)
        text = writer.module.config.get_text_config()
        assert text._attn_implementation == attention
        with torch.no_grad():
            states.append(writer.module(torch.arange(1, 40)[None]).logits)
    assert (states[0] - states[1]).abs().max() < 1e-4
    assert not torch.equal(states[0], states[1])  # so they were computed differently


@pytest.mark.parametrize(
    ("installed", "dtype", "device", "why"),
    [
        (False, torch.bfloat16, CUDA, "flash-attn is not installed"),
        (True, torch.bfloat16, CPU, "needs a CUDA device, not cpu"),
        (True, torch.float32, CUDA, "needs a 16-bit dtype, not float32"),
        (True, torch.bfloat16, CUDA, None),
    ],
)
def test_unavailable_flash_attention_is_refused_with_a_suggestion(monkeypatch, installed, dtype, device, why):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    refused = pytest.raises(ValueError, match=rf"policy\.model\.attention: flash_attention_2: .*{why}; use sdpa")
    with refused if why else nullcontext():
        require_attention("flash_attention_2", dtype=dtype, device=device)


# The preallocated key-value cache


def caches(**text):
    module = tiny_writers.module("qwen2.5", **text)
    return new_cache(module), DynamicCache(config=module.config)


def grow(cache, pieces, select=None):
    """Append pieces of these lengths to the first layer of two rows; ``select`` rows after the piece of that number."""
    draw, rows, got = torch.Generator().manual_seed(0), 2, None
    for number, length in enumerate(pieces):
        keys, values = (torch.randn(rows, 1, length, 4, generator=draw) for _ in range(2))
        got = cache.update(keys, values, 0)
        if select is not None and number == select[0]:
            cache.batch_select_indices(torch.tensor(select[1]))
            rows = len(select[1])
    return got


@pytest.mark.parametrize("pieces", [[7], [7, 1], [7, 1, 1, 2], [1] * (ROOM + 3), [7, ROOM + 9, 1], [3, *([5] * ROOM)]], ids=str)
@pytest.mark.parametrize("select", [None, (0, [1, 1, 0]), (1, [0])], ids=str)
def test_preallocated_cache_equals_the_transformers_cache(pieces, select):
    ours, theirs = caches()
    with torch.no_grad():
        for mine, wanted in zip(grow(ours, pieces, select), grow(theirs, pieces, select), strict=True):
            assert torch.equal(mine, wanted)
    assert ours.get_seq_length() == theirs.get_seq_length() == sum(pieces)


def test_selected_rows_do_not_share_memory():
    """Two copies of the same row are continued differently."""
    cache, _ = caches()
    with torch.no_grad():
        grow(cache, [3, 1])
        before = cache.layers[0].keys.clone()
        cache.batch_select_indices(torch.tensor([1, 1]))
        keys, _ = cache.update(torch.tensor([1.0, 2.0]).view(2, 1, 1, 1).expand(2, 1, 1, 4), torch.zeros(2, 1, 1, 4), 0)
    assert torch.equal(keys[:, :, :4], before[[1, 1]])
    assert keys[:, 0, 4, 0].tolist() == [1.0, 2.0]


def test_appending_with_gradients_enabled_keeps_earlier_gradients_correct():
    cache, _ = caches()
    first, second = (torch.randn(1, 1, 2, 4, requires_grad=True) for _ in range(2))
    cache.update(first, first, 0)
    keys, _ = cache.update(second, second, 0)
    seen = keys.square().sum()  # its backward pass reads the keys as they were before the next update
    cache.update(second, second, 0)
    seen.backward()
    torch.testing.assert_close(first.grad, 2 * first)


def test_sliding_window_layers_are_not_preallocated():
    windowed = tiny_writers.module("qwen2.5", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    kinds = [type(layer) is PreallocatedCacheLayer for layer in new_cache(windowed.model).layers]
    assert kinds == [True, False]
