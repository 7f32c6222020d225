"""Distributions: the seventeen exactly, and draws that keep to their percentages."""

import math
import random
from collections import Counter

import pytest

from toolsets.base import ToolsetError
from toolsets.catalog import TOOLSETS
from toolsets.distributions import DISTRIBUTIONS, describe_distributions, sample_toolsets

THE_SEVENTEEN = """
default: web100 vision100 image_gen100 terminal100 file100 browser100
image_gen: image_gen90 vision90 web55 terminal45
research: web90 browser70 vision50 terminal10
science: web94 terminal94 file94 vision65 browser50 image_gen15
development: terminal80 file80 web30 vision10
safe: web80 browser70 vision60 image_gen60
balanced: web50 vision50 image_gen50 terminal50 file50 browser50
minimal: web100
terminal_only: terminal100 file100
terminal_web: terminal100 file100 web100
creative: image_gen90 vision90 web30
reasoning: web90 file60 terminal20
browser_use: browser100 web80 vision70
browser_only: browser100
browser_tasks: browser97 vision12 terminal15
terminal_tasks: terminal97 file97 web97 browser75 vision50 image_gen10
mixed_tasks: browser92 terminal92 file92 web35 vision15 image_gen15
"""
DRAWS = 20_000


def test_there_are_the_seventeen_with_their_percentages_in_their_order() -> None:
    lines = [
        f"{name}: " + " ".join(f"{toolset}{percent}" for toolset, percent in distribution.percent_by_toolset.items())
        for name, distribution in DISTRIBUTIONS.items()
    ]
    assert lines == THE_SEVENTEEN.strip().split("\n")
    assert all(name == distribution.name for name, distribution in DISTRIBUTIONS.items())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_each_toolset_is_drawn_as_often_as_it_says(name: str) -> None:
    percents = DISTRIBUTIONS[name].percent_by_toolset
    rng = random.Random(f"draws of {name}")
    draws = [sample_toolsets(name, rng) for _ in range(DRAWS)]
    assert all(draws)
    assert all(draw == [toolset for toolset in percents if toolset in draw] for draw in draws)
    count = Counter(toolset for draw in draws for toolset in draw)
    chance_of_some = 1 - math.prod(1 - percent / 100 for percent in percents.values())
    for toolset, percent in percents.items():
        share = percent / 100 / chance_of_some
        assert abs(count[toolset] - DRAWS * share) <= 4 * math.sqrt(DRAWS * share * (1 - share)) + 1e-6, toolset


def test_two_toolsets_are_drawn_independently() -> None:
    rng = random.Random(7)
    draws = [sample_toolsets("science", rng) for _ in range(DRAWS)]
    share = 0.65 * 0.50
    both = sum("vision" in draw and "browser" in draw for draw in draws)
    assert abs(both - DRAWS * share) <= 4 * math.sqrt(DRAWS * share * (1 - share))


def test_an_empty_draw_is_drawn_again_and_not_always_the_same_toolset() -> None:
    rng = random.Random(3)
    alone = Counter(draw[0] for draw in (sample_toolsets("balanced", rng) for _ in range(DRAWS)) if len(draw) == 1)
    assert set(alone) == set(TOOLSETS)
    share = sum(alone.values()) / len(alone)
    assert all(abs(count - share) <= 4 * math.sqrt(share) for count in alone.values())


def test_only_what_is_available_results_and_at_least_one() -> None:
    rng = random.Random(5)
    draws = [sample_toolsets("reasoning", rng, {"file", "terminal"}) for _ in range(DRAWS)]
    assert {tuple(draw) for draw in draws} == {("file",), ("terminal",), ("file", "terminal")}
    share = 0.6 * 0.2 / (1 - 0.4 * 0.8)
    both = sum(len(draw) == 2 for draw in draws)
    assert abs(both - DRAWS * share) <= 4 * math.sqrt(DRAWS * share * (1 - share))


def test_the_draws_of_one_toolset_do_not_depend_on_what_is_available() -> None:
    for seed in range(500):
        everything = sample_toolsets("terminal_tasks", random.Random(seed))
        some = sample_toolsets("terminal_tasks", random.Random(seed), {"terminal", "file"})
        kept = [toolset for toolset in everything if toolset in ("terminal", "file")]
        assert some == kept or not kept


def test_the_same_seed_gives_the_same_toolsets() -> None:
    first, second = random.Random("x"), random.Random("x")
    assert [sample_toolsets("balanced", first) for _ in range(50)] == [
        sample_toolsets("balanced", second) for _ in range(50)
    ]


class Unlucky(random.Random):
    """Draws nothing that is not certain."""

    def random(self) -> float:
        return 0.9999


def test_endless_bad_luck_ends_at_the_likeliest_available_toolset() -> None:
    assert sample_toolsets("research", Unlucky(), {"vision", "terminal"}) == ["vision"]
    assert sample_toolsets("balanced", Unlucky()) == ["web"]


def test_an_unknown_name_is_an_error_that_names_the_nearest_and_the_known() -> None:
    with pytest.raises(ToolsetError) as raised:
        sample_toolsets("terminal_onyl", random.Random())
    assert "did you mean 'terminal_only'?" in str(raised.value)
    assert "balanced, browser_only" in str(raised.value)


def test_a_distribution_of_which_nothing_is_available_is_an_error_that_names_others() -> None:
    with pytest.raises(ToolsetError) as raised:
        sample_toolsets("minimal", random.Random(), {"terminal", "file"})
    assert "web (not part of this version)" in str(raised.value)
    assert "terminal_only" in str(raised.value)


def test_the_description_lists_all_in_alphabetical_order_likeliest_first() -> None:
    blocks = describe_distributions().split("\n\n")
    assert [block.split("\n")[0] for block in blocks] == [f"Distribution: {name}" for name in sorted(DISTRIBUTIONS)]
    block = next(block for block in blocks if block.startswith("Distribution: browser_tasks\n"))
    assert block.split("\n")[1].startswith("Description: ")
    assert block.split("\n")[2:] == [
        "Toolsets:",
        "  • browser : 97% chance (not available: not part of this version)",
        "  • terminal : 15% chance",
        "  • vision : 12% chance (not available: not part of this version)",
    ]
