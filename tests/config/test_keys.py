"""A key is sent only to addresses that the user has bound it to, and is removed from every text that leaves the process.

Each test begins without bindings. The server of this machine counts the connections that it accepts.
"""

import base64
import io
import json
import logging
import os
import socketserver
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote

import pytest

import loopback
from retouch.config import keys
from retouch.config.keys import RedactingFormatter, redacted
from retouch.policies.engine import TokenSampling
from retouch.recipe.recipe import load
from retouch.records.files import append_line, read_lines
from retouch_judge.chat_client import ChatClient
from retouch_judge.kinds import Endpoint
from retouch_judge.questions import ChoiceForm, Question
from retouch_plan.checks import check_key_addresses
from retouch_serve.engines.client import Client
from retouch_serve.engines.sections import VllmEngine
from retouch_serve.remote import RemoteReward

GRPO = Path(__file__).parents[2] / "recipes" / "playground" / "grpo.jsonnet"
SECRET = "sk-0123456789abcdef"


@pytest.fixture(autouse=True)
def missing_bindings_file(tmp_path, monkeypatch):
    """The file of the user's bindings, which does not exist."""
    monkeypatch.delenv("RETOUCH_KEYS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "retouch" / "keys.toml"


@pytest.fixture
def listener():
    """The address of a server, and the connections that it accepted."""
    accepted: list[object] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            accepted.append(self.client_address)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", accepted
        server.shutdown()


def judge(url, **more):
    return Endpoint(**{"model": "m", "base_url": url, "attempts": 1, **more})


def test_a_key_is_not_sent_to_a_judge_that_it_is_not_bound_to(listener, monkeypatch):
    url, accepted = listener
    for variable in ("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "HOME"):
        monkeypatch.setenv(variable, SECRET)
        with pytest.raises(ValueError, match="is not sent to") as refused:
            ChatClient(judge(url, key=variable))
        assert str(refused.value) == (
            f"{variable} is not sent to {url}: you have not bound this key to this address. If that server may have the key: "
            f'export RETOUCH_KEYS="{variable}={url}"'
        )
        assert SECRET not in str(refused.value)
    assert not accepted
    monkeypatch.setenv("RETOUCH_KEYS", f"OPENAI_API_KEY={url}")
    ChatClient(judge(url)).close()
    with pytest.raises(ValueError, match=r'export RETOUCH_KEYS="\$RETOUCH_KEYS HOME='):
        ChatClient(judge(url, key="HOME"))


def test_keys_from_files_and_custom_headers_need_a_binding_and_a_server_without_a_key_needs_none(listener, tmp_path, monkeypatch):
    ChatClient(judge(listener[0], key=None)).close()
    assert RemoteReward(endpoints=("http://10.1.2.3:8700",)).token is None
    Client("http://10.1.2.3:8000", timeout=1.0, patience=0.0).close()
    (tmp_path / "key").write_text(SECRET)
    monkeypatch.setenv("JUDGE_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(ValueError, match=r"JUDGE_KEY is not sent to https://judge\.example:8443"):
        ChatClient(judge("https://judge.example:8443/v1", key="JUDGE_KEY"))
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"Authorization: Bearer {SECRET}")
    with pytest.raises(ValueError, match="OPENAI_CUSTOM_HEADERS is not sent to"):
        ChatClient(judge(listener[0], key=None))
    assert not listener[1]


@pytest.mark.parametrize("bound", [False, True])
def test_openai_organization_and_project_ids_are_sent_only_to_bound_addresses(monkeypatch, bound):
    """The ``openai`` package takes them from the environment and sends them to every address."""
    received: list[dict[str, str]] = []

    class Handler(loopback.Handler):
        def do_POST(self):
            self.body()
            received.append({name.lower(): value for name, value in self.headers.items()})
            self.reply(400, {})

    with loopback.running(loopback.Server(Handler)) as server:
        url = server.url
        given = {"OPENAI_ORG_ID": "org-1", "OPENAI_PROJECT_ID": "project-1"}
        for variable, value in {**given, "OPENAI_ADMIN_KEY": SECRET}.items():
            monkeypatch.setenv(variable, value)
        if bound:
            monkeypatch.setenv("RETOUCH_KEYS", " ".join(f"{variable}={url}" for variable in given))
        client = ChatClient(judge(url, key=None))
        client.ask([Question("Judge.", ("Is this red?",), ChoiceForm("red", {"yes": 1.0, "no": 0.0}), seed=0, temperature=0.0)])
        client.close()
    sent = {name: value for name, value in received[0].items() if name in ("openai-organization", "openai-project")}
    assert sent == ({"openai-organization": "org-1", "openai-project": "project-1"} if bound else {})
    assert SECRET not in str(received)


def test_reward_tokens_and_engine_keys_are_sent_only_to_this_machine_and_bound_addresses(monkeypatch):
    monkeypatch.setenv("RETOUCH_TOKEN", SECRET)
    local = ("http://127.0.0.1:8700", "http://localhost:9000", "http://[::1]:8700")
    assert RemoteReward(endpoints=local).token == SECRET
    foreign = RemoteReward(endpoints=(*local, "https://rewards.example"))
    with pytest.raises(ValueError, match=r"RETOUCH_TOKEN is not sent to https://rewards\.example"):
        foreign.build()
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    Client("http://127.0.0.1:8000/v1", timeout=1.0, patience=0.0).close()
    engine = VllmEngine(url="http://10.1.2.3:8000")
    with pytest.raises(ValueError, match=r"VLLM_API_KEY is not sent to http://10\.1\.2\.3:8000"):
        engine.connect()
    sampling = TokenSampling(max_new_tokens=8)
    ((status, text, command),) = engine.diagnose(sampling, base_model=None, full_weights=False, image_grammar=False)
    assert status == "FAILED"
    assert "VLLM_API_KEY is not sent" in text
    assert command == 'export RETOUCH_KEYS="VLLM_API_KEY=http://10.1.2.3:8000"'
    monkeypatch.setenv("RETOUCH_KEYS", "RETOUCH_TOKEN=https://rewards.example VLLM_API_KEY=http://10.1.2.3:8000")
    assert foreign.token == SECRET
    engine.connect().close()


# Bindings


def test_the_key_of_a_provider_is_bound_to_its_address_which_a_binding_of_the_user_replaces(monkeypatch):
    api = "https://api.openai.com"
    mine = "OPENAI_API_KEY=https://proxy.example, OPENAI_API_KEY=http://127.0.0.1:*"
    similar = (
        f"{api}.evil.example/v1", "https://evil.example/api.openai.com", "https://evil.example#@api.openai.com", f"{api}:8443/v1",
        "http://api.openai.com/v1", "https://openai.com/v1", "https://xapi.openai.com/v1", "https://127.0.0.1.evil.example",
    )  # fmt: skip
    for bindings, accepted, refused in (
        (None, (f"{api}/v1", "https://API.OpenAI.com:443/v1/", f"{api}./v1", api), similar),
        (mine, ("https://proxy.example/v1", "http://127.0.0.1:12345/v1"), (f"{api}/v1", "http://localhost:12345/v1")),
    ):
        if bindings is not None:
            monkeypatch.setenv("RETOUCH_KEYS", bindings)
        for url in accepted:
            keys.require_bound("OPENAI_API_KEY", url)
        for url in refused:
            with pytest.raises(ValueError, match="OPENAI_API_KEY is not sent to"):
                keys.require_bound("OPENAI_API_KEY", url)


def test_bindings_are_read_from_the_users_file_too_and_an_invalid_one_raises_with_its_name(missing_bindings_file):
    missing_bindings_file.parent.mkdir()
    missing_bindings_file.write_text('A_KEY = "https://a.example:8443"\nB_KEY = ["https://b.example", "http://127.0.0.1:8000"]\n')
    keys.require_bound("A_KEY", "https://a.example:8443/v1")
    keys.require_bound("B_KEY", "http://127.0.0.1:8000/v1")
    with pytest.raises(ValueError, match=r"B_KEY is not sent to https://a\.example:8443"):
        keys.require_bound("B_KEY", "https://a.example:8443/v1")
    for text in ("A_KEY = 3", "A_KEY = [1]", "not toml", 'A_KEY = "http://a.example"'):
        missing_bindings_file.write_text(text)
        with pytest.raises(ValueError, match=r"keys\.toml"):
            keys.require_bound("A_KEY", "https://a.example")


def test_insecure_or_invalid_bindings_are_rejected(monkeypatch):
    for bindings, says in (
        ("OPENAI_API_KEY=http://judge.example", "without https everybody on the network path can read it"),
        ("OPENAI_API_KEY=https://judge.example:*", "only an address of this machine may have the port"),
        ("OPENAI_API_KEY=https://*", "is not an address"), ("OPENAI_API_KEY=judge.example", "is not an address"),
        ("OPENAI_API_KEY=https://me:pw@judge.example", "is not an address"), (SECRET, "needs an address: VARIABLE=https://host"),
    ):  # fmt: skip
        monkeypatch.setenv("RETOUCH_KEYS", bindings)
        with pytest.raises(ValueError, match=f"RETOUCH_KEYS: .*({says})"):
            keys.require_bound("OPENAI_API_KEY", "https://judge.example")


@pytest.mark.parametrize("relative", ["XDG_CONFIG_HOME", "HOME"])
def test_binding_files_below_the_current_folder_are_not_read(tmp_path, monkeypatch, relative):
    """Neither in a folder named "~" (without a home folder) nor at a relative path in the environment."""
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv(relative, "theirs")
    monkeypatch.chdir(tmp_path)
    for folder in ("theirs/retouch", "~/.config/retouch", "theirs/.config/retouch"):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "keys.toml").write_text('A_KEY = "https://evil.example"')
    with pytest.raises(ValueError, match="A_KEY is not sent to"):
        keys.require_bound("A_KEY", "https://evil.example")


def test_the_doctor_shows_which_key_goes_where(monkeypatch):
    def found(url):
        reward = {"kind": "aspects", "judge": {"kind": "endpoint", "model": "m", "base_url": url}, "combine": {"alignment": 1}}
        recipe = load(GRPO, [f"reward={json.dumps(reward)}", "eval.column=null"])
        return [(finding.status, finding.text, finding.fix) for finding in check_key_addresses(recipe)]

    assert found("https://api.openai.com/v1") == [("ok", "OPENAI_API_KEY goes to https://api.openai.com", "")]
    ((status, text, fix),) = found("https://judge.example/v1")
    assert status == "FAILED"
    assert "OPENAI_API_KEY is not sent to https://judge.example" in text
    assert fix == 'export RETOUCH_KEYS="OPENAI_API_KEY=https://judge.example"'


KEY = "jk-Xy7/Qw91zLm+4TtRbV0n3Kd8"
PROXY = "Tr0ub4dor-and-3"
FORMS = {
    "verbatim": KEY, "upper case": KEY.upper(), "reversed": KEY[::-1], "the first 16 characters": KEY[:16],
    "the last 14 characters": KEY[-14:], "masked in the middle": f"{KEY[:6]}********{KEY[-4:]}",
    "masked by dots": f"{KEY[:5]}...{KEY[-5:]}", "base64": base64.b64encode(KEY.encode()).decode(),
    "base64 of user and password": base64.b64encode(f"me:{KEY}".encode()).decode(),
    "base64 in a bearer token": base64.urlsafe_b64encode(f"Bearer {KEY}".encode()).decode(),
    "hexadecimal": KEY.encode().hex(), "percent-encoded": quote(KEY, safe=""),
    "percent-encoded as a whole": "".join(f"%{code:02X}" for code in KEY.encode()),
    "escaped as JSON": "".join(f"\\u{code:04x}" for code in KEY.encode()),
    "repr of bytes": str(list(KEY.encode())), "one character per line": "\n".join(KEY), "separated by spaces": " ".join(KEY),
    "split by zero-width spaces": "\u200b".join(KEY), "in a header": f"Authorization: Bearer {KEY}",
    "another bearer": "authorization: bearer eyJhbGciOiJIUzI1NiJ9.e30.abc",
    "in a query": f"https://judge.example/v1?api_key={KEY}&n=1",
    "another query": "GET https://judge.example/v1?n=1&access_token=abc-def",
    "a password in a URL": "http://me:letmein@judge.example/v1", "the password of a proxy": f"proxy refused {PROXY}",
    "a token of the Hub": "hf_" + "aB3" * 11,
}  # fmt: skip
HIDDEN = (KEY, KEY[-5:], PROXY, "letmein", "eyJhbGci", "abc-def", "aB3aB3", *FORMS.values())


@pytest.fixture
def _key(monkeypatch):
    """A key in a variable that is not named like one, but is bound to an address."""
    monkeypatch.setenv("JUDGE_OF_MINE", KEY)
    monkeypatch.setenv("RETOUCH_KEYS", "JUDGE_OF_MINE=https://judge.example")
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{PROXY}@proxy.example:3128")


def shows_a_secret(text):
    return [secret for secret in HIDDEN if secret.strip().lower() in text.lower()]


@pytest.mark.usefixtures("_key")
@pytest.mark.parametrize("form", FORMS)
def test_point_3_8_no_form_of_a_key_is_left_in_a_text(form):
    cleaned = redacted(f"HTTP 401: you sent {FORMS[form]} for nothing")
    assert shows_a_secret(cleaned) == []
    assert cleaned.startswith("HTTP 401: you sent ")
    assert cleaned.endswith(" for nothing")
    assert "[key]" in cleaned


@pytest.mark.usefixtures("_key")
def test_ordinary_texts_are_not_changed(monkeypatch, tmp_path):
    (tmp_path / "credentials-2024.json").touch()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "credentials-2024.json"))
    for text in (
        "the flag bearer of the parade, ask-me-anything, 2 * 3 ** 4 ... none",
        f"{tmp_path}/images/0001.png?size=3&key",
        "hf-internal-testing/tiny-sd3-pipe at https://huggingface.co/org/name@main, hf://datasets/a/b@1f0",
        '{"score": 5, "reasoning": "jk - a judge of mine"}',
    ):
        assert redacted(text) == text


