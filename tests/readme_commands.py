"""The README's shell commands, as they stand there: for `.ci/run`, and for the tests that run each of them."""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def shell_blocks(path: Path = README) -> list[str]:
    """Every ```sh block of a document, in order."""
    return [block.strip() for block in re.findall(r"^```sh\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)]


if __name__ == "__main__":
    print(shell_blocks()[int(sys.argv[1]) - 1])
