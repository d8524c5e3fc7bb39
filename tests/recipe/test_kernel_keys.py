"""The keys of kernels: attention backends, the fused optimizer, and an autoencoder that computes in slices."""

from typing import Any

import pytest
import torch

import tiny_models
from retouch.distributed.placement import init_distributed_from_recipe
from retouch.distributed.ranks import find_device, scoring_device
from retouch.models.sd3.family import SD3Model
from retouch.recipe.derived_facts import differences
from retouch.recipe.document import apply
from retouch.recipe.recipe import Recipe, parse
from retouch_plan.doctor.device import PlannedDevice, check_kernels
from tiny_recipes import SMALL

HERE = PlannedDevice("cpu", 1, torch.device("cpu"))


def recipe(*changes: str) -> Recipe:
    return parse(apply(SMALL, changes))


def test_kernels_may_change_when_a_run_resumes() -> None:
    other = recipe("policy.attention=native", "policy.compile=regional", "optimizer.fused=always")
    assert differences(recipe(), other) == []
    assert (recipe().optimizer.options.get("fused"), other.optimizer.options["fused"]) == (None, True)
    used = other.policy.for_inference()
    assert (getattr(used, "attention", "none"), used.compile) == (None, None)


def test_a_deterministic_run_rejects_attention_that_may_be_nondeterministic() -> None:
    with pytest.raises(ValueError, match=r"policy\.attention: whether flash is deterministic is not known; use null"):
        recipe("deterministic=true", "policy.attention=flash")
    recipe("deterministic=true", "policy.attention=_native_flash")


@pytest.mark.parametrize(("name", "status"), [("native", "ok"), ("sage", "FAILED")])
def test_the_doctor_tries_the_attention_backend(name: str, status: str) -> None:
    (finding,) = check_kernels(recipe(f"policy.attention={name}"), HERE)
    assert (finding.subject, finding.status) == ("kernels", status)
    assert f"policy.attention{' ' if status == 'ok' else ': '}{name}" in finding.text
    if status == "FAILED":
        assert "_native_math" in finding.text
        assert finding.fix == "--set policy.attention=null"
    (planned,) = check_kernels(recipe(f"policy.attention={name}"), PlannedDevice("h100", 1, None))
    assert "not tried, because h100 is not in this machine" in planned.text
    assert list(check_kernels(recipe(), HERE)) == []


def test_point_2_4_cudnn_attention_is_used_only_if_the_recipe_names_it() -> None:
    for find in (lambda: find_device("cpu"), scoring_device, lambda: init_distributed_from_recipe(recipe())):
        torch.backends.cuda.enable_cudnn_sdp(True)
        find()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    (finding,) = check_kernels(recipe("policy.model.dtype=bfloat16"), PlannedDevice("h100", 1, None))
    assert "torch's FlashAttention, and memory-efficient attention where there is a mask; cuDNN's" in finding.text
    (named,) = check_kernels(recipe("policy.attention=_native_cudnn"), PlannedDevice("h100", 1, None))
    assert "policy.attention _native_cudnn: not tried" in named.text


@torch.no_grad()
def test_vae_slicing_and_tiling_keys_configure_the_autoencoder() -> None:
    options: dict[str, Any] = {"kind": "sd3", "path": "folder"}
    whole, sliced = tiny_models.sd3_vae(), tiny_models.sd3_vae()
    SD3Model(**options, vae_slicing=True).limit_vae(sliced)
    assert (sliced.use_slicing, sliced.use_tiling) == (True, False)
    latents = torch.randn(3, 16, 4, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sliced.decode(latents).sample, whole.decode(latents).sample, rtol=0, atol=1e-5)
    SD3Model(**options, vae_tiling=True).limit_vae(whole)
    assert (whole.use_slicing, whole.use_tiling) == (False, True)
    assert not {"vae_slicing", "vae_tiling"} & SD3Model(**options).model_dump().keys()