@pytest.mark.parametrize(
    "bindings", [KEY, f"OPENAI_API_KEY={KEY}", f"OPENAI_API_KEY=https://me:{PROXY}@judge.example", f"OPENAI_API_KEY:{KEY}"]
)
def test_point_3_8_a_key_in_retouch_keys_or_in_a_file_is_neither_in_the_message_nor_in_a_text(bindings, monkeypatch, tmp_path):

    monkeypatch.setenv("RETOUCH_KEYS", bindings)
    with pytest.raises(ValueError, match="address") as raised:
        keys.require_bound("OPENAI_API_KEY", "https://judge.example")
    assert shows_a_secret(str(raised.value)) == []
    if PROXY not in bindings:
        assert shows_a_secret(redacted(f"echo {KEY}")) == []
    monkeypatch.delenv("RETOUCH_KEYS")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "key").write_text(KEY + "\n")
    monkeypatch.setenv("OPENAI_API_KEY_FILE", str(tmp_path / "key"))
    assert shows_a_secret(redacted(f"echo {KEY[::-1]}")) == []


@pytest.mark.usefixtures("_key")
def test_point_3_8_logs_with_tracebacks_and_run_files_contain_no_key(tmp_path):
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(RedactingFormatter())
    log = logging.Logger("judge")
    log.addHandler(handler)
    try:
        raise RuntimeError(KEY) from ValueError(f"http://me:letmein@h {base64.b64encode(KEY.encode()).decode()}")
    except RuntimeError:
        log.exception("refused: %s", KEY)
    assert "ValueError: http://[key]@h [key]" in lines.getvalue()
    assert shows_a_secret(lines.getvalue()) == []
    append_line(tmp_path / "alarms.jsonl", {"step": 3, "text": f'it said "{KEY}"\n', "also": [KEY[::-1]]})
    assert read_lines(tmp_path / "alarms.jsonl") == [{"step": 3, "text": 'it said "[key]"\n', "also": ["[key]"]}]


def test_point_3_8_what_a_command_prints_contains_no_key():
    """Neither its output nor the traceback of a chain of exceptions."""
    code = """
import os, sys
import retouch.cli.parser as parser
key = os.environ["A_KEY"]
def fail(arguments):
    print("printed", key)
    try:
        raise KeyError(key[::-1])
    except KeyError as error:
        raise RuntimeError(f"header {key}") from error
parser._run = fail
sys.argv = ["retouch", "recipes"]
parser.main()
"""
    environment = {**os.environ, "A_KEY": KEY}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "printed [key]\n"
    assert "RuntimeError: header [key]" in done.stderr
    assert shows_a_secret(done.stdout + done.stderr) == []
