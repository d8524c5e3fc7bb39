"""``retouch report``, ``compare``, ``view``, ``control``, ``ledger`` and ``votes``."""

import argparse
import importlib.util
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from retouch.cli.arguments import RUN_HELP, Commands, debug_option, import_option, port, run_folder

_LAST_SECONDS = 5.0


def add_report(commands: Commands) -> None:
    report = commands.add_parser(
        "report",
        parents=[debug_option()],
        help="write report.html into the folder of a run, also if it was stopped or is still training",
    )
    report.add_argument("folder", type=run_folder, metavar="RUN", help=RUN_HELP)
    report.set_defaults(run=_report)


def add_compare(commands: Commands) -> None:
    compare = commands.add_parser(
        "compare",
        parents=[debug_option()],
        help="compare runs: held-out scores, paired differences with 95 %% intervals, and what differs in the recipes",
    )
    compare.add_argument(
        "folders", type=run_folder, nargs="+", metavar="RUN", help=f"{RUN_HELP}; the others are compared to the first"
    )
    compare.set_defaults(run=_compare)


def _report(arguments: argparse.Namespace) -> int:
    from retouch_view.report.page import write_report

    print(write_report(arguments.folder))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from retouch_view.report.tables import comparison

    print(comparison(arguments.folders))
    return 0


def add_view(commands: Commands) -> None:
    view = commands.add_parser("view", parents=[debug_option()], help="follow runs in the browser: curves, samples, comparisons")
    view.add_argument("folder", nargs="?", type=Path, default=Path("runs"), metavar="RUNS_OR_RUN", help="default: runs")
    view.add_argument("--port", type=port, default=8765, help="port on the loopback address (default: 8765); 0 chooses a free one")
    view.add_argument(
        "--allow-host",
        dest="hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="a further host name under which the browser reaches this machine, e.g. behind a proxy",
    )
    view.add_argument("--vote", action="store_true", help="let people vote on pairs of images in the page, and store the votes")
    view.add_argument(
        "--control", action="store_true", help="let the page ask runs to stop, to save a checkpoint, or to store samples"
    )
    view.add_argument(
        "--try",
        dest="trying",
        nargs="?",
        const="auto",
        metavar="DEVICE",
        help="try checkpoints in the page, on this device (default: the device of the recipe, or cpu while the run trains)",
    )
    view.set_defaults(run=_view)


def _view(arguments: argparse.Namespace) -> int:
    return view(
        arguments.folder,
        port=arguments.port,
        hosts=arguments.hosts,
        vote=arguments.vote,
        control=arguments.control,
        trying=arguments.trying,
        report=partial(print, flush=True),
    )


def view(
    root: Path,
    *,
    port: int,
    hosts: Sequence[str] = (),
    vote: bool = False,
    control: bool = False,
    trying: str | None = None,
    report: Callable[[str], None],
) -> int:
    """Serve the page on the loopback address until a signal stops it, and return the exit code.

    ``port``: 0 chooses a free port. ``hosts``: further names under which a browser reaches this machine, for example behind a
    proxy. ``vote``, ``control`` and ``trying``: see ``build_app``. ``report``: called with the line that contains the address.
    Raises ValueError if the folder does not exist, the port is taken, or the extra ``serve`` is not installed.
    """
    for package in ("starlette", "uvicorn", "httptools"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"the page needs {package}: pip install 'retouch[serve]'")
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; give the folder that contains your runs, for example: retouch view runs")
    import uvicorn

    from retouch_serve.front import bounded_config
    from retouch_view.live.app import LIMITS, build_app

    token = secrets.token_urlsafe(24)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()  # before the address is printed, so that a browser that opens it at once waits and is not refused
    except OSError as error:
        listener.close()
        raise ValueError(f"port {port} cannot be used: {error.strerror}; choose another with --port, or 0 for any") from None
    with listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        report(f"runs in {root.resolve()}: open {address}/?token={token}")
        app = build_app(root, token=token, hosts=hosts, vote=vote, control=control, trying=trying)
        config = bounded_config(app, LIMITS, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        ends = server.handle_exit

        def end(sig: int, frame: FrameType | None) -> None:
            """End the process soon, also if a thread still reads a run."""
            limit = threading.Timer(_LAST_SECONDS, os._exit, (128 + sig,))
            limit.daemon = True
            limit.start()
            ends(sig, frame)

        server.handle_exit = end  # type: ignore[method-assign]
        server.run(sockets=[listener])
    return 0


def add_control(commands: Commands) -> None:
    control = commands.add_parser(
        "control", parents=[debug_option()], help="ask a run that is training to stop, to save a checkpoint, or to store samples"
    )
    control.add_argument("folder", type=run_folder, metavar="RUN", help=RUN_HELP)
    control.add_argument(
        "request",
        nargs="?",
        metavar="stop|checkpoint|samples=N",
        help="stop after this step, save a checkpoint after this step, or store samples every N steps (0: never); if left out, the "
        "requests so far are listed",
    )
    control.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="wait up to this long for the answer of the run (default: 0)"
    )
    control.set_defaults(run=_control)


