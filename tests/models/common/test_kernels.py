"""Attention backends and compiled blocks: the same results, the same names of weights, and clear errors."""

import copy

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import tiny_models
import tiny_policies
import tiny_writers
import tiny_writing
from families import FAMILIES
from retouch.models import kernels
from retouch.models.ip_adapter import ReferenceAttention
from retouch.models.pipeline import Guided
from retouch.policies.denoising import DenoisingPolicy
from retouch.policies.weights import WeightCopies
from retouch.types import Needs
from retouch_models.qwen_image import model as qwen_model
from retouch_worlds.testing.assertions import relative_distance
from slow_params import slow_except

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
    # A weight without influence, such as that of the last text tokens, has the gradient 0 in a graph.
    found = [torch.zeros_like(weight) if weight.grad is None else weight.grad.clone() for weight in weights]
    for weight in weights:
        weight.grad = None
    return torch.cat([each.log_probs.detach().flatten() for each in made]), torch.cat([each.kl.flatten() for each in made]), found


KL = {"DenoisingPolicy": "velocity", "AutoregressivePolicy": "k3"}


STRUCTURES = {"sd3": 2, "flux": 2, "flux2": 2, "qwen-image": 2, "qwen-image-edit": 2, "qwen-image-2": 1, "z-image": 4}
"""The structures of a family's tiny blocks; those of Qwen-Image and Z-Image count twice: with a mask of the texts, and without."""


def families_policy(family, folder):
    model = FAMILIES[family].build(folder, "bfloat16")
    tiny_models.make_trainable(model.module, "lora", FAMILIES[family].section.lora_targets)
    copies = WeightCopies(model.module)
    copies.snapshot_without_adapter("reference")
    rules = {"sampling": tiny_policies.sampling(), "eval_steps": 2, "microbatch": 8, "copies": copies}
    return DenoisingPolicy(Guided(model, 2.0), **rules)


@COMPILES
@pytest.mark.parametrize("backend", slow_except(["aot_eager"], ["aot_eager", "inductor"]))
@pytest.mark.parametrize("family", slow_except(["flux"], STRUCTURES))
def test_a_structure_is_compiled_once_for_sampling_and_updates_whose_ratio_is_exactly_1(family, backend, tmp_path, monkeypatch):
    """The backend aot_eager traces the forward and backward graphs, but generates no machine code."""
    monkeypatch.setattr(qwen_model, "OFFICIAL_PREFIX", {})  # the tiny tokenizer's templates are longer
    FAMILIES[family].save(tmp_path)
    plain, compiled = (families_policy(family, tmp_path) for _ in range(2))
    names, graphs = list(compiled.module.state_dict()), []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    kernels.compile_blocks(compiled.module, backend=count)
    texts = ("a red circle", "blue", "green and yellow")
    one, three = (tuple(FAMILIES[family].tasks(*texts[:count])) for count in (1, 3))
    batch = tiny_policies.batch(1, 4, tasks=lambda _: one)
    trajectories = [policy.rollout(batch) for policy in (plain, compiled)]
    torch.testing.assert_close(trajectories[0].outputs, trajectories[1].outputs, rtol=0, atol=0.1)
    assert not trajectories[1].outputs.requires_grad
    log_probs, kl, _ = gradients(compiled, trajectories[1])
    assert torch.equal(log_probs, trajectories[1].log_probs.flatten())
    assert (kl == 0).all()  # the reference runs the same graph
    tiny_policies.perturb(plain)
    tiny_policies.perturb(compiled)
    expected = gradients(plain, trajectories[1])[2]
    for _ in range(2):
        # Fused kernels round to bfloat16 less often: on SD3, both gradients are 0.034 from that of fp32.
        assert relative_distance(gradients(compiled, trajectories[1])[2], expected) < {"aot_eager": 1e-3, "inductor": 0.05}[backend]
        compiled.module.enable_gradient_checkpointing()
    compiled.sample(tiny_policies.batch(3, 1, tasks=lambda _: three))
    assert len(graphs) == STRUCTURES[family]
    assert list(compiled.module.state_dict()) == names


@COMPILES
@pytest.mark.parametrize("chosen", slow_except([False], [False, True]))
def test_compiled_graphs_are_kept_in_the_users_cache_or_in_the_folder_that_torch_was_given(chosen, tmp_path, monkeypatch):
    folder = tmp_path / ("chosen" if chosen else "retouch/torchinductor")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Imports of torchao set the variable to torch's default.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder) if chosen else default_cache_dir())
    kernels.require_compiler(CPU)
    assert list((folder / "fxgraph").rglob("*"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.relative_to(tmp_path).parts[0]]


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
        velocity(module)
    assert len(made) == 2  # the double block and the single blocks


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
