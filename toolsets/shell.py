"""The shell a sample seems to have: its current folder and exported variables last from one command to the
next.

Each command is a bash of its own. Around it, a few builtins (no further process) read the variables and the
folder that the command before left in a private folder of the sandbox, and write them again when it ends,
however it ends: an EXIT trap serves `exit 3`, `set -e` and syntax errors; what follows the command serves
one that sets an EXIT trap itself. A command that is killed, or replaces its shell with `exec`, leaves the
state as it was. Functions, aliases and variables that are not exported end with their command, and a
variable of the sandbox's own environment cannot be unset for good.

The runner reads the folder back only when a tool needs it for a relative path, so a command costs one call
of the sandbox.
"""

import shlex
from dataclasses import dataclass

from toolsets.base import ToolContext, ToolError
from toolsets.sandboxes.base import Sandbox, SandboxError

SETUP_TIMEOUT_S = 60
MAX_PATH_BYTES = 16_384

_SETUP = (
    'umask 077; d=$(mktemp -d "${TMPDIR:-/tmp}/.shell-XXXXXXXX") && : >"$d/env" && pwd >"$d/cwd" && '
    'printf "%s\\n%s" "$d" "${HOME:-/}"'
)
# Files are written over, not truncated first: on ext4 that would start a write to disk, at 1 ms each. So
# what is valid ends in `return`, or in a NUL, and older text may follow. REPLY ends in the newline of `pwd`,
# which protects folders whose own name ends in one; hence %?.
_RESTORE = (
    "set -- \"$PWD\"; {{ . {d}/env; IFS= read -r -d '' REPLY <{d}/cwd; }} 2>/dev/null; "
    'set -- "$1" "${{OLDPWD-}}"; '
    'CDPATH= cd -- "${{REPLY%?}}" 2>/dev/null || {{ CDPATH= cd -- "$1"; '
    'printf "bash: the current folder %s is gone, back in %s\\n" "${{REPLY%?}}" "$PWD"; }}; '
    "OLDPWD=$2; set --; unset REPLY"
)
_ONE_CALL_FOLDER = "CDPATH= cd -- {workdir} 2>/dev/null || {{ printf %s {no_workdir}; exit 126; }}"
# `builtin`, because the command may have defined functions of these names; the second try is for a command
# that removed the private folder. A DEBUG trap of the command's would print into the files.
_SAVE_ENV = "{{ builtin export -p; builtin echo return; }} 1<>{d}/env"
_SAVE_FOLDER = " && {{ builtin pwd; builtin printf '\\0'; }} 1<>{d}/cwd"
_SAVE = "{{ builtin trap - DEBUG; {save} || {{ command -p mkdir -p {d} && {save}; }} || :; }} 2>/dev/null"


@dataclass(slots=True)
class Shell:
    """The state of one sample's shell, as far as the runner knows it."""

    sandbox: Sandbox
    private_folder: str
    """Where the state is kept, inside the sandbox."""
    home: str
    folder: str
    is_folder_stale: bool = False
    """Whether a command ran since `folder` was read."""

    def command(self, command: str, workdir: str = "") -> str:
        """Wrap a command so that it begins where the last one ended, and leaves its state to the next.

        Args:
            command: Any text; bash judges it.
            workdir: A folder for this command alone, relative to the current one. When it cannot be entered,
                the command does not run and the output is `no_workdir`.
        """
        saved = _SAVE_ENV if workdir else _SAVE_ENV + _SAVE_FOLDER
        folder = shlex.quote(self.private_folder)
        save = _SAVE.format(save=saved.format(d=folder), d=folder)
        # `set +x` keeps a trace that the command switched on from showing what is ours.
        after = f'{{ set -- "$?" {folder}; {save}; set +x; }} 2>/dev/null; exit "$1"'
        at_exit = f'[ "${{2-}}" = {folder} ] || {save}'  # unless it is done already
        return "; ".join(
            [
                self._before(workdir),
                f"trap {shlex.quote(at_exit)} EXIT",
                f"eval {quote_on_one_line(command)}",
                after,
            ]
        )

    def background_command(self, command: str, workdir: str = "") -> str:
        """Wrap a command that begins where the last one ended and leaves nothing."""
        return f"{self._before(workdir)}; eval {quote_on_one_line(command)}"

    @property
    def no_workdir(self) -> str:
        """What a wrapped command prints, alone, when its `workdir` cannot be entered."""
        return f"{self.private_folder}: no workdir"

    async def current_folder(self) -> str:
        """The folder in which the next command would begin."""
        if self.is_folder_stale:
            try:
                data = await self.sandbox.read_file(f"{self.private_folder}/cwd", max_bytes=MAX_PATH_BYTES)
            except OSError:
                data = b""  # the command removed it: the next one begins where the first did
            folder = data.partition(b"\0")[0].decode(errors="surrogateescape")
            self.folder = folder.removesuffix("\n") or self.sandbox.cwd
            self.is_folder_stale = False
        return self.folder

    def _before(self, workdir: str) -> str:
        restore = _RESTORE.format(d=shlex.quote(self.private_folder))
        if not workdir:
            return restore
        if _starts_at_home(workdir):
            workdir = self.home + workdir[1:]
        elif not workdir.startswith("/"):
            workdir = f"./{workdir}"  # `cd -` is another folder
        enter = _ONE_CALL_FOLDER.format(workdir=shlex.quote(workdir), no_workdir=shlex.quote(self.no_workdir))
        return f"{restore}; {enter}"


async def open_shell(context: ToolContext) -> Shell:
    """The sample's shell, made when first asked for.

    Raises:
        SandboxError: the sandbox has no temporary folder, or no longer answers.
    """
    shell = context.state.get("shell")
    if not isinstance(shell, Shell):
        result = await context.sandbox.exec(_SETUP, timeout_s=SETUP_TIMEOUT_S)
        folder, newline, home = result.output.decode(errors="surrogateescape").partition("\n")
        if result.returncode or not newline:
            raise SandboxError(f"no temporary folder in the sandbox (exit {result.returncode}): {folder[:500]}")
        shell = context.state["shell"] = Shell(context.sandbox, folder, home, context.sandbox.cwd)
    return shell


async def resolve_path(context: ToolContext, path: str) -> str:
    """Make a path absolute as the sample's shell would: from its current folder, `~` being its home.

    Raises:
        ToolError: it is empty or holds a NUL.
    """
    if not path or "\0" in path:
        raise ToolError("the path is empty" if not path else "the path holds a NUL character")
    if _starts_at_home(path):
        path = (await open_shell(context)).home + path[1:]
    elif not path.startswith("/"):
        shell = context.state.get("shell")
        folder = await shell.current_folder() if isinstance(shell, Shell) else context.sandbox.cwd
        path = f"{folder}/{path}"
    # `..` stays: what it means depends on symbolic links that only the sandbox can see.
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def quote_on_one_line(text: str) -> str:
    """Quote for bash without a line break: those that are quoted spoil the line numbers of its errors."""
    if "\n" not in text:
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{escaped}'"


def _starts_at_home(path: str) -> bool:
    return path == "~" or path.startswith("~/")
