"""Change files: replace a quoted text, or apply a patch of several files, all of it or nothing."""

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolsets.base import Tool, ToolContext, ToolError, ToolResult
from toolsets.edits import NotFoundError, replace_text
from toolsets.lint import lint
from toolsets.shell import resolve_path
from toolsets.text import shortened
from toolsets.textfile import encode_text, explain_os_error, read_text
from toolsets.v4a import Operation, apply_hunks, parse_patch

MAX_DIFF_CHARS = 20_000
MAX_DIFF_LINES = 4_000
"""Changed lines that are compared line by line; the time it takes grows with their square."""
SHELL_TIMEOUT_S = 60

_HUNK_HEADER = re.compile(r"@@ -(\d+)(,\d+)? \+(\d+)(,\d+)? @@")


@dataclass(slots=True)
class Plan:
    """What files are to become, worked out before anything is written."""

    context: ToolContext
    before: dict[str, str | None] = field(default_factory=dict)
    """Text of each file touched, by absolute path; None when there is none."""
    after: dict[str, str | None] = field(default_factory=dict)
    copies: list[tuple[str, str]] = field(default_factory=list)
    """Moved files: (old, new) paths. They are copied first, which keeps their mode."""

    async def read(self, shown_path: str) -> tuple[str, str]:
        """Absolute path and present text of a file; raises ToolError when there is none."""
        path = await resolve_path(self.context, shown_path)
        if path not in self.after:
            text = await read_text(self.context, path, shown_path=shown_path)
            self.before[path] = self.after[path] = text
        text_now = self.after[path]
        if text_now is None:
            raise ToolError(f"File not found: {shown_path} (this patch removes it earlier on)")
        return path, text_now

    async def new_path(self, shown_path: str) -> str:
        """Absolute path of a file to be made; raises ToolError when there is one already."""
        path = await resolve_path(self.context, shown_path)
        if path not in self.after:
            try:
                await self.context.sandbox.read_file(path, max_bytes=1)
            except FileNotFoundError:
                self.before[path] = self.after[path] = None
            except OSError as exc:
                raise ToolError(explain_os_error(exc, shown_path)) from exc
            else:
                raise ToolError(f"{shown_path} exists already; change it with *** Update File")
        if self.after[path] is not None:
            raise ToolError(f"{shown_path} exists already; change it with *** Update File")
        return path

    def is_on_disk(self, path: str) -> bool:
        """Whether a file is there before this plan, or once its copies are made."""
        return self.before[path] is not None or any(path == new for _, new in self.copies)

    async def commit(self) -> None:
        """Write it all; when a part cannot be written, put everything back and raise ToolError."""
        try:
            await self._shell(
                [
                    f"mkdir -p -- {_folder(new)} && cp -p -- {shlex.quote(old)} {shlex.quote(new)}"
                    for old, new in self.copies
                ]
            )
            for path, text in self.after.items():
                if text is not None and text != self.before[path]:
                    await self._write(path, text)
            gone = [path for path, text in self.after.items() if text is None and self.is_on_disk(path)]
            await self._shell([f"rm -- {' '.join(map(shlex.quote, gone))}"] if gone else [])
        except ToolError as exc:
            await self._put_back(exc)
            raise

    async def _put_back(self, cause: ToolError) -> None:
        try:
            for path, text in self.before.items():
                if text is not None and text != self.after[path]:
                    await self._write(path, text)
            made = [path for path, text in self.before.items() if text is None]
            await self._shell([f"rm -f -- {' '.join(map(shlex.quote, made))}"] if made else [])
        except ToolError as exc:
            raise ToolError(f"{cause}; and then files could not be put back: {exc}") from exc

    async def _write(self, path: str, text: str) -> None:
        try:
            await self.context.sandbox.write_file(path, encode_text(text))
        except OSError as exc:
            raise ToolError(f"nothing was changed: {explain_os_error(exc, path)}") from exc

    async def _shell(self, commands: list[str]) -> None:
        if not commands:
            return
        result = await self.context.sandbox.exec(" && ".join(commands), timeout_s=SHELL_TIMEOUT_S)
        if result.returncode:
            said = shortened(result.output.decode(errors="replace").strip(), 1_000)
            raise ToolError(f"nothing was changed: {said}")

    def summary(self) -> dict[str, Any]:
        """The keys of the result that say what became of which file."""
        changed = {path: text for path, text in self.after.items() if text != self.before[path]}
        created = [path for path, text in changed.items() if self.before[path] is None]
        deleted = [path for path, text in changed.items() if text is None]
        modified = [path for path in changed if path not in created and path not in deleted]
        diffs = [unified_diff(path, self.before[path], text) for path, text in changed.items()]
        summary: dict[str, Any] = {"success": True, "diff": _cut_diff("\n".join(diffs)), "files_modified": modified}
        if created:
            summary["files_created"] = created
        if deleted:
            summary["files_deleted"] = deleted
        summary["lint"] = {path: lint(path, text) for path, text in changed.items() if text is not None}
        return summary


