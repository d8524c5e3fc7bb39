"""The results of ``retouch ledger`` as text for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from retouch_view.report.numbers import aligned

_MOST_LISTED = 20


def overview(found: Mapping[str, Any]) -> str:
    """The summary of a ledger as a table."""
    lines = [f"{found['run']}: what was scored", ""]
    rows = [["", "samples", "steps", "without image", "images stored", "scoring, s"]]
    for split, each in found["samples"].items():
        first, last = each["steps"]
        steps = f"{first}" if first == last else f"{first} to {last}"
        seconds = f"{each['seconds']:.1f}"
        rows.append([split, str(each["samples"]), steps, str(each["without_image"]), str(each["stored_images"]), seconds])
    lines += aligned(rows)
    for split, each in found["samples"].items():
        missing = ", ".join(f"{name} {count}" for name, count in each["missing"].items())
        lines += [f"  {split}, missing: {missing}"] if missing else []
    lines += ["", "judges"]
    for judge in found["judges"]:
        about = judge["about"]
        suffix = f"  {about['own']}" if about.get("own") else ""
        lines.append(f"  {judge['fingerprint']} since step {judge['since']}: {about.get('class') or about['kind']}{suffix}")
    if not found["asked"]:
        return "\n".join([*lines, "", "no judge or server outside the run was called, so there is no cost"])
    rows = [["judge", "calls", "failed", "attempts", "input tokens", "output tokens", "seconds per call", "cost"]]
    for each in found["asked"]:
        counts = [str(each[name]) for name in ("calls", "failed", "attempts", "input_tokens", "output_tokens")]
        rows.append([each["judge"], *counts, f"{each['seconds'] / each['calls']:.2f}", money(each["cost"])])
    lines += ["", *aligned(rows), f"  cost so far: {money(found['cost'])}"]
    if found["cost"] is None:
        lines.append("  (no price is known; give it with --prices 0.15,0.60, per million input and output tokens)")
    return "\n".join(lines)


def agreement(found: Mapping[str, Any]) -> str:
    """The agreement of two columns as a table."""
    a, b = found["columns"]
    within = found["within_groups"]
    return "\n".join(
        [
            f"{a} and {b}, {found['samples']} samples" + (f" ({found['missing']} missing)" if found["missing"] else ""),
            *aligned(
                [
                    ["Spearman's rho", f"{found['spearman']:+.3f}"],
                    ["Kendall's tau-b", f"{found['kendall']:+.3f}"],
                    ["pairs of a group in the same order", f"{within['same_order']:.3f}", f"of {within['pairs']}"],
                    ["means", f"{found['means'][0]:.3f}", f"{found['means'][1]:.3f}"],
                ]
            ),
        ]
    )


def worst(found: Sequence[Mapping[str, Any]], columns: tuple[str, str]) -> str:
    """The samples on which two columns differ most, as a table."""
    rows = [["", "step", "group", "slot", "rank difference", *columns, "task", "image"]]
    for each in found:
        place = [each["split"], str(each["step"]), str(each["group"]), str(each["slot"]), f"{each['rank_difference']:.2f}"]
        file = each["file"] or f"(not stored: {each['sha256'][:12]})"
        rows.append([*place, *(f"{each[name]:.3f}" for name in columns), each["task"], file])
    return "\n".join(aligned(rows))


def rescored(found: Mapping[str, Any]) -> str:
    """The result of a rescoring as text."""
    steps = found["steps"]
    left = f"; {found['without_image']} have no stored image" if found["without_image"] else ""
    return "\n".join(
        [
            f"{found['judged']} of {found['samples']} samples have scores of {found['name']}, {found['judged_now']} new{left}",
            f"steps with images: {', '.join(map(str, steps[:20]))}{', ...' if len(steps) > 20 else ''}",
            f"columns: {', '.join(found['columns'])}",
        ]
    )


def expelled(found: Mapping[str, Any]) -> str:
    """The expelled scores."""
    samples, answers = found["samples"], found["answers"]
    if not samples and not answers:
        return "no score in the ledger matches; nothing was changed"
    verb = "would be" if found["dry_run"] else "were"
    counts = f"the scores of {len(samples)} samples and {len(answers)} answers {verb} taken out of use; they are asked for again"
    rows = [["", "step", "group", "slot", "judge", "scores", "image"]]
    for each in samples[:_MOST_LISTED]:
        step = each["step"] + (each["split"] == "train")
        place = [each["split"], str(step), str(each["group_id"]), str(each["slot"])]
        rows.append([*place, each["judge"][:40], each["scores"][:60], each["picture"][:12]])
    for each in answers[:_MOST_LISTED]:
        rows.append(["answer", "", "", "", each["judge"][:40], each["scores"][:60], each["picture"][:12]])
    more = max(len(samples), len(answers)) > _MOST_LISTED
    return "\n".join([counts, *aligned(rows), *(["  ... (--json lists all)"] if more else [])])


def money(cost: float | None) -> str:
    """An amount with two decimals, or four below 1."""
    return "unknown" if cost is None else f"{cost:.2f}" if cost >= 1 else f"{cost:.4f}"
