"""`retouch ledger RUN ...`: shows scores, judges and cost, compares columns, scores images again, and expels wrong scores."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from retouch.records.files import jsonable
from retouch.rewards.vlm.endpoint_settings import Prices
from retouch_view.ledger import tables
from retouch_view.ledger.comparison import ColumnComparison
from retouch_view.ledger.expelling import Selection, expel
from retouch_view.ledger.images import RunImages
from retouch_view.ledger.ledger_view import LedgerView, select_samples
from retouch_view.ledger.overview import overview
from retouch_view.ledger.ratings import COLUMN, with_ratings


def ledger_command(arguments: Namespace) -> str:
    """The result as a table, or as JSON with ``--json``. Raises ValueError if the run, a column or a file does not exist."""
    result, table = _result(arguments)
    return json.dumps(jsonable(result), indent=2) if arguments.json else table


def _result(arguments: Namespace) -> tuple[Any, str]:
    run: Path = arguments.ledger_of
    match arguments.what:
        case "rescore":
            from retouch_view.ledger.rescoring import rescore

            result = rescore(run, arguments.reward, name=arguments.name, split=arguments.split, steps=arguments.steps)
            return result, tables.rescored(result)
        case "expel":
            chosen = Selection(image=arguments.image, judge=arguments.judge, split=arguments.split, steps=arguments.steps)
            result = expel(run, chosen, dry_run=arguments.dry_run)
            return result, tables.expelled(result)
        case "agree" | "worst":
            comparison = _comparison(arguments)
            if arguments.what == "agree":
                agreement = comparison.agreement()
                return agreement, tables.agreement(agreement)
            worst = comparison.worst(RunImages(run), top=arguments.top)
            return worst, tables.worst(worst, comparison.columns)
    result = overview(
        LedgerView.open(run), prices=arguments.prices and Prices(input=arguments.prices[0], output=arguments.prices[1])
    )
    return result, tables.overview(result)


def _comparison(arguments: Namespace) -> ColumnComparison:
    samples = select_samples(LedgerView.open(arguments.ledger_of).samples, split=arguments.split, steps=arguments.steps)
    if (arguments.ratings is None) == (arguments.other is None):
        raise ValueError("give either a second column, or human ratings with --ratings FILE.csv")
    if arguments.ratings is not None:
        samples = with_ratings(samples, arguments.ratings, arguments.ledger_of)
    return ColumnComparison.of(samples, (arguments.column, arguments.other or COLUMN))
