"""What model calls cost: the provider's own figure where it reports one, else a price list's, else unknown.

The price list is `--price_per_mtok` where it is given, else the package `genai-prices` (extra `prices`), which knows
public endpoints by their address and never goes to the network here. Unknown stays unknown: it is never counted as 0.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from promptmill.config import ModelSettings
from promptmill.endpoints import is_private
from promptmill.records import Usage

TOKENS_PER_PRICE = 1_000_000
MAX_COST_USD = 1_000_000.0
"""No call costs more: a figure above it is nonsense, and the cost unknown."""
MAX_NUMBER_CHARS = 30


def reported_cost_usd(usage: Mapping[str, Any]) -> float | None:
    """What the provider says a call cost, in US dollars; None when it says nothing.

    OpenRouter's `cost` is what it takes itself: with a key of one's own at the provider (`is_byok`), what that one
    takes comes on top. Source: https://openrouter.ai/docs/use-cases/usage-accounting
    """
    cost = usage.get("cost")
    own = _amount(cost.get("total_cost") if isinstance(cost, Mapping) else cost)
    details = usage.get("cost_details")
    upstream = _amount(details.get("upstream_inference_cost")) if isinstance(details, Mapping) else None
    if own is None or usage.get("is_byok") is not True:
        return own
    return own + (upstream or 0.0)


def _amount(value: object) -> float | None:
    """An amount of money; None where it is none."""
    number = number_of(value)
    return float(number) if number is not None and number <= MAX_COST_USD else None


def number_of(value: object) -> int | float | None:
    """A number from 0, which some endpoints write as text; None where it is none."""
    if isinstance(value, str) and len(value) <= MAX_NUMBER_CHARS:
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if 0 <= value < math.inf else None


class Prices:
    """The prices of one model at one endpoint."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._is_listed = not is_private(settings.endpoint.host)
        """Whether the package may know the model: until it has said that it does not."""

    def priced(self, usage: Usage) -> Usage:
        """The usage of a call with its cost, where the provider reported none and there is a price."""
        if usage.priced_calls or not usage.reported_calls:
            return usage
        cost_usd = self._cost_usd(usage)
        return usage if cost_usd is None else replace(usage, cost_usd=cost_usd, priced_calls=usage.reported_calls)

    def _cost_usd(self, usage: Usage) -> float | None:
        if self._settings.price_per_mtok is not None:
            per_prompt, per_completion = self._settings.price_per_mtok
            prices = usage.prompt_tokens * per_prompt + usage.completion_tokens * per_completion
            return _amount(prices / TOKENS_PER_PRICE)
        return self._listed_cost_usd(usage) if self._is_listed else None

    def _listed_cost_usd(self, usage: Usage) -> float | None:
        try:
            import genai_prices  # an optional package: extra `prices`
        except ImportError:
            self._is_listed = False
            return None
        counted = genai_prices.Usage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cache_read_tokens=min(usage.cached_tokens, usage.prompt_tokens),
        )
        endpoint = self._settings.endpoint
        try:
            calculated = genai_prices.calc_price(counted, self._settings.model, provider_api_url=endpoint.base_url)
        except LookupError:
            self._is_listed = False
            return None
        return _amount(float(calculated.total_price))
