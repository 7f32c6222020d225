"""What a call cost: the provider's figure, else a price list's, else unknown and never 0."""

import io
from typing import Any

import pytest
from rich.console import Console

from promptmill.prices import MAX_COST_USD, Prices, reported_cost_usd
from promptmill.records import Usage
from promptmill.statistics import RunFacts, RunStatistics, statistics_json
from promptmill.summary import print_summary
from tests.fakes.model_server import one_turn, say
from tests.rows import make_settings, make_summary
from tests.test_command import run_inline

OPENROUTER = "https://openrouter.ai/api/v1"
COUNTED = Usage(1_000_000, 100_000, 0, 0, 1)


@pytest.mark.parametrize(
    ("usage", "cost_usd"),
    [
        ({}, None),
        ({"cost": 0.25}, 0.25),
        ({"cost": 0}, 0.0),
        ({"cost": {"total_cost": 0.5, "input_tokens_cost": 0.1}}, 0.5),
        ({"cost": 0.01, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.2}}, 0.21),
        ({"cost": 0.01, "is_byok": False, "cost_details": {"upstream_inference_cost": 0.2}}, 0.01),
        ({"cost": 0.01, "is_byok": True, "cost_details": None}, 0.01),
        ({"cost": "0.1"}, 0.1),
        ({"cost": MAX_COST_USD}, MAX_COST_USD),
        *(({"cost": cost}, None) for cost in (None, "x", True, -1, float("nan"), float("inf"), [], {})),
        *(({"cost": cost}, None) for cost in (MAX_COST_USD + 1, 1.7e308, 10**400, "9" * 99)),
    ],
)
def test_the_providers_own_figure_is_read(usage, cost_usd):
    assert reported_cost_usd(usage) == (cost_usd if cost_usd is None else pytest.approx(cost_usd))


def prices(base_url: str = OPENROUTER, **given: Any) -> Prices:
    return Prices(make_settings(base_url, **{"model": "openai/gpt-4o", **given}))


def test_the_providers_figure_wins_over_a_price():
    reported = Usage(10, 10, 0, 0, 1, 0.25, 1)
    assert prices(price_per_mtok=(3.0, 15.0)).priced(reported) is reported


def test_price_per_mtok_is_for_a_million_tokens_in_and_out():
    assert prices(price_per_mtok=(3.0, 15.0)).priced(COUNTED) == Usage(1_000_000, 100_000, 0, 0, 1, 4.5, 1)


def test_a_call_without_token_counts_has_no_price():
    assert prices(price_per_mtok=(3.0, 15.0)).priced(Usage()).priced_calls == 0


def test_a_price_that_makes_nonsense_of_the_tokens_is_none():
    assert prices(price_per_mtok=(1e308, 1e308)).priced(COUNTED) == COUNTED


def test_genai_prices_knows_a_public_endpoints_models():
    pytest.importorskip("genai_prices")
    listed = prices("https://api.openai.com/v1", model="gpt-4o")
    whole, cached = listed.priced(COUNTED), listed.priced(Usage(1_000_000, 100_000, 0, 2_000_000, 1))
    assert (whole.cost_usd, whole.priced_calls) == (pytest.approx(3.5), 1)
    assert 0 < cached.cost_usd < whole.cost_usd


@pytest.mark.parametrize(
    ("base_url", "model"),
    [("https://api.openai.com/v1", "my-own-model"), ("https://llm.example.org/v1", "gpt-4o"),
     ("http://127.0.0.1:8000/v1", "gpt-4o")],
)  # fmt: skip
def test_what_no_list_knows_stays_unknown(base_url, model):
    listed = prices(base_url, model=model)
    assert listed.priced(COUNTED) == COUNTED
    assert listed.priced(COUNTED) == COUNTED


def printed(*usages: Usage) -> str:
    counted = RunStatistics()
    for usage in usages:
        fields = {name: getattr(usage, name) for name in Usage.__dataclass_fields__}
        counted.add(make_summary(usage=fields))
    screen = io.StringIO()
    facts = RunFacts(run_name="my_run", samples=1, not_selected=0, invalid=0, starts=[])
    print_summary(statistics_json(counted, facts, ()), "data/my_run", Console(file=screen, width=200))
    (line,) = (line for line in screen.getvalue().splitlines() if line.strip().startswith("Cost"))
    return line.strip()


def test_the_summary_says_how_many_calls_have_a_price():
    priced, unpriced = Usage(1, 1, 0, 0, 1, 1234.5, 1), Usage(1, 1, 0, 0, 1)
    assert printed(priced).endswith("  $1,234.5000")
    assert printed(priced, unpriced).endswith("  $1,234.5000 (for 1 of 2 calls; the rest is unknown)")
    assert "unknown: the endpoint reports none" in printed(unpriced)
    assert "0.0" not in printed(unpriced)


async def test_a_run_counts_what_the_endpoint_reports(start_server):
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "cost": 0.125}
    server = await start_server(lambda request: say("so", reasoning="r", usage=usage))
    run = await run_inline(server.base_url, ["a", "b"])
    assert [(row["usage"]["cost_usd"], row["usage"]["priced_calls"]) for row in run.rows] == [(0.125, 1)] * 2
    cost = {"usd": 0.25, "calls_priced": 2, "includes": "failed, interrupted and superseded attempts"}
    assert run.json("statistics.json")["cost"] == cost


async def test_an_unknown_cost_is_null_in_the_statistics(start_server, capsys):
    server = await start_server(one_turn)
    run = await run_inline(server.base_url, ["a"])
    assert run.json("statistics.json")["cost"]["usd"] is None
    assert "unknown: the endpoint reports none" in capsys.readouterr().out
    assert run.row["usage"] == {
        "prompt_tokens": 100, "completion_tokens": 10, "reasoning_tokens": 0, "cached_tokens": 0, "reported_calls": 1,
        "cost_usd": 0.0, "priced_calls": 0,
    }  # fmt: skip
    assert isinstance(run.row["usage"]["cost_usd"], float)
