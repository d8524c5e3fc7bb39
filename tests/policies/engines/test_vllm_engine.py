"""The vLLM engine against a double of the server that samples from the same weights and the adapters that it was told to load."""

import copy
import logging
import re
import threading
from contextlib import contextmanager

import pytest
import torch
from transformers import Qwen2VLImageProcessorPil

import loopback
import tiny_emu3
import tiny_models
import tiny_policies
import tiny_writers
import tiny_writing
import vllm_double
import vllm_runner
from retouch.models.emu3 import DRAW
from retouch.models.lora import write_lora
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.policies.engine import EngineFault
from retouch.types import Needs, Slice
from retouch_serve.engines.client import Client, RequestRefused
from retouch_serve.engines.sections import VllmEngine
from retouch_serve.engines.vllm import AdapterPublisher, Servable, VllmDecoding
from retouch_serve.engines.vllm_wire import PLUGIN, has_plugin, query_server
from vllm_double import CHANGES, GENERATE, LOAD, UNLOAD, Double, always, at_first, serving

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


@contextmanager
def served(tmp_path, kind="qwen2.5-vl", *, sampling=None, limits=None, timeout=600.0, patience=60.0, ranks=None, **double):
    """A policy with the engine, the double of its server, and the clock of its retries."""
    writer = tiny_writers.writer(kind, train="none", stop=tiny_writing.STOPS)
    twin = Double(
        copy.deepcopy(writer.module),
        image_processor=tiny_writers.image_processor(kind) if kind in tiny_writers.VISION_KINDS else None,
        image_token=writer.image_token,
        **double,
    )
    tiny_writers.make_trainable(writer.module, "lora")
    waiting = FakeClock()
    with serving(twin) as url:
        policy = tiny_writing.policy(writer=writer, sampling=sampling)
        policy.limits = VllmEngine(url=url, **{"truncate_at": None, **(limits or {})})
        adapters = AdapterPublisher(
            weights=policy.copies.parameters,
            save=lambda folder: write_lora(writer.module, folder, pipeline=None),
            folder=tmp_path / "adapters",
            prefix="retouch-test",
            **(ranks or {}),
        )

        def connect():
            return Client(url, timeout=timeout, patience=patience, sleep=waiting.sleep, clock=waiting.clock)

        any_rank = {"any_rank": ranks["any_rank"]} if ranks else {}
        policy.engine = VllmDecoding(writer, connect=connect, weights=adapters, **any_rank)
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


def test_top_k_raises_if_the_server_does_not_report_the_kept_tokens(tmp_path):
    with (
        served(tmp_path, sampling={"top_k": 5}) as (policy, _, _),
        pytest.raises(EngineFault, match="start the server with --return-sampling-mask"),
    ):
        policy.rollout(tiny_writing.batch())


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


def test_forbidden_tokens_are_sent_as_logit_bias(tmp_path):
    with served(tmp_path) as (policy, twin, _):
        policy.rollout(tiny_writing.batch())
        banned = (~policy.model.grammar.vocabularies[0]).nonzero()[:, 0].tolist()
        assert twin.asked[0].sampling_params.logit_bias == dict.fromkeys(banned, -100.0)
        how = twin.asked[0].sampling_params
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


# Faults


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


def test_a_server_that_does_not_answer_in_time_raises(tmp_path):
    with (
        served(tmp_path, timeout=0.2, patience=0.0, fault=always("hang", path=LOAD)) as (policy, _, _),
        pytest.raises(EngineFault, match=r"within 0 s .* no answer in time"),
    ):
        policy.rollout(tiny_writing.batch())


@pytest.mark.parametrize("way", ["503", "429", "reset", "close mid-body"])
def test_a_lasting_fault_raises_after_patience(tmp_path, way):
    with served(tmp_path, patience=40.0) as (policy, twin, waiting):
        twin.fault = always(way)
        with pytest.raises(EngineFault, match=r"did not answer /inference/v1/generate within 40 s \(rollout.engine.patience\)"):
            policy.rollout(tiny_writing.batch().take(slice(0, 2)))
        assert sum(waiting.pauses) == pytest.approx(40.0)
        assert len(waiting.pauses) < 20


def test_an_unreachable_server_raises_after_patience(tmp_path):
    with served(tmp_path) as (policy, _, waiting):
        pass
    with pytest.raises(EngineFault, match=r"did not answer /v1/load_lora_adapter within 60 s.*ConnectError"):
        policy.rollout(tiny_writing.batch())
    assert sum(waiting.pauses) == pytest.approx(60.0)


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


