"""The parser of all commands, ``main``, which runs one of them, and ``retouch tools completion``."""

import argparse
import errno
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

from retouch import __version__
from retouch.cli.arguments import Commands, debug_option
from retouch.config import consent, other_names, wings
from retouch.config.imports import imported_code_error, is_user_error, protect
from retouch.config.keys import redact_output
from retouch.config.packaged import available, short_name

_COMMANDS = {
    "train": "retouch.cli.commands:add_train",
    "launch": "retouch.cli.commands:add_launch",
    "eval": "retouch.cli.commands:add_eval",
    "sample": "retouch.cli.commands:add_sample",
    "score": "retouch.cli.commands:add_score",
    "export": "retouch.cli.commands:add_export",
    "recipes": "retouch.cli.commands:add_recipes",
    "data": "retouch.cli.commands:add_data",
    "tools": "retouch.cli.parser:add_tools",
}
_TOOLS = {"convert": "retouch.cli.commands:add_convert", "completion": "retouch.cli.parser:add_completion"}
_PURPOSES = {
    "train": ("recipes", "data", "doctor", "train", "launch", "control"),
    "look at runs": ("view", "report", "compare"),
    "measure": ("eval", "bench", "score", "ledger", "votes"),
    "use the result": ("sample", "export", "serve"),
    "rarely needed": ("tools",),
}
_USER_ERROR = 2
_LOST_RANK = 3
_ADVICE = {
    errno.ENOSPC: "free some space and run the same command again",
    errno.EDQUOT: "free some space (this user's quota is used up) and run the same command again",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "choose another folder, or ask its owner for the permission",
    errno.EPERM: "choose another folder, or ask its owner for the permission",
    errno.ENOTDIR: "a part of this path is a file; choose another folder",
    errno.EEXIST: "a file has the name of a folder that is needed; choose another folder",
    errno.EISDIR: "a folder has the name of a file that is needed; move it away",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "replace it with a copy of the file or folder; only the run's folder itself may be a link",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 for success, 1 if it found a problem, 2 for a mistake of the user, 3 if a rank was
    lost, and 128 + the signal number for Ctrl-C or a closed pipe."""
    words = sys.argv[1:] if argv is None else argv
    arguments = build_parser(words).parse_args(words)
    if argv is None:  # this is the program; a caller in Python keeps its own streams and environment
        redact_output()
        protect(os.environ)
    if os.environ.keys() & {"RETOUCH_LAUNCHER", "TORCHELASTIC_RUN_ID"}:
        from retouch.distributed.launching import die_with_launcher

        die_with_launcher()
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `retouch recipes | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    if "retouch.rewards.worker" in sys.modules and sys.modules["retouch.rewards.worker"].has_abandoned_threads():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the thread of a reward that hangs would prevent the interpreter from exiting
    return code


def _run(arguments: argparse.Namespace) -> int:
    """Run a command and return its exit code. Errors that the user can correct are printed to stderr without a traceback."""
    try:
        with consent.allowing(vars(arguments).get("allow_import", ()), ask=True):
            code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print(f"retouch {arguments.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        message = None if arguments.debug else _message(error)
        if message is None:
            raise
        text, code = message
        print(f"retouch {arguments.command}: {text}", file=sys.stderr)
    return code


def _message(error: Exception) -> tuple[str, int] | None:
    """The text for the user about an error, and the exit code; None for an error that needs a traceback."""
    ranks = sys.modules.get("retouch.distributed.ranks")
    if is_user_error(error):
        return str(error), _USER_ERROR
    if isinstance(error, OSError) and (error.filename is not None or error.errno == errno.ENOSPC):
        advice = _ADVICE.get(error.errno or 0)
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror}{'' if advice is None else f'; {advice}'}", _USER_ERROR
    if isinstance(error, RuntimeError) and ranks is not None and ranks.lost_contact(error):
        reason = str(error).strip().splitlines()[0]
        advice = "Start the run again; it continues from its last checkpoint"
        return f"another rank ended or did not answer ({reason}). {advice}", _LOST_RANK
    wrong = imported_code_error(error)
    return None if wrong is None else (f"{wrong}\n  add --debug to see the traceback", _USER_ERROR)


class _Parser(argparse.ArgumentParser):
    """A parser whose error about an unknown option suggests ``--set`` if a recipe key has that name (``--steps 5``)."""

    def error(self, message: str) -> NoReturn:
        words, changes = message.partition("unrecognized arguments: ")[2].split(), []
        if any(word.startswith("--") for word in words):
            from retouch.recipe.document import value_of
            from retouch.recipe.keys import RecipeKeys

            for index, word in enumerate(words):
                dashes = word.partition("=")[0].count("-") - 2
                key, equals, value = word.removeprefix("--").replace("-", "_", dashes).partition("=")
                paths = [key] if key in RecipeKeys.model_fields else other_names.TRL.get(key, (key,))[0].split(", ")
                if not word.startswith("--") or paths[0].partition(".")[0] not in RecipeKeys.model_fields:
                    continue
                if not equals:
                    following = words[index + 1 : index + 2]
                    value = following[0] if following and not following[0].startswith("--") else "true"
                meant, own = other_names.translated(key, value_of(value)) if key in other_names.TRL else (value, True)
                value = value if own else meant if isinstance(meant, str) else json.dumps(meant)
                changes += [f"--set {shlex.quote(f'{path}={value}')}" for path in paths if meant is not None]
        super().error(f"{message}\nkeys of the recipe are changed with: {' '.join(changes)}" if changes else message)


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Build the parser. If ``words`` start with a command, only its module is imported; otherwise the parser has all commands, as
    help and error messages need. The parsed namespace contains ``run``, the function of the command."""
    parser = _Parser(
        prog="retouch",
        usage="retouch [-h] [--version] COMMAND ...",
        description="Reinforcement-learning post-training for image editing and generation.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"retouch {__version__}")
    parser.set_defaults(build_parser=build_parser)  # for `retouch launch`, which parses the words of another command
    commands = parser.add_subparsers(dest="command", prog="retouch", required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    known = _COMMANDS | wings.of_set("command")
    _add(commands, {words[0]: known[words[0]]} if words and words[0] in known else known)
    helps = {command.dest: (command.help or "").replace("%%", "%") for command in commands._choices_actions}
    lines = (
        line
        for purpose, names in _PURPOSES.items()
        for line in (f"\n{purpose}:", *(f"  {name:9} {helps[name]}" for name in names if name in helps))
    )
    parser.epilog = "\n".join(lines).lstrip("\n")
    return parser


def _add(commands: Any, known: Mapping[str, str]) -> None:
    for path in known.values():
        module, _, function = path.partition(":")
        getattr(import_module(module), function)(commands)


def add_tools(commands: Commands) -> None:
    tools = commands.add_parser("tools", help="convert other trainers' files, audit a judge, FID, build the playground, completion")
    _add(tools.add_subparsers(dest="tool", required=True, metavar="TOOL"), _TOOLS | wings.of_set("tool"))


_LINES = {
    "bash": 'add to ~/.bashrc: eval "$(retouch tools completion bash)"',
    "zsh": 'add to ~/.zshrc after compinit: eval "$(retouch tools completion zsh)"',
    "fish": "retouch tools completion fish > ~/.config/fish/completions/retouch.fish",
}
_BASH = """_retouch() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words="" files=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    files="$(compgen -f -- "$current")"
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current") $files)
}}
complete -o filenames -F _retouch retouch"""


def add_completion(commands: Commands) -> None:
    completion = commands.add_parser(
        "completion",
        parents=[debug_option()],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="print a script that lets the shell complete commands, options and recipes",
        epilog="\n".join(_LINES.values()),
    )
    completion.add_argument("shell", choices=tuple(_LINES), metavar="bash|zsh|fish")
    completion.set_defaults(run=_completion)


def _completion(arguments: argparse.Namespace) -> int:
    recipes, parser = [short_name(name) for name in available()], build_parser()
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {choice.dest: (choice.help or "") % {"prog": parser.prog} for group in groups for choice in group._choices_actions}
    fish, cases = [], []
    for name, command in ((name, command) for group in groups for name, command in group.choices.items()):
        inner = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
        subcommands = {name: each for group in inner for name, each in group.choices.items()}
        actions = [action for each in (command, *subcommands.values()) for action in each._actions]
        options = dict.fromkeys(word for action in actions for word in action.option_strings if word.startswith("--"))
        takes_recipe = any("RECIPE" in str(action.metavar) for action in actions if not action.option_strings)
        words = [*subcommands, *(recipes if takes_recipe else [])]
        cases.append(f'      {name}) words="{" ".join([*words, *options])}";;')
        fish.append(f"complete -c retouch -n __fish_use_subcommand -f -a {name} -d {_quoted(helps.get(name, ''))}")
        after = f"complete -c retouch -n '__fish_seen_subcommand_from {name}'"
        fish += [f"{after} -l {option.removeprefix('--')}" for option in options]
        fish += [f"{after} -a {_quoted(' '.join(words))}"] if words else []
    if arguments.shell == "fish":
        print("\n".join(fish))
        return 0
    script = _BASH.format(commands=" ".join(name for group in groups for name in group.choices), cases="\n".join(cases))
    print(f"autoload -U +X bashcompinit && bashcompinit\n{script}" if arguments.shell == "zsh" else script)
    return 0


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
