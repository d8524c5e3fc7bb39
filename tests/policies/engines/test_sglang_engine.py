"""The SGLang engine against a double of the server, which has SGLang's schema and samples from its own copy of the weights."""

import logging
import struct
from contextlib import contextmanager
from functools import partial

import pytest
import torch

import family_runs
import sglang_double
import tiny_loop
import tiny_models
import tiny_policies as tiny
from retouch.distributed.ranks import Ranks
from retouch.models.lora import write_lora
from retouch.models.pipeline import Guided, PipelineModel
from retouch.models.train import FullWeights, Lora
from retouch.policies.denoising import DenoisingPolicy
from retouch.policies.engine import EngineFault
from retouch.policies.rollout import EngineContext
from retouch.policies.weights import WeightCopies
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.run.metrics import completion_metrics
from retouch.run.session import run
from retouch.types import Needs, Slice
from retouch_models.flux import FluxModel
from retouch_models.qwen_image import QwenImageModel
from retouch_models.sd3 import SD3Model
from retouch_models.z_image import ZImageModel
from retouch_serve.engines.sections import SglangEngine
from retouch_serve.wire import unpack
from retouch_worlds.testing import check_policy
from sglang_double import CHECKSUM, GENERATE, LIST_LORAS, SET_LORA, UPDATE
from slow_params import slow_after


@contextmanager
def served(tmp_path, *, train="lora", guidance=1.0, context=None, limits=None, **how):
    """A policy with the engine, and the double behind it."""
    model = tiny.sd3_model()
    double = sglang_double.double_of(model)
    tiny.make_trainable(model.module, train)
    copies = WeightCopies(model.module)

    def save(folder):
        if train == "full":
            model.module.save_pretrained(folder)
        else:
            write_lora(model.module, folder, pipeline=None)

    with sglang_double.serving(double) as url:
        section = SglangEngine(url=url, patience=0.0, timeout=60.0, images=2, **(limits or {}))
        weights = {"weights": copies.parameters, "save": save, "folder": tmp_path / "run", "full_weights": train == "full"}
        run = EngineContext(**weights, **(context or {}))
        engine = section.build(model, run)
        sampling = tiny.sampling(engine=section, guidance_scale=guidance, **how)
        options = {"sampling": sampling, "eval_steps": tiny.NUM_STEPS, "microbatch": 4, "copies": copies, "engine": engine}
        yield DenoisingPolicy(Guided(model, guidance) if guidance > 1 else model, **options, any_rank=run.any_rank), double
        engine.close()


def batch(group_size=3):
    return tiny.batch(group_size=group_size, tasks=lambda count: tiny.tasks(count, with_images=False))


@pytest.mark.parametrize(
    ("kind", "mode", "guidance", "reduction"),
    [("sde", "all", 1.0, "mean"), ("cps", "window", 3.0, "mean"), ("sde", "sliding", 3.0, "sum"), ("cps", "all", 1.0, "sum")],
)
def test_server_trajectories_match_the_policys_log_probs(tmp_path, kind, mode, guidance, reduction):
    with served(tmp_path, kind=kind, mode=mode, guidance=guidance, reduction=reduction) as (policy, double):
        tiny.perturb(policy)
        made = policy.rollout(batch())
        torch.testing.assert_close(made.log_probs, made.behaviour_log_probs, rtol=1e-4, atol=1e-5)
        assert made.deviations.mean().sqrt() < 5e-3
        assert len(double.bodies(GENERATE)) == 4  # two groups of three rows, two images a request
        found = policy.evaluate(made, Slice(slice(0, 6), slice(0, made.mask.shape[1])), Needs())
        torch.testing.assert_close(
            found.log_ratio, torch.zeros_like(found.log_ratio), rtol=0, atol=1e-4 if reduction == "sum" else 1e-6
        )
        assert len({row.sum().item() for row in made.outputs}) == 6


