"""``retouch completion``: a script that lets the shell complete commands, options and names of recipes."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from retouch.cli.arguments import Commands, debug_option

_LINES = {
    "bash": 'add to ~/.bashrc: eval "$(retouch completion bash)"',
    "zsh": 'add to ~/.zshrc after compinit: eval "$(retouch completion zsh)"',
    "fish": "retouch completion fish > ~/.config/fish/completions/retouch.fish",
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


@dataclass(frozen=True, slots=True)
class _Command:
    """What can follow a command: its subcommands and options, and the names of recipes if ``takes_recipe``."""

    name: str
    help: str
    subcommands: tuple[str, ...]
    options: tuple[str, ...]
    takes_recipe: bool


def add_completion(commands: Commands, *, parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Add the command. ``parser``: builds the parser of all commands."""
    completion = commands.add_parser(
        "completion",
        parents=[debug_option()],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="print a script that lets the shell complete commands, options and recipes",
        epilog="\n".join(_LINES.values()),
    )
    completion.add_argument("shell", choices=tuple(_LINES), metavar="bash|zsh|fish")
    completion.set_defaults(run=partial(_completion, parser))


def _completion(parser: Callable[[], argparse.ArgumentParser], arguments: argparse.Namespace) -> int:
    from retouch.config.packaged import available, short_name

    recipes = [short_name(name) for name in available()]
    commands = list(_commands(parser()))
    print(_fish(commands, recipes) if arguments.shell == "fish" else _bash(commands, recipes, zsh=arguments.shell == "zsh"))
    return 0


def _commands(parser: argparse.ArgumentParser) -> Iterator[_Command]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {choice.dest: (choice.help or "") % {"prog": parser.prog} for group in groups for choice in group._choices_actions}
    for name, command in ((name, command) for group in groups for name, command in group.choices.items()):
        inner = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
        subcommands = {name: each for group in inner for name, each in group.choices.items()}
        actions = [action for each in (command, *subcommands.values()) for action in each._actions]
        options = dict.fromkeys(word for action in actions for word in action.option_strings if word.startswith("--"))
        takes_recipe = any("RECIPE" in str(action.metavar) for action in actions if not action.option_strings)
        yield _Command(name, helps.get(name, ""), tuple(subcommands), tuple(options), takes_recipe)


def _bash(commands: list[_Command], recipes: list[str], *, zsh: bool) -> str:
    cases = "\n".join(
        f'      {each.name}) words="{" ".join([*each.subcommands, *each.options, *(recipes if each.takes_recipe else [])])}";;'
        for each in commands
    )
    script = _BASH.format(commands=" ".join(each.name for each in commands), cases=cases)
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if zsh else script


def _fish(commands: list[_Command], recipes: list[str]) -> str:
    lines = []
    for each in commands:
        lines.append(f"complete -c retouch -n __fish_use_subcommand -f -a {each.name} -d {_quoted(each.help)}")
        after = f"complete -c retouch -n '__fish_seen_subcommand_from {each.name}'"
        lines += [f"{after} -l {option.removeprefix('--')}" for option in each.options]
        words = [*each.subcommands, *(recipes if each.takes_recipe else [])]
        lines += [f"{after} -a {_quoted(' '.join(words))}"] if words else []
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
