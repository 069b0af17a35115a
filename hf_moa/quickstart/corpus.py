"""English that every CPython installation carries, as plain text and as labelled examples.

Two sources, read without importing the modules they document:

- the language reference behind `help()`, in `pydoc_data.topics` (about 0.5 MB);
- the docstrings of the standard library, parsed from its `.py` files (about 1.6 MB).

The classification task is: given a docstring, name the top-level package it was written for.
So that the text does not hand over the answer, every word that contains the name of any of the
candidate packages is replaced by the mask token, whichever package the docstring belongs to.
"""

import ast
import hashlib
import re
import sysconfig
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Third-party code, tests (their docstrings are few and odd) and generated or vendored trees.
SKIPPED_DIRECTORIES = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
MASK_TOKEN = "[MASK]"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Fields that hold statements, in the order of a statement. What is documented stands in no expression.
_BLOCKS = ("body", "handlers", "cases", "orelse", "finalbody")


@dataclass(frozen=True)
class Docstring:
    """One docstring: its text, indentation cleaned, and the top-level package it stands in."""

    package: str
    text: str


@dataclass(frozen=True)
class Example:
    """A docstring with the candidates' names masked, and its class as an index into `labels`."""

    text: str
    label: int


@dataclass(frozen=True)
class Corpus:
    """All the text of a quickstart.

    `labels` are package names in alphabetical order. `pretraining` and `heldout` are passages of
    plain text; no text of `heldout` or `evaluation` stands in `pretraining`, and none of
    `evaluation` in `train`, comparing by `normalise`.
    """

    labels: list[str]
    train: list[Example]
    evaluation: list[Example]
    pretraining: list[str]
    heldout: list[str]

    @property
    def majority_rate(self) -> float:
        """Accuracy on `evaluation` of always answering with `train`'s most frequent class."""
        majority = Counter(example.label for example in self.train).most_common(1)[0][0]
        return sum(example.label == majority for example in self.evaluation) / len(self.evaluation)


def normalise(text: str) -> str:
    """`text` in lower case with every run of other than letters and digits made one space."""
    return re.sub(r"[\W_]+", " ", text.lower()).strip()


