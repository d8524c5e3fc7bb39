"""``retouch view`` and ``retouch control``."""

import argparse
from functools import partial
from pathlib import Path

from retouch.cli.arguments import RUN_HELP, Commands, debug_option, port, run_folder


def add_view(commands: Commands) -> None:
    """Add the command."""
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
    view.add_argument(
        "--export", type=Path, metavar="FILE.html", help="write the page of one run to a file that needs no server, and exit"
    )
    view.set_defaults(run=_view)


def _view(arguments: argparse.Namespace) -> int:
    if arguments.export is not None:
        from retouch.view.inline import view as static_view

        print(static_view(arguments.folder, everything=True).save(arguments.export))
        return 0
    from retouch.view.command import view

    return view(
        arguments.folder,
        port=arguments.port,
        hosts=arguments.hosts,
        vote=arguments.vote,
        control=arguments.control,
        trying=arguments.trying,
        report=partial(print, flush=True),
    )


def add_control(commands: Commands) -> None:
    """Add the command."""
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
    import time

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
