"""Exported weights, loaded by the libraries they are for, compute what the run computes; IP-Adapters as safetensors."""

import json
import os
import re

import pytest
import torch
from diffusers import QwenImageEditPipeline, QwenImageTransformer2DModel, SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import LoraConfig, PeftModel
from safetensors import safe_open
from safetensors.torch import load_file

import retouch
import tiny_models
from retouch import cli
from retouch.inference.exporting import convert_adapter, export_target
from retouch.inference.opening import open_recipe, read_target
from retouch.models import ip_adapter
from retouch.models.lora import write_lora
from retouch.models.train import IpAdapter
from retouch.recipe.recipe import parse
from retouch.records.files import read_json
from retouch.run.session import run
from retouch.trainer.trainer import Trainer
from retouch_worlds.playground import playground_weights
from tiny_recipes import SMALL

FULL = {"train": {"kind": "full"}, "ema": {"decay": 0.9}}


def trained(tmp_path, **policy):
    """A run of two steps."""
    recipe = parse({**SMALL, "out": str(tmp_path / "runs"), "policy": {**SMALL["policy"], **policy}})
    run(recipe, fresh=False)
    return recipe.folder


def qwen_output(module):
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return module(
            hidden_states=torch.randn(2, 18, 32, generator=draw), timestep=torch.tensor([0.3, 0.9]),
            encoder_hidden_states=torch.randn(2, 5, 64, generator=draw),
            encoder_hidden_states_mask=torch.ones(2, 5, dtype=torch.bool), img_shapes=[[(1, 3, 3), (1, 3, 3)]] * 2,
            return_dict=False,
        )[0]  # fmt: skip


def expected(folder, which):
    """What the run's transformer computes with the weights of that name."""
    parts, _ = open_recipe(*read_target(str(folder)), trained=True)
    if which == "current":
        return qwen_output(parts.model.module)
    with parts.copies.using(which):
        return qwen_output(parts.model.module)


def base():
    return QwenImageTransformer2DModel.from_pretrained(playground_weights() / "transformer", torch_dtype=torch.float32)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("full"), **FULL, attention="native")


@pytest.mark.parametrize("which", ["average", "current"])
def test_peft_and_diffusers_load_an_adapter(tmp_path, adapter, which):
    folder = adapter
    written = export_target(str(folder), to=tmp_path / "out", which=which)
    assert {path.name for path in written} == {
        "adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors", "comfyui_lora.safetensors",
        "export.json", "README.md", "before-and-after.png",
    }  # fmt: skip
    wanted = expected(folder, which)
    assert not torch.equal(wanted, qwen_output(base()))
    assert torch.equal(qwen_output(PeftModel.from_pretrained(base(), tmp_path / "out")), wanted)
    others = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "processor"))
    pipeline = QwenImageEditPipeline(transformer=base(), **others)
    pipeline.load_lora_weights(tmp_path / "out")
    assert torch.equal(qwen_output(pipeline.transformer), wanted)


def test_diffusers_loads_full_weights_and_other_users_may_read_them_if_the_umask_allows_it(tmp_path, full):
    before = os.umask(0o027)
    try:
        assert cli.main(["export", str(full), "--to", str(tmp_path / "out")]) == 0
    finally:
        os.umask(before)
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in written)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in written} == {path.name: "0o640" for path in written}
    wanted = expected(full, "average")
    assert not torch.equal(wanted, expected(full, "current"))
    assert torch.equal(qwen_output(QwenImageTransformer2DModel.from_pretrained(tmp_path / "out" / "transformer")), wanted)
    about = read_json(tmp_path / "out" / "export.json")
    assert (about["step"], about["weights"], about["recipe"]["name"]) == (2, "average", "small")
    assert about["recipe"]["policy"]["attention"] == "native", "the recipe of the run, not the one that opened it for the export"


def test_a_stable_diffusion_3_pipeline_loads_an_adapter(tmp_path):
    def output(module):
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            return module(
                hidden_states=torch.randn(2, module.config.in_channels, 8, 8, generator=draw),
                timestep=torch.tensor([300.0, 900.0]), encoder_hidden_states=torch.randn(2, 5, 48, generator=draw),
                pooled_projections=torch.randn(2, 40, generator=draw), return_dict=False,
            )[0]  # fmt: skip

    module: SD3Transformer2DModel = tiny_models.sd3_transformer()
    module.add_adapter(LoraConfig(r=4, lora_alpha=12, init_lora_weights=False, target_modules=["to_q", "to_out.0"]))
    write_lora(module, tmp_path, pipeline="StableDiffusion3Pipeline")
    names = ("scheduler", "vae", "tokenizer", "tokenizer_2", "tokenizer_3", "text_encoder", "text_encoder_2", "text_encoder_3")
    pipeline = StableDiffusion3Pipeline(transformer=tiny_models.sd3_transformer(), **dict.fromkeys(names))
    assert not torch.equal(output(pipeline.transformer), output(module))
    pipeline.load_lora_weights(tmp_path)
    assert torch.equal(output(pipeline.transformer), output(module))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == 12


