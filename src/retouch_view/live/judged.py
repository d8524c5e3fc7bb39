"""Reads the answers of judges about a stored sample, texts and scores, from the ledger of the run."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retouch.records.files import jsonable
from retouch.records.folder import RunFolder
from retouch.rewards.ledger.database import decode_scores, open_read_only
from retouch_view.live.bodies import integer
from retouch_view.live.catalogue import Catalogue

_SPLITS = {"group": ("train", 1), "heldout": ("heldout", 0)}  # the ledger counts training steps from 0
_PLACE = "SELECT DISTINCT picture FROM samples WHERE split = ? AND step = ? AND group_id = ? AND slot = ? AND picture != ''"
_ANSWERS = (
    "SELECT CAST(judge AS TEXT) AS judge, CAST(rubric AS TEXT) AS rubric, substr(CAST(text AS TEXT), 1, ?) AS text, "
    "length(text) AS characters, CAST(fault AS TEXT) AS fault, CAST(scores AS TEXT) AS scores, CAST(attempts AS REAL) AS attempts, "
    "CAST(seconds AS REAL) AS seconds, CAST(cost AS REAL) AS cost "
    "FROM answers WHERE picture = ? ORDER BY number LIMIT ?"
)
_MOST_CHARACTERS = 20_000
_MOST_ANSWERS = 20


def judged_routes(catalogue: Catalogue) -> list[Route]:
    """``GET /api/runs/NAME/answers?set=SET&step=STEP&group=GROUP&slot=SLOT``, with the values of the sample's stored line."""

    async def answers(request: Request) -> Response:
        run = await run_in_threadpool(catalogue.run, request.path_params["name"])
        if run is None:
            return JSONResponse({"error": "there is no such run"}, 404)
        kind = request.query_params.get("set", "")
        step, group, slot = (integer(request, name) for name in ("step", "group", "slot"))
        found = await run_in_threadpool(read_answers, run.folder, kind, step=step, group=group, slot=slot)
        return Response(
            json.dumps({"answers": jsonable(found)}), media_type="application/json", headers={"Cache-Control": "no-store"}
        )

    return [Route("/api/runs/{name}/answers", answers)]


def read_answers(folder: RunFolder, kind: str, *, step: int, group: int, slot: int) -> list[dict[str, Any]]:
    """Return the answers about the image of a stored sample, in the order in which they were given; long texts are cut.

    ``kind``: the ``set`` of the sample, "group" or "heldout"; empty list for another one. Keys of an answer: ``judge``: its name.
    ``rubric``: the fingerprint of the rubric, empty for a reward server. ``fault``: why there is no score, otherwise empty.
    ``scores``: by column, or None. ``cost``: None if no price is known. Raises ValueError if a ledger is damaged.
    """
    if kind not in _SPLITS:
        return []
    split, earlier = _SPLITS[kind]
    found: list[dict[str, Any]] = []
    for path in sorted(folder.root.glob("ledger*.sqlite")):
        if path.is_file() and not path.is_symlink():
            with closing(open_read_only(path, seconds=5.0)) as connection:
                found += _answers(connection, (split, step - earlier, group, slot))
    return found[:_MOST_ANSWERS]


def _answers(connection: sqlite3.Connection, place: tuple[str, int, int, int]) -> Iterator[dict[str, Any]]:
    connection.row_factory = sqlite3.Row
    try:
        for (picture,) in connection.execute(_PLACE, place).fetchall():
            for row in connection.execute(_ANSWERS, (_MOST_CHARACTERS, picture, _MOST_ANSWERS)):
                yield {**dict(row), "scores": None if row["scores"] is None else decode_scores(row["scores"])}
    except sqlite3.Error as error:
        raise ValueError(f"the ledger cannot be read: {error}") from None
