"""The vLLM engine against a double of the server: adapters, all weights, sleep mode, faults and image tokens."""

import copy
import logging
import re
import threading
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import pytest
import torch
from transformers import Qwen2VLImageProcessorPil

import loopback
import served_models
import tiny_emu3
import tiny_loop
import tiny_models
import tiny_policies
import tiny_writers
import tiny_writing
import vllm_double
import vllm_runner
from retouch.models.lora import write_lora
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.policies.engine import EngineFault
from retouch.policies.rollout import EngineContext
from retouch.recipe.recipe import parse
from retouch.types import Needs, Slice
from retouch_models.emu3 import DRAW
from retouch_plan.checks import check_engines
from retouch_serve.engines.client import Client, RequestRefused
from retouch_serve.engines.sections import VllmEngine
from retouch_serve.engines.vllm import SLEEP, WAKE, AdapterPublisher, Servable, SleepMode, VllmDecoding
from retouch_serve.engines.vllm_wire import PLUGIN, has_plugin
from vllm_double import CHANGES, GENERATE, LOAD, Double, always, at_first, serving

GRPO = PolicyGradient(clip_low=0.2, clip_high=0.2)


class FakeClock:
    """A clock that moves only when somebody sleeps."""

    def __init__(self):
        self.now = 0.0
        self.pauses = []
        self.lock = threading.Lock()

    def sleep(self, seconds):
        with self.lock:
            self.pauses.append(seconds)
            self.now += seconds

    def clock(self):
        return self.now


def tasks_for(kind):
    return tiny_writers.tasks(with_images=kind in tiny_writers.VISION_KINDS)


def publisher(policy, tmp_path, **ranks):
    return AdapterPublisher(
        weights=policy.copies.parameters,
        save=lambda folder: write_lora(policy.model.module, folder, pipeline=None),
        folder=tmp_path / "adapters",
        prefix="retouch-test",
        **ranks,
    )


@contextmanager
def served(tmp_path, kind="qwen2.5-vl", *, sampling=None, limits=None, patience=60.0, ranks=None, **double):
    """A policy with the engine, the double of its server, and the clock of its retries."""
    writer, ranks = tiny_writers.writer(kind, train="none", stop=tiny_writing.STOPS), ranks or {}
    processor = tiny_writers.image_processor(kind) if kind in tiny_writers.VISION_KINDS else None
    twin = Double(copy.deepcopy(writer.module), image_processor=processor, image_token=writer.image_token, **double)
    tiny_writers.make_trainable(writer.module, "lora")
    waiting = FakeClock()
    with serving(twin) as url:
        policy = tiny_writing.policy(writer=writer, sampling=sampling)
        policy.limits = VllmEngine(url=url, **{"truncate_at": None, **(limits or {})})
        connect = partial(Client, url, timeout=600.0, patience=patience, sleep=waiting.sleep, clock=waiting.clock)
        any_rank = {"any_rank": ranks["any_rank"]} if ranks else {}
        policy.engine = VllmDecoding(writer, connect=connect, weights=publisher(policy, tmp_path, **ranks), **any_rank)
        yield policy, twin, waiting


def all_actions(trajectory):
    return Slice(slice(0, len(trajectory)), slice(0, trajectory.mask.shape[1]))


def gap(trajectory):
    return (trajectory.log_probs - trajectory.behaviour_log_probs)[trajectory.mask].abs().max()


@pytest.mark.parametrize("kind", tiny_writers.KINDS)
def test_server_log_probs_match_the_policy(tmp_path, kind):
    with served(tmp_path, kind, sampling={"temperature": 0.8}) as (policy, twin, _):
        assert isinstance(policy.model, Servable)
        tiny_writers.perturb(policy.module)
        batch = tiny_writing.batch(tasks_for(kind), 4)
        trajectory = policy.rollout(batch)
        assert gap(trajectory) < 1e-4
        assert len(set(trajectory.lengths.tolist())) > 2
        assert len({written.ids for written in trajectory.outputs}) > 8
        evaluation = policy.evaluate(trajectory, all_actions(trajectory), Needs())
        assert (evaluation.log_ratio.exp() - 1).abs().max() <= 1e-5
        assert [asked.sampling_params.n for asked in twin.asked] == [4] * 3
        assert policy.model.grammar.vocabularies[0][trajectory.ids[trajectory.mask]].all()


