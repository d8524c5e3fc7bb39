"""The autoregressive policy and its loop, with tiny writers of the real classes."""

import math
from dataclasses import replace

import pytest
import torch
from PIL.Image import new
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tiny_loop
import tiny_policies
import tiny_writers
import tiny_writing
from retouch.core.random import generator
from retouch.core.surrogates import importance_weights
from retouch.data.tasks import assign
from retouch.distributed.optimizer import ReplicatedStepper
from retouch.distributed.ranks import Ranks
from retouch.objectives.policy_gradient import Kl, PolicyGradient, TokenCycle
from retouch.policies.autoregressive import check_mismatch
from retouch.policies.decoding import AutoregressiveTrajectory, CachedDecoding, scatter, token_log_probs
from retouch.policies.engine import EngineFault, Generation
from retouch.policies.rollout import CachedEngine
from retouch.protocols import AutoregressiveModel, Policy
from retouch.run.metrics import Clock, completion_metrics
from retouch.run.step import Run, accumulate, collect, make_minibatch
from retouch.types import Kind, Needs, Slice
from retouch_worlds.testing import check_policy

# The autoregressive policy with tiny writers of the real classes

TRUNCATED = {"top_k": 40, "top_p": 0.9, "temperature": 0.8}
GRPO = PolicyGradient(clip_low=0.2, clip_high=0.2, kl=Kl(kind="k3", weight=0.1))


def all_actions(trajectory):
    return Slice(slice(0, len(trajectory)), slice(0, trajectory.mask.shape[1]))


def tasks_for(kind):
    return tiny_writers.tasks(with_images=kind in tiny_writers.VISION_KINDS)


@pytest.mark.parametrize("kind", tiny_writers.KINDS)
def test_autoregressive_policy_passes_the_contract_checks(kind):
    policy = tiny_writing.policy(kind)
    assert isinstance(policy, Policy)
    assert isinstance(policy.model, AutoregressiveModel)
    batch = tiny_writing.batch(tasks_for(kind))
    assert len(set(policy.rollout(batch).lengths.tolist())) > 1
    check_policy(policy, batch, needs=Needs(kl="k3"))


