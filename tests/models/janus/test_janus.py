"""Janus as a text-to-image model: generation equals that of transformers; contract checks, runs and exports."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file

import tiny_janus
import tiny_models
import tiny_policies
import tiny_writer_runs
import tiny_writing
from retouch.cli import main
from retouch.inference.opening import open_recipe, read_target
from retouch.objectives.imitation import CrossEntropy
from retouch.protocols import AutoregressiveModel, DecodesCodes, Grammar
from retouch.renderers.base import CodesDecoder
from retouch.types import Kind, Minibatch, Needs, Slice, Task
from retouch_models.janus import BEGIN, TEMPLATE, JanusImageModel, JanusImageModules, load_janus
from retouch_worlds.testing import check_policy
from slow_params import slow_except
from tiny_janus import CODES, SIDE

# Janus as a text-to-image model

COUNT = SIDE * SIDE


def tasks():
    return (
        Task(id="one", instruction="a red circle"),
        Task(id="two", instruction="no"),
        Task(id="three", instruction="two blue cats"),
    )


def policy(model, *, train="lora", **sampling):
    return tiny_writing.policy(writer=model, train=train, sampling={"max_new_tokens": COUNT + 1, **sampling})


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.19"), reason="its own generation of images raises TypeError")
@pytest.mark.parametrize("seed", [0])
def test_greedy_image_tokens_match_transformers(seed):
    whole = tiny_janus.whole(seed)
    model = JanusImageModel(JanusImageModules(whole), tiny_janus.tokenizer(), vq=whole.model.vqmodel)
    prompts = model.encode(tasks())
    assert (~prompts.mask).any()  # of unequal lengths
    drawn = policy(model, train="full").sample(tiny_writing.batch(tasks(), group_size=1))
    expected = tiny_janus.generate_with_transformers(whole, prompts)
    assert torch.equal(drawn.ids[:, :COUNT], expected)
    assert len(expected.unique()) > 4
    assert drawn.ids[:, COUNT].tolist() == [CODES] * 3


def test_codes_and_decoded_images_match_the_autoencoder():
    model = tiny_janus.image_model()
    image = tiny_models.image(3, *model.size)
    given = torch.from_numpy(np.array(image)).float().permute(2, 0, 1)[None] / 127.5 - 1
    with torch.no_grad():
        codes = model.vq.encode(given, return_dict=True).image_tokens
        again = model.vq.decode(codes.reshape(1, -1))[0]
    assert torch.equal(model.encode_codes([image, tiny_models.image(4, 40, 30)])[0].flatten(), codes.flatten())
    (shown,) = model.decode_codes(codes.reshape(1, SIDE, SIDE))
    assert shown.size == model.size
    seen = torch.from_numpy(np.array(shown)).float().permute(2, 0, 1)
    assert (seen - (again.clamp(-1, 1) + 1) * 127.5).abs().max() <= 0.51
    assert torch.equal(model.codes_in(codes.flatten().tolist()), codes.reshape(SIDE, SIDE))
    assert model.codes_in([0] * (COUNT - 1)) is None
    assert model.codes_in([CODES] * COUNT) is None


def test_prompt_is_the_formatted_template_and_the_begin_of_image_token():
    model = tiny_janus.image_model()
    prompts = model.encode(tasks())
    words = model.tokenizer
    assert words.decode(prompts.ids[2][prompts.mask[2]]) == words.bos_token + TEMPLATE.format("two blue cats") + BEGIN
    assert isinstance(model, AutoregressiveModel)
    assert isinstance(model, DecodesCodes)
    assert isinstance(model.grammar, Grammar)
    with pytest.raises(ValueError, match="from text only"):
        model.encode([tiny_models.task("edit", "x", tiny_models.image(0, 8, 8))])
    with pytest.raises(ValueError, match="contains the special token"):
        model.encode([Task(id="x", instruction=f"a {BEGIN}")])


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize(
    "sampling", slow_except([{"temperature": 0.7, "top_p": 0.9}], [{}, {"temperature": 0.7, "top_p": 0.9}]), ids=str
)
def test_policy_passes_the_contract_checks(train, sampling):
    made = policy(tiny_janus.image_model(train=train), train=train, **sampling)
    batch = tiny_writing.batch(tasks())
    check_policy(made, batch, needs=Needs(kl="k3"))
    trajectory = made.rollout(batch)
    assert trajectory.mask.sum(1).tolist() == [COUNT] * len(batch)
    assert set(trajectory.kind[trajectory.mask].tolist()) == {Kind.IMAGE_TOKEN}
    evaluation = made.evaluate(trajectory, Slice(slice(0, 4), slice(0, COUNT + 1)), Needs())
    assert (evaluation.log_ratio[trajectory.mask[:4]].exp() - 1).abs().max() <= 1e-5
    images = CodesDecoder(made.model)([batch.tasks[k] for k in batch.group], trajectory)
    assert all(image is not None and image.size == made.model.size for image in images)


def test_every_trainable_module_receives_a_gradient():
    made = policy(tiny_janus.image_model(train="full"), train="full")
    aims = tuple(dataclasses.replace(task, target=tiny_models.image(row, 16, 16)) for row, task in enumerate(tasks()))
    batch = tiny_writing.batch(aims, group_size=1)
    shown = made.demonstrate(batch)
    assert torch.equal(made.model.codes_in(shown.outputs[1].ids), made.model.encode_codes([aims[1].target])[0])
    weights = shown.mask.float() / shown.mask.sum()
    gradient, _ = tiny_policies.gradient(made, CrossEntropy(), Minibatch(batch, shown, torch.ones_like(weights), weights, 0))
    assert all(bool(part.any()) for part in gradient.values()), [name for name, part in gradient.items() if not part.any()]
    assert {name.split(".")[1] for name in gradient} == {
        *("language_model", "generation_embeddings", "generation_aligner", "generation_head")
    }
    with pytest.raises(ValueError, match="'two' has no target"):
        made.model.target_ids([aims[0], tasks()[1]])


def test_loading_a_folder_in_bfloat16_keeps_the_autoencoder_in_fp32(tmp_path):
    whole = tiny_janus.whole(1)
    whole.save_pretrained(tmp_path)
    tiny_janus.tokenizer().save_pretrained(tmp_path)
    model = load_janus(tmp_path, dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
    wanted = whole.model.vqmodel.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.vq.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    with pytest.raises(ValueError, match="contains no Janus"):
        load_janus(tmp_path / "nowhere", dtype=torch.bfloat16, device="cpu")


# Runs whose policy generates images with Janus


@pytest.fixture
def document(tmp_path):
    folder = tmp_path / "janus"
    tiny_janus.whole().save_pretrained(folder)
    tiny_janus.tokenizer().save_pretrained(folder)

    def made(**changes):
        settings = {
            "policy__model": {"kind": "janus", "path": str(folder), "dtype": "float32"},
            "policy__train": {"kind": "lora", "rank": 4, "alpha": 8},
            "renderer": {"kind": "codes"},
            "rollout__max_new_tokens": SIDE * SIDE + 1,
            "data": {"kind": "playground-scenes", "complexity": [1, 2], "count": 32},
            "reward": {"kind": "compressibility", "quality": 20, "combine": {"compressibility": 1}},
        }
        return tiny_writer_runs.recipe(tmp_path / "runs", folder, **{**settings, **changes})

    return made


def trained(tmp_path, document):
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(document))
    assert main(["train", str(file)]) == 0
    run = tmp_path / "runs" / document["name"]
    return run, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_run_trains_and_transformers_loads_the_exported_adapter(tmp_path, document):
    run, steps = trained(tmp_path, document())
    assert all(step["policy/ratio_max_first"] <= 1e-5 and step["policy/grad_norm"] > 0 for step in steps)
    assert all(step["completion/cut_off_fraction"] == 0 for step in steps)
    assert main(["export", str(run), "--to", str(tmp_path / "exported"), "--weights", "current"]) == 0
    whole = tiny_janus.whole()
    ids = torch.arange(8)[None]
    before = whole.model.language_model(ids).last_hidden_state
    whole.load_adapter(str(tmp_path / "exported"))
    assert not torch.equal(whole.model.language_model(ids).last_hidden_state, before)


@pytest.mark.slow
def test_exported_full_weights_generate_the_same_tokens_when_loaded_again(tmp_path, document):
    run, _ = trained(tmp_path, document(policy__train={"kind": "full"}, learning_rate=1e-2))
    exported = tmp_path / "exported"
    assert main(["export", str(run), "--to", str(exported), "--weights", "current"]) == 0
    parts, _ = open_recipe(*read_target(str(run)), trained=True)
    parts.judge.close()
    base, settings = tmp_path / "janus", {"dtype": torch.float32, "device": "cpu"}
    again = load_janus(base, weights=exported / "writer", **settings)
    wanted, found = parts.model.module.state_dict(), again.module.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    tasks = (Task("1", "a red circle"), Task("2", "two cats"))
    first, second, untrained = (greedy(model, tasks) for model in (parts.model, again, load_janus(base, **settings)))
    assert torch.equal(first, second)
    assert not torch.equal(first, untrained)
    whole = tiny_janus.whole()
    assert whole.load_state_dict(load_file(exported / "writer" / "model.safetensors"), strict=False).unexpected_keys == []
    assert torch.equal(tiny_janus.generate_with_transformers(whole, again.encode(tasks)), first[:, : SIDE * SIDE])
    with pytest.raises(ValueError, match="does not contain the weights of this Janus model's trainable modules"):
        load_janus(base, weights=base, **settings)


def greedy(model, tasks):
    made = tiny_writing.policy(writer=model, train="full", sampling={"max_new_tokens": SIDE * SIDE + 1})
    return made.sample(tiny_writing.batch(tasks, group_size=1)).ids