@pytest.mark.parametrize("sampling", [{"top_k": 5}, {"top_k": 40, "top_p": 0.8, "temperature": 1.3}], ids=str)
def test_the_tokens_kept_by_top_k_and_top_p_are_returned_with_the_ids(tmp_path, sampling):
    with served(tmp_path, sampling=sampling, sampling_mask=True) as (policy, _, _):
        tiny_writers.perturb(policy.module)
        trajectory = policy.rollout(tiny_writing.batch(group_size=4))
        assert gap(trajectory) < 1e-4
        kept = (trajectory.support >= 0).sum(-1)
        assert (kept[trajectory.mask] <= sampling["top_k"]).all()
        assert (kept[~trajectory.mask] == 0).all()


def test_every_update_is_loaded_before_the_next_rollout(tmp_path):
    """Large steps: with the adapter of the previous step, the log-probabilities would differ by a lot."""
    with served(tmp_path, limits={"max_mismatch": 1e-3}) as (policy, twin, _):
        optimizer = torch.optim.SGD(tiny_policies.trained(policy).values(), lr=2.0)
        for step in range(3):
            batch = tiny_writing.batch(group_size=4, step=step)
            trajectory = policy.rollout(batch)
            assert gap(policy.rollout(batch.take(slice(4, 8)))) < 1e-4  # the adapter is already loaded for the next chunk of a step
            advantages = torch.tensor([1.0, -1.0] * 6)
            found, _ = tiny_policies.gradient(policy, GRPO, tiny_policies.minibatch(batch, trajectory, advantages))
            for name, parameter in tiny_policies.trained(policy).items():
                parameter.grad = found[name]
            optimizer.step()
            moved = policy.evaluate(trajectory, all_actions(trajectory), Needs()).log_ratio
            assert moved.abs().max() > 0.05
        assert len(twin.loaded) == len(set(twin.loaded)) == 3
        assert twin.unloaded == twin.loaded[:-1]
        assert list(twin.adapters) == [folder.name for folder in (tmp_path / "adapters").iterdir()] == twin.loaded[-1:]


def test_rows_have_seeds_by_group_and_slot(tmp_path):
    with served(tmp_path) as (policy, twin, _):
        batch = tiny_writing.batch(group_size=6)
        together = policy.rollout(batch)
        for rows in (slice(0, 1), slice(4, 9), slice(17, 18)):
            assert torch.equal(policy.rollout(batch.take(rows)).ids, together.ids[rows])
        for other in (tiny_writing.batch(group_size=6, seed=4), tiny_writing.batch(group_size=6, step=6)):
            assert not torch.equal(policy.rollout(other).ids, together.ids)
        seeds = [asked.sampling_params.seed + k for asked in twin.asked[:3] for k in range(6)]
        assert len(set(seeds)) == 18
        assert len(twin.loaded) == 1


