"""Attention backends and compiled blocks: the same results, the same names of weights, and clear errors."""

import copy

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

import tiny_models
import tiny_policies
import tiny_writers
import tiny_writing
from retouch.models import kernels
from retouch.models.ip_adapter import ReferenceAttention
from retouch.types import Needs

CPU = torch.device("cpu")
WORKS = ("native", "_native_math")
COMPILES = pytest.mark.filterwarnings("ignore")
"""torch.compile warns of torch's own code."""


@pytest.fixture(autouse=True)
def _fresh_graphs():
    torch._dynamo.reset()


# Attention backends


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_attention_backends_support_training(name, dtype):
    assert kernels.trains_with(name, device=CPU, dtype=dtype) is None


def test_unavailable_attention_backend_reports_the_reason():
    for name, why in (("nonsense", "no such backend"), ("sage", "missing package"), ("flash", "missing package")):
        assert why in kernels.trains_with(name, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda output: output.detach(), "no gradient"),
        (lambda output: output * 1.5, "output differs from that of torch by 50%"),
        (lambda output: output.detach() + 0.5 * (output - output.detach()), "gradient differs from that of torch by 50%"),
    ],
)
def test_backend_with_wrong_output_or_gradient_is_rejected(monkeypatch, spoil, why):
    name, backends = AttentionBackendName._NATIVE_MATH, _AttentionBackendRegistry._backends
    attend = backends[name]
    monkeypatch.setitem(backends, name, lambda *args, **kwargs: spoil(attend(*args, **kwargs)))
    assert why in kernels.trains_with(name.value, device=CPU, dtype=torch.float32)


def velocity(module):
    random = torch.Generator().manual_seed(0)
    hidden, words, pooled = (torch.randn(2, *shape, generator=random) for shape in ((6, 64), (5, 48), (16,)))
    given = {"hidden_states": hidden, "encoder_hidden_states": words, "pooled_projections": pooled, "return_dict": False}
    scales = {"timestep": torch.tensor([0.3, 0.7]), "guidance": torch.tensor([3.0, 3.0])}
    return module(**given, **scales, img_ids=torch.zeros(6, 3), txt_ids=torch.zeros(5, 3))[0]


def test_set_attention_changes_only_the_given_model():
    one, other = tiny_models.flux_transformer(), tiny_models.flux_transformer()
    active = _AttentionBackendRegistry.get_active_backend()
    kernels.set_attention(one, "_native_math")
    assert _AttentionBackendRegistry.get_active_backend() == active
    chosen = [
        {each.processor._attention_backend for each in module.modules() if hasattr(each, "processor")} for module in (one, other)
    ]
    assert chosen == [{AttentionBackendName._NATIVE_MATH}, {None}]
    torch.testing.assert_close(velocity(one), velocity(other), rtol=0, atol=1e-5)


def test_set_attention_also_sets_the_backend_of_reference_attention(monkeypatch):
    module = tiny_models.flux_transformer()
    attention = module.transformer_blocks[0].attn
    attention.processor = ReferenceAttention(
        attention.processor, width=8, heads=2, head_width=32, scale=1.0, output_dtype=torch.float32
    )
    kernels.set_attention(module, "_native_math")
    assert attention.processor.backend == attention.processor.base._attention_backend == AttentionBackendName._NATIVE_MATH


def test_models_without_backends_or_known_blocks_raise():
    with pytest.raises(ValueError, match=r"policy\.attention: SD3Transformer2DModel does not support attention backends; use null"):
        kernels.set_attention(tiny_models.sd3_transformer(), "_native_math")
    with pytest.raises(ValueError, match=r"policy\.compile: the repeated blocks of Linear are unknown; use null"):
        kernels.compile_blocks(torch.nn.Linear(2, 2))


# Compiled blocks


