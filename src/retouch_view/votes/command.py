"""``retouch votes``: statistics, export for DPO, calibration of a judge, and simulated voters."""

import json
from argparse import Namespace
from pathlib import Path

from retouch.records.files import jsonable
from retouch_view.votes.log import VoteLog, logs_of


def votes_command(arguments: Namespace) -> str:
    """The output of the command. Raises ValueError for a folder without votes, and the errors of the subcommands."""
    folder: Path = arguments.votes_of
    if arguments.what == "simulate":
        return _simulate(arguments)
    logs = logs_of(folder)
    if arguments.what == "export":
        from retouch_view.votes.export import export

        done = export(logs, arguments.to)
        return (
            f"{done.pairs} pairs in {arguments.to}; left out: {done.undecided} without a decision, {done.lost} without their images"
        )
    if arguments.what == "calibrate":
        return _calibrate(logs, arguments)
    from retouch_view.votes.summary import as_text, summarise

    found = summarise(logs)
    return json.dumps(jsonable(found), indent=2) if arguments.json else as_text(found)


def _calibrate(logs: list[VoteLog], arguments: Namespace) -> str:
    from retouch_view.votes.calibration import calibrate
    from retouch_view.votes.judged_votes import judged_votes

    made = calibrate(judged_votes(logs), arguments.column)
    made.save(arguments.to)
    ends = [f"{made.scores[k]:.4g}: {made.probability[k]:.2f} ({made.low[k]:.2f} to {made.high[k]:.2f})" for k in (0, -1)]
    return f"{arguments.to}: {made.votes} votes on {made.tasks} tasks; win probability at a score of {ends[0]}, of {ends[1]}"


def _simulate(arguments: Namespace) -> str:
    from retouch.recipe.reward_arguments import parse_reward, read_reward
    from retouch.rewards.base import close
    from retouch_view.votes.simulated import Preference, SimulatedVoter

    reward = parse_reward(read_reward(arguments.reward)).build()
    if arguments.column not in reward.columns:
        raise ValueError(f"the reward has no column {arguments.column!r}; its columns are {', '.join(reward.columns)}")
    preference = Preference(noise=arguments.noise, tie=arguments.tie)
    folder: Path = arguments.votes_of
    queue = folder if (folder / "groups").is_dir() or folder.name == "queue" else folder / "queue"
    voter = SimulatedVoter(queue, reward, arguments.column, preference, name=arguments.voter, seed=arguments.seed)
    try:
        voter.run(limit=arguments.limit, stop=lambda: False)
    finally:
        close(reward)
    return f"{voter.votes} votes in {queue}"