def test_forbidden_tokens_are_sent_as_logit_bias(tmp_path, monkeypatch):
    """To a server with an API key."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with served(tmp_path, key="secret") as (policy, twin, _):
        policy.rollout(tiny_writing.batch())
        banned = (~policy.model.grammar.vocabularies[0]).nonzero()[:, 0].tolist()
        how = twin.asked[0].sampling_params
        assert how.logit_bias == dict.fromkeys(banned, -100.0)
        assert (how.stop_token_ids, how.max_tokens, how.ignore_eos) == (list(policy.model.stop), 7, True)


def test_a_grammar_that_the_server_does_not_support_raises(tmp_path):
    with served(tmp_path) as (policy, _, _):
        writer, engine = policy.model, policy.engine
        plain = writer.grammar
        writer.grammar = tiny_writing.ForcedGrammar(writer)
        with pytest.raises(ValueError, match="one set of tokens"):
            VllmDecoding(writer, connect=engine._connect, weights=engine._weights)
        writer.grammar.vocabularies = plain.vocabularies.expand(2, -1)
        with pytest.raises(EngineFault, match="generated tokens that this model's grammar forbids"):
            engine(tiny_writing.batch(), writer.encode(tiny_writers.tasks()), policy.sampling)
        plain.vocabularies = torch.arange(2000)[None] < 900
        writer.grammar = plain
        with pytest.raises(ValueError, match="ban at most 1024"):
            VllmDecoding(writer, connect=engine._connect, weights=engine._weights)


def test_groups_larger_than_max_num_seqs_are_split_into_several_requests(tmp_path):
    """vLLM refuses an ``n`` above ``--max-num-seqs``."""
    with served(tmp_path) as (policy, twin, _):
        batch = tiny_writing.batch(group_size=5)
        wanted = policy.rollout(batch)
        assert len(twin.asked) == 3
        twin.max_num_seqs = 2
        assert torch.equal(policy.rollout(batch).ids, wanted.ids)
        assert [asked.sampling_params.n for asked in twin.asked[3:6]].count(2) > 0
        assert sum(asked.sampling_params.n for asked in twin.asked[3:]) == 15


def test_images_are_sent_at_their_final_size(tmp_path):
    """The server resizes with torchvision and we with PIL, so neither may have anything to resize."""
    shapes = ((30, 50), (100, 70), (16, 16), (9, 130))
    with served(tmp_path, sampling={"max_new_tokens": 2}) as (policy, twin, _):
        images = tuple(tiny_models.image(k, *shape) for k, shape in enumerate(shapes))
        task = tiny_models.task("sizes", "red", *images)
        policy.rollout(tiny_writing.batch((task,)))
        sent = [vllm_double._picture(part.url) for part in twin.asked[0].content_parts]
        processor = policy.model.template.image_processor
        for image, final in zip(images, sent, strict=True):
            grid = processor(images=[final], return_tensors="pt")["image_grid_thw"][0].tolist()
            assert [side * processor.patch_size for side in grid[1:]] == [final.height, final.width]
            assert torch.equal(
                *(processor(images=[each], return_tensors="pt")["pixel_values"] for each in (image.convert("RGB"), final))
            )
        assert sum(image.size != final.size for image, final in zip(images, sent, strict=True)) == 3


def test_temporary_faults_are_retried_and_do_not_change_completions(tmp_path, caplog):
    with served(tmp_path) as (policy, twin, waiting), caplog.at_level(logging.WARNING, "retouch"):
        batch = tiny_writing.batch()
        wanted = policy.rollout(batch)
        assert not waiting.pauses
        for ways in (("503", "429", "503"), ("reset", "close mid-body"), ("502", "500", "500")):
            twin.fault = at_first(*ways)
            assert torch.equal(policy.rollout(batch).ids, wanted.ids)
        assert len(waiting.pauses) >= 8  # a busy machine may drop another connection
        assert max(waiting.pauses) <= 2.0
        twin.fault = at_first("503", "502", path=LOAD)
        tiny_writers.perturb(policy.module)
        assert gap(policy.rollout(batch)) < 1e-4
        assert any("HTTP 503: told to answer 503; trying again for 60 s" in line for line in caplog.messages)


@pytest.mark.parametrize("way", ["503", "reset"])
def test_a_lasting_fault_raises_after_patience(tmp_path, way):
    with served(tmp_path, patience=40.0) as (policy, twin, waiting):
        twin.fault = always(way)
        with pytest.raises(EngineFault, match=r"did not answer /inference/v1/generate within 40 s \(rollout.engine.patience\)"):
            policy.rollout(tiny_writing.batch().take(slice(0, 2)))
        assert sum(waiting.pauses) == pytest.approx(40.0)
        assert len(waiting.pauses) < 20
        waiting.pauses.clear()
        twin.fault = always("500", path=GENERATE)  # a permanent error of the server is tried again only a few times
        with pytest.raises(EngineFault, match="refuses to generate: HTTP 500: told to answer 500"):
            policy.rollout(tiny_writing.batch().take(slice(0, 2)))
        assert len(waiting.pauses) == 2
        assert sum(waiting.pauses) <= 1.5


def test_a_restarted_server_gets_the_adapter_again(tmp_path):
    with served(tmp_path) as (policy, twin, _):
        tiny_writers.perturb(policy.module)
        batch = tiny_writing.batch()
        wanted = policy.rollout(batch)
        twin.fault = at_first("forgets its adapters")
        again = policy.rollout(batch)
        assert torch.equal(again.ids, wanted.ids)
        assert gap(again) < 1e-4
        assert twin.loaded == twin.loaded[:1] * 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"runtime_lora": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        ({"max_lora_rank": 2}, "LoRA rank 4 is greater than max_lora_rank 2"),
        ({"key": "secret"}, "HTTP 401"),
        ({"scale_out": False}, "--enable-scale-out"),
        ({"max_model_len": 40}, "--max-model-len"),
        ({"sampling": {"top_k": 5}}, "start the server with --return-sampling-mask"),
        ({"processed": False, "sampling": {"temperature": 0.5}}, "--logprobs-mode processed_logprobs"),
        # At temperature 1 they differ only by the probability of the banned tokens, which can be far below the allowed mismatch.
        ({"processed": False}, r"returns raw log-probabilities.*--logprobs-mode processed_logprobs"),
        # vLLM answers a request without top_k by HTTP 500 and an empty message.
        ({"sampling_mask": True}, r"was started with --return-sampling-mask.*set rollout\.top_k"),
    ],
    ids=str,
)
def test_a_server_that_is_set_up_wrongly_raises_with_the_option_to_set(tmp_path, options, says):
    with served(tmp_path, **options) as (policy, twin, waiting), pytest.raises(EngineFault, match=says):
        policy.rollout(tiny_writing.batch())
    assert not waiting.pauses
    assert not twin.asked or not {"processed", "sampling_mask"} & options.keys() or "sampling" in options


@pytest.mark.parametrize("way", [way for way in CHANGES if way != "log-probabilities off"])
def test_invalid_responses_raise_without_a_retry(tmp_path, way):
    with served(tmp_path) as (policy, twin, waiting):
        twin.fault = always(way)
        with pytest.raises(EngineFault, match="gave an invalid response"):
            policy.rollout(tiny_writing.batch())
        assert not waiting.pauses


def test_a_mismatch_above_the_limit_or_another_image_processor_stops_the_run(tmp_path):
    with served(tmp_path) as (policy, twin, _):
        policy.rollout(tiny_writing.batch())
        twin.fault = always("log-probabilities off")
        with pytest.raises(EngineFault, match=r"off from the policy's own by 0\.5 nats a token.*allows 0\.1"):
            policy.rollout(tiny_writing.batch())
        policy.limits = policy.limits.model_copy(update={"max_mismatch": 0.6, "truncate_at": 1.5})
        trajectory = policy.rollout(tiny_writing.batch())
        scale = policy.evaluate(trajectory, all_actions(trajectory), Needs()).scale
        torch.testing.assert_close(scale[trajectory.mask], torch.full_like(scale[trajectory.mask], 1.5))
        twin.image_processor = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=16 * 16, max_pixels=24 * 24)
        with pytest.raises(EngineFault, match="another tokenizer or image processor"):
            policy.rollout(tiny_writing.batch())


def test_a_closed_connection_does_not_mean_that_the_engine_is_dead():
    """A server that closes a connection after HTTP 500 is alive if it answers a health check on another connection."""

    class ClosesAfterAnError(loopback.Handler):
        failed = False

        def do_POST(self):
            if self.failed:
                self.close_connection = True  # without a reply
                return
            self.body()
            self.failed = True
            self.reply(500, {"error": {"message": "no such layer"}})

        def do_GET(self):
            if self.failed:
                self.close_connection = True
                return
            self.reply(200, b"")

    waiting = FakeClock()
    with (
        loopback.running(loopback.Server(ClosesAfterAnError)) as server,
        Client(server.url, timeout=30.0, patience=60.0, sleep=waiting.sleep, clock=waiting.clock) as client,
        pytest.raises(RequestRefused, match="no such layer"),
    ):
        client.post(GENERATE, {}, tries_of_500=1)
    assert not waiting.pauses


def test_requests_are_retried_until_a_dead_engine_is_restarted(tmp_path):
    """vLLM answers running requests with 500 and health checks with 503, and exits; a supervisor starts it again."""
    with served(tmp_path, patience=60.0) as (policy, twin, waiting):
        batch = tiny_writing.batch()
        wanted = policy.rollout(batch)
        left = ["500"] * 12
        twin.fault = lambda path: left.pop() if left and path == GENERATE else ("503" if left and path == "/health" else None)
        assert torch.equal(policy.rollout(batch).ids, wanted.ids)
        assert not left
        assert len(waiting.pauses) >= 12  # one for each reply of 500, and more if a request arrived during the restart


def test_closing_removes_the_adapter_from_the_server_and_the_disk(tmp_path):
    with served(tmp_path) as (policy, twin, _):
        policy.rollout(tiny_writing.batch())
        with policy.engine._connect() as client:
            policy.engine._weights.close(client)
            assert not twin.adapters
            assert not list((tmp_path / "adapters").iterdir())
            policy.engine._weights.close(client)
        policy.rollout(tiny_writing.batch())
        assert len(twin.adapters) == 1
    with policy.engine._connect() as client:  # closing without a server raises no error
        policy.engine._weights.close(client)


def test_all_ranks_raise_if_one_rank_fails(tmp_path):
    ranks = tiny_loop.thread_ranks(2)
    with (
        served(tmp_path / "a", ranks={"first": True, "any_rank": ranks[0].any}) as (first, double, _),
        served(tmp_path / "b", ranks={"first": False, "any_rank": ranks[1].any}) as (second, _, _),
    ):
        second.engine._connect = first.engine._connect
        second.engine._weights._folder = tmp_path / "a" / "adapters"
        first.any_rank, second.any_rank = ranks[0].any, ranks[1].any
        parts = [(first, tiny_writing.batch().take(slice(0, 3))), (second, tiny_writing.batch().take(slice(3, 6)))]

        def both():
            return tiny_loop.run_on_threads(ranks, lambda own: tiny_loop.engine_fault(*parts[own.rank]))

        assert both() == [None, None]
        assert len(double.loaded) == 1
        double.fault = at_first("aborted")
        assert sorted(text.split(":")[0][:24] for text in both()) == ["the vLLM server at http", "the vLLM server failed o"]
        double.fault = always("500", path=LOAD)
        for policy in (first, second):
            tiny_writers.perturb(policy.module)
        caught = both()
        assert "did not load the adapter" in caught[0]
        assert "rank 0 could not load the weights" in caught[1]


# Image tokens


@contextmanager
def served_image_tokens(tmp_path, *, grammar=True, **double):
    """A policy of image tokens with the engine, and the double behind it."""
    editor = tiny_emu3.editor(prefill=DRAW, grammar=grammar)
    twin = Double(copy.deepcopy(editor.module), **double)
    twin.base.delete_adapter("default")
    tiny_writers.perturb(editor.module)
    height, width = editor.grid
    longest = len(editor.words.header(height, width)) + height * (width + 1) + 3
    with serving(twin) as url:
        policy = tiny_writing.policy(writer=editor, sampling={"max_new_tokens": longest, "temperature": 0.7})
        connect = partial(Client, url, timeout=600.0, patience=1.0)
        policy.engine = VllmDecoding(editor, connect=connect, weights=publisher(policy, tmp_path))
        yield policy, twin


def edits():
    return (
        tiny_models.task("one", "make it red", tiny_models.image(0, 16, 24)),
        tiny_models.task("two", "no", tiny_models.image(1, 32, 32)),
    )


def test_image_tokens_of_a_server_with_the_plugin_match_the_policy(tmp_path, monkeypatch):
    with served_image_tokens(tmp_path, processor=vllm_runner.install_plugin(monkeypatch)) as (policy, twin):
        assert isinstance(policy.model, Servable)
        batch = tiny_writing.batch(edits())
        trajectory = policy.rollout(batch)
        assert gap(trajectory) < 1e-4
        assert (trajectory.behaviour_log_probs[~trajectory.mask] == 0).all()
        assert all(policy.model.codes_in(written.ids) is not None for written in trajectory.outputs)
        evaluation = policy.evaluate(trajectory, all_actions(trajectory), Needs())
        assert (evaluation.log_ratio.exp() - 1).abs().max() <= 1e-5
        assert not any(asked.content_parts for asked in twin.asked)
        assert all(asked.sampling_params.logit_bias == {} for asked in twin.asked)


def test_image_tokens_raise_if_the_server_has_no_plugin(tmp_path):
    with served_image_tokens(tmp_path) as (policy, _), pytest.raises(EngineFault, match=re.escape(f"--logits-processors {PLUGIN}")):
        policy.rollout(tiny_writing.batch(edits()))


def test_an_invalid_grammar_is_rejected_by_the_server_and_top_k_with_a_grammar_before_it(tmp_path, monkeypatch):
    with served_image_tokens(tmp_path, processor=vllm_runner.install_plugin(monkeypatch)) as (policy, twin):
        policy.engine._grammar = {**policy.engine._grammar, "begin": -1}
        with pytest.raises(EngineFault, match=r"refuses to generate: HTTP 400: extra_args\.retouch_form\.begin"):
            policy.rollout(tiny_writing.batch(edits()))
        with policy.engine._connect() as client:
            assert has_plugin(client)
            twin.processor = None
            assert not has_plugin(client)
        policy.sampling = policy.sampling.model_copy(update={"top_k": 5})
        with pytest.raises(ValueError, match="remove both"):
            policy.rollout(tiny_writing.batch(edits()))


def test_image_tokens_without_a_grammar_need_no_plugin(tmp_path):
    with served_image_tokens(tmp_path, grammar=False) as (policy, twin):
        trajectory = policy.rollout(tiny_writing.batch(edits()))
        assert gap(trajectory) < 1e-4
        assert all(asked.sampling_params.extra_args is None for asked in twin.asked)


@contextmanager
def served_text(folder, train="full", *, patience=0.2, sleep=False, **double):
    """A policy of text and the double behind it, which has the development endpoints."""
    writer = tiny_writers.writer("qwen2.5", train="none", stop=tiny_writing.STOPS)
    twin = Double(copy.deepcopy(writer.module), **{"dev_mode": True, **double})
    tiny_writers.make_trainable(writer.module, train)
    with serving(twin) as url:
        yield served_models.policy(writer, url, folder, patience=patience, max_mismatch=1e-3, sleep=sleep), twin


def batch(step=0):
    return tiny_writing.batch(tiny_writers.tasks(with_images=False), 4, step=step)


def test_every_update_of_all_weights_is_reloaded_before_the_next_rollout(tmp_path):
    with served_text(tmp_path) as (policy, twin):
        for step in range(3):
            assert gap(policy.rollout(batch(step))) < 1e-4
            assert gap(policy.rollout(batch(step).take(slice(4, 8)))) < 1e-4
            assert [folder.name for folder in (tmp_path / "adapters").iterdir()] == [twin.weight_version]
            tiny_writers.perturb(policy.module, key=step)
        assert len(twin.reloaded) == len(set(twin.reloaded)) == 3
        assert all(asked.model is None for asked in twin.asked)
        policy.engine.close()
        assert not (tmp_path / "adapters").exists()
        assert gap(policy.rollout(batch())) < 1e-4


def test_a_restarted_server_gets_all_weights_again(tmp_path):
    """After its restart it answers with its initial weights, and reports their version."""
    with served_text(tmp_path) as (policy, twin):
        tiny_writers.perturb(policy.module)
        start = copy.deepcopy(twin.base.state_dict())
        wanted = policy.rollout(batch())
        twin.base.load_state_dict(start)
        twin.weight_version = "default"
        again = policy.rollout(batch())
        assert torch.equal(again.ids, wanted.ids)
        assert gap(again) < 1e-4
        assert twin.reloaded == twin.reloaded[:1] * 2


def test_a_failed_reload_raises_and_is_repeated_at_the_next_rollout(tmp_path):
    with served_text(tmp_path) as (policy, twin):
        policy.rollout(batch())
        save, policy.engine._weights._save = policy.engine._weights._save, lambda folder: None
        tiny_writers.perturb(policy.module)
        with pytest.raises(EngineFault, match=r"did not load the weights .*VLLM_SERVER_DEV_MODE=1"):
            policy.rollout(batch())
        assert twin.weight_version.startswith("loading-retouch-")
        policy.engine._weights._save = save
        assert gap(policy.rollout(batch())) < 1e-4

        def forget(path):  # a server that loses the weights after each load stops the run
            if path == GENERATE:
                twin.weight_version = "default"

        twin.fault = forget
        with pytest.raises(EngineFault, match="lost the weights again as soon as they were loaded"):
            policy.rollout(batch())


def test_a_server_that_does_not_clear_its_prefix_cache_stops_the_run(tmp_path):
    with (
        served_text(tmp_path, clears_cache=False) as (policy, _),
        pytest.raises(EngineFault, match="did not clear its prefix cache"),
    ):
        policy.rollout(batch())


def test_missing_development_endpoints_fail_in_the_doctor_and_in_the_rollout(tmp_path, make):
    with served_text(tmp_path) as (policy, twin):
        recipe = parse(make(rollout__engine={"kind": "vllm", "url": policy.limits.url}, policy__train={"kind": "full"}))
        assert not [finding.text for finding in check_engines(recipe) if finding.status == "FAILED"]
        twin.dev_mode = False
        (failed,) = (finding for finding in check_engines(recipe) if finding.status == "FAILED")
        assert "VLLM_SERVER_DEV_MODE=1" in failed.text
        with pytest.raises(EngineFault, match="VLLM_SERVER_DEV_MODE=1"):
            policy.rollout(batch())


def test_sharded_weights_are_refused(tmp_path):
    writer = tiny_writers.writer("qwen2.5", train="full")
    context = EngineContext(weights={}, save=lambda folder: None, folder=tmp_path, full_weights=True, sharded=True)
    with pytest.raises(ValueError, match="use sharding zero2 or none"):
        VllmEngine(url="http://127.0.0.1:9").build(writer, context)


def states(twin):
    return [state for state, _ in groupby(twin.states)]


@pytest.mark.parametrize("train", ["full", "lora"])
def test_the_server_is_awake_only_during_a_rollout(tmp_path, train):
    with served_text(tmp_path, train, sleep=True) as (policy, twin):
        for step in range(2):
            assert gap(policy.rollout(batch(step))) < 1e-4
            tiny_writers.perturb(policy.module, key=step)
        assert states(twin) == ["awake", "generates", "asleep"] * 2
        policy.engine.close()
        assert states(twin)[-1] == "awake"
        assert not twin.adapters
        assert not (tmp_path / "adapters").exists()


def test_a_server_that_does_not_sleep_or_wake_up_stops_the_run(tmp_path):
    with served_text(tmp_path / "without", sleep=True, dev_mode=False) as (policy, _):
        wanted = r"refuses rollout\.engine\.sleep.*VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
        with pytest.raises(EngineFault, match=wanted):
            policy.rollout(batch())
    for path, says in ((SLEEP, "did not go to sleep"), (WAKE, "did not wake up")):
        with served_text(tmp_path / says, sleep=True) as (policy, twin):
            twin.fault = lambda asked, twin=twin, path=path: (
                setattr(twin, "asleep", path == WAKE) if asked == "/is_sleeping" else None
            )
            with pytest.raises(EngineFault, match=says):
                policy.rollout(batch())


def test_only_rank_0_sends_sleep_requests_and_its_failure_raises_on_every_rank(tmp_path):
    with served_text(tmp_path, sleep=True) as (_, twin), serving(twin) as url, Client(url, timeout=5.0, patience=0.0) as client:
        SleepMode(first=False).sleep(client)
        assert twin.states == []
        with pytest.raises(EngineFault, match="rank 0 could not use the vLLM server's sleep mode"):
            SleepMode(first=False, any_rank=lambda flag: True).sleep(client)


def test_doctor_checks_sleep_mode_and_does_not_wake_a_sleeping_server(tmp_path, make):
    with served_text(tmp_path, sleep=True) as (policy, twin):
        engine = {"kind": "vllm", "url": policy.limits.url, "sleep": True}
        recipe = parse(make(rollout__engine=engine, policy__train={"kind": "full"}))

        def found():
            return [(finding.status, finding.text) for finding in check_engines(recipe)]

        assert any(status == "ok" and "frees its GPU memory between rollouts" in text for status, text in found())
        assert "generates" in twin.states
        twin.states.clear()
        twin.asleep = True
        assert any(status == "note" and "is asleep" in text for status, text in found())
        twin.sleeps = False
        assert any(status == "FAILED" and "without --enable-sleep-mode" in text for status, text in found())
        twin.dev_mode = False
        assert any(status == "FAILED" and "without VLLM_SERVER_DEV_MODE=1" in text for status, text in found())
        assert twin.states == []
