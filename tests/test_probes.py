"""How many tokens the model's answer is measured on, and which."""

from __future__ import annotations

from typing import Any

import pytest

from reap.artifacts import Format
from reap.calibrate import CalibrationSettings
from reap.calibrate.probes import Probes
from reap.cli import main
from reap.cli.pipeline import _changed
from reap.errors import ReapError
from reap.models.source import open_source
from reap.models.text import TokenSequence

FORMATS = (Format(2, 64, "affine"),)
# The embedded model has layers 0 to 5, experts in 1 to 5: 6 + 5 + 4 + 3 + 2 passes with the head.
PASSES = {(): 20, FORMATS: 40}


def sequences(*lengths: int, domain: int = 0) -> list[TokenSequence]:
    return [
        TokenSequence(domain, document, tuple(range(length)))
        for document, length in enumerate(lengths)
    ]


def choose(parts: list[TokenSequence], formats: tuple[Format, ...], **settings: Any) -> Probes:
    domains = len({part.domain for part in parts})
    made = CalibrationSettings(**settings)
    return Probes.choose(parts, made, open_source("embedded"), formats, domains)


def total(parts: list[TokenSequence]) -> int:
    return sum(len(part.tokens) for part in parts)


@pytest.mark.parametrize("formats", [(), FORMATS], ids=["drop", "drop and low"])
def test_variants_are_no_more_work_than_the_rest(formats: tuple[Format, ...]) -> None:
    for count, all_of_them in ((12, True), (4, False)):
        parts = sequences(*[500] * count)
        probes = choose(parts, formats, probe_tokens=1900 if formats else 2000)
        own = 6 * (500 * count + 2000)
        assert probes.parts == parts[:4]
        assert (probes.changed is probes.parts) == (PASSES[formats] * 2000 <= own)
        work = PASSES[formats] * total(probes.changed)
        assert work <= own
        assert all_of_them or not formats or work > own - PASSES[formats]


def test_probes_of_the_shipped_text_are_all_used_from_20_000_tokens_on() -> None:
    parts = [part for domain in range(5) for part in sequences(*[500] * 8, domain=domain)]
    probes = choose(parts, FORMATS)
    assert probes.changed is probes.parts and total(probes.parts) == 5 * 500


def test_every_domain_has_at_least_64_tokens() -> None:
    parts = [part for domain in range(3) for part in sequences(90, 90, domain=domain)]
    probes = choose(parts[:5], FORMATS, probe_tokens=500)
    assert 6 * 2 * total(parts[:5]) // 40 < 3 * 64
    assert [len(part.tokens) for part in probes.changed] == [64] * 3
    assert [part.domain for part in probes.changed] == [0, 1, 2]


@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [
        (100, [[20, 20, 20], [30, 20]]),  # as many as the probes were asked for: all of them
        (99, [[20, 20, 9], [30, 19]]),
        (41, [[20], [20]]),
        (42, [[20, 1], [21]]),
        (1, [[1], [1]]),
    ],
)
def test_each_domains_first_tokens(tokens: int, lengths: list[list[int]]) -> None:
    parts = sequences(20, 20, 20, 20) + sequences(30, 20, 20, domain=1)
    probes = choose(parts, FORMATS, probe_tokens=100, sensitivity_tokens=tokens)
    assert probes.parts == parts[:3] + parts[4:6]
    of_domains = [[p for p in probes.changed if p.domain == domain] for domain in (0, 1)]
    assert [[len(p.tokens) for p in some] for some in of_domains] == lengths
    for some, all_of_it in zip(of_domains, (parts[:4], parts[4:])):
        for part, whole in zip(some, all_of_it):
            assert part.document == whole.document
            assert part.tokens == whole.tokens[: len(part.tokens)]


def test_none_without_sensitivity_or_probes() -> None:
    parts = sequences(50, 50)
    assert choose(parts, FORMATS, sensitivity=False).changed == []
    assert choose(parts, FORMATS, sensitivity=False).parts == parts
    assert choose(parts, FORMATS, probe_tokens=0) == Probes([], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sensitivity-tokens", "0"], "the sensitivity cannot be measured on 0 tokens."),
        (["--sensitivity-tokens", "-5"], "the sensitivity cannot be measured on -5 tokens."),
        (
            ["--sensitivity-tokens", "5", "--no-sensitivity"],
            "sensitivity_tokens is 5, but no sensitivity is to be measured.",
        ),
        (
            ["--sensitivity-tokens", "2049"],
            "sensitivity_tokens is 2,049, more than the 2,048 probe_tokens that they are taken",
        ),
        (["--sensitivity-tokens", "5", "--probe-tokens", "0"], "more than the 0 probe_tokens"),
    ],
)
def test_what_contradicts_itself_is_refused(
    options: list[str], message: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "embedded", "--tokens", "100", *options]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_the_setting_is_refused_wherever_it_comes_from() -> None:
    with pytest.raises(ReapError, match="cannot be measured on 0 tokens") as raised:
        CalibrationSettings(sensitivity_tokens=0)
    assert raised.value.hint == "--no-sensitivity leaves it out"


def test_a_file_from_before_the_setting_was_made_with_its_default() -> None:
    before = {"tokens": 5}
    assert _changed(before, before | {"sensitivity_tokens": None}) == ""
    found = _changed(before, before | {"sensitivity_tokens": 7})
    assert found == "sensitivity_tokens is None, the recipe says 7"