def _control(arguments: argparse.Namespace) -> int:
    from retouch.records.control import make_request, read_requests
    from retouch.records.folder import RunFolder

    folder = RunFolder(arguments.folder)
    folder.read_recipe()
    if arguments.request is None:
        requests = read_requests(folder)
        if not requests:
            print(f"run {folder.name} has no requests; ask for one with: retouch control {arguments.folder} checkpoint")
        for each in requests.values():
            value = "" if each.value is None else f"={each.value}"
            print(f"{each.at}  {each.action}{value}  {each.by}  {_answer(each.taken, each.answer)}")
        return 0
    action, _, value = arguments.request.partition("=")
    number = int(value) if value.isascii() and value.isdecimal() and len(value) < 10 else value or None
    name = make_request(folder, action, number, via="command line")
    deadline = time.monotonic() + arguments.wait
    while (request := read_requests(folder).get(name)) is None or request.taken is None:
        if time.monotonic() >= deadline:
            print(f"recorded; run {folder.name} takes the request at the end of its current step")
            return 0
        time.sleep(0.2)
    print(_answer(request.taken, request.answer))
    return 0 if request.taken else 1


def _answer(taken: bool | None, answer: str | None) -> str:
    if taken is None:
        return "waiting"
    return str(answer) if taken else f"refused: {answer}"


def add_ledger(commands: Commands) -> None:
    """Add the command and its subcommands."""
    ledger = commands.add_parser(
        "ledger",
        parents=[debug_option(), import_option()],
        help="show the scores of a run, the judges and the cost; score the images again",
    )
    ledger.add_argument("ledger_of", type=run_folder, metavar="RUN", help=RUN_HELP)
    ledger.add_argument("--json", action="store_true")
    ledger.add_argument(
        "--prices", type=_prices, metavar="IN,OUT", help="prices per million input and output tokens, if the recipe has none"
    )
    ledger.set_defaults(run=_ledger, what="cost")
    what = ledger.add_subparsers(metavar="WHAT")

    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", default=argparse.SUPPRESS)
    subset = argparse.ArgumentParser(add_help=False, parents=[as_json])
    subset.add_argument(
        "--split",
        choices=("train", "heldout", "ceiling", "best", "turns", "guided", "watch", "canary"),
        help="use only this split (default: all)",
    )
    subset.add_argument("--steps", type=_steps, metavar="A:B", help="use only steps A to B, inclusive")
    cost = what.add_parser(
        "cost", parents=[as_json], help="show what was scored, by which judges, and the cost so far (the default)"
    )
    cost.add_argument("--prices", type=_prices, metavar="IN,OUT", default=argparse.SUPPRESS)
    cost.set_defaults(what="cost")
    answers = what.add_parser(
        "answers", parents=[as_json], help="list the latest answers of judges and reward servers, with their texts"
    )
    answers.add_argument("--failed", action="store_true", help="list only answers that could not be used")
    answers.add_argument("--top", type=int, default=20, metavar="N", help="list the latest N answers (default: 20)")
    answers.set_defaults(what="answers")
    for name, description in (
        ("agree", "measure the agreement of two columns"),
        ("worst", "show the samples on which two columns differ most"),
    ):
        compare = what.add_parser(name, parents=[subset], help=description)
        compare.add_argument("column", metavar="COLUMN")
        compare.add_argument("other", nargs="?", metavar="OTHER", help="the second column; NAME:COLUMN for scores of `rescore`")
        compare.add_argument(
            "--ratings", type=Path, metavar="FILE.csv", help="compare with these human ratings instead of a second column"
        )
        compare.add_argument("--top", type=int, default=20, metavar="N", help="number of samples that `worst` shows")
        compare.set_defaults(what=name)
    rescore = what.add_parser("rescore", parents=[subset], help="score the stored images with another reward")
    rescore.add_argument("reward", metavar="REWARD", help="a reward, named as in `retouch score`")
    rescore.add_argument("--name", help="prefix of the new columns (default: the name of the reward)")
    rescore.set_defaults(what="rescore")
    expel = what.add_parser(
        "expel", parents=[subset], help="exclude wrong scores from use; without a selection, all scores that are not finite"
    )
    expel.add_argument("--image", metavar="HASH", help="select by image: the first 8 or more digits of its hash")
    expel.add_argument("--judge", help="select by judge, named as in the table of `retouch ledger RUN`")
    expel.add_argument("--dry-run", action="store_true", help="only list what would be excluded")
    expel.set_defaults(what="expel")


