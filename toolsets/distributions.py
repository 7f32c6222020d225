"""Distributions: how likely each toolset is given to a prompt, so that a dataset covers many combinations.

Each toolset is an independent draw with its own percentage; those of a distribution need not add up to
anything. At least one toolset results: an empty draw is drawn again, so that what results then follows the
percentages too. The draw of one toolset never depends on which others can be used on this machine.
"""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from toolsets.base import ToolsetError
from toolsets.catalog import unavailable, unknown_name

MAX_DRAWS = 1_000
"""After so many empty draws the likeliest is taken: once in 10^45 when the only usable one has 10 %."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A named set of chances."""

    name: str
    description: str
    percent_by_toolset: Mapping[str, int]
    """Chance of each toolset in percent, 1 to 100, in the order in which sampled toolsets are listed."""


DISTRIBUTIONS: dict[str, Distribution] = {
    name: Distribution(name, description, percents)
    for name, description, percents in (
        (
            "default",
            "Every toolset, every time.",
            {"web": 100, "vision": 100, "image_gen": 100, "terminal": 100, "file": 100, "browser": 100},
        ),
        (
            "image_gen",
            "Making and judging images, now and then with the web or a shell.",
            {"image_gen": 90, "vision": 90, "web": 55, "terminal": 45},
        ),
        (
            "research",
            "Finding things out on the web, by search or in a browser.",
            {"web": 90, "browser": 70, "vision": 50, "terminal": 10},
        ),
        (
            "science",
            "Looking up, computing and writing results down.",
            {"web": 94, "terminal": 94, "file": 94, "vision": 65, "browser": 50, "image_gen": 15},
        ),
        (
            "development",
            "Programming with a shell and files, sometimes with the web.",
            {"terminal": 80, "file": 80, "web": 30, "vision": 10},
        ),
        (
            "safe",
            "Anything but a shell and files.",
            {"web": 80, "browser": 70, "vision": 60, "image_gen": 60},
        ),
        (
            "balanced",
            "Each toolset for half of the prompts: all combinations alike.",
            {"web": 50, "vision": 50, "image_gen": 50, "terminal": 50, "file": 50, "browser": 50},
        ),
        ("minimal", "The web and nothing else.", {"web": 100}),
        ("terminal_only", "A shell and files, no network tools.", {"terminal": 100, "file": 100}),
        ("terminal_web", "A shell, files and the web.", {"terminal": 100, "file": 100, "web": 100}),
        (
            "creative",
            "Making and looking at images, with some web for ideas.",
            {"image_gen": 90, "vision": 90, "web": 30},
        ),
        (
            "reasoning",
            "Mostly thinking: the web for facts, files for notes, seldom a shell.",
            {"web": 90, "file": 60, "terminal": 20},
        ),
        (
            "browser_use",
            "A browser always, mostly with web search and vision beside it.",
            {"browser": 100, "web": 80, "vision": 70},
        ),
        ("browser_only", "A browser and nothing else.", {"browser": 100}),
        (
            "browser_tasks",
            "Work in a browser, seldom helped by a shell or vision.",
            {"browser": 97, "vision": 12, "terminal": 15},
        ),
        (
            "terminal_tasks",
            "Work in a shell with files and the web, often with a browser.",
            {"terminal": 97, "file": 97, "web": 97, "browser": 75, "vision": 50, "image_gen": 10},
        ),
        (
            "mixed_tasks",
            "Work that needs a browser, a shell and files alike.",
            {"browser": 92, "terminal": 92, "file": 92, "web": 35, "vision": 15, "image_gen": 15},
        ),
    )
}


def sample_toolsets(name: str, rng: random.Random, available: Collection[str] | None = None) -> list[str]:
    """Draw the toolsets of one prompt.

    Args:
        name: Key of `DISTRIBUTIONS`.
        rng: Source of the draws; the same state gives the same toolsets.
        available: Toolsets that can be used; others are dropped from what was drawn. None means all.

    Returns:
        At least one toolset, in the order in which the distribution lists them.

    Raises:
        ToolsetError: no distribution has that name, or none of its toolsets is available.
    """
    percents = _distribution(name).percent_by_toolset
    usable = [toolset for toolset in percents if available is None or toolset in available]
    if not usable:
        raise ToolsetError(_nothing_usable(name))
    for _ in range(MAX_DRAWS):
        # All are drawn, then the unusable dropped: what is usable must not shift the draws of the others.
        drawn = [toolset for toolset, percent in percents.items() if rng.random() * 100 < percent]
        kept = [toolset for toolset in drawn if toolset in usable]
        if kept:
            return kept
    return [max(usable, key=lambda toolset: percents[toolset])]


def usable_toolsets(name: str) -> tuple[str, ...]:
    """The toolsets of a distribution that can be used here, in its order.

    Raises:
        ToolsetError: no distribution has that name, or none of its toolsets can be used.
    """
    percents = _distribution(name).percent_by_toolset
    missing = unavailable(percents)
    usable = tuple(toolset for toolset in percents if toolset not in missing)
    if not usable:
        raise ToolsetError(_nothing_usable(name))
    return usable


def describe_distributions() -> str:
    """List every distribution for a person, in alphabetical order, the likeliest toolsets first."""
    blocks = []
    for name in sorted(DISTRIBUTIONS):
        distribution = DISTRIBUTIONS[name]
        lines = [f"Distribution: {name}", f"Description: {distribution.description}", "Toolsets:"]
        missing = unavailable(distribution.percent_by_toolset)
        for toolset, percent in sorted(distribution.percent_by_toolset.items(), key=lambda item: -item[1]):
            note = f" (not available: {missing[toolset]})" if toolset in missing else ""
            lines.append(f"  • {toolset} : {percent}% chance{note}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _distribution(name: str) -> Distribution:
    if name not in DISTRIBUTIONS:
        message = unknown_name("distribution", name, DISTRIBUTIONS)
        raise ToolsetError(f"{message}; --list_distributions describes them")
    return DISTRIBUTIONS[name]


def _nothing_usable(name: str) -> str:
    percents = _distribution(name).percent_by_toolset
    missing = unavailable(percents)
    reasons = ", ".join(f"{toolset} ({missing.get(toolset, 'not available')})" for toolset in percents)
    alternatives = [
        other
        for other, distribution in DISTRIBUTIONS.items()
        if len(unavailable(distribution.percent_by_toolset)) < len(distribution.percent_by_toolset)
    ]
    return (
        f"distribution {name!r} has no toolset that can be used here: {reasons}; "
        f"distributions that have one: {', '.join(sorted(alternatives))}"
    )
