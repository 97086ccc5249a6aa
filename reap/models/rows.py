"""Text sources: what `--calibration` and `--text` name, opened and read row by row.

Nothing is read ahead: a dataset on the hub is streamed, and only as far as its rows are asked for.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from reap.errors import CalibrationError

KINDS = (".txt", ".jsonl", ".parquet", ".csv")
SYNTAX = "[DOMAIN:]SOURCE[=WEIGHT or =NUMBERtok]"


@dataclass(frozen=True)
class TextOption:
    """One `--calibration` or `--text`, taken apart. `rest`: what stands after the name's colon."""

    given: str
    domain: str
    name: str
    rest: tuple[str, ...]
    weight: Fraction
    tokens: int | None

    @classmethod
    def parse(cls, given: str) -> TextOption:
        """Raises CalibrationError for a weight or a number of tokens that is not positive."""
        text, weight, tokens = _amount(given)
        if Path(text).expanduser().exists():
            return cls(given, "", text, (), weight, tokens)
        domain, (name, *rest) = "", text.split(":")
        # A name with a colon before it is a domain unless it is a file, folder or hub name itself.
        if rest and re.fullmatch(r"[\w.+-]+", name) and not name.endswith(KINDS):
            folder = Path(name).exists()
            if "/" in rest[0] or not folder:
                domain, (name, *rest) = name, rest
        return cls(given, domain, name, tuple(rest), weight, tokens)


def _amount(given: str) -> tuple[str, Fraction, int | None]:
    text, equals, amount = given.rpartition("=")
    if not equals or Path(given).expanduser().exists():
        return given, Fraction(1), None
    try:
        tokens = int(amount.removesuffix("tok")) if amount.endswith("tok") else None
        weight = Fraction(1 if tokens is not None else amount)
    except (ValueError, ZeroDivisionError):
        raise CalibrationError(
            f"{given}: {amount!r} is neither a weight nor a number of tokens.",
            f"give {SYNTAX}, e.g. code=2 or code=20000tok",
        ) from None
    if weight <= 0 or (tokens is not None and tokens <= 0):
        raise CalibrationError(f"{given}: {amount} must be more than 0.")
    return text, weight, tokens