def test_a_server_that_is_set_up_wrongly_raises_with_its_message(tmp_path):
    for double, says in (
        ({"runtime_lora": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        ({"max_lora_rank": 2}, "LoRA rank 4 is greater than max_lora_rank 2"),
        ({"key": "secret"}, "HTTP 401"),
    ):
        with served(tmp_path, **double) as (policy, _, _), pytest.raises(EngineFault, match=says):
            policy.rollout(tiny_writing.batch())
    with served(tmp_path, scale_out=False) as (policy, _, _), pytest.raises(EngineFault, match="--enable-scale-out"):
        policy.rollout(tiny_writing.batch())


def test_an_adapter_that_the_server_does_not_find_raises(tmp_path):
    with served(tmp_path) as (policy, _, _):
        policy.engine._weights._save = lambda folder: None
        with pytest.raises(EngineFault, match="No adapter found"):
            policy.rollout(tiny_writing.batch())


def test_the_api_key_is_sent_to_the_server(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with served(tmp_path, key="secret") as (policy, _, _):
        policy.rollout(tiny_writing.batch())


@pytest.mark.parametrize("way", [way for way in CHANGES if way != "log-probabilities off"])
def test_invalid_responses_raise_without_a_retry(tmp_path, way):
    with served(tmp_path) as (policy, twin, waiting):
        twin.fault = always(way)
        with pytest.raises(EngineFault, match="gave an invalid response"):
            policy.rollout(tiny_writing.batch())
        assert not waiting.pauses


def test_a_max_model_len_that_is_too_small_raises(tmp_path):
    with served(tmp_path, max_model_len=40) as (policy, _, _), pytest.raises(EngineFault, match="--max-model-len"):
        policy.rollout(tiny_writing.batch())


def test_a_different_image_processor_raises(tmp_path):
    with served(tmp_path) as (policy, twin, _):
        twin.image_processor = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=16 * 16, max_pixels=24 * 24)
        with pytest.raises(EngineFault, match="another tokenizer or image processor"):
            policy.rollout(tiny_writing.batch())


def test_a_mismatch_above_the_limit_stops_the_run(tmp_path):
    with served(tmp_path) as (policy, twin, _):
        policy.rollout(tiny_writing.batch())
        twin.fault = always("log-probabilities off")
        with pytest.raises(EngineFault, match=r"off from the policy's own by 0\.5 nats a token.*allows 0\.1"):
            policy.rollout(tiny_writing.batch())
        policy.limits = policy.limits.model_copy(update={"max_mismatch": 0.6, "truncate_at": 1.5})
        trajectory = policy.rollout(tiny_writing.batch())
        scale = policy.evaluate(trajectory, all_actions(trajectory), Needs()).scale
        torch.testing.assert_close(scale[trajectory.mask], torch.full_like(scale[trajectory.mask], 1.5))
    with (
        served(tmp_path, processed=False, sampling={"temperature": 0.5}) as (policy, _, _),
        pytest.raises(EngineFault, match="--logprobs-mode processed_logprobs"),
    ):
        policy.rollout(tiny_writing.batch())


def test_raw_log_probs_of_the_server_raise_at_temperature_1(tmp_path):
    """They differ only by the probability of the banned tokens, which can be far below the allowed mismatch."""
    with (
        served(tmp_path, processed=False) as (policy, twin, _),
        pytest.raises(EngineFault, match=r"returns raw log-probabilities.*--logprobs-mode processed_logprobs"),
    ):
        policy.rollout(tiny_writing.batch())
    assert not twin.asked


def test_a_server_with_the_sampling_mask_raises_without_top_k(tmp_path):
    """vLLM answers a request without top_k by HTTP 500 and an empty message."""
    with (
        served(tmp_path, sampling_mask=True) as (policy, twin, _),
        pytest.raises(EngineFault, match=r"was started with --return-sampling-mask.*set rollout\.top_k"),
    ):
        policy.rollout(tiny_writing.batch())
    assert not twin.asked


def test_a_permanent_server_error_raises_after_few_retries(tmp_path):
    with served(tmp_path) as (policy, twin, waiting):
        policy.rollout(tiny_writing.batch())
        twin.fault = always("500")
        with pytest.raises(EngineFault, match="refuses to generate: HTTP 500: told to answer 500"):
            policy.rollout(tiny_writing.batch().take(slice(0, 2)))
        assert len(waiting.pauses) == 2
        assert sum(waiting.pauses) <= 1.5
    with served(tmp_path, max_lora_rank=2) as (policy, _, waiting), pytest.raises(EngineFault, match="max_lora_rank"):
        policy.rollout(tiny_writing.batch())
    assert not waiting.pauses


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
    """Two ranks in lockstep: if one meets a fault, both raise at the same call."""
    meeting, told = threading.Barrier(2), []

    def any_rank(flag):
        told.append(flag)
        meeting.wait(timeout=30)
        found = any(told[-2:] if len(told) % 2 == 0 else told[-3:])
        meeting.wait(timeout=30)
        return found

    with (
        served(tmp_path / "a", ranks={"first": True, "any_rank": any_rank}) as (first, double, _),
        served(tmp_path / "b", ranks={"first": False, "any_rank": any_rank}) as (second, _, _),
    ):
        second.engine._connect = first.engine._connect
        second.engine._weights._folder = tmp_path / "a" / "adapters"
        batch = tiny_writing.batch()
        caught = [None, None]

        def act(number, policy, rows):
            try:
                policy.rollout(batch.take(rows))
            except EngineFault as fault:
                caught[number] = str(fault)

        def both():
            threads = [
                threading.Thread(target=act, args=(number, policy, rows))
                for number, policy, rows in ((0, first, slice(0, 3)), (1, second, slice(3, 6)))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        first.any_rank = second.any_rank = any_rank
        both()
        assert caught == [None, None]
        assert len(double.loaded) == 1
        double.fault = at_first("aborted")
        both()
        assert sorted(text.split(":")[0][:24] for text in caught) == ["the vLLM server at http", "the vLLM server failed o"]
        double.fault = always("500", path=LOAD)
        for policy in (first, second):
            tiny_writers.perturb(policy.module)
        both()
        assert "rank 0 could not load the weights" in caught[1]
        assert "did not load the adapter" in caught[0]


# Capabilities


def test_query_server_reports_the_capabilities_of_the_server(tmp_path):
    with served(tmp_path) as (policy, twin, _), policy.engine._connect() as client:
        found = query_server(client)
        assert (found.version, found.base.id, found.loads_adapters, found.takes_ids) == ("0.32.0", "base", True, True)
        twin.runtime_lora = twin.scale_out = False
        found = query_server(client)
        assert (found.loads_adapters, found.takes_ids) == (False, False)
        assert not twin.loaded
        twin.key = "secret"
        with pytest.raises(EngineFault, match="HTTP 401"):
            query_server(client)


def test_the_double_rejects_invalid_requests(tmp_path):
    good = {"token_ids": [1], "sampling_params": {"max_tokens": 1, "logit_bias": {"3": -1.0}}}
    with served(tmp_path, "qwen2.5") as (_, double, _):
        assert double.answer("POST", GENERATE, vllm_double.json.dumps(good).encode())
        for wrong in (
            {**good, "prompt": "x"},
            {**good, "token_ids": "1"},
            {**good, "token_ids": []},
            {**good, "sampling_params": {**good["sampling_params"], "temperature": 3}},
            {**good, "sampling_params": {**good["sampling_params"], "top_k": 2.5}},
            {**good, "sampling_params": {**good["sampling_params"], "allowed": [1]}},
            {**good, "sampling_params": {**good["sampling_params"], "logit_bias": {"9999": -1.0}}},
        ):
            with pytest.raises(vllm_double.Refusal):
                double.answer("POST", GENERATE, vllm_double.json.dumps(wrong).encode())
        with pytest.raises(vllm_double.Refusal):
            double.answer("POST", UNLOAD, b'{"lora_name": "x"}')


# Image tokens


@contextmanager
def served_image_tokens(tmp_path, *, prefill=DRAW, grammar=True, **double):
    """A policy of image tokens with the engine, and the double behind it."""
    editor = tiny_emu3.editor(prefill=prefill, grammar=grammar)
    twin = Double(copy.deepcopy(editor.module), **double)
    twin.base.delete_adapter("default")
    tiny_writers.perturb(editor.module)
    height, width = editor.grid
    longest = len(editor.words.header(height, width)) + height * (width + 1) + 3
    with serving(twin) as url:
        policy = tiny_writing.policy(writer=editor, sampling={"max_new_tokens": longest, "temperature": 0.7})
        policy.engine = VllmDecoding(
            editor,
            connect=lambda: Client(url, timeout=600.0, patience=1.0),
            weights=AdapterPublisher(
                weights=policy.copies.parameters,
                save=lambda folder: write_lora(editor.module, folder, pipeline=None),
                folder=tmp_path / "adapters",
                prefix="retouch-test",
            ),
        )
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


def test_an_invalid_grammar_is_rejected_by_the_server(tmp_path, monkeypatch):
    with served_image_tokens(tmp_path, processor=vllm_runner.install_plugin(monkeypatch)) as (policy, twin):
        policy.engine._grammar = {**policy.engine._grammar, "begin": -1}
        with pytest.raises(EngineFault, match=r"refuses to generate: HTTP 400: extra_args\.retouch_form\.begin"):
            policy.rollout(tiny_writing.batch(edits()))
        with policy.engine._connect() as client:
            assert has_plugin(client)
            twin.processor = None
            assert not has_plugin(client)


def test_image_tokens_without_a_grammar_need_no_plugin(tmp_path):
    with served_image_tokens(tmp_path, grammar=False) as (policy, twin):
        trajectory = policy.rollout(tiny_writing.batch(edits()))
        assert gap(trajectory) < 1e-4
        assert all(asked.sampling_params.extra_args is None for asked in twin.asked)


def test_top_k_raises_for_image_tokens_with_a_grammar(tmp_path, monkeypatch):
    with served_image_tokens(tmp_path, processor=vllm_runner.install_plugin(monkeypatch)) as (policy, _):
        policy.sampling = policy.sampling.model_copy(update={"top_k": 5})
        with pytest.raises(ValueError, match="remove both"):
            policy.rollout(tiny_writing.batch(edits()))
