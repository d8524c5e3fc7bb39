"""A real vLLM server that returns the mask of top-k and top-p, and servers that were started with the wrong flags."""

import pytest
import torch
from transformers import Qwen2ForCausalLM

import like_vllm
import served_models
import tiny_writer_runs
import tiny_writers
import tiny_writing
import vllm_server
from retouch.policies.engine import EngineFault
from retouch_serve.engines.vllm_wire import query_sampling, query_server
from vllm_double import Double

pytestmark = [pytest.mark.slow, pytest.mark.engines, vllm_server.NEEDS_VLLM]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    tiny_writer_runs.save_language_model(found, hidden_size=64)
    return found


def batch():
    return tiny_writing.batch(served_models.tasks(images=False), 4)


def double(folder, **options):
    return Double(Qwen2ForCausalLM.from_pretrained(folder).eval(), max_num_seqs=16, max_model_len=512, **options)


def test_log_probabilities_match_with_the_returned_top_k_and_top_p_mask(folder, tmp_path):
    with vllm_server.running(folder, tmp_path, *vllm_server.LORA_FLAGS, "--return-sampling-mask", runner=2) as server:
        assert like_vllm.differences(server.url, double(folder, sampling_mask=True), like_vllm.MASK) == []
        for sampling in ({"top_k": 5}, {"top_k": 40, "top_p": 0.8, "temperature": 1.3}):
            policy = served_models.policy(
                served_models.writer(folder), server.url, tmp_path / str(len(sampling)), sampling=sampling
            )
            tiny_writers.perturb(policy.module)
            trajectory = policy.rollout(batch())
            assert (trajectory.log_probs - trajectory.behaviour_log_probs)[trajectory.mask].abs().max() < 1e-4
            kept = (trajectory.support >= 0).sum(-1)
            assert (kept[trajectory.mask] <= sampling["top_k"]).all()
            assert (torch.isin(trajectory.ids, torch.tensor(policy.model.stop)) | (kept > 0))[trajectory.mask].all()
        without = served_models.policy(served_models.writer(folder), server.url, tmp_path / "without")
        with pytest.raises(EngineFault, match=r"was started with --return-sampling-mask.*set rollout\.top_k"):
            without.rollout(batch())


def test_a_server_with_raw_log_probabilities_is_rejected(folder, tmp_path):
    """This server also returns no mask and has no development endpoints."""
    with vllm_server.running(folder, tmp_path, *vllm_server.LORA_FLAGS, "--logprobs-mode", "raw_logprobs") as server:
        exchanges = (*like_vllm.ALL_SERVERS, *like_vllm.ADAPTERS, *like_vllm.NO_DEVELOPMENT)
        assert like_vllm.differences(server.url, double(folder, processed=False, max_lora_rank=32), exchanges) == []
        policy = served_models.policy(served_models.writer(folder), server.url, tmp_path / "run")
        with policy.engine._connect() as client:
            assert not query_sampling(client).processed
            assert not query_server(client).reloads
        with pytest.raises(EngineFault, match=r"returns raw log-probabilities.*--logprobs-mode processed_logprobs"):
            policy.rollout(batch())


def test_a_server_without_scale_out_and_runtime_lora_is_rejected(folder, tmp_path):
    with vllm_server.running(folder, tmp_path, *vllm_server.LORA_FLAGS, scale_out=False, runtime_lora=False) as server:
        exchanges = (*like_vllm.NO_SCALE_OUT, *like_vllm.NO_RUNTIME_LORA)
        assert like_vllm.differences(server.url, double(folder, scale_out=False, runtime_lora=False), exchanges) == []
        policy = served_models.policy(served_models.writer(folder), server.url, tmp_path / "run")
        with policy.engine._connect() as client:
            found = query_server(client)
            assert (found.takes_ids, found.loads_adapters) == (False, False)
        with pytest.raises(EngineFault, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
            policy.rollout(batch())