@pytest.mark.parametrize(
    ("train", "options"),
    [
        ("full", {"share": False, "sampling": TRUNCATED}),
        ("lora", {"mask_truncated": True, "microbatch": 1}),
        pytest.param("lora", {"sampling": TRUNCATED}, marks=pytest.mark.slow),
        pytest.param("full", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_policy_passes_the_contract_checks_with_sampling_and_training_options(train, options):
    check_policy(tiny_writing.policy("qwen3-vl", train=train, **options), tiny_writing.batch(), needs=Needs(kl="k3"))


@pytest.mark.parametrize("kind", ["qwen2.5-vl", "qwen3-vl"])
def test_policy_passes_the_contract_checks_with_forced_tokens_and_two_vocabularies(kind):
    writer = tiny_writers.writer(kind)
    writer.grammar = tiny_writing.ForcedGrammar(writer)
    policy = tiny_writing.policy(writer=writer)
    batch = tiny_writing.batch()
    check_policy(policy, batch, needs=Needs(kl="k3"))
    trajectory = policy.rollout(batch)
    assert trajectory.mask.tolist() == [[True, False, True, True, False, True, True]] * 6
    assert trajectory.kind[0].tolist() == [Kind.TEXT_TOKEN] * 2 + [Kind.IMAGE_TOKEN] + [Kind.TEXT_TOKEN] * 4


@pytest.mark.parametrize(
    ("kind", "sampling"), [("qwen2-vl", {}), ("qwen2.5-vl", TRUNCATED), ("qwen3-vl", {}), ("qwen3", TRUNCATED)]
)
def test_the_ratio_is_one_before_a_step(kind, sampling):
    """In float64, so that a difference is an error and not rounding. In fp32, kernels of single tokens and of whole rows round
    differently: the ratio then deviates by up to 1e-5, depending on the version of torch."""
    policy = tiny_writing.policy(kind, sampling=sampling)
    policy.module.double()
    trajectory = policy.rollout(tiny_writing.batch(tasks_for(kind), 4))
    for part in policy.microbatches(trajectory):
        evaluation = policy.evaluate(trajectory, part, Needs())
        assert (evaluation.log_ratio.exp() - 1).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", tiny_writers.KINDS)
def test_log_probs_equal_those_of_the_transformers_forward_pass(kind):
    """One row at a time, without padding, through the whole model's forward."""
    policy = tiny_writing.policy(kind, sampling={"temperature": 0.7})
    tiny_writers.perturb(policy.module)
    trajectory = policy.rollout(tiny_writing.batch(tasks_for(kind)))
    writer = policy.model
    for row, length in enumerate(trajectory.lengths.tolist()):
        task = trajectory.group[row : row + 1]
        prompt, said = trajectory.prompts.take(task), trajectory.ids[row : row + 1, :length]
        ids = torch.cat([prompt.ids, said], dim=1)
        inputs = {}
        if pictures := tasks_for(kind)[int(task)].images:
            seen = writer.template.image_processor(images=list(pictures), return_tensors="pt")
            types = (ids == writer.image_token).int()
            inputs = {"pixel_values": seen["pixel_values"], "image_grid_thw": seen["image_grid_thw"], "mm_token_type_ids": types}
        with torch.no_grad():
            logits = writer.module(input_ids=ids, **inputs).logits[0, -length - 1 : -1]
        wanted = (logits / 0.7).masked_fill(~writer.grammar.vocabularies, -torch.inf).log_softmax(-1).gather(1, said[0, :, None])
        torch.testing.assert_close(trajectory.log_probs[row, :length], wanted[:, 0], atol=1e-5, rtol=0)


def test_a_shared_prompt_gives_the_same_gradient():
    gradients = []
    for share in (True, False):
        policy = tiny_writing.policy(share=share)
        tiny_writers.perturb(policy.module)
        batch = tiny_writing.batch(group_size=4)
        trajectory = policy.rollout(batch)
        advantages = torch.randn(len(batch), generator=generator("advantages"))
        gradients.append(tiny_policies.gradient(policy, GRPO, tiny_policies.minibatch(batch, trajectory, advantages))[0])
    assert tiny_policies.distance(*gradients) < 1e-5


@pytest.mark.parametrize("kind", ["qwen2.5-vl", "qwen3"])
def test_gradient_checkpointing_saves_memory_and_keeps_the_gradient(kind):
    gradients, saved = [], []
    for checkpointing in (False, True):
        writer = tiny_writers.writer(kind, stop=tiny_writing.STOPS, checkpointing=checkpointing, train="full")
        policy = tiny_writing.policy(writer=writer, train="full", share=False)
        batch = tiny_writing.batch(tasks_for(kind))
        trajectory = policy.rollout(batch)
        numbers = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, n=numbers: n.append(x.numel()) or x, lambda x: x):
            policy.evaluate(trajectory, all_actions(trajectory), Needs())
        saved.append(sum(numbers))
        minibatch = tiny_policies.minibatch(batch, trajectory, torch.randn(len(batch), generator=generator("a")))
        gradients.append(tiny_policies.gradient(policy, GRPO, minibatch)[0])
        assert not any(part.training for part in writer.module.modules())
    assert tiny_policies.distance(*gradients) < 1e-5
    assert saved[1] < 0.5 * saved[0]


def test_entropy_and_k3_kl_equal_their_formulas():
    policy = tiny_writing.policy("qwen2.5", sampling={"temperature": 0.9})
    tasks = tasks_for("qwen2.5")
    tiny_writers.perturb(policy.module)
    trajectory = policy.rollout(tiny_writing.batch(tasks))
    evaluation = policy.evaluate(trajectory, all_actions(trajectory), Needs(kl="k3", entropy=True))
    writer, spreads, kls = policy.model, [], []
    prompts = trajectory.prompts.take(trajectory.group)
    written = torch.arange(7) < trajectory.lengths[:, None]
    for adapter in (True, False):
        if not adapter:
            writer.module.disable_adapters()
        with torch.no_grad():
            states = writer.states(writer.module, prompts, trajectory.ids, written).flatten(0, 1)
            logits = writer.logits(writer.module, states).view(6, 7, -1) / 0.9
        logged = logits.masked_fill(~writer.grammar.vocabularies, -torch.inf).log_softmax(-1)
        spreads.append(-(logged.exp() * logged.masked_fill(~writer.grammar.vocabularies, 0)).sum(-1) * written)
        kls.append(logged.gather(-1, trajectory.ids[..., None])[..., 0])
    torch.testing.assert_close(evaluation.entropy, spreads[0], atol=1e-5, rtol=1e-5)
    d = (kls[1] - kls[0]) * written
    torch.testing.assert_close(evaluation.kl, d.exp() - d - 1, atol=1e-5, rtol=1e-4)
    assert evaluation.kl.max() > 1e-3


def test_truncated_completions_are_masked_if_mask_truncated_is_set():
    batch = tiny_writing.batch(group_size=6)
    plain, masked = (tiny_writing.policy(mask_truncated=how).rollout(batch) for how in (False, True))
    cut = torch.tensor([written.truncated for written in plain.outputs])
    assert 0 < cut.sum() < len(cut)
    assert masked.outputs == plain.outputs
    assert torch.equal(masked.mask, plain.mask & ~cut[:, None])
    assert plain.mask[cut].all()


def test_outputs_have_the_ids_without_the_stop_token_and_their_text():
    policy = tiny_writing.policy()
    trajectory = policy.rollout(tiny_writing.batch(group_size=6))
    tokenizer = policy.model.template.tokenizer
    for row, written in enumerate(trajectory.outputs):
        length = int(trajectory.lengths[row])
        last = int(trajectory.ids[row, length - 1])
        assert written.truncated == (last not in policy.model.stop)
        assert list(written.ids) == trajectory.ids[row, : length if written.truncated else length - 1].tolist()
        assert written.text == tokenizer.decode(list(written.ids), skip_special_tokens=True)
    assert {written.truncated for written in trajectory.outputs} == {True, False}


def test_concatenated_trajectories_equal_one_rollout():
    for sampling in ({}, TRUNCATED):
        policy = tiny_writing.policy(sampling=sampling)
        batch = tiny_writing.batch()
        parts = [policy.rollout(batch.take(rows)) for rows in (slice(0, 2), slice(2, 3), slice(3, 6))]
        joined, whole = AutoregressiveTrajectory.concat(parts), policy.rollout(batch)
        assert torch.equal(joined.ids, whole.ids)
        assert joined.outputs == whole.outputs
        assert len(joined.prompts) == 4  # the second task's rows came in two parts
        evaluations = [policy.evaluate(each, all_actions(each), Needs()).log_probs for each in (joined, whole)]
        torch.testing.assert_close(*evaluations, atol=2e-6, rtol=1e-6)


def test_sample_uses_greedy_decoding_and_the_averaged_weights():
    policy = tiny_writing.policy(copies=("reference", "average"))
    batch = tiny_writing.batch(group_size=1)
    before = policy.sample(batch)
    words = [written.ids for written in before.outputs]
    assert before.log_probs[before.mask].isnan().all()
    assert [written.ids for written in policy.sample(tiny_writing.batch(group_size=1, seed=9)).outputs] == words
    tiny_writers.perturb(policy.module, size=0.5)
    assert policy.sample(batch).outputs == before.outputs
    policy.copies.snapshot("average")
    assert policy.sample(batch).outputs != before.outputs


class ShiftedLogProbs:
    """An engine that generates what the model generates, and reports log-probabilities that are too high by ``by``."""

    exact = False

    def __init__(self, model, by):
        self.inner, self.by = CachedDecoding(model), by

    def __call__(self, batch, prompts, sampling):
        made = self.inner(batch, prompts, sampling)
        return Generation(ids=made.ids, lengths=made.lengths, log_probs=made.log_probs + self.by)


def test_log_probs_of_another_engine_are_stored_as_behaviour_log_probs():
    writer = tiny_writers.writer(stop=tiny_writing.STOPS)
    policy = tiny_writing.policy(
        writer=writer, engine=ShiftedLogProbs(writer, -0.25), sampling={"engine": CachedEngine(max_mismatch=0.3)}
    )
    batch = tiny_writing.batch()
    trajectory, own = policy.rollout(batch), tiny_writing.policy(writer=writer).rollout(batch)
    assert own.behaviour_log_probs is None
    torch.testing.assert_close(trajectory.log_probs[own.mask], own.log_probs[own.mask], atol=1e-5, rtol=0)
    assert torch.equal(trajectory.behaviour_log_probs, own.log_probs - 0.25)
    assert torch.equal(trajectory.take(slice(1, 3)).behaviour_log_probs, trajectory.behaviour_log_probs[1:3])
    check_policy(policy, batch)
    policy = tiny_writing.policy(writer=writer, engine=ShiftedLogProbs(writer, -0.25), sampling=TRUNCATED)
    with pytest.raises(ValueError, match="does not report which ids"):
        policy.rollout(batch)


def test_log_probs_of_bf16_models_come_from_the_evaluation_in_fp32():
    """Decoding in bf16 may deviate by more than a ratio may; the stored log-probabilities are the evaluation's, in fp32."""
    policy = tiny_writing.policy(writer=bfloat16("qwen3-vl"))
    trajectory = policy.rollout(tiny_writing.batch(tasks_for("qwen3-vl")))
    assert trajectory.log_probs.dtype == torch.float32
    assert trajectory.behaviour_log_probs is not None
    for part in policy.microbatches(trajectory):
        evaluation = policy.evaluate(trajectory, part, Needs())
        assert evaluation.log_probs.dtype == torch.float32
        assert (evaluation.log_ratio.exp() - 1).abs().max() <= 1e-6


def bfloat16(kind):
    """A writer whose frozen weights are in bfloat16."""
    writer = tiny_writers.writer(kind, stop=tiny_writing.STOPS)
    for name, parameter in writer.module.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    return writer


def test_ratios_of_bf16_models_are_1_if_chunks_are_multiples_of_the_microbatch():
    """Log-probabilities are computed chunk by chunk, and the update's forward passes then have the same rows."""
    policy = tiny_writing.policy(writer=bfloat16("qwen2.5-vl"), microbatch=2)
    batch = tiny_writing.batch(tasks_for("qwen2.5-vl"), group_size=4)
    trajectory = AutoregressiveTrajectory.concat([policy.rollout(batch.take(slice(k, k + 4))) for k in range(0, len(batch), 4)])
    assert len(set(trajectory.lengths.tolist())) > 1
    for part in policy.microbatches(trajectory):
        assert (policy.evaluate(trajectory, part, Needs()).log_ratio == 0).all()


def test_unsupported_needs_temperature_0_and_invalid_demonstrations_raise():
    policy = tiny_writing.policy()
    trajectory = policy.rollout(tiny_writing.batch())
    for needs in (Needs(kl="closed"), Needs(log_ratio="norm"), Needs(values=True)):
        with pytest.raises(ValueError, match="k3 KL and the plain ratio"):
            policy.evaluate(trajectory, all_actions(trajectory), needs)
    with pytest.raises(ValueError, match="temperature"):
        tiny_writing.policy(sampling={"temperature": 0.0})
    long = {"completion": "A B C D E"}
    for meta, says in (({}, "no text"), ({"completion": 3}, "no text"), (long, "raise rollout.max_new_tokens above 9")):
        with pytest.raises(ValueError, match=says):
            policy.demonstrate(tiny_writing.batch(tuple(replace(task, meta=meta) for task in tiny_writers.tasks())))


def test_demonstrate_returns_the_completions_of_the_tasks_as_a_trajectory():
    policy = tiny_writing.policy(sampling={"max_new_tokens": 9})
    stop = policy.model.template.tokenizer.decode([policy.model.stop[0]])
    told = ["RED 1", "", "2 3 4"]
    tasks = tuple(replace(task, meta={"completion": text}) for task, text in zip(tiny_writers.tasks(), told, strict=True))
    acted = policy.demonstrate(tiny_writing.batch(tasks))
    assert [written.text for written in acted.outputs] == [text for text in told for _ in range(2)]
    assert not any(written.truncated for written in acted.outputs)
    assert acted.lengths.tolist() == [len(written.ids) + 1 for written in acted.outputs]
    assert acted.mask.sum(1).tolist() == acted.lengths.tolist()
    measured = policy.evaluate(acted, all_actions(acted), Needs()).log_probs
    for row, text in enumerate(text for text in told for _ in range(2)):
        prompt = acted.prompts.take(acted.group[row : row + 1])
        ids = torch.tensor([policy.model.template.tokenizer(text + stop).input_ids])
        with torch.no_grad():
            states = policy.model.states(policy.module, prompt, ids, torch.ones_like(ids, dtype=torch.bool))
            logits = policy.model.logits(policy.module, states[0]).masked_fill(~policy.model.grammar.vocabularies, -torch.inf)
        wanted = logits.log_softmax(-1).gather(1, ids[0, :, None])[:, 0]
        torch.testing.assert_close(measured[row, : ids.shape[1]], wanted, atol=1e-5, rtol=0)


# The training loop of a language model

LANGUAGE_MODEL_LOOP_GRPO = PolicyGradient(clip_low=0.2, clip_high=0.2, kl=Kl(kind="k3", weight=0.01))
TASKS = tiny_writers.tasks(2)


def redness(tasks, trajectory):
    """An image per completion, whose red value is the fraction of even ids; None for a truncated completion."""
    shares = [sum(k % 2 == 0 for k in written.ids) / max(len(written.ids), 1) for written in trajectory.outputs]
    pairs = zip(shares, trajectory.outputs, strict=True)
    return [None if written.truncated else new("RGB", (1, 1), (int(255 * share), 255, 0)) for share, written in pairs]


def run(policy, *, ranks=tiny_loop.ALONE, chunk):
    return Run(
        **{"policy": policy, "renderer": redness, "judge": tiny_loop.RedJudge(), "ranks": ranks, "chunk": chunk, "clock": Clock()},
        **{"stepper": ReplicatedStepper(policy.module, ranks, max_grad_norm=None), "max_missing": 0.5},
        average=lambda taken: None,
    )


def phase(*, ranks=tiny_loop.ALONE, group_size=4, **options):
    made = tiny_loop.phase(LANGUAGE_MODEL_LOOP_GRPO, group_size=group_size, ranks=ranks, minibatches=1, **options)
    shares = {"minibatches": 1, "rank": ranks.rank, "world": ranks.world}
    return replace(made, batch=lambda step: assign(seed=3, step=step, tasks=TASKS, group_size=group_size, **shares))


EARL = PolicyGradient(surrogate="reinforce", kl=Kl(kind="k3", weight=3e-4))


class Uneven:
    """Ends the completions of the first group after one token; all others have seven tokens."""

    exact = True

    def __init__(self, model):
        self.decoder = CachedDecoding(model)
        self.model = model

    def __call__(self, batch, prompts, sampling):
        made = self.decoder(batch, prompts, sampling)
        first = torch.tensor(batch.group_ids)[torch.tensor(batch.group)] == 0
        ids, lengths = made.ids.clone(), torch.full_like(made.lengths, made.ids.shape[1])
        ids[first, 0], ids[first, 1:], lengths[first] = self.model.stop[0], self.model.pad, 1
        ids[~first] = torch.where(torch.isin(ids, torch.tensor([*self.model.stop, self.model.pad])), 65, ids)[~first]
        return replace(made, ids=ids, lengths=lengths)


def uneven_gradient(policy, ranks=tiny_loop.ALONE, *, alone=False):
    """``alone``: each rank divides by the number of its own tokens, as the published code does."""
    policy.engine = Uneven(policy.model)
    made = run(policy, ranks=ranks, chunk=4)
    learning = replace(phase(ranks=ranks, steps=range(1)), objective=EARL)
    collected = collect(made, learning, 0)
    paid = torch.tensor([[float(slot) - 1.5] for slot in collected.batch.slot]).expand_as(collected.advantages)
    dividing = replace(made, ranks=tiny_loop.ALONE) if alone else made
    accumulate(made, EARL, make_minibatch(dividing, learning, replace(collected, advantages=paid), slice(0, len(paid)), 0))
    made.stepper.step(1e-3)
    return tiny_loop.gradient(made), collected.trajectory.mask.sum().item()


def test_two_ranks_with_unequal_lengths_get_the_gradient_of_one_rank():
    wanted, tokens = uneven_gradient(tiny_writing.policy())
    policies = [tiny_writing.policy() for _ in range(2)]
    shared = tiny_loop.run_on_threads(2, lambda ranks: uneven_gradient(policies[ranks.rank], ranks))
    assert [written for _, written in shared] == [4, 28]
    assert tokens == 32
    assert all(tiny_policies.distance(found, wanted) < 1e-5 for found, _ in shared)
    policies = [tiny_writing.policy() for _ in range(2)]
    biased = tiny_loop.run_on_threads(2, lambda ranks: uneven_gradient(policies[ranks.rank], ranks, alone=True))
    assert all(tiny_policies.distance(found, wanted) > 0.1 for found, _ in biased)


def test_only_tokens_of_the_selected_kind_get_loss_weights():
    writer = tiny_writers.writer("qwen2.5-vl")
    writer.grammar = tiny_writing.ForcedGrammar(writer)
    policy = tiny_writing.policy(writer=writer)
    made = run(policy, chunk=4)
    turns = PolicyGradient(tokens=TokenCycle(text_steps=2, vision_steps=1))
    assert [turns.trained_kinds(step) for step in range(7)] == [[0], [0], [1], [0], [0], [1], [0]]
    everything, weighed = phase(steps=range(1)), {}
    made = replace(made, renderer=lambda tasks, trajectory: [new("RGB", (1, 1), (9 * row, 0, 0)) for row in range(len(tasks))])
    for tokens in ("all", "text", "vision"):
        learning = replace(everything, objective=PolicyGradient(normalise="token", tokens=tokens))
        collected = collect(made, learning, 0)
        weighed[tokens] = make_minibatch(made, learning, collected, slice(0, len(collected.batch)), 0).weights
    mask, kind = collected.trajectory.mask, collected.trajectory.kind
    for tokens, right in (("all", mask), ("text", mask & (kind == 0)), ("vision", mask & (kind == 1))):
        assert right.any()
        assert torch.equal(weighed[tokens], right / right.sum()), tokens


def test_microbatches_do_not_depend_on_completion_lengths():
    policy = tiny_writing.policy(microbatch=2)
    long, short = (policy.rollout(tiny_writing.batch(seed=seed)) for seed in (3, 4))
    assert not torch.equal(long.lengths, short.lengths)
    assert list(policy.microbatches(long)) == list(policy.microbatches(short))


# Log-probabilities computed in chunks

VOCABULARY = 152_064


class LargestTensor(TorchDispatchMode):
    """The number of elements in the largest block of memory that any operation allocates."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


def wide_policy(longest, chunk):
    """A narrow Qwen2.5 with the vocabulary of the published ones."""
    text = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    writer = tiny_writers.writer("qwen2.5", text=text)
    return tiny_writing.policy(writer=writer, sampling={"max_new_tokens": longest}, logits_at_once=chunk)


def largest_of_an_update(rows, longest, chunk):
    policy = wide_policy(longest, chunk)
    batch = tiny_writing.batch(tiny_writers.tasks(1, with_images=False), rows)
    trajectory = policy.rollout(batch)
    whole = Slice(slice(0, rows), slice(0, longest))
    with LargestTensor() as seen:
        evaluation = policy.evaluate(trajectory, whole, Needs(kl="k3", entropy=True))
        (evaluation.log_probs + evaluation.kl + evaluation.entropy).sum().backward()
    return seen.numbers


def test_the_update_allocates_the_logits_of_one_chunk_at_most():
    """With more rows and tokens, the largest block of memory is still the logits of one chunk."""
    assert largest_of_an_update(2, 3, chunk=2) == largest_of_an_update(4, 6, chunk=2) == 2 * VOCABULARY
    assert largest_of_an_update(4, 6, chunk=24) == 24 * VOCABULARY, "the test sees no logits where there are"


@pytest.mark.parametrize("support", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunk_size_does_not_change_log_probs_entropy_and_gradients(chunk, support):
    writer = tiny_writers.writer("qwen2.5", train="full")
    random = torch.Generator().manual_seed(1)
    states = torch.randn(8, 32, generator=random).requires_grad_()
    ids = torch.randint(0, 200, (8,), generator=random)
    kept = torch.stack([torch.cat([ids[k : k + 1], torch.arange(200, 205), torch.tensor([-1])]) for k in range(8)]).int()
    given = {"vocabulary": torch.zeros(8, dtype=torch.long), "support": kept if support else None, "temperature": 0.8}
    head = writer.module.lm_head.weight
    parts, whole = (
        token_log_probs(writer, writer.module, states, ids, chunk=size, with_entropy=True, **given) for size in (chunk, 8)
    )
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b)
        slopes = [torch.autograd.grad(x.square().sum(), (states, head), retain_graph=True) for x in (a, b)]
        for found, wanted in zip(*slopes, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    logits = (states @ head.T / 0.8).masked_fill(~writer.grammar.vocabularies, -torch.inf)
    if support:
        logits = torch.full_like(logits, -torch.inf).scatter(1, kept[:, :-1].long(), logits.gather(1, kept[:, :-1].long()))
    torch.testing.assert_close(whole[0], logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])


def test_a_batch_without_sampled_tokens_has_a_gradient_of_0():
    writer = tiny_writers.writer("qwen2.5")
    states = torch.randn(3, 4, 32).requires_grad_()
    choice = torch.zeros(3, 4, dtype=torch.bool)
    nothing = torch.zeros(0, dtype=torch.long)
    given = {"vocabulary": nothing, "support": None, "temperature": 1.0, "chunk": 2}
    found, none = token_log_probs(writer, writer.module, states[choice], nothing, **given)
    assert none is None
    column = scatter(found, choice)
    assert (column == 0).all()
    (gradient,) = torch.autograd.grad(column.sum(), states)
    assert (gradient == 0).all()


# The log-probabilities that an engine reports

MASK = torch.tensor([[True, True, False], [True, False, False]])
OURS = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, 0.0, 0.0]])
THEIRS = torch.tensor([[-1.5, -1.8, 0.0], [-2.5, math.nan, 0.0]])


def test_importance_weights_are_the_probability_ratio_up_to_the_cap():
    found = importance_weights(OURS, THEIRS, MASK, cap=3.0)
    wanted = torch.tensor([[math.exp(0.5), math.exp(-0.2), 1.0], [3.0, 1.0, 1.0]])
    torch.testing.assert_close(found, wanted)


def test_importance_weights_make_averages_over_engine_samples_unbiased():
    ours, theirs = (torch.randn(50, generator=generator("spread", k), dtype=torch.float64).log_softmax(-1) for k in range(2))
    values = torch.randn(50, generator=generator("values"), dtype=torch.float64)
    weights = importance_weights(ours[None], theirs[None], torch.ones(1, 50, dtype=torch.bool), cap=math.inf)[0]
    torch.testing.assert_close((theirs.exp() * weights * values).sum(), (ours.exp() * values).sum())


def test_a_mean_mismatch_above_the_limit_raises():
    """(0.5 + 0.2 + 2) / 3 = 0.9."""
    check_mismatch(OURS, THEIRS, MASK, limit=0.91)
    with pytest.raises(EngineFault, match=r"by 0\.9 nats a token"):
        check_mismatch(OURS, THEIRS, MASK, limit=0.89)


def test_a_nan_mismatch_raises():
    with pytest.raises(EngineFault, match="nan"):
        check_mismatch(OURS, THEIRS, torch.ones_like(MASK), limit=0.1)
    check_mismatch(OURS, THEIRS, torch.zeros_like(MASK), limit=1e-9)


def policy(by, *, cap):
    writer = tiny_writers.writer(stop=tiny_writing.STOPS)
    return tiny_writing.policy(
        writer=writer, engine=ShiftedLogProbs(writer, by), sampling={"engine": CachedEngine(max_mismatch=1.0, truncate_at=cap)}
    )


@pytest.mark.parametrize(("by", "cap", "weight"), [(0.5, 3.0, math.exp(-0.5)), (-0.5, 1.2, 1.2), (0.5, None, 1.0)])
def test_importance_weights_scale_the_gradient_and_not_the_ratio(by, cap, weight):
    """Every token is off by the same amount, so the gradient is that of the model's own engine, times the weight."""
    found = []
    for way in (policy(by, cap=cap), tiny_writing.policy(writer=tiny_writers.writer(stop=tiny_writing.STOPS))):
        batch = tiny_writing.batch()
        trajectory = way.rollout(batch)
        advantages = torch.tensor([1.0, -1.0] * 3)
        objective = PolicyGradient(clip_low=0.2, clip_high=0.2)
        gradient, losses = tiny_policies.gradient(way, objective, tiny_policies.minibatch(batch, trajectory, advantages))
        assert max(float(loss.maxima["policy/ratio_max"]) for loss in losses) <= 1e-5
        found.append(gradient)
    for name, plain in found[1].items():
        torch.testing.assert_close(found[0][name], plain * weight, atol=1e-6, rtol=1e-3)


def test_completion_metrics_report_the_mismatch_of_an_engine():
    way = policy(0.5, cap=None)
    batch = tiny_writing.batch()
    trajectory = way.rollout(batch)
    off = replace(trajectory, behaviour_log_probs=trajectory.log_probs - trajectory.ids * 1e-3)
    drawn = trajectory.ids[trajectory.mask] * 1e-3
    mean = drawn.mean().item()
    for made, wanted in ((trajectory, (0.5, 0.5, 0.5)), (off, (mean, drawn.max().item(), -mean))):
        told = completion_metrics(made, ranks=Ranks())
        found = [told[f"engine/{name}"] for name in ("mismatch", "mismatch_max", "kl")]
        assert found == pytest.approx(wanted, rel=1e-3)
    alone = tiny_writing.policy(writer=way.model).rollout(batch)
    assert not any(name.startswith("engine/") for name in completion_metrics(alone, ranks=Ranks()))