async def run_patch(context: ToolContext, arguments: Mapping[str, Any]) -> ToolResult:
    """Answer one `patch` call."""
    plan = Plan(context)
    if arguments["mode"] == "patch":
        if "patch" not in arguments:
            raise ToolError("mode 'patch' needs the parameter patch")
        for operation in parse_patch(arguments["patch"]):
            await _plan_operation(plan, operation)
        await plan.commit()
        return ToolResult(plan.summary())
    missing = [name for name in ("path", "old_string", "new_string") if name not in arguments]
    if missing:
        raise ToolError(f"mode 'replace' needs the parameter {', '.join(missing)}")
    path, text = await plan.read(arguments["path"])
    replaced = replace_text(
        text, arguments["old_string"], arguments["new_string"], replace_all=arguments["replace_all"]
    )
    plan.after[path] = replaced.text
    await plan.commit()
    summary = plan.summary()
    summary["lint"] = summary["lint"].get(path, {"status": "skipped", "message": "unchanged"})
    if replaced.count > 1:
        summary["replacements"] = replaced.count
    if replaced.strategy != "exact":
        summary["hint"] = f"old_string was found only by allowing for other {replaced.strategy}; check the diff"
    return ToolResult(summary)


async def _plan_operation(plan: Plan, operation: Operation) -> None:
    if operation.kind == "Add":
        path = await plan.new_path(operation.path)
        plan.after[path] = operation.text
        return
    path, text = await plan.read(operation.path)
    if operation.kind == "Delete":
        plan.after[path] = None
        return
    try:
        text = apply_hunks(text, operation.hunks, operation.path)
    except NotFoundError as exc:
        raise ToolError(f"{exc} Nothing was changed; read the file again.") from exc
    if operation.new_path:
        new_path = await plan.new_path(operation.new_path)
        if plan.is_on_disk(path):
            plan.copies.append((path, new_path))
        plan.after[path], path = None, new_path
    plan.after[path] = text


def unified_diff(path: str, before: str | None, after: str | None) -> str:
    """The change of one file as a unified diff; None stands for no file."""
    old, new = _diff_lines(before), _diff_lines(after)
    head = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    room = min(len(old), len(new)) - head
    pairs = zip(reversed(old), reversed(new), strict=False)
    tail = min(room, next((i for i, (a, b) in enumerate(pairs) if a != b), room))
    first, rest = max(0, head - 3), max(0, tail - 3)
    header = ["--- " + ("/dev/null" if before is None else path), "+++ " + ("/dev/null" if after is None else path)]
    old_part, new_part = old[first : len(old) - rest], new[first : len(new) - rest]
    if len(old_part) + len(new_part) > MAX_DIFF_LINES:
        return "\n".join(
            [*header, f"@@ {len(old_part)} lines became {len(new_part)} lines from line {first + 1} on @@"]
        )
    lines = list(difflib.unified_diff(old_part, new_part, lineterm=""))[2:]
    shifted = (_HUNK_HEADER.sub(lambda found: _shift(found, first), line) if line[0] == "@" else line for line in lines)
    return "\n".join([*header, *(line.removesuffix("\r") for line in shifted)])


def _diff_lines(text: str | None) -> list[str]:
    lines = (text or "").split("\n")
    last = lines.pop()
    return [*lines, f"{last}\n\\ No newline at end of file"] if last else lines


def _shift(header: re.Match[str], first: int) -> str:
    return f"@@ -{int(header[1]) + first}{header[2] or ''} +{int(header[3]) + first}{header[4] or ''} @@"


def _cut_diff(diff: str) -> str:
    if len(diff) <= MAX_DIFF_CHARS:
        return diff
    left_out = f"{len(diff) - MAX_DIFF_CHARS} of {len(diff)}"
    return f"{shortened(diff, MAX_DIFF_CHARS)}\n... [diff cut: {left_out} characters left out]"


def _folder(path: str) -> str:
    return shlex.quote(path.rpartition("/")[0] or "/")


PATCH = Tool(
    name="patch",
    description=(
        "Change files. mode=replace: put new_string in the place of old_string, which must occur exactly once "
        "(or set replace_all). mode=patch: apply a V4A patch to one or more files, all or nothing:\n"
        "*** Begin Patch\n*** Update File: path\n@@ line above the change\n context line\n-old line\n+new line\n"
        "*** Add File: path\n+line\n*** Delete File: path\n*** Move File: old -> new\n*** End Patch\n"
        "Returns a diff and the syntax check of .py, .json and .toml files."
    ),
    parameters={
        "type": "object",
        "properties": {
            "mode": {
                "type": "string",
                "enum": ["replace", "patch"],
                "default": "replace",
                "description": "replace needs path, old_string, new_string; patch needs patch. Default replace.",
            },
            "path": {"type": "string", "description": "The file, absolute or from the current folder."},
            "old_string": {
                "type": "string",
                "description": "The text to replace, with enough lines around it to be the only one.",
            },
            "new_string": {"type": "string", "description": "The text to put there; empty to delete."},
            "replace_all": {
                "type": "boolean",
                "default": False,
                "description": "Replace every occurrence. Default false.",
            },
            "patch": {"type": "string", "description": "The V4A patch, for mode=patch."},
        },
        "required": [],
        "additionalProperties": False,
    },
    run=run_patch,
)