def test_the_same_weights_are_exported_as_the_same_bytes(tmp_path):
    """Several exports, since safetensors writes the entries of its metadata in random order."""
    module: SD3Transformer2DModel = tiny_models.sd3_transformer()
    module.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_out.0", "to_k", "to_v"]))
    for number in range(5):
        write_lora(module, tmp_path / str(number), pipeline="StableDiffusion3Pipeline")
    files = {path.name: path.read_bytes() for path in (tmp_path / "0").iterdir()}
    assert sorted(files) == ["adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors"]
    for number in range(1, 5):
        assert {path.name: path.read_bytes() for path in (tmp_path / str(number)).iterdir()} == files
    written = tmp_path / "0" / "pytorch_lora_weights.safetensors"
    with safe_open(written, "pt") as opened:
        metadata = opened.metadata()
    targets = ["to_k", "to_out.0", "to_q", "to_v"]  # a set in PEFT: its order differs between processes
    assert json.loads(metadata["lora_adapter_metadata"])["transformer.target_modules"] == targets
    assert json.loads(files["adapter_config.json"])["target_modules"] == targets
    assert metadata["format"] == "pt"
    assert load_file(written).keys() == {
        name.replace("base_model.model", "transformer") for name in load_file(tmp_path / "0" / "adapter_model.safetensors")
    }


def test_a_run_with_a_function_as_reward_is_exported_without_its_script(tmp_path):
    def brightness(images, **kwargs):
        return [image.convert("L").getpixel((0, 0)) / 255 for image in images]

    trainer = Trainer(
        model=retouch.models.PlaygroundTextToImage(), reward_funcs=brightness,
        train_dataset=[{"prompt": "a red circle"}, {"prompt": "a blue square"}], peft_config=retouch.Lora(rank=2, alpha=4),
        rollout={"num_steps": 2, "transition": {"kind": "cps", "noise_level": 0.7}},
        **{"steps": 1, "tasks_per_step": 1, "group_size": 2, "output_dir": tmp_path, "run_name": "bright"},
    )  # fmt: skip
    trainer.train()
    of_trainer = {path.name for path in trainer.save_pretrained(tmp_path / "by-trainer")}
    assert cli.main(["export", str(trainer.folder), "--to", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == of_trainer
    for name in ("pytorch_lora_weights.safetensors", "adapter_model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "by-trainer" / name).read_bytes()


def test_invalid_exports_raise_and_write_nothing(tmp_path):
    folder = trained(tmp_path, ema=None)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for target, to, which, says in (
        (str(folder), "taken", None, "not empty"),
        (str(folder), "taken/file", None, "this is a file; name a new folder"),
        (str(folder), "out", "average", "kept no average"),
        ("recipes/quickstart.jsonnet", "out", None, "is not a run"),
    ):
        with pytest.raises(ValueError, match=says):
            export_target(target, to=tmp_path / to, **({"which": which} if which else {}))
    assert not (tmp_path / "out").exists()


FORM = IpAdapter(encoder="playground", tokens=6, projection="mlp", blocks="all")
QFORMER = FORM.model_copy(update={"projection": "qformer"})


def transformer(seed, form=FORM):
    """A tiny Flux with the adapter of the IP-Adapter trainer (docs/coming-from.md) and random weights from ``seed``."""
    made = tiny_models.flux_transformer(channels=64)
    ip_adapter.attach(made, form, embed_width=12, seed=seed)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in ip_adapter.modules(made):
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random))
    return made


def parts(made, folder):
    """Projection and attention under the names of the source's state dicts."""
    folder.mkdir()
    stored = load_file(ip_adapter.write(made, folder))
    return tuple(
        {name.removeprefix(part): tensor for name, tensor in stored.items() if name.startswith(part)}
        for part in ("image_proj.", "ip_adapter.")
    )


def test_a_converted_adapter_has_the_weights_of_the_original(tmp_path, capsys):
    one = transformer(1)
    projection, attention = parts(one, tmp_path / "one")
    torch.save({"image_proj": projection, "ip_adapter": attention}, tmp_path / "adapter.bin")
    assert cli.main(["tools", "convert", str(tmp_path / "adapter.bin"), "--to", str(tmp_path / "made")]) == 0
    assert "6 tokens, projection 'mlp'" in capsys.readouterr().out
    other = transformer(2)
    ip_adapter.read(other, tmp_path / "made")
    assert_same(ip_adapter.modules(one), ip_adapter.modules(other))


def assert_same(theirs, ours):
    for one, other in zip(theirs, ours, strict=True):
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])


def calligrapher(made, file):
    """A file with the names of calligrapher.bin: an MLP, a Q-Former, and attention."""
    projection, attention = parts(made, file.with_suffix(""))
    halves = {
        half: {name.removeprefix(f"{half}."): tensor for name, tensor in projection.items() if name.startswith(f"{half}.")}
        for half in ("mlp", "qformer")
    }
    attention = {name: tensor for name, tensor in attention.items() if name.split(".")[0].isdigit()}
    torch.save({**{f"image_proj_{half}": each for half, each in halves.items()}, "attn_adapter": attention}, file)


