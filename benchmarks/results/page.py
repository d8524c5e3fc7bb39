"""docs/results.md: what it compares, and how it says it."""

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A row of a table: a recipe, its name there, and its seeds: one is for comparison, three are for a claim."""

    name: str
    recipe: str
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True)
class Section:
    """What is compared: its rows, and what a reader must know of the tasks and the ceiling.

    ``columns``, and ``levels`` of the ``tag``: what the second table shows. ``kinds`` of edits: the third, and the verdict on
    shortcuts. ``plot``: a picture beside the others of the docs, of the column that is judged over the processor's seconds.
    """

    title: str
    about: str
    entries: tuple[Entry, ...]
    columns: tuple[str, ...] = ("overall", "IF", "IP", "PQ", "exact")
    tag: str = "complexity"
    levels: tuple[int, ...] = (1, 2, 3)
    kinds: tuple[str, ...] = ("recolour", "reshape", "remove", "add", "move")
    plot: str | None = None


SECTIONS = (
    Section(
        "The editor",
        "A flow-matching editor on instructions with one to three edits. Those with two or three were never in the supervised "
        "phase of the base. The ceiling is the exact target through the autoencoder.",
        (
            Entry("GRPO (headline)", "recipes/quickstart.jsonnet"),
            Entry("DiffusionNFT", "recipes/playground/nft.jsonnet"),
            Entry("supervised control", "recipes/playground/supervised.jsonnet"),
        ),
    ),
    Section(
        "A writer in front of the editor",
        "A vision-language model that sees the picture writes for the frozen editor. Instructions name things only as far as they "
        'must be for who sees the picture ("make the circle red"); the base names single things in full, and mostly says nothing '
        "where several edits are asked for. The ceiling is what the editor makes of the right words. Encoder `frozen`: the "
        "editor's own text encoder reads what was written; `policy`: the writer itself does, with what it has learnt. Blind: a "
        "renderer that is not told what was written. Supervised: as many sample passes of the base's own data. What the encoder "
        "costs the pictures shows in IP and PQ below, beside what the words gain in IF.",
        (
            Entry("GRPO, encoder frozen", "recipes/qwen-image-edit/writer-grpo-frozen-playground.jsonnet"),
            Entry("GRPO, encoder policy", "recipes/qwen-image-edit/writer-grpo-playground.jsonnet"),
            Entry("blind control", "recipes/playground/writer-blind.jsonnet"),
            Entry("supervised control", "recipes/playground/writer-supervised.jsonnet"),
        ),
    ),
    Section(
        "A writer of prompts in front of the painter",
        "A language model rewrites what people ask for, in words that the frozen text-to-image painter never met, into the "
        "painter's own; the judge knows the scene that was asked for and never sees the rewritten prompt. The base names single "
        "things rightly, and of several mostly the first. The ceiling is what the painter makes of the right words. `shown`: the "
        "share of things that stand where they should; `extra`: things too many. Blind: the painter draws the request as it "
        "stands, whatever was written. Supervised: as many sample passes of the base's own data.",
        (
            Entry("GRPO", "recipes/sd3/prompt-enhancer-playground.jsonnet"),
            Entry("blind control", "recipes/playground/enhancer-blind.jsonnet"),
            Entry("supervised control", "recipes/playground/enhancer-supervised.jsonnet"),
        ),
        columns=("overall", "alignment", "quality", "exact", "shown", "extra"),
        levels=(1, 2, 3, 4),
        kinds=(),
    ),
    Section(
        "An editor of image tokens",
        "A tiny Emu3 reads the source picture as nine codes and writes the edited one as nine. S: single edits; C: two and three "
        "in an instruction. SFT (S) was taught single edits alone, SFT (S+C) a quarter of complex ones beside them; what each does "
        "untrained is its row's `before`. SFT (unfinished) went on from SFT (S+C) with complex demonstrations of which nine in ten "
        "lack an edit, as those that models make do: it has learned to leave one out, and RL, whose judge sees what is missing, to "
        "do it. The ceiling is the exact target through the codes.",
        (
            Entry("SFT (unfinished), RL (S+C)", "recipes/playground/image-tokens-unfinished.jsonnet"),
            Entry("SFT (unfinished), more of it", "recipes/playground/image-tokens-unfinished-supervised.jsonnet", (0,)),
            Entry("SFT (S), RL (S+C)", "recipes/emu3/sft_s__rl_sc-playground.jsonnet"),
            Entry("SFT (S), RL (C)", "recipes/emu3/sft_s__rl_c-playground.jsonnet", (0,)),
            Entry("SFT (S), RL (S)", "recipes/emu3/sft_s__rl_s-playground.jsonnet", (0,)),
            Entry("SFT (S), more of it", "recipes/emu3/sft_s-playground.jsonnet", (0,)),
            Entry("SFT (S+C), RL (S+C)", "recipes/emu3/sft_sc__rl_sc-playground.jsonnet", (0,)),
            Entry("SFT (S+C), RL (C)", "recipes/emu3/sft_sc__rl_c-playground.jsonnet", (0,)),
            Entry("SFT (S+C), more of it", "recipes/emu3/sft_sc-playground.jsonnet", (0,)),
        ),
    ),
    Section(
        "A painter of words",
        "A tiny FLUX.1-Fill writes a word on an empty sign, in the ink, on the paper and in the size of the sign beside it, and "
        "RapidOCR reads it: 1 - edit distance over the longer length, 0 to 1. No word that is judged was ever trained on. The base "
        "was taught from demonstrations of which half of the letters are wrong. The ceiling is the right picture through the "
        "autoencoder. Supervised: as many sample passes of the base's own demonstrations. AWM is pulled to the reference, without "
        "which it destroys the painter.",
        (
            Entry("GRPO", "recipes/playground/words-grpo.jsonnet"),
            Entry("DiffusionNFT", "recipes/playground/words-nft.jsonnet"),
            Entry("supervised control", "recipes/playground/words-supervised.jsonnet"),
            Entry("PPO, batch-relative", "recipes/playground/words-ppo.jsonnet", (0,)),
            Entry("PPO, value head", "recipes/playground/words-ppo-value.jsonnet", (0,)),
            Entry("AWM", "recipes/playground/words-awm.jsonnet", (0,)),
            Entry("DPO", "recipes/playground/words-dpo.jsonnet", (0,)),
        ),
        columns=("correctness",),
        tag="letters",
        levels=(3, 4, 5, 6),
        kinds=(),
        plot="words.png",
    ),
    Section(
        "A painter that is shown a reference",
        "The same painter, of words whose ink and paper the picture does not have: both of its signs are in another style, and an "
        "IP-Adapter, with a LoRA beside it, is shown a sign in the right one. The reward is half what the reader reads and half "
        "the style: how near paper and ink are to the reference's. First a supervised warm-up, whose demonstrations have as many "
        "wrong letters as the base's, so that style is all that they teach; then RL. Columns are told before, after the warm-up "
        "and at the end. The ceiling is the right picture through the autoencoder, which keeps papers and little of an ink's hue. "
        "Settings were chosen on these same tasks, and there is no control of as many passes.",
        (
            Entry("GRPO", "recipes/flux-fill/ip-adapter-grpo-playground.jsonnet"),
            Entry("DiffusionNFT", "recipes/flux-fill/ip-adapter-nft-playground.jsonnet", (0,)),
        ),
        columns=("ocr/correctness", "signs/style", "signs/paper", "signs/ink"),
        tag="letters",
        levels=(3, 4, 5, 6),
        kinds=(),
    ),
)


def page(found: dict[Entry, list[dict]]) -> str:
    """docs/results.md, of what has been run."""
    lines = [
        "# Results",
        "",
        "Held-out tasks of the playground: scenes, instructions and seeds that no training saw. Every figure here is made by "
        "`make results`.",
        "",
        "Share of gap: (after - before) / (ceiling - before) of the overall score on compound tasks, those that ask for several "
        "edits or things in one instruction, and of words on all. Best of k: the best of k samples of the base, picked by the "
        "judge. Singles: the gain on tasks that ask for one thing. Ratio: the largest |ratio - 1| of an action before the first "
        "update of its step, 0 but for rounding; NFT and imitation have none. Seconds are those of the training steps by the "
        "clock, which others shared; CPU those of the processor for the whole run, evaluations with it.",
        "",
    ]
    for section in SECTIONS:
        rows = {entry.name: found[entry] for entry in section.entries if entry in found}
        if rows:
            lines += [f"## {section.title}", "", section.about, "", *headline(rows), "", *detail(section, rows), ""]
            if section.plot is not None:
                lines += [f"![{section.title}: held-out reward over seconds of the processor, seed 0](pictures/{section.plot})", ""]
            lines += [*edits(section, rows), ""] if section.kinds else []
    return "\n".join(lines[:-1]) + "\n"


def headline(found: dict[str, list[dict]]) -> list[str]:
    lines = [
        "| recipe | seed | before | after | gain (95 %) | share of gap | best of k | ceiling | singles | ratio | seconds | CPU |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, results in found.items():
        for result in results:
            s = result["summary"]
            singles = alone(result)
            low, high = s["gain_ci95"]
            gain = f"{s['gain']:+.2f} ({low:+.2f} to {high:+.2f})"
            best = f"{s['best_of_k']:.2f} (k={s['k']})" if s.get("best_of_k") is not None else ""
            beside = f"{best} | {s['ceiling']:.2f}"
            share = "" if s["gap_closed"] is None else f"{s['gap_closed']:z.2f}"
            ratio = "" if result["ratio_max_first"] is None else f"{result['ratio_max_first']:.0e}"
            spent = f"{result['cpu_seconds']:.0f}" if "cpu_seconds" in result else ""
            lines.append(
                f"| {name} | {result['seed']} | {s['before']:.2f} | {s['after']:.2f} | {gain} | {share} | {beside} | "
                f"{singles} | {ratio} | {s['cost']['training seconds']:.0f} | {spent} |"
            )
        shares = [result["summary"]["gap_closed"] for result in results]
        mean = "" if None in shares else f"**{statistics.mean(shares):z.2f}**"  # a blind renderer leaves no gap
        lines.append(f"| **{name}** | mean of {len(shares)} |  |  |  | {mean} |" + "  |" * 6)
    return lines


def alone(result: dict) -> str:
    """The gain on tasks that ask for one thing, where tasks are told apart so."""
    before, after = (result[when].get("complexity=1") for when in ("before", "after"))
    return "" if before is None else f"{after['overall'] - before['overall']:+.2f}"


def detail(section: Section, found: dict[str, list[dict]]) -> list[str]:
    lines = ["What changed, column by column: means over the seeds, before -> after.", ""]
    lines += ["| recipe | tasks | " + " | ".join(section.columns) + " |", "| --- | --- |" + " --- |" * len(section.columns)]
    for name, results in found.items():
        for level in section.levels:
            cells = []
            for column in section.columns:
                cells.append(" -> ".join(f"{mean:.2f}" for mean in means(results, f"{section.tag}={level}", column)))
            lines.append(f"| {name} | {section.tag} {level} | " + " | ".join(cells) + " |")
    return lines


def means(results: list[dict], row: str, column: str) -> list[float]:
    """Over the seeds: before, after the warm-up where there is one, and after."""
    whens = [when for when in ("before", "warm", "after") if all(when in result for result in results)]
    return [statistics.mean(result[when][row][column] for result in results) for when in whens]


def edits(section: Section, found: dict[str, list[dict]]) -> list[str]:
    lines = ["Share of edits that are done, by kind, over all held-out tasks:", ""]
    kinds = section.kinds
    lines += ["| recipe | " + " | ".join(kinds) + " |", "| --- |" + " --- |" * len(kinds)]
    for name, results in found.items():
        cells = []
        for kind in kinds:
            before, after = (
                statistics.mean(result[when]["all"][f"success/{kind}"] for result in results) for when in ("before", "after")
            )
            cells.append(f"{before:.2f} -> {after:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "A gain that one kind of edit carries, or that costs more than 0.3 of IP, is a shortcut, whatever the mean says.",
        "",
    ]
    return lines + [f"- {name}: {shortcut(results, kinds)}" for name, results in found.items()]


def shortcut(results: list[dict], kinds: tuple[str, ...]) -> str:
    """What the change in IP and in each kind of edit says of a gain."""

    def change(row: str, column: str) -> float:
        return statistics.mean(result["after"][row][column] - result["before"][row][column] for result in results)

    preserved = change("all", "IP")
    rises = {kind: change("all", f"success/{kind}") for kind in kinds}
    told = ", ".join(f"{kind} {rise:+.2f}" for kind, rise in sorted(rises.items(), key=lambda item: -item[1]))
    most, second = sorted(rises.values(), reverse=True)[:2]
    carried = most > 0.05 and most > 3 * max(second, 0.0)
    verdict = "a shortcut" if carried or preserved < -0.3 else "no shortcut by this rule"
    return f"IP {preserved:+.2f}; done edits {told}: {verdict}."