def test_policy_with_the_sglang_engine_passes_the_contract_checks(tmp_path):
    with served(tmp_path, mode="window") as (policy, _):
        check_policy(policy, batch(group_size=2), needs=Needs())


def test_samples_do_not_depend_on_the_split_into_batches(tmp_path):
    with served(tmp_path) as (policy, _):
        whole = policy.rollout(batch())
        parts = [policy.rollout(batch().take(rows)) for rows in (slice(0, 1), slice(1, 5), slice(5, 6))]
        torch.testing.assert_close(torch.cat([part.outputs for part in parts]), whole.outputs)
        joined = type(whole).concat(parts)
        torch.testing.assert_close(joined.behaviour_log_probs, whole.behaviour_log_probs)
        assert joined.deviations.shape == joined.take(torch.arange(6)).deviations.shape == whole.deviations.shape


def test_a_small_mismatch_is_logged_and_weighted(tmp_path):
    with served(tmp_path, limits={"max_mismatch": 1.0, "truncate_at": 1.01}) as (policy, double):
        double.drift = 0.3
        made = policy.rollout(batch())
        difference = (made.log_probs - made.behaviour_log_probs).exp().clamp(max=1.01)
        found = policy.evaluate(made, Slice(slice(0, 6), slice(0, 3)), Needs())
        torch.testing.assert_close(found.scale, difference)
        assert (found.log_ratio.abs() < 1e-6).all()
        told = completion_metrics(made, ranks=Ranks())
        assert told["engine/deviation"] == pytest.approx(made.deviations.mean().sqrt().item(), rel=1e-5)
        assert told["engine/mismatch_max"] >= told["engine/mismatch"] > 0
        assert completion_metrics(tiny.policy().rollout(tiny.batch()), ranks=Ranks()) == {}


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_a_deviation_is_measured_in_standard_deviations(tmp_path, kind):
    """A drift of the velocity moves the mean by v_coefficient * drift; the estimate is that over the step's std."""
    with served(tmp_path, kind=kind, limits={"max_mismatch": 1e4}) as (policy, double):
        double.drift = 1.0
        made = policy.rollout(batch(group_size=16))
        sigmas = made.sigmas
        flat = torch.zeros(3, 1)
        step = partial(policy.sampling.transition.step, sigma_max=sigmas[1], reduction="mean", next=flat)
        steps = [step(flat, flat + drift, sigmas[:3], sigmas[1:4]) for drift in (0.0, 1.0)]
        expected = ((steps[1].mean - steps[0].mean)[:, 0] / steps[0].step_std).square()
        signed = (made.behaviour_log_probs - made.log_probs).mean(0)
        estimate = 2 * signed if kind == "sde" else signed / steps[0].step_std.square()
        torch.testing.assert_close(estimate, expected, rtol=0.25, atol=0.05)


def test_a_large_mismatch_and_a_response_that_is_not_msgpack_raise(tmp_path):
    with served(tmp_path) as (policy, double):
        double.drift = 0.5
        with pytest.raises(EngineFault, match=r"off from the policy's by .* standard deviations .* allows 0.1"):
            policy.rollout(batch())
        double.fault = lambda path: "not a message" if path == GENERATE else None
        with pytest.raises(EngineFault, match="not MessagePack"):
            policy.rollout(batch())


def field(name, change, inside="dit_trajectory"):
    def changed(rows):
        place = rows[-1] if inside is None else rows[-1][inside]
        place[name] = change(place[name])
        return rows

    return changed


