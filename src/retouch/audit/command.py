"""`retouch ledger RUN ...`: what was scored, by whom, at what cost; where judges disagree; judging again."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from retouch.audit import tables
from retouch.audit.comparing import Compared
from retouch.audit.images import Shown
from retouch.audit.opening import LedgerView, chosen
from retouch.audit.overview import overview
from retouch.audit.ratings import COLUMN, rated
from retouch.records.files import jsonable
from retouch.rewards.vlm.prices import Prices


def ledger_command(arguments: Namespace) -> str:
    """The answer, as a table or as JSON. ValueError: no such run, column or file."""
    found, table = _answer(arguments)
    return json.dumps(jsonable(found), indent=2) if arguments.json else table


def _answer(arguments: Namespace) -> tuple[Any, str]:
    run: Path = arguments.ledger_of
    match arguments.what:
        case "rescore":
            from retouch.audit.rescoring import rescore

            found = rescore(run, arguments.reward, name=arguments.name, split=arguments.split, steps=arguments.steps)
            return found, tables.rescored(found)
        case "agree" | "worst":
            compared = _compared(arguments)
            if arguments.what == "agree":
                agreement = compared.agreement()
                return agreement, tables.agreement(agreement)
            worst = compared.worst(Shown(run), top=arguments.top)
            return worst, tables.worst(worst, compared.columns)
    found = overview(LedgerView.open(run), prices=arguments.prices and Prices(*arguments.prices))
    return found, tables.overview(found)


def _compared(arguments: Namespace) -> Compared:
    samples = chosen(LedgerView.open(arguments.ledger_of).samples, split=arguments.split, steps=arguments.steps)
    if (arguments.ratings is None) == (arguments.other is None):
        raise ValueError("compare with what? Give a second column, or people's ratings with --ratings FILE.csv")
    if arguments.ratings is not None:
        samples = rated(samples, arguments.ratings, arguments.ledger_of)
    return Compared.of(samples, (arguments.column, arguments.other or COLUMN))
