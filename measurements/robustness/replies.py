"""Sends false and malformed replies to the clients of reward servers and judges.

    python measurements/robustness/replies.py

A wrong reply must not become a score, raise anything but ValueError at the start, or make the client lose the correct reply that
follows.
"""

import sys
from contextlib import closing

import numpy as np
from counting import Counts, silence
from PIL import Image

import bad_server
import faulty_judge
from live_server import remote, samples_of
from retouch_judge.chat_client import ChatClient
from retouch_judge.kinds import Endpoint
from retouch_judge.questions import Question, ScoresForm, WordForm
from retouch_judge.wording import Scale
from served_rewards import digest_score


def counts() -> Counts:
    """Send every wrong reply once."""
    counted = Counts()
    _descriptions(counted)
    _scores(counted)
    _answers(counted)
    return counted


def _descriptions(counted: Counts) -> None:
    for name, info in bad_server.WRONG_INFOS.items():
        counted.cases += 1
        with bad_server.bad_server("none", info=info) as server:
            try:
                remote([server.url], wait=5.0).close()
            except ValueError:
                continue
            except Exception as error:  # noqa: BLE001  (counted as a traceback)
                counted.tracebacks += 1
                counted.notes.append(f"description, {name}: {error!r}")
                continue
        counted.wrong += 1
        counted.notes.append(f"accepted: a description with {name}")


def _scores(counted: Counts) -> None:
    samples = samples_of(4)
    true = [digest_score(sample) for sample in samples]
    now: dict[str, bad_server.FaultKind] = {"kind": "none"}
    kinds = {**bad_server.WRONG_REPLIES, **{kind: kind for kind in bad_server.ALL_FAULTS}}
    with bad_server.bad_server(lambda: now["kind"]) as server:
        for name, kind in kinds.items():
            counted.cases += 1
            with closing(remote([server.url], batch=4, attempts=1, timeout=2.0, deadline=4.0)) as reward:
                now["kind"] = kind
                given = reward(samples)["digest"].tolist()
                now["kind"] = "none"
                counted.lost += reward(samples)["digest"].tolist() != true
            if any(value == value and value != right for value, right in zip(given, true, strict=True)):
                counted.wrong += 1
                counted.notes.append(f"accepted: {name}")


def _answers(counted: Counts) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    forms = (ScoresForm({"score": Scale(0, 10)}), WordForm("yes", {"yes": 1.0, "no": 0.0}))
    tables = ((faulty_judge.SCORES, forms[0]), (faulty_judge.WIRE, forms[0]), (faulty_judge.WORDS, forms[1]))
    quick = {"key": None, "timeout": 10.0, "deadline": 2.0, "attempts": 1, "pause": 0.001, "longest_pause": 0.01}
    with faulty_judge.faulty_judge() as judge, faulty_judge.faulty_judge() as elsewhere:
        client = ChatClient(Endpoint(model="judge", base_url=judge.url, **quick))
        for table, form in tables:
            for name, reply in table.items():
                _ask(counted, client, judge, name, reply, Question("Judge.", ("Picture:", picture), form, seed=0, temperature=0.0))
        truth = Question("Judge.", ("Picture:", picture), forms[0], seed=0, temperature=0.0)
        target = {"Location": f"{elsewhere.url}/chat/completions"}
        for status in faulty_judge.REDIRECTS:
            _ask(counted, client, judge, f"redirect {status}", lambda true, s=status: faulty_judge.Reply(b"", s, target), truth)
        for name, usage in faulty_judge.USAGE.items():
            counted.cases += 1
            judge.make_reply = lambda true, usage=usage: faulty_judge._json({**true, "usage": usage})
            (answer,) = client.ask([truth])
            if not 1 <= answer.input_tokens < 1000 or not 1 <= answer.output_tokens <= 1100:
                counted.wrong += 1
                counted.notes.append(f"accepted: a usage of {name}")
        counted.wrong += len(elsewhere.requests)
        judge.make_reply = faulty_judge._json
        counted.lost += client.ask([truth])[0].scores != {"score": 7.0}
        client.close()


def _ask(
    counted: Counts,
    client: ChatClient,
    judge: faulty_judge.FaultyJudge,
    name: str,
    reply: faulty_judge.ReplyMaker,
    question: Question,
) -> None:
    counted.cases += 1
    judge.make_reply = reply
    try:
        (answer,) = client.ask([question])
    except Exception as error:  # noqa: BLE001  (counted as a traceback)
        counted.tracebacks += 1
        counted.notes.append(f"judge, {name}: {error!r}")
        return
    if answer.scores:
        counted.wrong += 1
        counted.notes.append(f"accepted: {name} ({answer.scores})")


if __name__ == "__main__":
    silence()
    sys.exit(counts().finish("replies to clients"))
