"""Published IP-Adapters in pickle files: the safetensors have the same weights, and only tensors are unpickled."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny_models
from retouch.cli import main
from retouch.inference.published_adapters import convert_adapter
from retouch.models.ip_adapter import adapter as files
from retouch.models.ip_adapter import adapter as ip_adapter
from retouch.models.ip_adapter.section import IpAdapter

FORM = IpAdapter(encoder="playground", tokens=6, projection="mlp", blocks="all")
QFORMER = FORM.model_copy(update={"projection": "qformer"})


def transformer(seed: int, form: IpAdapter = FORM) -> torch.nn.Module:
    """A tiny Flux with the adapter of system B (docs/coming-from.md) and random weights from ``seed``."""
    made = tiny_models.flux_transformer(channels=64)
    ip_adapter.attach(made, form, embed_width=12, seed=seed)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in ip_adapter.modules(made):
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random))
    return made


def parts(made: torch.nn.Module, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Projection and attention under the names of the source's state dicts."""
    folder.mkdir()
    stored = load_file(files.write(made, folder))
    projection = {name.removeprefix("image_proj."): tensor for name, tensor in stored.items() if name.startswith("image_proj.")}
    return projection, {
        name.removeprefix("ip_adapter."): tensor for name, tensor in stored.items() if name.startswith("ip_adapter.")
    }


def test_a_converted_adapter_has_the_weights_of_the_original(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = transformer(1)
    projection, attention = parts(one, tmp_path / "one")
    torch.save({"image_proj": projection, "ip_adapter": attention}, tmp_path / "adapter.bin")
    assert main(["convert", str(tmp_path / "adapter.bin"), "--to", str(tmp_path / "made")]) == 0
    assert "6 tokens, projection 'mlp'" in capsys.readouterr().out
    other = transformer(2)
    files.read(other, tmp_path / "made")
    assert_same(ip_adapter.modules(one), ip_adapter.modules(other))


def assert_same(theirs: list[torch.nn.Module], ours: list[torch.nn.Module]) -> None:
    for one, other in zip(theirs, ours, strict=True):
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])


def calligrapher(made: torch.nn.Module, file: Path) -> None:
    """A file with the names of calligrapher.bin: an MLP, a Q-Former, and attention."""
    projection, attention = parts(made, file.with_suffix(""))
    halves = {
        half: {name.removeprefix(f"{half}."): tensor for name, tensor in projection.items() if name.startswith(f"{half}.")}
        for half in ("mlp", "qformer")
    }
    attention = {name: tensor for name, tensor in attention.items() if name.split(".")[0].isdigit()}
    torch.save({**{f"image_proj_{half}": each for half, each in halves.items()}, "attn_adapter": attention}, file)


def test_converted_calligrapher_adapters_keep_qformer_and_mlp_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = transformer(1, QFORMER)
    calligrapher(one, tmp_path / "calligrapher.bin")
    assert main(["convert", str(tmp_path / "calligrapher.bin"), "--to", str(tmp_path / "made")]) == 0
    assert "6 tokens, projection 'qformer'" in capsys.readouterr().out
    other, mlp = transformer(2, QFORMER), transformer(3)
    for made in (other, mlp):
        files.read(made, tmp_path / "made")
    assert_same(ip_adapter.modules(one), ip_adapter.modules(other))
    (projection, *attention), (theirs, *rest) = ip_adapter.modules(mlp), ip_adapter.modules(one)
    assert_same(rest, attention)
    assert_same([theirs.image_projection_layers[0].mlp], [projection.image_projection_layers[0]])


def test_qformer_tokens_equal_the_published_formula() -> None:
    """The tokens of the MLP plus those of queries that attend to 32 vectors: two norms in sequence of attended + queries."""
    projection = ip_adapter.modules(transformer(1, QFORMER))[0].image_projection_layers[0]
    embeds = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    state, attend = projection.qformer.state_dict(), projection.qformer.cross_attn
    width = state["query_embeds"].shape[1]
    keys = projection.qformer.id_proj(embeds).view(3, 32, width)
    query, key, value = (
        (states @ weight.T + bias).view(*states.shape[:-1], 8, width // 8).transpose(-2, -3)
        for states, weight, bias in zip(
            (state["query_embeds"], keys, keys),
            state["cross_attn.in_proj_weight"].chunk(3),
            state["cross_attn.in_proj_bias"].chunk(3),
            strict=True,
        )
    )
    mixed = (query @ key.transpose(-1, -2) / (width // 8) ** 0.5).softmax(dim=-1) @ value
    attended = attend.out_proj(mixed.transpose(-2, -3).reshape(3, 6, width))
    wanted = projection.qformer.norm(projection.qformer.cross_attn_norm(attended + state["query_embeds"]))
    torch.testing.assert_close(projection(embeds) - projection.mlp(embeds), wanted, rtol=1e-4, atol=1e-5)


def test_adapter_blocks_are_renumbered_without_gaps(tmp_path: Path) -> None:
    """Blocks are numbered in their order, whatever their numbers in the source's list of modules."""
    projection, _ = parts(transformer(1), tmp_path / "one")
    attention = {f"{k}.{what}.weight": torch.full((2, 2), float(k)) for k in (3, 10, 4) for what in ("to_k_ip", "to_v_ip")}
    torch.save({"image_proj": projection, "ip_adapter": attention}, tmp_path / "adapter.bin")
    found = load_file(convert_adapter(tmp_path / "adapter.bin", to=tmp_path / "made").file)
    assert [found[f"ip_adapter.{k}.to_v_ip.weight"][0, 0].item() for k in range(3)] == [3, 4, 10]


class MaliciousPickle:
    def __reduce__(self):
        return print, ("code ran",)


def test_files_that_are_not_an_ip_adapter_raise_and_run_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    projection, attention = parts(transformer(1), tmp_path / "one")
    cases = [
        ({"image_proj": MaliciousPickle(), "ip_adapter": attention}, "contains more than numbers"),
        ({"weights": attention}, "not an IP-Adapter; it should have image_proj and ip_adapter"),
        ({"image_proj": {"x": 3}, "ip_adapter": attention}, "image_proj should be a map of tensors"),
        ({"image_proj": {"layers.0.w": torch.zeros(1)}, "ip_adapter": attention}, "neither a linear layer nor an MLP"),
        (
            {"image_proj_mlp": projection, "attn_adapter": attention, "image_proj_qformer": {"latents": torch.zeros(2)}},
            "Q-Former has 'latents'",
        ),
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
