"""The page rejects requests without a token, from other hosts and origins, with other methods, and for paths outside the runs."""

import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
import pytest
from conftest import TOKEN
from starlette.testclient import TestClient

from retouch_view.cli import view
from retouch_view.live.app import build_app

SECRET = "the secret"
OUTSIDE = (
    "../secret.png", "..%2fsecret.png", "%2e%2e/secret.png", "%2e%2e%2fsecret.png", "..%5csecret.png", "..\\secret.png",
    "%252e%252e%252fsecret.png", "..%c0%afsecret.png", "..%ef%bc%8fsecret.png", "....//secret.png", "..;/secret.png",
    "./../secret.png", "a/../../secret.png", "/secret.png", "//secret.png", "%2fsecret.png", "%00secret.png",
    "secret.png%00.png", "secret.png/", "linked.png", ".hidden.png", "samples.jsonl", "file:///secret.png",
    "http:%2f%2f127.0.0.1%2fsecret.png", "~/secret.png", "C:%5csecret.png", "CON.png", "secret.PNG", "x" * 5000 + ".png",
    "\u202egnp.terces.png", "%0d%0aSet-Cookie:x.png",
)  # fmt: skip
PLACES = ("/images/one/4/{}", "/thumbnails/one/4/{}")
OTHER_PATHS = (
    *("/images/../one/4/a.png", "/images/..%2fone/4/a.png", "/images/%2e%2e/4/secret.png", "/images/one/-1/a.png"),
    *("/images/one/../../secret.png", "/images/one/4e9/a.png", "/images/one/99999999999999999999/a.png"),
    *("/images/linked/4/secret.png", "/api/runs/..", "/api/runs/%2e%2e", "/api/runs/..%2foutside", "/api/runs/linked"),
    *("/api/runs/one%00", "/api/runs//etc/passwd", "/static/../gate.py", "/static/%2e%2e/gate.py", "/static/..%2fgate.py"),
    *("/static//etc/passwd", "/static/%2fetc%2fpasswd", "/.git/config"),
)


@pytest.fixture
def run(write_run, tmp_path):
    folder = write_run("one")
    for place in (tmp_path, tmp_path / "runs", folder.root, folder.root / "samples"):
        (place / "secret.png").write_text(SECRET)
    (folder.samples(4) / "linked.png").symlink_to(tmp_path / "secret.png")
    (folder.samples(4) / ".hidden.png").write_text(SECRET)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "recipe.json").write_text(f'{{"recipe": {{"name": "{SECRET}"}}}}')
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "outside")
    return folder


@pytest.mark.parametrize(
    "path", [*(place.format(name) for place in PLACES for name in OUTSIDE), *OTHER_PATHS], ids=lambda path: path[:60]
)
def test_no_path_outside_the_runs_is_served(run, browser, path):
    reply = browser.get(quote(path, safe="/%:~;.\\-_"), follow_redirects=False)
    assert reply.status_code in (404, 405, 307)
    assert SECRET not in reply.text
    assert "Set-Cookie" not in reply.headers


@pytest.mark.parametrize(
    "path", ["/", "/api/runs", "/api/runs/one", "/api/runs/one/events", "/images/one/4/heldout-0000-000.png", "/static/main.js"]
)
def test_nothing_is_served_without_the_token(run, anonymous, path):
    for given in (
        {},
        {"Cookie": "retouch_view_8765=wrong"},
        {"Cookie": "retouch_view_8765="},
        {"Authorization": f"Bearer {TOKEN}"},
    ):
        assert anonymous.get(path, headers=given).status_code == 401
    assert anonymous.get(f"{path}?token=wrong").status_code == 401
    assert anonymous.get(f"{path}?token=").status_code == 401


def test_token_is_moved_from_the_url_to_a_cookie(run, anonymous):
    reply = anonymous.get(f"/?token={TOKEN}", follow_redirects=False)
    assert (reply.status_code, reply.headers["location"]) == (303, "/")
    cookie = reply.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert cookie.startswith("retouch_view_8765=")  # two pages on two ports keep their tokens
    assert TOKEN.lower() not in cookie
    page = anonymous.get("/")
    assert TOKEN not in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["referrer-policy"] == "no-referrer"


