"""Text files of a sandbox: bytes that survive the round trip, and errors that a model can mend."""

import errno
import shlex

from toolsets.base import ToolContext, ToolError
from toolsets.text import is_binary

MAX_BYTES = 4_000_000
"""The largest file that is read whole."""
MAX_SIMILAR = 5
SIMILAR_TIMEOUT_S = 10


def encode_text(text: str) -> bytes:
    """Bytes of a text, the escaped bytes of its file as they were; another lone surrogate becomes `?`."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


async def read_text(context: ToolContext, path: str, *, shown_path: str = "") -> str:
    """Read a whole text file; bytes that are not UTF-8 become surrogate escapes, which `encode_text` undoes.

    Args:
        context: The sample's sandbox and memory.
        path: Absolute path.
        shown_path: How the model named it, for errors.

    Raises:
        ToolError: it is missing, a folder, binary, too large, or may not be read.
    """
    shown_path = shown_path or path
    data = await read_bytes(context, path, shown_path=shown_path, max_bytes=MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ToolError(f"{shown_path} is larger than {MAX_BYTES} bytes; use the terminal tool (sed, awk, python)")
    refuse_binary(data, shown_path)
    return data.decode("utf-8", "surrogateescape")


async def read_bytes(context: ToolContext, path: str, *, shown_path: str, max_bytes: int) -> bytes:
    """Read the start of a file; raises ToolError for whatever a process inside would be told."""
    try:
        return await context.sandbox.read_file(path, max_bytes=max_bytes)
    except FileNotFoundError as exc:
        similar = await _similar_files(context, path)
        details = {"similar_files": similar} if similar else {}
        raise ToolError(f"File not found: {shown_path}", **details) from exc
    except OSError as exc:
        raise ToolError(explain_os_error(exc, shown_path)) from exc


def refuse_binary(data: bytes, shown_path: str) -> None:
    """Raise ToolError when bytes are not text."""
    if is_binary(data):
        raise ToolError(f"{shown_path} is a binary file ({len(data)} bytes read); it cannot be shown as text")


def explain_os_error(exc: OSError, shown_path: str) -> str:
    """One sentence about a file operation that failed inside the sandbox."""
    if isinstance(exc, IsADirectoryError):
        return f"{shown_path} is a directory, not a file"
    reason = exc.strerror or errno.errorcode.get(exc.errno or 0, str(exc))
    return f"{shown_path}: {reason}"


async def _similar_files(context: ToolContext, path: str) -> list[str]:
    """Files named like the missing one in its folder, and exactly like it below the working folder."""
    folder, _, name = path.rpartition("/")
    like = "*" + glob_literal(name.rpartition(".")[0] or name) + "*"
    script = (
        'show() { while IFS= read -r f; do printf \'%s/%s\\n\' "${PWD%/}" "${f#./}"; done; }; '
        f"cd -- {shlex.quote(folder or '/')} 2>/dev/null && "
        f"find . -maxdepth 1 -type f -iname {shlex.quote(like)} 2>/dev/null | head -n {MAX_SIMILAR} | show; "
        f"cd -- {shlex.quote(context.sandbox.cwd)} && find . -maxdepth 5 -name '.?*' -prune -o -type f "
        f"-iname {shlex.quote(glob_literal(name))} -print 2>/dev/null | head -n {MAX_SIMILAR} | show"
    )
    result = await context.sandbox.exec(script, timeout_s=SIMILAR_TIMEOUT_S, max_output_bytes=100_000)
    found = result.output.decode(errors="replace").splitlines()
    return list(dict.fromkeys(found))[:MAX_SIMILAR]


def glob_literal(text: str) -> str:
    """A shell pattern that matches one text and nothing else."""
    return "".join(f"\\{c}" if c in "*?[]\\" else c for c in text)
