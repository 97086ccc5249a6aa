"""Conversations into tokens, through the model's own chat template.

Control tokens come from the template only. A special token that is spelled out in a message is
encoded as the characters it consists of, as a server has to do against injection. Not covered:
added tokens that the tokenizer does not call special (`<think>` of some models), which templates
look for in messages, and tokenizers that render chats in their own code, which is left to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reap.errors import CalibrationError


class ChatRenderer:
    """Renders and encodes. Raises CalibrationError if the tokenizer has no chat template."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers import PreTrainedTokenizerBase

        self._tokenizer = tokenizer
        inner = getattr(tokenizer, "_tokenizer", tokenizer)
        method = getattr(type(inner), "apply_chat_template", None)
        self._own_code = method is not PreTrainedTokenizerBase.apply_chat_template
        if method is None or not (
            getattr(tokenizer, "has_chat_template", False)
            or getattr(tokenizer, "chat_template", None)
            or self._own_code
        ):
            raise _no_template(getattr(tokenizer, "name_or_path", "this model"))
        special = {
            token.content: index
            for index, token in inner.added_tokens_decoder.items()
            if token.special and len(token.content) > 1
        }
        self._special_ids = frozenset(special.values())
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def __call__(self, messages: list[dict[str, Any]], tools: Any = None) -> tuple[str, list[int]]:
        """The conversation as text and as tokens. Raises whatever the template raises."""
        if self._own_code:
            return self._render(messages, tools, tokenize=False), _ids(
                self._render(messages, tools, tokenize=True)
            )
        mark = _unused_word([messages, tools])
        spelled: list[str] = []

        def hide(found: re.Match[str]) -> str:
            spelled.append(found[0])
            return f"{mark}{len(spelled) - 1}x"

        hidden, tools = _map_strings([messages, tools], lambda text: self._special.sub(hide, text))
        rendered = self._render(hidden, tools, tokenize=False)
        pieces = re.split(rf"{mark}(\d+)x", rendered)
        text, ids = "", list[int]()
        for number, piece in enumerate(pieces):
            if number % 2:
                piece = spelled[int(piece)]
                ids += self._as_characters(piece)
            elif piece:
                ids += self._tokenizer.encode(piece, add_special_tokens=False)
            text += piece
        return text, ids

    def _render(self, messages: list[dict[str, Any]], tools: Any, *, tokenize: bool) -> Any:
        apply = self._tokenizer.apply_chat_template
        given = {} if tools is None else {"tools": tools}
        # A call without text: templates print null as "None".
        messages = [m if m.get("content") is not None else {**m, "content": ""} for m in messages]
        try:
            return apply(_with_objects(messages), tokenize=tokenize, **given)
        except TypeError:
            # Some templates join the arguments of a call as text.
            return apply(messages, tokenize=tokenize, **given)

    def _as_characters(self, token: str) -> list[int]:
        """Tokens of what a special token is spelled like."""
        for parts in ([token], [token[:1], token[1:]], list(token)):
            ids: list[int] = []
            for part in parts:
                ids += self._tokenizer.encode(
                    part, add_special_tokens=False, split_special_tokens=True
                )
            if not self._special_ids.intersection(ids):
                break
        return ids


def _no_template(path: str) -> CalibrationError:
    code = sorted(file.name for file in Path(path).glob("*.py"))
    message = f"the tokenizer of {path} has no chat template, and the text is conversations."
    if code:
        return CalibrationError(
            message,
            f"some models (Kimi-K3) render chats in Python code: pass --trust-remote-code if you "
            f"trust the code beside it ({', '.join(code)}); or give plain text",
        )
    return CalibrationError(message, "give text that is rendered already, in a column `text`")


def _ids(encoded: Any) -> list[int]:
    return list(encoded["input_ids"] if isinstance(encoded, Mapping) else encoded)


def _unused_word(texts: Any) -> str:
    everything, word = json.dumps(texts, default=str), "reapmark"
    while word in everything:
        word += "z"
    return word


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _map_strings(item, change) for key, item in value.items()}
    return value


def _with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments of tool calls as objects, where they are JSON in a string."""
    return [
        {**message, "tool_calls": [_call(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            return {**call, "arguments": json.loads(arguments)}
        except json.JSONDecodeError:
            return call
    return call
