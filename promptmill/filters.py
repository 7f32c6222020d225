"""Quality filters: named rules by which the merge leaves a row out. The row stays where it is.

A rule takes a row's summary and the run's tools, and returns the reason for which the row is left out, or "".
"""

from collections.abc import Callable, Collection

from promptmill.errors import Outcome
from promptmill.records import RowSummary

FOLLOWED_PRODUCT_TOOLS = frozenset(
    [
        "terminal",
        "process",
        "read_terminal",
        "close_terminal",
        "read_file",
        "write_file",
        "patch",
        "search_files",
        "web_search",
        "web_extract",
        "vision_analyze",
        "image_generate",
        "browser_navigate",
        "browser_snapshot",
        "browser_click",
        "browser_type",
        "browser_scroll",
        "browser_back",
        "browser_press",
        "browser_get_images",
        "browser_vision",
        "browser_console",
        "browser_cdp",
        "browser_dialog",
        "browser_close",
        "todo",
        "skills_list",
        "skill_view",
        "skill_manage",
        "execute_code",
        "delegate_task",
        "memory",
        "session_search",
        "clarify",
        "text_to_speech",
        "video_analyze",
        "video_generate",
        "xai_video_edit",
        "xai_video_extend",
        "mixture_of_agents",
    ]
)
"""Tool names that shards of hermes-agent may use; their rows do not say what was offered."""

Rule = Callable[[RowSummary, Collection[str]], str]


def no_reasoning(summary: RowSummary, tools: Collection[str]) -> str:
    """No assistant turn has reasoning."""
    del tools
    return "" if summary.reasoning_turns else "no_reasoning"


def hallucinated_tool(summary: RowSummary, tools: Collection[str]) -> str:
    """The model called a tool that does not exist.

    Our rows list such names themselves (`unknown_tools`); a row of another program is judged by the names it used.
    """
    unknown = summary.unknown_tools
    if not summary.content_hash:
        unknown = tuple(name for name in summary.tallies if name not in tools and name not in FOLLOWED_PRODUCT_TOOLS)
    return "hallucinated_tool" if unknown else ""


def ending_when_kept(stop_reason: str) -> Outcome:
    """What a discarded row counts as where rows without reasoning are kept."""
    return Outcome.COMPLETED if stop_reason == "answer" else Outcome.PARTIAL


def merge_rules(*, keep_no_reasoning: bool) -> tuple[Rule, ...]:
    """The rules that are on by default."""
    return (hallucinated_tool,) if keep_no_reasoning else (hallucinated_tool, no_reasoning)


def reason_to_leave_out(summary: RowSummary, rules: Collection[Rule], tools: Collection[str]) -> str:
    """The first rule's reason that applies, or ""."""
    for rule in rules:
        if reason := rule(summary, tools):
            return reason
    return ""