def gradients(policy, trajectory):
    """Log-probabilities, KL and the gradient of their sum."""
    made = [policy.evaluate(trajectory, part, Needs(kl=KL[type(policy).__name__])) for part in policy.microbatches(trajectory)]
    sum((each.log_probs.sum() + each.kl.sum()) for each in made).backward()
    weights = [parameter for parameter in policy.module.parameters() if parameter.requires_grad]
    found = [weight.grad.clone() for weight in weights]
    for weight in weights:
        weight.grad = None
    return torch.cat([each.log_probs.detach().flatten() for each in made]), torch.cat([each.kl.flatten() for each in made]), found


KL = {"DenoisingPolicy": "velocity", "AutoregressivePolicy": "k3"}


@COMPILES
@pytest.mark.slow
@pytest.mark.parametrize(("family", "recompute"), [("sd3", False), ("sd3", True), ("edit", False), ("edit", True)])
def test_compiled_transformer_gives_the_same_samples_and_gradients(family, recompute):
    """The backend aot_eager traces the forward and backward graphs, but generates no machine code."""
    plain, compiled = (tiny_policies.policy(family, guidance=2.0) for _ in range(2))
    names = list(compiled.module.state_dict())
    kernels.compile_blocks(compiled.module, backend="aot_eager")
    if recompute:
        compiled.module.enable_gradient_checkpointing()
    batch = tiny_policies.batch()
    trajectories = [policy.rollout(batch) for policy in (plain, compiled)]
    torch.testing.assert_close(trajectories[0].outputs, trajectories[1].outputs, rtol=0, atol=1e-4)
    assert not trajectories[1].outputs.requires_grad
    log_probs, kl, _ = gradients(compiled, trajectories[1])
    torch.testing.assert_close(log_probs, trajectories[1].log_probs.flatten(), rtol=0, atol=1e-5)
    assert (kl == 0).all()  # the reference runs the same graph
    tiny_policies.perturb(plain)
    tiny_policies.perturb(compiled)
    for one, other in zip(gradients(plain, trajectories[1])[2], gradients(compiled, trajectories[1])[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max()))
    assert list(compiled.module.state_dict()) == names


@COMPILES
def test_identical_blocks_share_a_compiled_graph():
    made = []

    def count(graph, inputs):
        made.append(graph)
        return graph.forward

    module = tiny_models.flux_transformer().requires_grad_(False)
    single = module.single_transformer_blocks
    single.extend([copy.deepcopy(single[-1]) for _ in range(2)])
    with torch.no_grad():
        expected = velocity(module)
        kernels.compile_blocks(module, backend=count)
        torch.testing.assert_close(velocity(module), expected, rtol=0, atol=1e-5)
        # The double block, the first single block, whose input has another memory layout, and the other three.
        assert len(made) == 3
        velocity(module)
    assert len(made) == 3


@pytest.mark.slow
@COMPILES
def test_decoder_layers_are_compiled_for_the_update_and_not_for_generation():
    writers = [tiny_writers.writer(checkpointing=True, stop=tiny_writing.STOPS) for _ in range(2)]
    plain, compiled = (tiny_writing.policy(writer=writer) for writer in writers)
    names, calls = list(compiled.module.state_dict()), []

    def count(graph, inputs):
        calls.append(graph)
        return graph.forward

    kernels.compile_blocks(compiled.module, backend=count)
    batch = tiny_writing.batch()
    trajectories = [policy.rollout(batch) for policy in (plain, compiled)]
    assert torch.equal(trajectories[0].ids, trajectories[1].ids)
    assert not calls
    for policy in (plain, compiled):
        tiny_writers.perturb(policy.module)
    one, other = (gradients(policy, trajectories[0]) for policy in (plain, compiled))
    assert calls
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-5)
    for mine, theirs in zip(one[2], other[2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * float(mine.abs().max()))
    assert list(compiled.module.state_dict()) == names


@pytest.mark.slow
@COMPILES
def test_a_compiled_module_can_be_copied():
    module = tiny_models.flux_transformer()
    kernels.compile_blocks(module, backend="eager")
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        assert velocity(twin).abs().max() == 0 < velocity(module).abs().max()
