"""What the doctor asks a vLLM server that a recipe names: whether it answers, serves the writer, and lets adapters be loaded."""

from collections.abc import Iterator

from retouch.assembly.engine import connect
from retouch.doctor.findings import Finding, failed, note, ok
from retouch.models.base import ImageModel
from retouch.policies.autoregressive.mismatch import EngineFault
from retouch.recipe.emu3 import TokenModel
from retouch.recipe.engine import VllmEngine
from retouch.recipe.recipe import Recipe
from retouch.recipe.rollout import TokenRollout

_SECONDS = 10.0


def check_engines(recipe: Recipe) -> Iterator[Finding]:
    """The servers of all phases, each asked once; nothing where there is none."""
    engines = {
        phase.rollout.engine.url: phase.rollout
        for phase in recipe.resolved_phases()
        if isinstance(phase.rollout, TokenRollout) and isinstance(phase.rollout.engine, VllmEngine)
    }
    for rollout in engines.values():
        yield from _check(recipe, rollout)


def _check(recipe: Recipe, rollout: TokenRollout) -> Iterator[Finding]:
    section = rollout.engine
    assert isinstance(section, VllmEngine)
    starting = "start the server as docs/engines.md says"
    try:
        client = connect(section.model_copy(update={"timeout": min(section.timeout, _SECONDS), "patience": 0.0}))
    except ValueError as error:
        yield failed("engine", str(error), mend="pip install 'retouch[vllm]'")
        return
    from retouch.policies.engines.form import PLUGIN
    from retouch.policies.engines.server import ask, keeps_to_forms
    from retouch.policies.engines.wire import INTERFACE

    model = recipe.policy.model
    with client:
        try:
            server = ask(client)
            asks = isinstance(model, TokenModel) and model.grammar and server.takes_ids
            lawless = asks and not keeps_to_forms(client)
        except EngineFault as fault:
            yield failed("engine", str(fault), mend=starting)
            return
    where = f"vLLM {server.version} at {client.url}"
    yield ok("engine", f"{where} serves {server.base.root or server.base.id}")
    yield note("engine", f"this engine was tested against a double of vLLM {INTERFACE}'s interface, and has never run on vLLM")
    if server.version != INTERFACE:
        yield note("engine", f"{where} may speak otherwise than {INTERFACE}, which this was written for")
    if not isinstance(model, ImageModel) and model.path and server.base.root not in (None, model.path):
        yield note("engine", f"it serves {server.base.root}, and policy.model.path is {model.path}; the weights must be the same")
    if not server.loads_adapters:
        text = f"{where} lets no LoRA be loaded: it was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        yield failed("engine", text, mend=starting)
    if not server.takes_ids:
        yield failed("engine", f"{where} takes no token ids: it was started without --enable-scale-out", mend=starting)
    if lawless:
        text = f"{where} does not keep to the grammar of image tokens: it was started without --logits-processors {PLUGIN}"
        yield failed("engine", text, mend=starting)
    room = server.base.max_model_len
    if room is not None and room <= rollout.max_new_tokens:
        yield failed("engine", f"{where} has room for {room} tokens, prompt and completion together", mend=starting)
