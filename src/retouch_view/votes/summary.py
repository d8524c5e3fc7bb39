"""The statistics of votes, as JSON for the page of results and as tables for the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from retouch_view.votes import bradley_terry, shares
from retouch_view.votes.judged_votes import judged_votes
from retouch_view.votes.log import VoteLog


def summarise(logs: Sequence[VoteLog]) -> dict[str, Any]:
    """All statistics of the votes in several logs: ``win_rates``, ``arms``, ``judges``, ``voters`` and ``voter_agreement``."""
    read = [log.read() for log in logs]
    votes = judged_votes(logs)
    return {
        "votes": len(votes),
        "tasks": len({vote.task for vote in votes}),
        "pairs": len({vote.pair for vote in votes}),
        "undone": sum(found.undone for found in read),
        "damaged": sum(found.damaged for found in read),
        "choices": {choice: sum(vote.choice == choice for vote in votes) for choice in ("left", "right", "tie", "both_bad")},
        "win_rates": [asdict(row) for row in shares.win_rates(votes)],
        "arms": [asdict(row) for row in bradley_terry.table(votes)],
        "judges": [asdict(row) for row in shares.judge_agreement(votes)],
        "voters": [asdict(row) for row in shares.voters(votes)],
        "voter_agreement": asdict(shares.voter_agreement(votes)),
    }


def as_text(found: Mapping[str, Any]) -> str:
    """The summary as tables for the command line."""
    lines = [f"{found['votes']} votes on {found['pairs']} pairs of {found['tasks']} tasks"]
    if found["undone"] or found["damaged"]:
        lines.append(f"{found['undone']} votes were taken back, {found['damaged']} lines are damaged")
    lines += _section(
        "win rates (ties count one half)",
        [[row["arm"], "against", row["other"], _share(row["share"]), f"{row['ties']} ties"] for row in found["win_rates"]],
    )
    lines += _section(
        "Bradley-Terry (log-odds, 0 is the mean)",
        [
            [row["arm"], f"{row['strength']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})", f"{row['votes']} votes"]
            for row in found["arms"]
        ],
    )
    lines += _section(
        "agreement of judges with people", [[row["column"], row["category"], _share(row["share"])] for row in found["judges"]]
    )
    lines += _section(
        "voters (consistency on hidden repeats)",
        [[row["name"], f"{row['votes']} votes", _share(row["consistency"]), row["status"]] for row in found["voters"]],
    )
    if found["voter_agreement"]["count"]:
        lines += ["", f"agreement of two voters on the same pair: {_share(found['voter_agreement'])}"]
    return "\n".join(lines)


def _section(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "",
        title,
        *("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]


def _share(found: Mapping[str, Any]) -> str:
    if not found["count"]:
        return "-"
    return f"{found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f}), n {found['count']}"