def shifted(place, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return change


FAULTS = {
    "fewer images": (lambda rows: rows[:-1], r"images, but \d images were requested"),
    "no list": (lambda rows: rows[0], "not a list of images"),
    "another prompt": (field("prompt", lambda prompt: "another", None), "another prompt or seed"),
    "another seed": (field("seed", lambda seed: seed + 1, None), "another prompt or seed"),
    "another size": (field("latents", lambda latents: latents[..., :-1]), r"latents has the shape"),
    "a state less": (field("latents", lambda latents: latents[1:]), "latents has the shape"),
    "a state that is no number": (field("latents", shifted((0, 0), torch.nan)), "latents has a value that is not a finite"),
    "integers": (field("latents", lambda latents: latents.long()), "latents has a value that is not a finite"),
    "no tensor": (field("latents", lambda latents: [1.0]), "no tensor dit_trajectory.latents"),
    "another schedule": (field("sigmas", shifted(1, 0.9)), "scheduler_config.json"),
    "more steps": (field("sigmas", lambda sigmas: torch.cat([sigmas, sigmas[-1:]])), "sigmas has the shape"),
    "states of other steps": (field("timesteps", lambda times: times.roll(1)), "states of other steps"),
    "an infinite log-probability": (field("rollout_log_probs", shifted(0, -torch.inf), None), "rollout_log_probs has a value"),
    "log-probabilities of other steps": (
        field("rollout_log_probs", lambda found: found.roll(1), None),
        "other steps than requested were stochastic",
    ),
    "no trajectory": (field("dit_trajectory", lambda found: None, None), "no dit_trajectory"),
    "twice the same": (lambda rows: [rows[0]] * len(rows), "two images with the same states"),
}


@pytest.mark.parametrize("way", slow_after(8, FAULTS))
def test_a_response_with_a_fault_is_rejected(tmp_path, way):
    changes, message = FAULTS[way]
    with served(tmp_path, mode="window") as (policy, double):
        double.changes = changes
        with pytest.raises(EngineFault, match=f"gave an invalid response: .*{message}"):
            policy.rollout(batch())


def test_temporary_faults_are_retried_and_permanent_ones_raise(tmp_path, caplog):
    with served(tmp_path, limits={}) as (policy, double):
        left = [500]
        double.fault = lambda path: left.pop() if path == GENERATE and left else None
        policy.engine._connect = policy.sampling.engine.model_copy(update={"patience": 60.0}).connect
        with caplog.at_level(logging.WARNING, logger="retouch"):
            policy.rollout(batch())
        assert "the SGLang server at" in caplog.text
        double.fault = lambda path: 400 if path == GENERATE else None
        with pytest.raises(EngineFault, match="refuses to sample: HTTP 400"):
            policy.rollout(batch())
        double.fault = lambda path: 503 if path == GENERATE else None
        policy.engine._connect = policy.sampling.engine.connect
        with pytest.raises(EngineFault, match=r"did not answer /rollout/generate within 0 s \(rollout.engine.patience\)"):
            policy.rollout(batch())


@pytest.mark.parametrize("train", ["lora", "full"])
def test_every_update_is_loaded_before_the_next_rollout(tmp_path, train):
    load = SET_LORA if train == "lora" else UPDATE
    with served(tmp_path, train=train) as (policy, double):
        for step in range(3):
            made = policy.rollout(batch())
            policy.rollout(batch())
            assert len(double.bodies(load)) == step + 1
            torch.testing.assert_close(made.log_probs, made.behaviour_log_probs, rtol=1e-4, atol=1e-5)
            tiny.perturb(policy, key=step)
        folders = list((tmp_path / "run" / "adapters").iterdir())
        assert len(folders) == 1
        if train == "lora":
            bodies = double.bodies(SET_LORA)
            assert {body["lora_nickname"] for body in bodies} == {"retouch-run"}
            assert {body["merge_mode"] for body in bodies} == {"dynamic"}
            assert len({body["lora_path"] for body in bodies}) == 3
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("train", ["lora", "full"])
def test_a_restarted_server_gets_the_weights_again(tmp_path, train):
    with served(tmp_path, train=train) as (policy, double):
        tiny.perturb(policy)
        policy.rollout(batch())
        double.restart()
        made = policy.rollout(batch())
        torch.testing.assert_close(made.log_probs, made.behaviour_log_probs, rtol=1e-4, atol=1e-5)
        double.after = double.restart
        with pytest.raises(EngineFault, match="lost the weights again"):
            policy.rollout(batch())


def test_a_lora_that_was_not_loaded_and_a_server_without_loras_raise(tmp_path):
    with served(tmp_path) as (policy, double):
        loaded, double.set_lora = double.set_lora, lambda body: {"status": "ok", "message": ""}
        with pytest.raises(EngineFault, match=r"reports that it loaded .* other weights"):
            policy.rollout(batch())
        double.set_lora = loaded
        for path, message in ((SET_LORA, "did not load"), (LIST_LORAS, "refuses /v1/list_loras")):
            double.fault = lambda asked, path=path: 404 if asked == path else None
            with pytest.raises(EngineFault, match=message):
                policy.rollout(batch())


def test_full_weights_that_were_not_loaded_raise(tmp_path):
    with served(tmp_path, train="full") as (policy, double):
        policy.rollout(batch())
        tiny.perturb(policy)
        double.update = lambda body: {"success": True, "message": ""}
        with pytest.raises(EngineFault, match="its weights did not change"):
            policy.rollout(batch())
        double.update = lambda body: {"success": False, "message": "no room"}
        with pytest.raises(EngineFault, match=r"did not load .*: no room. It must see that folder"):
            policy.rollout(batch())
        double.checksum = lambda body: {"transformer": "not_found"}
        del double.update
        with pytest.raises(EngineFault, match="returned no checksum of its transformer, but 'not_found'"):
            policy.rollout(batch())


def test_all_ranks_raise_together_and_only_rank_0_loads_weights(tmp_path):
    ranks = tiny_loop.thread_ranks(2)
    with (
        served(tmp_path, context={"first": True, "any_rank": ranks[0].any}) as (first, double),
        served(tmp_path, context={"first": False, "any_rank": ranks[1].any}) as (second, other),
    ):
        second.engine._connect = first.engine._connect
        parts = [(first, batch().take(slice(0, 3))), (second, batch().take(slice(3, 6)))]

        def both():
            return tiny_loop.run_on_threads(ranks, lambda own: tiny_loop.engine_fault(*parts[own.rank]))

        assert both() == [None, None]
        assert len(double.bodies(SET_LORA)) == 1
        assert not other.asked
        double.restart()
        assert both() == [None, None]
        assert len(double.bodies(SET_LORA)) == 2
        left = [400]
        double.fault = lambda path: left.pop() if path == GENERATE and left else None
        assert sorted(text.split(":")[0][:27] for text in both()) == ["the SGLang server at http", "the SGLang server failed on"]


def rollout(**options):
    return tiny.sampling(engine=SglangEngine(url="http://127.0.0.1:1"), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "dance"}, "rollout.transition.kind: dance is not supported by SGLang"),
        ({"kind": "ode"}, "rollout.transition.kind: ode has no log-probabilities"),
        ({"noise_level": 0.0}, "rollout.transition.noise_level: SGLang has no log-probabilities without noise"),
        ({"shared_noise": True}, "rollout.shared_noise: SGLang draws different noise"),
        ({"mode": "branch"}, "rollout.window.mode: in SGLang, images cannot share steps of a chain"),
    ],
)
def test_unsupported_rollout_options_are_reported(options, words):
    (found,) = _problems(rollout(**options))
    assert found.startswith(words)