@dataclass(frozen=True)
class Chat:
    """A conversation before the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None


@dataclass(frozen=True)
class Rows:
    """Documents of a file or dataset.

    `read` starts anew and yields the place of each row, for messages, and the row. Arrow gives
    every row all columns and every message all fields, null where there are none (`arrow`).
    `endless`: it may be too large to read to its end.
    """

    name: str
    read: Callable[[], Iterator[tuple[str, Any]]]
    column: str = ""
    arrow: bool = False
    endless: bool = False

    @cached_property
    def shape(self) -> tuple[str, ...]:
        """The columns that hold the documents, from the first row. Raises CalibrationError."""
        _, row = next(self.read(), ("", None))
        if row is None:
            raise CalibrationError(f"{self.name} has no text: 0 tokens to work on.", "give text")
        has = ", ".join(map(str, row)) or "none"
        if self.column:
            if self.column not in row:
                raise CalibrationError(
                    f"{self.name} has no column {self.column}; its columns: {has}."
                )
            return (self.column,)
        shapes = (("text",), ("messages",), ("prompt", "completion"))
        found = [s for s in shapes if all(row.get(name) is not None for name in s)]
        found = found or [s for s in shapes if all(name in row for name in s)][:1]
        if not found:
            raise CalibrationError(
                f"{self.name} has no column text, no messages, and no prompt and completion; "
                f"its columns: {has}.",
                "name the column that holds the text: SOURCE:SPLIT:COLUMN, or FILE:COLUMN",
            )
        if len(found) > 1:
            raise CalibrationError(
                f"{self.name} has both {' and '.join(s[0] for s in found)}.",
                "name the column to use: SOURCE:SPLIT:COLUMN, or FILE:COLUMN",
            )
        return found[0]

    def documents(self) -> Iterator[tuple[str, str | Chat]]:
        """Place and content of every document. Raises CalibrationError at a row without one."""
        shape = self.shape
        chat: bool | None = True if len(shape) == 2 else None
        for place, row in self.read():
            at = f"{place} of {self.name}"
            values = [row.get(name) for name in shape]
            for name, value in zip(shape, values):
                if name not in row or (value is None and chat is not None):
                    has = [str(key) for key in row if row[key] is not None]
                    raise CalibrationError(
                        f"{at} has no {name}, unlike the rows before it; "
                        f"it has {', '.join(has) or 'nothing'}."
                    )
            if len(shape) == 2:
                messages = [
                    message
                    for name, role, value in zip(shape, ("user", "assistant"), values)
                    for message in _turn(at, name, role, value)
                ]
            elif chat is not False and isinstance(values[0], list):
                chat, messages = True, _messages(at, shape[0], values[0])
            elif isinstance(values[0], str) and not chat and shape[0] != "messages":
                chat = False
                yield place, _unicode(at, values[0])
                continue
            else:
                # A column `messages` or `text` says what it ought to hold.
                wanted = chat if chat is not None else shape[0] == "messages"
                kind = "a list of messages" if wanted else "a string"
                raise CalibrationError(f"{at}: {shape[0]} is {_type(values[0])}, not {kind}.")
            if self.arrow:
                messages = _without_null(messages)
            yield place, Chat(messages, self._tools(at, row.get("tools")))

    def _tools(self, at: str, tools: Any) -> list[Any] | None:
        if isinstance(tools, str) and tools.strip():
            try:
                tools = json.loads(tools)
            except json.JSONDecodeError:
                raise CalibrationError(f"{at}: tools is a string that is not JSON.") from None
        if not tools:
            return None
        if not isinstance(tools, list):
            raise CalibrationError(f"{at}: tools is {_type(tools)}, not a list of tools.")
        return _without_null(tools) if self.arrow else tools


def _turn(at: str, name: str, role: str, value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list):
        return _messages(at, name, value)
    raise CalibrationError(f"{at}: {name} is {_type(value)}, not a string or a list of messages.")


def _messages(at: str, name: str, value: list[Any]) -> list[dict[str, Any]]:
    if not value:
        raise CalibrationError(f"{at}: {name} is an empty list.")
    for number, message in enumerate(value, 1):
        where = f"{at}: message {number} of {name}"
        if not isinstance(message, dict):
            raise CalibrationError(f"{where} is {_type(message)}, not an object with a role.")
        if not isinstance(message.get("role"), str):
            has = ", ".join(map(str, message)) or "nothing"
            raise CalibrationError(f"{where} has no role; it has {has}.")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise CalibrationError(f"{where}: content is {_type(content)}, not a string.")
    return value


def _unicode(at: str, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise CalibrationError(f"{at} is not valid Unicode: it has a lone surrogate.") from None
    return text


def _type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(type(value), "a number" if isinstance(value, int | float) else "binary data")


def _without_null(value: Any) -> Any:
    """Without the null fields that Arrow fills in."""
    if isinstance(value, Mapping):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


# Files


def file_rows(path: Path, column: str = "") -> Rows:
    """A local .jsonl, .parquet or .csv file. Raises CalibrationError if it cannot be opened."""
    if path.suffix == ".jsonl":
        return Rows(str(path), lambda: _json_lines(path), column)
    if path.suffix == ".csv":
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                header = next(csv.reader(file), [])
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise CalibrationError(f"{path} cannot be read: {error}") from None
        if not header:
            raise CalibrationError(f"{path} has no text: 0 tokens to work on.", "give text")

        def load() -> Any:
            import datasets

            # Else pandas guesses types, and takes texts like "NA" for missing ones.
            strings = datasets.Features({name: datasets.Value("string") for name in header})
            options = {"features": strings, "keep_default_na": False}
            return datasets.load_dataset("csv", data_files=str(path), streaming=True, **options)

    elif path.suffix == ".parquet":

        def load() -> Any:
            import datasets

            return datasets.load_dataset("parquet", data_files=str(path), streaming=True)

    else:
        raise CalibrationError(
            f"{path} is of a kind that reap cannot read.", f"give one of {', '.join(KINDS)}"
        )
    rows = _opened(str(path), load)["train"]
    return Rows(str(path), lambda: _dataset_rows(str(path), rows), column, arrow=True)


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        # Only "\n" ends a line: JSON strings may hold U+2028 and other marks that look like ends.
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise CalibrationError(
                        f"{path} is not JSON lines of objects: line {number} is {_type(row)}."
                    )
                yield f"line {number}", row
    except json.JSONDecodeError as error:
        raise CalibrationError(f"{path} is not JSON lines: line {number}: {error}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} cannot be read: {error}") from None


# Datasets

HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:/([\w.+-]+))?(?:@([\w./-]+))?")


def directory_rows(path: Path, split: str = "", column: str = "") -> Rows:
    """A directory written by `save_to_disk`, or a folder of data files."""

    def load() -> Any:
        import datasets

        saved = any((path / name).exists() for name in ("state.json", "dataset_dict.json"))
        if saved:
            try:
                return datasets.load_from_disk(str(path))
            except IndexError:  # what the library makes of a dataset saved without rows
                raise CalibrationError(f"{path} has no text: 0 tokens to work on.") from None
        return datasets.load_dataset(str(path), streaming=True)

    return _split_rows(str(path), _opened(str(path), load), split, column)


def hub_rows(name: str, split: str = "", column: str = "") -> Rows:
    """A Hugging Face dataset, ORG/NAME[/CONFIG][@REVISION], streamed."""
    match = HUB_NAME.fullmatch(name)
    assert match is not None
    repository, config, revision = match.groups()

    def load() -> Any:
        import datasets

        return datasets.load_dataset(repository, config, revision=revision, streaming=True)

    return _split_rows(name, _opened(name, load, hub=True), split, column, endless=True)


def _opened(name: str, load: Callable[[], Any], *, hub: bool = False) -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    hint = None
    try:
        return load()
    except CalibrationError:
        raise
    except (ConnectionError, datasets.exceptions.DatasetNotFoundError) as error:
        reason: Exception = error
        if hub:
            hint = (
                "check the name and the network; or save it elsewhere with save_to_disk of the "
                "library datasets and give that directory"
            )
    # The library, its file systems and parsers raise nearly anything.
    except Exception as error:
        reason = error
    kind = f"no such file or folder here, and the dataset {name} on the hub" if hub else name
    raise CalibrationError(f"{kind} cannot be opened: {_first_line(reason)}", hint)


def _split_rows(name: str, data: Any, split: str, column: str, *, endless: bool = False) -> Rows:
    if isinstance(data, dict):
        splits = ", ".join(data)
        if not split and len(data) > 1:
            raise CalibrationError(f"{name} has several splits: {splits}.", f"e.g. {name}:train")
        chosen = data.get(split) if split else next(iter(data.values()), None)
        if chosen is None:
            raise CalibrationError(f"{name} has no split {split}; its splits: {splits}.")
    elif split and split != str(data.split or ""):
        raise CalibrationError(
            f"{name} has no split {split}: it is one saved split, {data.split or 'without a name'}."
        )
    else:
        chosen = data
    label = f"{name}:{split}" if split else name
    return Rows(label, lambda: _dataset_rows(label, chosen), column, arrow=True, endless=endless)


def _dataset_rows(name: str, rows: Any) -> Iterator[tuple[str, Any]]:
    iterator = iter(rows)
    number = 0
    while True:
        number += 1
        try:
            row = next(iterator)
        except StopIteration:
            return
        # As when opening: parsers and file systems raise nearly anything.
        except Exception as error:
            raise CalibrationError(
                f"{name} cannot be read at row {number}: {_first_line(error)}"
            ) from None
        yield f"row {number}", row


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
