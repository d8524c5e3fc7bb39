"""The grammar inside a vLLM server: with a double of vLLM's model runner, compared with the grammar of the policy."""

import ast
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import retouch
import tiny_emu3
import vllm_runner
from retouch.types import Prompts
from retouch_models.emu3 import Emu3Tokens, GridGrammar
from retouch_serve.engines.grammar import KEY, ImageGrammar, check_grammar, grammar_to_json
from vllm_runner import Request, Runner, params

HEIGHT, WIDTH, SLOTS, LONGEST = 2, 3, 400, 64
FORM = 3 + 1 + HEIGHT * (WIDTH + 1) + 3  # "2*3" and img, the rows, eof eoi eos


@pytest.fixture
def processor(monkeypatch):
    return vllm_runner.install_plugin(monkeypatch)


@functools.cache
def words():
    return Emu3Tokens(tiny_emu3.tokenizer())


def grammar():
    rows = len(words().tokenizer) + 5
    return GridGrammar(words(), height=HEIGHT, width=WIDTH, vocabulary=rows, device=torch.device("cpu"))


def request(number, random, *, thinks):
    """A prompt with an image between two texts; unless ``thinks``, it ends with the token that begins the next image."""
    before, after = (random.integers(0, 200, random.integers(0, 6)).tolist() for _ in range(2))
    source = words().image_ids(torch.from_numpy(random.integers(0, tiny_emu3.CODES, (HEIGHT, WIDTH))))
    prompt = [words().bos, *before, *source, *after, *([] if thinks else [words().boi])]
    return Request(prompt, params(**{KEY: grammar_to_json(grammar())}, number=number))


def sampled(processor, requests, *, seed, bias=None):
    """The requests completed from random logits, and for each the tokens that were allowed at each position."""
    law, random = grammar(), np.random.default_rng(seed)
    vocabulary = law.vocabularies.shape[1]
    runner = Runner(processor, slots=SLOTS, longest=LONGEST, vocabulary=vocabulary, random=random)
    draws = torch.Generator().manual_seed(seed)
    waiting, allowed, done = list(requests), {id(each): [] for each in requests}, []

    def logits(rows):
        made = 4 * torch.randn(len(rows), vocabulary, generator=draws)
        if bias is not None:
            made[:, bias] += 12
        return made

    while waiting or runner.active:
        while waiting and runner.free:
            runner.add(waiting.pop())
        chosen = runner.step(logits)
        if not chosen:
            continue
        table = torch.stack([row for _, row in chosen])
        open_to = table > -torch.inf
        tokens = torch.multinomial(table.softmax(-1), 1, generator=draws)[:, 0].tolist()
        for (each, _), row, token in zip(chosen, open_to, tokens, strict=True):
            allowed[id(each)].append(row)
            runner.write(each, token)
            if token == words().eos or len(each.tokens) == LONGEST:
                runner.remove(each)
                done.append(each)
        for each in runner.active[:]:
            if random.random() < 0.01:  # preempted
                runner.remove(each)
                waiting.insert(0, each)
    return done, allowed


def allowed_tokens(done):
    """Yields for each request the tokens that the policy's grammar allows at each position, (t, v)."""
    law = grammar()
    for first in range(0, len(done), 500):
        part = done[first : first + 500]
        ends = torch.tensor([each.prompt[-1:] for each in part])
        prompts = Prompts(ends, ends >= 0, ends[..., None], ({},) * len(part))
        longest = max(len(each.written) for each in part)
        ids = torch.tensor([[*each.written, *[0] * (longest - len(each.written))] for each in part])
        sets, forced = law.parse(prompts, ids)
        only = torch.nn.functional.one_hot(forced.clamp(min=0), law.vocabularies.shape[1]).bool()
        table = torch.where(forced[..., None] >= 0, only, law.vocabularies[sets])
        yield from (row[: len(each.written)] for each, row in zip(part, table, strict=True))


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_all_images_sampled_from_random_logits_can_be_decoded(processor, count):
    random = np.random.default_rng(1)
    requests = [request(number, random, thinks=False) for number in range(count)]
    done, allowed = sampled(processor, requests, seed=2)
    assert len(done) == count
    for each in done:
        assert len(each.written) == FORM
        assert words().codes([words().boi, *each.written], height=HEIGHT, width=WIDTH) is not None
    assert all(torch.equal(torch.stack(allowed[id(each)]), law) for each, law in zip(done, allowed_tokens(done), strict=True))
    drawn = torch.tensor([words().codes(each.written, height=HEIGHT, width=WIDTH).tolist() for each in done])
    assert len(drawn.unique()) == tiny_emu3.CODES


def test_allowed_tokens_after_text_equal_those_of_the_policys_grammar(processor):
    random = np.random.default_rng(3)
    requests = [request(number, random, thinks=True) for number in range(1000)]
    done, allowed = sampled(processor, requests, seed=4, bias=words().boi)
    pictures = 0
    for each, law in zip(done, allowed_tokens(done), strict=True):
        assert torch.equal(torch.stack(allowed[id(each)]), law)
        drawn = words().codes(each.written, height=HEIGHT, width=WIDTH)
        assert (drawn is not None) == (words().img in each.written and each.written[-1] == words().eos)
        pictures += drawn is not None
    assert 500 < pictures < 1000


