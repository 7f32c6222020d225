"""What is already done, and what is owed.

A sample is known by its content, never by its index: rows may be reordered, edited or added between two starts, and a
prompt listed three times is owed three trajectories. Matching is counted, from exact to loose:

    1. content hash of the whole dataset row, and occurrence
    2. content hash alone
    3. prompt, image and cwd (a further column was edited)
    4. the prompt's text, for rows of other programs, which have no hash
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from promptmill.budget import Spent
from promptmill.dataset import HASH_BYTES, Dataset
from promptmill.errors import OUTCOME_POLICY, Outcome
from promptmill.records import RowSummary
from promptmill.rows import decoded_row, summarise
from promptmill.shards import read_lines


@dataclass(slots=True)
class DoneRows:
    """The identities of rows that need not be run again, and how often samples have failed. Digests, never texts."""

    exact: set[tuple[bytes, int]] = field(default_factory=set)
    surplus: Counter[bytes] = field(default_factory=Counter)
    """Content hashes of rows whose exact identity came twice (two datasets with the same row, say)."""
    content_key_by_hash: dict[bytes, bytes] = field(default_factory=dict)
    foreign_prompts: Counter[bytes] = field(default_factory=Counter)
    attempts: Counter[tuple[bytes, int]] = field(default_factory=Counter)

    def add_done(self, summary: RowSummary) -> None:
        """Count a row of a shard or of `discarded.jsonl`."""
        if not summary.content_hash:
            self.foreign_prompts[digest(summary.prompt)] += 1
            return
        identity = identity_of(summary)
        if identity in self.exact:
            self.surplus[identity[0]] += 1
            return
        self.exact.add(identity)
        self.content_key_by_hash[identity[0]] = digest(summary.prompt, summary.image, summary.cwd)

    def add_failed(self, summary: RowSummary) -> None:
        """Count an attempt of `failed.jsonl`."""
        if summary.content_hash:
            self.attempts[identity_of(summary)] += 1

    def __bool__(self) -> bool:
        return bool(self.exact or self.foreign_prompts)


@dataclass(slots=True)
class ScannedRows:
    """What the files of a run folder say."""

    done: DoneRows = field(default_factory=DoneRows)
    endings: Counter[tuple[int, Outcome]] = field(default_factory=Counter)
    """How many samples of each batch ended how."""
    spent: Spent = field(default_factory=Spent)

    def highest_batch(self, shards: Iterable[Path]) -> int:
        """The highest batch number in use, an empty or unreadable shard's included; -1 when there is none."""
        named = (int(path.stem.rpartition("_")[2]) for path in shards)
        return max((-1, *(number for number, _ in self.endings), *named))


def scan_rows(files: Iterable[Path], advance: Callable[[int], None]) -> ScannedRows:
    """Read every row of a run folder.

    Args:
        files: Shards, `discarded.jsonl` and `failed.jsonl`. What is no row in them is passed over.
        advance: Told the bytes read, for a progress bar.

    Raises:
        StorageError: a file cannot be read.
    """
    scanned = ScannedRows()
    for path in files:
        for line in read_lines(path):
            advance(len(line) + 1)
            row = decoded_row(line)
            if row is None:
                continue
            summary = summarise(row)
            scanned.endings[summary.batch_number, summary.outcome] += 1
            scanned.spent.add(summary)
            if OUTCOME_POLICY[summary.outcome].done:
                scanned.done.add_done(summary)
            else:
                scanned.done.add_failed(summary)
    return scanned


def identity_of(summary: RowSummary) -> tuple[bytes, int]:
    """Content hash and occurrence of a row that has them."""
    return bytes.fromhex(summary.content_hash), summary.occurrence


def digest(*texts: str) -> bytes:
    """One short key for some texts, in order."""
    state = blake2b(digest_size=HASH_BYTES)
    for part in texts:
        encoded = part.encode("utf-8", "surrogatepass")
        state.update(len(encoded).to_bytes(8, "big") + encoded)
    return state.digest()


def match_done(dataset: Dataset, done: DoneRows) -> bytearray:
    """Which samples of the dataset are done: one byte a sample, 1 for done."""
    flags = bytearray(len(dataset))
    unclaimed = set(done.exact)
    for index in range(len(dataset)):
        identity = dataset.identity(index)
        if identity in unclaimed:
            unclaimed.discard(identity)
            flags[index] = 1
    by_hash = Counter(content_hash for content_hash, _ in unclaimed) + done.surplus
    for index in _open(flags):
        flags[index] = _claim(by_hash, dataset.identity(index)[0])
    by_content: Counter[bytes] = Counter()
    for content_hash, count in by_hash.items():
        if count:
            by_content[done.content_key_by_hash[content_hash]] += count
    if by_content or done.foreign_prompts:
        _match_by_text(dataset, flags, by_content, Counter(done.foreign_prompts))
    return flags


def _match_by_text(dataset: Dataset, flags: bytearray, by_content: Counter[bytes], by_prompt: Counter[bytes]) -> None:
    for index in _open(flags):
        sample = dataset.sample(index)
        flags[index] = _claim(by_content, digest(sample.prompt, sample.image, sample.cwd)) or _claim(
            by_prompt, digest(sample.prompt)
        )


def _open(flags: bytearray) -> Iterator[int]:
    position = flags.find(0)
    while position >= 0:
        yield position
        position = flags.find(0, position + 1)


def _claim(counter: Counter[bytes], key: bytes) -> bool:
    """Take one of a key's rows, if one is left."""
    if counter[key] <= 0:
        return False
    counter[key] -= 1
    return True
