"""Names of tools as models write them.

Only what can mean one thing is mended: case, the signs between words, and what some models put before or after a name
(`functions.terminal`, `Read-File`, `terminal:0`). A name that is misspelt stays wrong, and the model is told the real
ones.
"""

import re
from collections.abc import Collection

_BEFORE = re.compile(r"(?:functions?|tools?|default_api)\s*(?:[.:/]|__)\s*", re.IGNORECASE)
_AFTER = re.compile(r"(?:<\|.*|:\d+|\(\s*\))\Z", re.DOTALL)
_SEPARATORS = re.compile(r"[\s_\-.]+")
MAX_NAME_CHARS = 200


def matching_tool(written: str, offered: Collection[str]) -> str | None:
    """The one offered tool that a written name can mean; None where it means none, or several."""
    if written in offered:
        return written
    if len(written) > MAX_NAME_CHARS:
        return None
    bare = written.strip().strip("\"'`")
    while match := _BEFORE.match(bare):
        bare = bare[match.end() :]
    key = _key(_AFTER.sub("", bare))
    matches = [name for name in offered if _key(name) == key] if key else []
    return matches[0] if len(matches) == 1 else None


def _key(name: str) -> str:
    return _SEPARATORS.sub("", name).casefold()
