"""Draws the figures of docs/concepts.md as SVG files: `python docs/figures.py`. A test compares them with what this file draws."""

import math
import random
from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"
INK, SOFT, BLUE, RED, GREEN, LINE = "#1f2937", "#6b7280", "#3949ab", "#c62828", "#2e7d32", "#9ca3af"
SIGMAS = (1.0, 0.83, 0.63, 0.36, 0.0)
CELLS = 12


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "middle", colour: str = INK, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, *, colour: str = LINE, width: float = 1.5, more: str = "") -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="{width:g}"{more}/>'


def arrow(x1: float, y: float, x2: float, *, colour: str = SOFT) -> str:
    head = f'<path d="M{x2:g} {y:g} l-8 -4 v8 z" fill="{colour}"/>'
    return line(x1, y, x2 - 6, y, colour=colour, width=2) + head


def figure(width: int, height: int, title: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'font-family="system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif">'
    )
    return "\n".join(
        [head, f"<title>{title}</title>", f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>', *parts, "</svg>", ""]
    )


def tile(x: float, y: float, side: float, sigma: float) -> str:
    """The image x = (1 - sigma) data + sigma noise; the data are a red circle on grey."""
    draw = random.Random(7)
    size = side / CELLS
    cells = []
    for row in range(CELLS):
        for column in range(CELLS):
            inside = math.hypot(row - 5.5, column - 5.5) < 3.8
            data = (214, 48, 49) if inside else (223, 228, 234)
            noise = [draw.gauss(128, 70) for _ in range(3)]
            mixed = [round(min(255, max(0, (1 - sigma) * clean + sigma * noisy))) for clean, noisy in zip(data, noise, strict=True)]
            place = f'x="{x + column * size:.1f}" y="{y + row * size:.1f}" width="{size + 0.2:.1f}" height="{size + 0.2:.1f}"'
            cells.append(f'<rect {place} fill="#{mixed[0]:02x}{mixed[1]:02x}{mixed[2]:02x}"/>')
    return f'<g shape-rendering="crispEdges">{"".join(cells)}</g>'


def chain() -> str:
    """A denoising chain: two steps are transitions with noise, which are the actions; the others are Euler steps."""
    side, gap, top = 92.0, 58.0, 52.0
    parts = [text(12, 24, "One sample of a denoising policy: four steps, two of them actions", anchor="start", bold=True)]
    for k, sigma in enumerate(SIGMAS):
        x = 12 + k * (side + gap)
        parts += [tile(x, top, side, sigma), text(x + side / 2, top + side + 18, f"σ = {sigma:g}", colour=SOFT)]
        if k < len(SIGMAS) - 1:
            stochastic = k < 2
            colour = BLUE if stochastic else SOFT
            middle = x + side + gap / 2
            parts.append(arrow(x + side + 5, top + side / 2, x + side + gap - 4, colour=colour))
            parts.append(text(middle, top + side / 2 - 10, "SDE" if stochastic else "ODE", size=12, colour=colour, bold=stochastic))
            if stochastic:
                parts.append(text(middle, top + side / 2 + 22, f"log π{'₁₂'[k]}", size=13, colour=BLUE))
    parts.append(
        text(
            12,
            196,
            "SDE step: adds noise, so it has a log-probability. It is an action and is trained.",
            anchor="start",
            colour=BLUE,
        )
    )
    parts.append(
        text(12, 216, "ODE step: an Euler step without noise. It is computed, but not trained.", anchor="start", colour=SOFT)
    )
    return figure(720, 232, "Denoising as a chain of actions", parts)


REWARDS = (0.62, 0.35, None, 0.81, 0.42)


def advantages() -> list[float | None]:
    """As `retouch.core.advantages.group_relative`: reward minus mean, over the standard deviation of the valid samples."""
    valid = [reward for reward in REWARDS if reward is not None]
    mean = sum(valid) / len(valid)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in valid) / len(valid))
    return [None if reward is None else (reward - mean) / (std + 1e-4) for reward in REWARDS]