def test_unsupported_models_and_training_options_are_reported():
    good = rollout()
    assert list(_problems(good)) == []
    assert list(_problems(good, model=FluxModel(path="p"), train=FullWeights())) == []
    assert "sglang samples for qwen-image, flux, sd3, and not for z-image" in next(_problems(good, model=ZImageModel(path="p")))
    assert "SGLang's server gives FLUX 3.5" in next(_problems(good, model=FluxModel(path="p", guidance=4.0)))
    assert "accepts only whole numbers" in next(_problems(good, train=Lora(rank=4, alpha=1.5)))
    qwen = QwenImageModel(path="p")
    for targets in (None, ("to_q", "to_v"), ("add_q_proj", "attn.add_k_proj", "attn.add_v_proj")):
        assert list(_problems(good, model=qwen, train=Lora(rank=4, alpha=4.0, targets=targets))) == []
    part = Lora(rank=4, alpha=4.0, targets=("to_q", "add_k_proj"))
    assert "ignores an adapter of add_k_proj alone" in next(_problems(good, model=qwen, train=part))
    assert list(_problems(good, train=part)) == []


def _problems(section, *, model=None, train=None):
    model, train = model or SD3Model(path="p", size=(8, 16)), train or Lora(rank=4, alpha=4.0)
    return section.engine_problems("rollout", model=model, train=train)


