"""The training text and, apart from it, the documents for calibration and evaluation.

Five domains: code (Python's standard library), prose (the King James Bible), docs (Python's
documentation), tools (made-up tool calls in chat form) and math (made-up arithmetic). A source
document (a file, a chapter) goes to exactly one of training, calibration and evaluation; so does
every made-up record. The same inputs and seed give the same corpus.
"""

import json
import random
import re
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SAMPLING_WEIGHTS = {"code": 0.32, "prose": 0.27, "docs": 0.27, "tools": 0.07, "math": 0.07}
"""How often a training sequence comes from each domain."""

PASSAGES_PER_DOCUMENT = 2
"""Held-out passages taken from one source document at most, so that they differ."""


@dataclass(frozen=True)
class CorpusConfig:
    """Where the text comes from and how much of it is used.

    Attributes:
        stdlib: directory of Python's standard library.
        docs: directory searched for `*.rst.txt`, or None to use the library's own topics.
        kjv: text of the King James Bible, or None to use the library's docstrings.
        seed: decides which documents are held out and what is made up.
        text_characters: training characters of code, prose and docs, each.
        tools_characters, math_characters: training characters of the made-up domains.
    """

    stdlib: Path
    docs: Path | None
    kjv: Path | None
    seed: int = 0
    text_characters: int = 4_000_000
    tools_characters: int = 1_000_000
    math_characters: int = 800_000
    text_passages: int = 49
    tools_passages: int = 43
    math_passages: int = 39
    text_passage_characters: int = 2000
    made_up_passage_characters: int = 500


@dataclass(frozen=True)
class Domain:
    """The documents of one domain, by use."""

    name: str
    training: tuple[str, ...]
    calibration: tuple[str, ...]
    evaluation: tuple[str, ...]


def build_corpus(config: CorpusConfig) -> tuple[Domain, ...]:
    """Read or make up the documents of all domains."""
    code = list(_code(config.stdlib))
    prose = _prose(config.kjv) if config.kjv else _docstrings(code)
    docs = _docs(config.docs) if config.docs else _topics(config.stdlib)
    return (
        _held_out("code", code, config),
        _held_out("prose", prose, config),
        _held_out("docs", docs, config),
        _made_up("tools", tool_call, config.tools_passages, config.tools_characters, config),
        _made_up("math", exercise, config.math_passages, config.math_characters, config),
    )


def write_texts(domains: Iterable[Domain], directory: Path) -> None:
    """Write `<domain>.calibration.jsonl` and `<domain>.evaluation.jsonl`, a document per line."""
    directory.mkdir(parents=True, exist_ok=True)
    for domain in domains:
        for use in ("calibration", "evaluation"):
            lines = [
                json.dumps({"text": text, "domain": domain.name}) + "\n"
                for text in getattr(domain, use)
            ]
            (directory / f"{domain.name}.{use}.jsonl").write_text("".join(lines), encoding="utf-8")


def _code(stdlib: Path) -> Iterator[str]:
    """Modules of the standard library, without tests and tables."""
    skipped = {"site-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"}
    for path in sorted(stdlib.rglob("*.py")):
        if not skipped & set(path.relative_to(stdlib).parts):
            yield path.read_text(encoding="utf-8", errors="ignore")


def _prose(kjv: Path) -> list[str]:
    """Chapters of the Bible; each opens with a line such as `1 Kings 3`."""
    return re.split(r"\n\n(?=\S.* \d+\n\n)", kjv.read_text(encoding="utf-8").strip("\n"))