def group() -> str:
    """A group of samples of one prompt, their rewards, the baseline, and the advantages."""
    left, right, width, scale, zero = 28.0, 426.0, 36.0, 150.0, 120.0
    valid = [reward for reward in REWARDS if reward is not None]
    mean = sum(valid) / len(valid)
    parts = [
        text(12, 24, "Rewards of the five samples of one prompt", anchor="start", bold=True),
        text(right - 12, 24, "Their advantages", anchor="start", bold=True),
        line(left - 12, 200, left + 5 * 54, 200),
        line(right - 12, zero, right + 5 * 54, zero),
    ]
    for k, (reward, advantage) in enumerate(zip(REWARDS, advantages(), strict=True)):
        x, y = left + k * 54, right + k * 54
        parts += [text(x + width / 2, 218, f"{k + 1}", colour=SOFT), text(y + width / 2, 218, f"{k + 1}", colour=SOFT)]
        if reward is None or advantage is None:
            parts += [text(x + width / 2, 192, "NaN", colour=SOFT), text(y + width / 2, zero - 8, "none", colour=SOFT)]
            continue
        colour = GREEN if advantage > 0 else RED
        tall, deep = reward * scale, abs(advantage) * 45
        top = zero - deep if advantage > 0 else zero
        parts.append(f'<rect x="{x:g}" y="{200 - tall:.1f}" width="{width:g}" height="{tall:.1f}" fill="{BLUE}" opacity="0.75"/>')
        parts.append(text(x + width / 2, 194 - tall, f"{reward:.2f}", size=12))
        parts.append(f'<rect x="{y:g}" y="{top:.1f}" width="{width:g}" height="{deep:.1f}" fill="{colour}" opacity="0.8"/>')
        parts.append(text(y + width / 2, top - 6 if advantage > 0 else top + deep + 15, f"{advantage:+.2f}", size=12))
    level = 200 - mean * scale
    parts.append(line(left - 12, level, left + 5 * 54, level, colour=RED, more=' stroke-dasharray="5 4"'))
    parts.append(text(left + 5 * 54 + 4, level + 4, f"mean {mean:.2f}", size=12, anchor="start", colour=RED))
    parts.append(
        text(12, 244, "Sample 3 could not be judged: it changes neither the mean nor the loss.", anchor="start", colour=SOFT)
    )
    return figure(720, 260, "A group of samples, its baseline and its advantages", parts)


def surrogate(ratio: float, advantage: float, clip: float) -> float:
    """PPO's clipped surrogate (arXiv 1707.06347)."""
    return min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)


def clipped() -> str:
    """The clipped surrogate over the ratio, for a good and a bad sample; learning starts at ratio 1."""
    clip, low, high = 0.2, 0.5, 1.5
    parts = [text(12, 24, "The clipped surrogate of one action, and where a step starts", anchor="start", bold=True)]
    for advantage, left, title, colour in (
        (1.0, 60.0, "advantage +1: make it likelier", GREEN),
        (-1.0, 410.0, "advantage −1: make it rarer", RED),
    ):
        base, wide, tall = 190.0, 260.0, 110.0
        points = []
        for k in range(101):
            ratio = low + (high - low) * k / 100
            value = surrogate(ratio, advantage, clip)
            share = (value - (0.5 if advantage > 0 else -1.5)) / 1.0
            points.append(f"{left + wide * k / 100:.1f},{base - tall * share:.1f}")
        start = left + wide * (1 - low) / (high - low)
        edges = [left + wide * (1 - clip - low) / (high - low), left + wide * (1 + clip - low) / (high - low)]
        parts += [
            f'<rect x="{edges[0]:.1f}" y="{base - tall - 10:g}" width="{edges[1] - edges[0]:.1f}" height="{tall + 10:g}" '
            f'fill="{BLUE}" opacity="0.08"/>',
            line(left, base, left + wide, base),
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2.5"/>',
            f'<circle cx="{start:.1f}" cy="{base - tall / 2:.1f}" r="5" fill="{INK}"/>',
            text(left + wide / 2, 54, title, colour=colour),
            text(start, base + 18, "1", size=12, colour=SOFT),
            text(edges[0], base + 18, "1 − clip", size=12, colour=SOFT),
            text(edges[1], base + 18, "1 + clip", size=12, colour=SOFT),
            text(left + wide, base + 18, "ratio", size=12, colour=SOFT),
        ]
    parts.append(
        text(
            12,
            240,
            "Dot: before the first update the ratio is exactly 1. A run whose first ratio is not 1 is stopped.",
            anchor="start",
            colour=SOFT,
        )
    )
    return figure(720, 256, "The clipped surrogate", parts)


FIGURES = {"concept-chain.svg": chain, "concept-group.svg": group, "concept-clip.svg": clipped}


def main() -> None:
    for name, draw in FIGURES.items():
        (PICTURES / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