def test_converted_calligrapher_adapters_keep_qformer_and_mlp_weights(tmp_path, capsys):
    one = transformer(1, QFORMER)
    calligrapher(one, tmp_path / "calligrapher.bin")
    assert cli.main(["tools", "convert", str(tmp_path / "calligrapher.bin"), "--to", str(tmp_path / "made")]) == 0
    assert "6 tokens, projection 'qformer'" in capsys.readouterr().out
    other, mlp = transformer(2, QFORMER), transformer(3)
    for made in (other, mlp):
        ip_adapter.read(made, tmp_path / "made")
    assert_same(ip_adapter.modules(one), ip_adapter.modules(other))
    (projection, *attention), (theirs, *rest) = ip_adapter.modules(mlp), ip_adapter.modules(one)
    assert_same(rest, attention)
    assert_same([theirs.image_projection_layers[0].mlp], [projection.image_projection_layers[0]])


def test_qformer_tokens_equal_the_published_formula():
    """The tokens of the MLP plus those of queries that attend to 32 vectors: two norms in sequence of attended + queries."""
    projection = ip_adapter.modules(transformer(1, QFORMER))[0].image_projection_layers[0]
    embeds = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    state, attend = projection.qformer.state_dict(), projection.qformer.cross_attn
    width = state["query_embeds"].shape[1]
    keys = projection.qformer.id_proj(embeds).view(3, 32, width)
    query, key, value = (
        (states @ weight.T + bias).view(*states.shape[:-1], 8, width // 8).transpose(-2, -3)
        for states, weight, bias in zip(
            (state["query_embeds"], keys, keys), state["cross_attn.in_proj_weight"].chunk(3),
            state["cross_attn.in_proj_bias"].chunk(3), strict=True,
        )
    )  # fmt: skip
    mixed = (query @ key.transpose(-1, -2) / (width // 8) ** 0.5).softmax(dim=-1) @ value
    attended = attend.out_proj(mixed.transpose(-2, -3).reshape(3, 6, width))
    wanted = projection.qformer.norm(projection.qformer.cross_attn_norm(attended + state["query_embeds"]))
    torch.testing.assert_close(projection(embeds) - projection.mlp(embeds), wanted, rtol=1e-4, atol=1e-5)


def test_adapter_blocks_are_renumbered_without_gaps(tmp_path):
    """Blocks are numbered in their order, whatever their numbers in the source's list of modules."""
    projection, _ = parts(transformer(1), tmp_path / "one")
    attention = {f"{k}.{what}.weight": torch.full((2, 2), float(k)) for k in (3, 10, 4) for what in ("to_k_ip", "to_v_ip")}
    torch.save({"image_proj": projection, "ip_adapter": attention}, tmp_path / "adapter.bin")
    found = load_file(convert_adapter(tmp_path / "adapter.bin", to=tmp_path / "made").file)
    assert [found[f"ip_adapter.{k}.to_v_ip.weight"][0, 0].item() for k in range(3)] == [3, 4, 10]


class MaliciousPickle:
    def __reduce__(self):
        return print, ("code ran",)


def test_files_that_are_not_an_ip_adapter_raise_and_run_no_code(tmp_path, capsys):
    projection, attention = parts(transformer(1), tmp_path / "one")
    latents = {"image_proj_qformer": {"latents": torch.zeros(2)}}
    cases = [
        ({"image_proj": MaliciousPickle(), "ip_adapter": attention}, "contains more than numbers"),
        ({"weights": attention}, "not an IP-Adapter; it should have image_proj and ip_adapter"),
        ({"image_proj": {"x": 3}, "ip_adapter": attention}, "image_proj should be a map of tensors"),
        ({"image_proj": {"layers.0.w": torch.zeros(1)}, "ip_adapter": attention}, "neither a linear layer nor an MLP"),
        ({"image_proj_mlp": projection, "attn_adapter": attention, **latents}, "Q-Former has 'latents'"),
        ({"image_proj": projection, "ip_adapter": {"0.to_q.weight": torch.zeros(1)}}, "has no to_k_ip and to_v_ip"),
        ({"image_proj": projection, "ip_adapter": {"0.to_k_ip.weight": torch.zeros(1)}}, r"has no ip_adapter\.0\.to_v_ip"),
    ]
    for k, (stored, why) in enumerate(cases):
        torch.save(stored, tmp_path / f"{k}.bin")
        with pytest.raises(ValueError, match=why):
            convert_adapter(tmp_path / f"{k}.bin", to=tmp_path / "made")
    assert "code ran" not in capsys.readouterr().out
    assert not (tmp_path / "made").exists()
    with pytest.raises(ValueError, match="no such file"):
        convert_adapter(tmp_path / "nowhere.bin", to=tmp_path / "made")
    with pytest.raises(ValueError, match=re.escape("exists; choose another folder")):
        convert_adapter(tmp_path / "0.bin", to=tmp_path / "one")