def _docs(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*.rst.txt")):
        yield path.read_text(encoding="utf-8", errors="ignore")


def _docstrings(code: Iterable[str]) -> list[str]:
    """The docstrings of each module: stands in for prose when only the library is at hand."""
    return ["\n".join(re.findall(r'"""(.*?)"""', module, re.DOTALL)) for module in code]


def _topics(stdlib: Path) -> list[str]:
    """The help texts of pydoc, in documents of some size: stand in for the documentation."""
    text = (stdlib / "pydoc_data" / "topics.py").read_text(encoding="utf-8")
    text = text.replace("\\n'\n", "\n").replace("\\n", "\n")
    return list(_passages(text, 6000))


def _passages(document: str, characters: int) -> Iterator[str]:
    """Cut at line ends, as soon as a passage has `characters`; what remains is left out."""
    passage = ""
    for line in document.splitlines(keepends=True):
        passage += line
        if len(passage) >= characters:
            yield passage
            passage = ""


def _take(documents: Iterator[str], characters: int) -> Iterator[str]:
    """Documents until together they have `characters`; the last is cut short."""
    for document in documents:
        yield document[:characters]
        characters -= len(document)
        if characters <= 0:
            return


def _held_out(name: str, documents: Iterable[str], config: CorpusConfig) -> Domain:
    """Shuffle the documents, hold some out and train on what follows."""
    distinct = [document for document in dict.fromkeys(documents) if document.strip()]
    random.Random(f"{config.seed} {name}").shuffle(distinct)
    remaining = iter(distinct)

    def hold_out() -> tuple[str, ...]:
        passages: list[str] = []
        for document in remaining:
            found = list(_passages(document, config.text_passage_characters))
            passages += found[:PASSAGES_PER_DOCUMENT]
            if len(passages) >= config.text_passages:
                return tuple(passages[: config.text_passages])
        raise ValueError(f"not enough text for {name}: {len(distinct)} documents found")

    calibration, evaluation = hold_out(), hold_out()
    training = tuple(_take(remaining, config.text_characters))
    if not training:
        raise ValueError(f"no text left to train on for {name}")
    return Domain(name, training, calibration, evaluation)


def _made_up(
    name: str,
    record: Callable[[random.Random], str],
    passages: int,
    characters: int,
    config: CorpusConfig,
) -> Domain:
    """Join records to documents; no held-out record occurs twice or in training."""
    generator = random.Random(f"{config.seed} {name}")
    held_out: set[str] = set()

    def document(*, hold_out: bool) -> str:
        text = ""
        while len(text) < config.made_up_passage_characters:
            new = record(generator)
            if new not in held_out:
                text += new
                if hold_out:
                    held_out.add(new)
        return text

    calibration = tuple(document(hold_out=True) for _ in range(passages))
    evaluation = tuple(document(hold_out=True) for _ in range(passages))
    endless = iter(lambda: document(hold_out=False), "")
    return Domain(name, tuple(_take(endless, characters)), calibration, evaluation)


@dataclass(frozen=True)
class Tool:
    """A made-up function: its arguments and how a person asks for it."""

    name: str
    arguments: tuple[str, ...]
    request: str


DIRECTORIES = ("src", "docs", "tests", "data", "logs", "tmp", "lib", "notes")

TOOLS = (
    Tool("get_weather", ("city", "date"), "What is the weather in {city} on {date}?"),
    Tool(
        "search_flights",
        ("origin", "destination", "date"),
        "Find flights from {origin} to {destination} on {date}.",
    ),
    Tool("send_email", ("to", "subject", "body"), "Email {to} about the {subject}: {body}"),
    Tool(
        "create_event", ("title", "start", "minutes"), "Book a {minutes} minute {title} at {start}."
    ),
    Tool("lookup_stock", ("ticker",), "How is {ticker} doing?"),
    Tool("translate_text", ("text", "target"), "Say '{text}' in {target}."),
    Tool("set_timer", ("minutes", "label"), "Set a {minutes} minute timer for {label}."),
    Tool("list_files", ("path", "recursive"), "What is in {path}?"),
)


def _one_of(*values: object) -> Callable[[random.Random], object]:
    return lambda generator: generator.choice(values)


ARGUMENTS: dict[str, Callable[[random.Random], object]] = {
    "city": _one_of("Paris", "Lima", "Oslo", "Cairo", "Kyoto", "Quito", "Accra", "Delhi", "Hanoi"),
    "date": lambda generator: f"2026-{generator.randint(1, 12):02}-{generator.randint(1, 28):02}",
    "origin": _one_of("CDG", "LIM", "OSL", "JFK", "DEL", "ACC"),
    "destination": _one_of("CAI", "KIX", "UIO", "HAN", "TRN", "SYD"),
    "to": _one_of("ana@example.com", "li@example.org", "omar@example.net", "eva@example.com"),
    "subject": _one_of("minutes", "invoice", "travel plan", "budget", "offer", "lease"),
    "body": _one_of("see attached", "please confirm", "thanks", "call me", "it is done", "sign it"),
    "title": _one_of("standup", "review", "dentist", "lunch", "lesson", "interview"),
    "start": lambda generator: f"{generator.randint(8, 19):02}:{generator.randrange(0, 60, 15):02}",
    "minutes": lambda generator: generator.randint(1, 90),
    "ticker": lambda generator: "".join(generator.choices(string.ascii_uppercase, k=3)),
    "text": lambda generator: (
        f"{generator.choice(['good', 'see you', 'welcome', 'meet me', 'closed', 'until'])} "
        f"{generator.choice(['today', 'at noon', 'tonight', 'tomorrow', 'on Sunday', 'here'])}"
    ),
    "target": _one_of("fr", "es", "no", "ja", "it", "pt", "de", "hi"),
    "label": _one_of("tea", "laundry", "call", "bread", "eggs", "nap"),
    "path": lambda generator: "/".join(generator.choices(DIRECTORIES, k=3)),
    "recursive": _one_of(True, False),
}


def tool_call(generator: random.Random) -> str:
    """A request and the call that answers it, in chat form."""
    tool = generator.choice(TOOLS)
    arguments = {name: ARGUMENTS[name](generator) for name in tool.arguments}
    call = json.dumps({"name": tool.name, "arguments": arguments})
    return (
        f"<|im_start|>user\n{tool.request.format(**arguments)}<|im_end|>\n"
        f"<|im_start|>assistant\n{call}<|im_end|>\n"
    )


def exercise(generator: random.Random) -> str:
    """One line of arithmetic with its result."""
    a, b = generator.randrange(100), generator.randrange(100)
    factor = generator.randrange(2, 10)
    return generator.choice(
        (
            f"{a} + {b} = {a + b}\n",
            f"{a} * {b} = {a * b}\n",
            f"({a} + {b}) * {factor} = {a + b} * {factor} = {(a + b) * factor}\n",
            f"If x + {a} = {a + b} then x = {a + b} - {a} = {b}.\n",
        )
    )
