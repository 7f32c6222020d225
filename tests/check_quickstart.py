"""Checks the rows that the README's first command left: `python tests/check_quickstart.py data/quickstart`.

A row counts when the tool turn holds what that very call must have printed or done.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE_TOOLS = ("read_file", "write_file", "patch", "search_files")


def calls_with_results(row: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each tool call of a row with its result, matched by id: name, arguments, result."""
    results = {turn["tool_call_id"]: turn["value"] for turn in row["conversations"] if turn["from"] == "tool"}
    for turn in row["conversations"]:
        for call in turn.get("tool_calls", []):
            function = call["function"]
            yield function["name"], json.loads(function["arguments"]), json.loads(results[call["id"]])


def is_right(name: str, arguments: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Whether the result is the known one of that call."""
    if name == "terminal":
        echoed = re.fullmatch(r"echo ['\"]?([\w .,!-]+?)['\"]?", arguments["command"].strip())
        return echoed is not None and result["exit_code"] == 0 and result["output"].strip() == echoed[1].strip()
    if name == "write_file":
        return result.get("bytes_written") == len(arguments["content"].encode())
    if name == "read_file":
        return "content" in result and not result.get("error")
    return name in FILE_TOOLS and not result.get("error")


def main(run_dir: str) -> None:
    """Print what was found; exit 1 when the terminal or the file tools are missing among the right calls."""
    rows = [json.loads(line) for line in (Path(run_dir) / "trajectories.jsonl").read_text().splitlines()]
    right = Counter(name for row in rows for name, *call in calls_with_results(row) if is_right(name, *call))
    print(f"quickstart: {len(rows)} rows, calls with their known result: {dict(right)}")
    if not right["terminal"] or not any(right[name] for name in FILE_TOOLS):
        sys.exit("quickstart: no row in which the terminal, or none in which a file tool, gave its known result")


if __name__ == "__main__":
    main(sys.argv[1])