def test_point_3_8_the_cookie_is_valid_only_for_its_server_and_port(run, tmp_path):
    """Browsers send it to every port of the host, so every other server there sees it."""
    first, later = (TestClient(build_app(tmp_path / "runs", token=TOKEN), base_url="http://127.0.0.1:8765") for _ in range(2))
    first.get(f"/?token={TOKEN}")
    value = first.cookies["retouch_view_8765"]

    def status(client, port, cookie):
        address = f"http://127.0.0.1:{port}/api/runs"
        client.cookies.clear()
        return client.get(address, headers={"Cookie": f"retouch_view_{port}={cookie}"}).status_code

    assert status(first, 8765, value) == 200
    assert status(first, 8766, value) == 401, "another port"
    assert status(later, 8765, value) == 401, "a server that was started again, with the same token"
    assert status(first, 8765, TOKEN) == 401, "the token is no cookie"
    assert status(first, 8765, value[:-1]) == status(first, 8765, "") == status(first, 8765, value.upper()) == 401
    assert first.get(f"/api/runs?token={value}").status_code == 401, "the cookie is no token"


def test_point_3_8_two_pages_on_two_ports_do_not_log_each_other_out(run, tmp_path):
    pages = [TestClient(build_app(tmp_path / "runs", token=TOKEN), base_url=f"http://127.0.0.1:{port}") for port in (81, 82)]
    for page in pages:
        assert page.get(f"/?token={TOKEN}").status_code == 200
        for other in pages:  # as a browser does, which shares cookies between ports
            other.cookies.update(page.cookies)
    assert [page.get("/api/runs").status_code for page in pages] == [200, 200]


@pytest.mark.parametrize(
    "headers",
    [
        *({"Host": host} for host in ("attacker.example", "127.0.0.1.attacker.example", "attacker.example:8765", "[::1", "")),
        *({"Origin": origin} for origin in ("https://attacker.example", "null", "http://127.0.0.1.attacker.example")),
    ],
    ids=str,
)
def test_other_hosts_origins_and_methods_are_refused(run, browser, headers):
    assert browser.get("/api/runs", headers=headers).status_code == 421
    assert browser.get(f"/?token={TOKEN}", headers=headers, follow_redirects=False).status_code == 421
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        assert browser.request(method, "/api/runs").status_code == 405


def test_text_from_runs_is_sent_as_json_and_never_inserted_as_html(write_run, browser):
    """The text is sent as JSON, which browsers do not render, and the scripts never insert it as HTML."""
    hostile = "<script>alert(1)</script><img src=x onerror=alert(1)>\u202e" + "x" * 1_000_000
    write_run("one", instruction=hostile)
    reply = browser.get("/api/runs/one/samples")
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.json()["samples"][0]["instruction"] == hostile
    static = Path(__file__).parents[2] / "src" / "retouch_view" / "live" / "static"
    scripts = "".join(path.read_text() for path in static.glob("*.js"))
    assert not any(
        word in scripts for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(")
    )
    assert "<script>" not in (static / "index.html").read_text()


def test_the_address_can_be_opened_as_soon_as_it_is_printed(write_run, tmp_path):
    write_run("one")

    def report(line):
        url = urlsplit(line.split("open ")[1])
        socket.create_connection((url.hostname, url.port), timeout=5).close()
        raise RuntimeError("it was reached")

    with pytest.raises(RuntimeError, match="it was reached"):
        view(tmp_path / "runs", port=0, report=report)


def test_the_token_and_the_cookie_are_in_no_log(write_run, tmp_path):
    """Also after malformed requests, the token appears only in the address that the command prints at its start."""
    write_run("one")
    command = [sys.executable, "-m", "retouch", "view", str(tmp_path / "runs"), "--port", "0", "--control"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            address = process.stdout.readline().split("open ")[1].strip()
            base, _, token = address.partition("/?token=")
            with httpx.Client(base_url=base, timeout=20) as client:
                for path in (f"/?token={token}", f"/nowhere?token={token}", "/", f"/images/{token}/4/a.png", f"/api/runs/{token}"):
                    client.get(path)
                (cookie,) = client.cookies.values()
                client.post(f"/api/runs/one/control?token={token}", content=token.encode(), headers={"Origin": base})
                client.request("BREW", f"/?token={token}")
        finally:
            process.terminate()
        rest = process.stdout.read()
    assert token
    for secret in (token, cookie):
        assert secret not in rest
        assert [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()] == []