def test_sharded_weights_and_unsupported_models_raise(tmp_path, monkeypatch):
    section = SglangEngine(url="http://127.0.0.1:1")
    context = EngineContext(weights={}, save=lambda to: None, folder=tmp_path, sharded=True)
    with pytest.raises(ValueError, match="use zero2 or none"):
        section.build(tiny.sd3_model(), context)
    monkeypatch.delattr(PipelineModel, "NEGATIVE")
    with pytest.raises(ValueError, match="and not for SD3"):
        section.build(tiny.sd3_model(), context)


def test_doctor_diagnoses_the_sglang_server(tmp_path):
    with served(tmp_path) as (policy, double):
        section = policy.sampling.engine
        for full_weights in (True, False):
            found = list(section.diagnose(base_model="base", full_weights=full_weights))
            assert [status for status, _, _ in found] == ["ok", "note"]
        assert [status for status, _, _ in section.diagnose(base_model="other", full_weights=False)] == ["ok", "note", "note"]
        double.fault = lambda path: 404 if path == GENERATE else None
        assert list(section.diagnose(base_model="base", full_weights=False))[-1][0] == "FAILED"
        double.fault = lambda path: 404 if path == CHECKSUM else None
        assert next(section.diagnose(base_model="base", full_weights=True))[0] == "FAILED"
    assert next(section.diagnose(base_model="base", full_weights=False))[0] == "FAILED"


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"\x05", 5),
        (b"\xff", -1),
        (b"\xd1\xff\x00", -256),
        (b"\xca" + struct.pack(">f", 0.5), 0.5),
        (b"\x92\x01\xa1a", [1, "a"]),
        (b"\x81\xa1a\xc4\x01b", {"a": b"b"}),
        (b"\xdc\x00\x01\xc0", [None]),
        (b"\xde\x00\x01\xd9\x01a\xcd\x01\x00", {"a": 256}),
    ],
)
def test_msgpack_encodings_are_unpacked(body, value):
    assert unpack(body, most=100) == value


def test_invalid_msgpack_raises():
    for body in (b"", b"\x92\x01", b"\x01\x01", b"\xc1", b"\xd4\x00\x00", b"\x81\x01\x01", b"\xa1\xff", b"\x91" * 99):
        with pytest.raises(ValueError, match=r".+"):
            unpack(body, most=100)


@pytest.mark.slow
def test_a_recipe_runs_with_the_engine(tmp_path):
    folder = tiny_models.save_flux(tmp_path / "flux")
    recipe = family_runs.small_recipe({"kind": "flux", "path": str(folder), "size": [32, 48]}, tmp_path)
    double = sglang_double.double_of(parse(recipe).policy.model.build(device=torch.device("cpu")))
    with sglang_double.serving(double) as url:
        recipe["rollout"]["engine"] = {"kind": "sglang", "url": url, "timeout": 60.0, "patience": 0.0}
        read = parse(recipe)
        assert parse(read.document()) == read
        assert run(read, fresh=False) == 0
    lines = RunFolder(read.folder).read_metrics()
    assert len(double.bodies(SET_LORA)) == 2
    for line in lines[-2:]:
        assert line["engine/deviation"] < 0.05
        assert line["policy/ratio_max_first"] == 0