def _ledger(arguments: argparse.Namespace) -> int:
    from retouch.records.files import jsonable
    from retouch_judge.models import Prices
    from retouch_view import ledger

    run: Path = arguments.ledger_of
    result: object
    if arguments.what == "rescore":
        from retouch_view.rescoring import rescore

        result, table = rescore(run, arguments.reward, name=arguments.name, split=arguments.split, steps=arguments.steps)
    elif arguments.what == "expel":
        selected = {name: getattr(arguments, name) for name in ("image", "judge", "split", "steps", "dry_run")}
        result, table = ledger.expel(run, **selected)
    elif arguments.what == "answers":
        result, table = ledger.answers(ledger.LedgerView.open(run), failed=arguments.failed, top=arguments.top)
    elif arguments.what in ("agree", "worst"):
        samples = ledger.select_samples(ledger.LedgerView.open(run).samples, split=arguments.split, steps=arguments.steps)
        if (arguments.ratings is None) == (arguments.other is None):
            raise ValueError("give either a second column, or human ratings with --ratings FILE.csv")
        if arguments.ratings is not None:
            samples = ledger.with_ratings(samples, arguments.ratings, run)
        columns = arguments.column, arguments.other or ledger.RATING
        if arguments.what == "agree":
            result, table = ledger.agree(samples, columns)
        else:
            result, table = ledger.worst(samples, columns, run, top=arguments.top)
    else:
        prices = arguments.prices and Prices(input=arguments.prices[0], output=arguments.prices[1])
        result, table = ledger.overview(ledger.LedgerView.open(run), prices=prices)
    print(json.dumps(jsonable(result), indent=2) if arguments.json else table)
    return 0


def _prices(text: str) -> tuple[float, float]:
    input_price, output_price = text.split(",")
    return float(input_price), float(output_price)


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    return int(first), int(last or first)


def add_votes(commands: Commands) -> None:
    """Add the command and its subcommands."""
    votes = commands.add_parser(
        "votes",
        parents=[debug_option(), import_option()],
        help="analyze votes: win rates, agreement of judges with people, voters; export pairs for DPO; calibrate a judge",
    )
    votes.add_argument("votes_of", type=Path, metavar="RUN", help="the folder of a run, or of a vote queue")
    votes.add_argument("--json", action="store_true")
    votes.set_defaults(run=_votes, what="show")
    what = votes.add_subparsers(metavar="WHAT")

    export = what.add_parser("export", help="write a folder with chosen and rejected images, for DPO")
    export.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a new folder")
    export.set_defaults(what="export")
    calibrate = what.add_parser(
        "calibrate", help="fit the map from a judge's score to the probability that people prefer the image"
    )
    calibrate.add_argument("column", metavar="COLUMN", help="column of the judge")
    calibrate.add_argument(
        "--to", type=Path, required=True, metavar="FILE", help="file for the map, which a reward of kind `calibrated` reads"
    )
    calibrate.set_defaults(what="calibrate")
    simulate = what.add_parser(
        "simulate", help="answer a vote queue with the scores of a reward instead of people; stop it with Ctrl-C"
    )
    simulate.add_argument("reward", metavar="REWARD", help="a reward, named as in `retouch score`")
    simulate.add_argument("--column", required=True, help="column of the reward that decides the votes")
    simulate.add_argument("--noise", type=float, default=0.0, help="P(left) = sigmoid(score difference / noise)")
    simulate.add_argument("--tie", type=float, default=0.0, help="vote for a tie if the scores differ by less than this")
    simulate.add_argument("--limit", type=int, metavar="N", help="stop after N votes")
    simulate.add_argument("--voter", default="simulated", metavar="NAME")
    simulate.add_argument("--seed", type=int, default=0)
    simulate.set_defaults(what="simulate")


def _votes(arguments: argparse.Namespace) -> int:
    from retouch_view.votes.commands import votes_command

    print(votes_command(arguments))
    return 0