def read_topics() -> list[str]:
    """The sections of Python's language reference, in alphabetical order of their topic.

    Raises:
        ValueError: the installation lacks `pydoc_data` (some distributions split it off).
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            "the quickstart reads pydoc_data.topics of the standard library, which this Python "
            "installation lacks; install the full standard library (on Debian: libpython3-stdlib)"
        ) from error
    return [topics[name] for name in sorted(topics)]


def read_docstrings(root: str | Path | None = None) -> list[Docstring]:
    """The docstrings of all modules, classes and functions below `root`, in order of their path.

    Args:
        root: folder of Python sources; default: this interpreter's standard library.

    Files are parsed, not imported; those that do not parse are left out, as are
    `SKIPPED_DIRECTORIES`.
    """
    root = Path(root if root is not None else sysconfig.get_paths()["stdlib"])
    docstrings = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_DIRECTORIES.intersection(parts[:-1]) or parts[0].startswith("config-"):
            continue
        package = parts[0].removesuffix(".py")
        docstrings += [Docstring(package, text) for text in _docstrings_of(path)]
    return docstrings


def _docstrings_of(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        # Old modules hold invalid escape sequences, which is not this program's business.
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return
    left: deque[ast.AST] = deque([tree])
    while left:
        node = left.popleft()
        for block in _BLOCKS:
            left.extend(getattr(node, block, ()))
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text


def choose_labels(
    docstrings: Iterable[Docstring], num_labels: int = 10, min_words: int = 5, min_texts: int = 50
) -> list[str]:
    """The `num_labels` public packages with the most distinct docstrings, in alphabetical order.

    Args:
        docstrings: candidates.
        num_labels: classes wanted; fewer come back where fewer qualify.
        min_words: words a docstring needs to count.
        min_texts: distinct docstrings a package needs to qualify.

    Raises:
        ValueError: fewer than two packages qualify.
    """
    texts: dict[str, set[str]] = defaultdict(set)
    for docstring in docstrings:
        normal = normalise(docstring.text)
        if not docstring.package.startswith("_") and len(normal.split()) >= min_words:
            texts[docstring.package].add(normal)
    # Ties go to the alphabet, so that the choice does not hang on the order of the files.
    ranked = sorted(texts, key=lambda package: (-len(texts[package]), package))
    labels = sorted(package for package in ranked[:num_labels] if len(texts[package]) >= min_texts)
    if len(labels) < 2:
        raise ValueError(
            f"docstrings must hold at least 2 packages with {min_texts} docstrings or more "
            f"(got {len(labels)}); is the standard library's source installed?"
        )
    return labels


def mask_names(text: str, names: Iterable[str], mask_token: str = MASK_TOKEN) -> str:
    """`text` with every word that contains one of `names`, in any case, made `mask_token`."""
    alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    # from the start of a word: otherwise each of its letters would be tried
    return re.sub(rf"(?<!\w)\w*(?:{alternatives})\w*", mask_token, text, flags=re.IGNORECASE)


def label_docstrings(
    docstrings: Iterable[Docstring],
    labels: list[str],
    *,
    eval_fraction: float = 0.2,
    min_words: int = 5,
    seed: int = 0,
) -> tuple[list[Example], list[Example]]:
    """Examples for training and for evaluation, with the labels' names masked.

    A text that stands in one package several times is taken once, one that stands in several
    packages not at all (both compared by `normalise`, after masking). The split is by a hash of
    the text and `seed`, within each class: it depends neither on the order of the files nor on
    the platform. Methods that differ by a word ("Return the width", "Return the height") count as
    different texts, so the two sides are of the same kind, though never equal.

    Args:
        docstrings: what to draw from; packages outside `labels` are ignored.
        labels: class names.
        eval_fraction: share of every class that goes to evaluation, between 0 and 1.
        min_words: words that must be left besides the mask.
        seed: another seed gives another split.

    Returns:
        training and evaluation examples, each in the order of the hash.
    """
    if not 0 < eval_fraction < 1:
        raise ValueError(f"eval_fraction must be between 0 and 1 (got {eval_fraction})")
    index = {package: i for i, package in enumerate(labels)}
    variants: dict[str, list[Example]] = defaultdict(list)
    for docstring in docstrings:
        if docstring.package in index:
            text = mask_names(docstring.text, labels)
            variants[normalise(text)].append(Example(text, index[docstring.package]))

    by_label: dict[int, list[tuple[str, Example]]] = defaultdict(list)
    for normal, examples in variants.items():
        long_enough = len(normalise(examples[0].text.replace(MASK_TOKEN, " ")).split()) >= min_words
        if long_enough and len({example.label for example in examples}) == 1:
            digest = hashlib.sha256(f"{seed}:{normal}".encode()).hexdigest()
            chosen = min(examples, key=lambda example: example.text)
            by_label[chosen.label].append((digest, chosen))

    train: list[tuple[str, Example]] = []
    evaluation: list[tuple[str, Example]] = []
    for members in by_label.values():
        members.sort(key=lambda member: member[0])
        num_eval = round(eval_fraction * len(members))
        evaluation += members[:num_eval]
        train += members[num_eval:]
    return (
        [example for _, example in sorted(train, key=lambda member: member[0])],
        [example for _, example in sorted(evaluation, key=lambda member: member[0])],
    )


def build_corpus(
    *,
    num_labels: int = 10,
    eval_fraction: float = 0.2,
    heldout_fraction: float = 0.05,
    seed: int = 0,
    docstrings: list[Docstring] | None = None,
    topics: list[str] | None = None,
) -> Corpus:
    """Reads and splits everything a quickstart needs; the same arguments give the same corpus.

    Args:
        num_labels: classes of the classification task.
        eval_fraction: share of every class kept for evaluation.
        heldout_fraction: share of the remaining passages kept to measure the masked-language loss.
        seed: of both splits.
        docstrings, topics: text to use instead of this installation's.
    """
    docstrings = read_docstrings() if docstrings is None else docstrings
    topics = read_topics() if topics is None else topics
    labels = choose_labels(docstrings, num_labels)
    train, evaluation = label_docstrings(docstrings, labels, eval_fraction=eval_fraction, seed=seed)

    # Evaluation texts are kept out of pretraining too: by the form with the names masked, since
    # the same docstring may stand elsewhere under another package's name.
    taken = {normalise(example.text) for example in evaluation}
    # A topic is split at blank lines, so that a held-out passage is a paragraph or more.
    texts = [docstring.text for docstring in docstrings]
    texts += [passage for topic in topics for passage in _passages(topic)]
    pretraining: list[str] = []
    heldout: list[str] = []
    for text in texts:
        if (normal := normalise(mask_names(text, labels))) in taken or not normal:
            continue
        taken.add(normal)
        digest = hashlib.sha256(f"heldout:{seed}:{normal}".encode()).digest()
        is_heldout = int.from_bytes(digest[:8], "big") < heldout_fraction * 2**64
        (heldout if is_heldout else pretraining).append(text)
    return Corpus(labels, train, evaluation, pretraining, heldout)


def _passages(text: str, max_words: int = 150) -> Iterator[str]:
    """`text` cut at blank lines into passages of about `max_words` words."""
    passage: list[str] = []
    words = 0
    for paragraph in re.split(r"\n\s*\n", text):
        length = len(paragraph.split())
        if passage and words + length > max_words:
            yield "\n\n".join(passage)
            passage, words = [], 0
        passage.append(paragraph)
        words += length
    if passage:
        yield "\n\n".join(passage)