@pytest.mark.parametrize(("before", "after"), [(0, 0), (3, 4)])
def test_source_images_and_stale_slot_tokens_do_not_begin_the_image_form(processor, before, after):
    """The source image may be anywhere in the prompt; a slot's tokens after the last one are from an earlier request."""
    law = grammar()
    runner = Runner(processor, slots=1, longest=LONGEST, vocabulary=law.vocabularies.shape[1])
    runner.ids.gpu[:] = words().boi
    source = words().image_ids(torch.zeros(HEIGHT, WIDTH, dtype=torch.long))
    prompt = [words().bos, *[7] * before, *source, *[9] * after]
    each = Request(prompt, params(**{KEY: grammar_to_json(law)}))
    runner.add(each)
    logits = torch.zeros(1, law.vocabularies.shape[1])
    for token in (11, 12, words().boi):
        ((_, row),) = runner.step(lambda rows: logits)
        assert torch.equal(row > -torch.inf, law.vocabularies[0])
        runner.write(each, token)
    for wanted in law.form[law.form >= 0][:3].tolist():
        ((_, row),) = runner.step(lambda rows: logits)
        assert (row > -torch.inf).nonzero()[:, 0].tolist() == [wanted]
        runner.write(each, wanted)


def test_requests_without_a_grammar_keep_their_logits_in_a_reused_slot(processor):
    random = np.random.default_rng(5)
    law = grammar()
    vocabulary = law.vocabularies.shape[1]
    runner = Runner(processor, slots=2, longest=LONGEST, vocabulary=vocabulary)
    given = torch.randn(2, vocabulary)
    bound = request(0, random, thinks=False)
    runner.add(bound)
    assert (runner.step(lambda rows: given[:1])[0][1] > -torch.inf).sum() == 1
    runner.remove(bound)
    for free in (Request([1, 2], params()), Request([words().boi], params(other={"begin": 1}))):
        runner.add(free)
    for (_, row), raw in zip(runner.step(lambda rows: given), given, strict=True):
        assert torch.equal(row, raw)


def test_the_form_begins_correctly_after_a_prompt_prefilled_in_chunks(processor):
    """A prompt longer than the server's budget of tokens is read in parts; no row of such a step has reached the prompt's end."""
    law = grammar()
    for seed in range(20):
        runner = Runner(
            processor, slots=4, longest=LONGEST, vocabulary=law.vocabularies.shape[1], random=np.random.default_rng(seed)
        )
        each = request(0, np.random.default_rng(1), thinks=False)
        runner.add(each)
        while each.read < len(each.prompt):
            done = runner.step(lambda rows: torch.zeros(len(rows), runner.vocabulary))  # noqa: B023
        ((_, row),) = done
        assert (row > -torch.inf).nonzero()[:, 0].tolist() == law.form[:1].tolist()


def test_speculative_decoding_raises_at_the_start_and_a_forced_id_beyond_the_vocabulary_is_replaced_by_the_last_id(processor):
    with pytest.raises(ValueError, match="without speculative decoding"):
        Runner(processor, slots=1, longest=8, vocabulary=9, speculative={"method": "ngram"})
    said = {**grammar_to_json(grammar()), "form": [10**6, -1], "drawn": [[5, 10**6]]}
    runner = Runner(processor, slots=1, longest=8, vocabulary=9)
    runner.add(Request([words().boi], params(**{KEY: said})))
    ((_, row),) = runner.step(lambda rows: torch.zeros(1, 9))
    assert (row > -torch.inf).nonzero()[:, 0].tolist() == [8]


def test_invalid_grammars_raise_in_validate_params(processor):
    said = json.loads(json.dumps(grammar_to_json(grammar())))
    processor.validate_params(params(**{KEY: said}))
    processor.validate_params(params())
    wrong = {"begin": [-1, True, "7"], "form": [[], [1, -2], [1.5]], "text": [[]], "drawn": [[[3, 3]], [[1, 2, 3]], 4], "more": [1]}
    for key, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=KEY):
                processor.validate_params(params(**{KEY: {**said, key: value}}))
    with pytest.raises(ValueError, match="give begin, form, text and drawn"):
        check_grammar([1])


def test_grammar_to_json_describes_the_policys_grammar():
    law = grammar()
    assert isinstance(law, ImageGrammar)
    said = grammar_to_json(law)
    assert len(said["form"]) == FORM + 1
    assert said["drawn"] == [[int(words().visual.min()), int(words().visual.max()) + 1]]
    text = torch.zeros(law.vocabularies.shape[1], dtype=torch.bool)
    for first, after in said["text"]:
        text[first:after] = True
    assert torch.equal(text, law.vocabularies[0])


def test_the_plugin_imports_only_torch_vllm_and_the_standard_library():
    """It runs in vLLM's own environment, where little else of what this package needs is installed."""
    root = Path(retouch.__file__).parents[1] / "retouch_serve"
    names = set()
    for file in ("__init__", "engines/__init__", "engines/grammar", "engines/plugin"):
        for line in ast.parse((root / f"{file}.py").read_text()).body:
            names |= {line.module} if isinstance(line, ast.ImportFrom) else set()
            names |= {each.name for each in line.names} if isinstance(line, ast.Import) else set()
    own = {vllm_runner.INTERFACE, "retouch_serve.engines.grammar"}
    assert names <= {"collections.abc", "importlib", "json", "typing", "torch"} | own
