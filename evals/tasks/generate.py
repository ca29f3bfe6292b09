"""The items of the bundled tasks, made from a seed.

A task has several sheets. A sheet is a long prefix of examples that its items share, with a notation of its own: what
to answer can be read from the sheet alone, so that a block of another sheet in its place shows in the answer. Items of
different sheets follow each other, so that few of them fill a small pool with different prefixes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict, TypeVar

from vllm_kvplug.evals.tasks.words import CAPITALS, WORDS

NUM_EXAMPLE_ROWS = 14
NUM_EXAMPLE_CAPITALS = 6
NUM_EXAMPLE_COPIES = 12
NUM_EXAMPLE_SUMS = 40
NUM_EXAMPLE_CHOICES = 3
NUM_CHOICES = 4
NUM_CHOICE_SHEETS = 5


class Item(TypedDict):
    """A prompt and its one right answer; `sheet` is the number of its shared prefix."""

    sheet: int
    prompt: str
    target: str


class ChoiceItem(TypedDict):
    """A prompt and continuations, of which the one at `gold` is right."""

    sheet: int
    prompt: str
    choices: list[str]
    gold: int


_AnyItem = TypeVar("_AnyItem", Item, ChoiceItem)

# Separator of a counted row, by sheet. All prompts are equally long: lm-eval asks in the order of lengths, and shall
# not ask one sheet after the other.
_SEPARATORS = (" - ", " > ", " / ", " | ", " ; ", " : ", " ~ ", " * ")
_NUMBERS_IN_A_ROW = 4

# Question and answer about a country and its capital, by sheet.
_CAPITALS = (
    ("The capital of {country}", "is the city of {capital}."),
    ("Question: What is the capital city of {country}?\nAnswer:", "The capital city of {country} is {capital}."),
    ("Country: {country}; capital:", "{capital} (capital of {country})"),
    ("Travel guide, chapter about {country}. The seat of the government is in", "{capital}, {country}."),
    ("{country}'s government sits in", "{capital}, the capital of {country}."),
    ("Q: Which city is the capital of {country}?\nA:", "{capital} is the capital of {country}."),
)
# What is copied, by sheet.
_COPIES = (
    ("Words: {words}\nCopy:", " "),
    ("Input: {words}\nOutput:", ", "),
    ("List [{words}] again:", " - "),
    ("Say {words}. I say", " and "),
    ("Original: {words} | Same:", " / "),
    ("Q: {words}\nA:", "; "),
)
# A sum, by sheet.
_SUMS = (
    ("{a} + {b} =", "{sum}"),
    ("{a} plus {b} is", "{sum}"),
    ("add({a}, {b}) ->", "{sum}"),
    ("{a} and {b} make", "{sum}"),
    ("sum of {a} and {b}:", "{sum}"),
    ("{a} more than {b} is", "{sum}"),
)


def counted_rows(seed: int) -> list[Item]:
    """Rows that count up; of the item's row the first number is given."""
    rng = random.Random(f"rows {seed}")

    def sheet(number: int) -> list[Item]:
        separator = _SEPARATORS[number]
        starts = rng.sample(range(10, 97), NUM_EXAMPLE_ROWS + 50)
        rows = [[str(start + place) for place in range(_NUMBERS_IN_A_ROW)] for start in starts]
        shown = "".join(separator.join(row) + "\n" for row in rows[:NUM_EXAMPLE_ROWS])
        items = []
        for row in rows[NUM_EXAMPLE_ROWS:]:
            given = row[0] + separator.rstrip()
            rest = separator.join(row)[len(given) :]
            items.append(Item(sheet=number, prompt=shown + given, target=rest.strip()))
        return items

    return _mixed(rng, map(sheet, range(len(_SEPARATORS))))


def capitals(seed: int) -> list[Item]:
    """Capitals of countries."""
    rng = random.Random(f"capitals {seed}")

    def sheet(number: int) -> list[Item]:
        question, answer = _CAPITALS[number]
        countries = rng.sample(sorted(CAPITALS), len(CAPITALS))
        pairs = [(question.format(country=c), answer.format(country=c, capital=CAPITALS[c])) for c in countries]
        return _items(number, pairs, NUM_EXAMPLE_CAPITALS)

    return _mixed(rng, map(sheet, range(len(_CAPITALS))))


def copies(seed: int) -> list[Item]:
    """Six words to be repeated."""
    rng = random.Random(f"copies {seed}")

    def sheet(number: int) -> list[Item]:
        question, separator = _COPIES[number]
        rows = [separator.join(rng.sample(WORDS, 6)) for _ in range(NUM_EXAMPLE_COPIES + 60)]
        return _items(number, [(question.format(words=row), row) for row in rows], NUM_EXAMPLE_COPIES)

    return _mixed(rng, map(sheet, range(len(_COPIES))))


def sums(seed: int) -> list[Item]:
    """Sums of two digits; those asked for are not among the sheet's examples."""
    rng = random.Random(f"sums {seed}")

    def sheet(number: int) -> list[Item]:
        question, answer = _SUMS[number]
        digits = rng.sample(list(itertools.product(range(10), repeat=2)), 100)
        pairs = [(question.format(a=a, b=b), answer.format(sum=a + b)) for a, b in digits]
        return _items(number, pairs, NUM_EXAMPLE_SUMS)

    return _mixed(rng, map(sheet, range(len(_SUMS))))


def capital_choice(seed: int) -> list[ChoiceItem]:
    """A country's capital among those of others."""
    rng = random.Random(f"choice {seed}")
    sheets = []
    for number in range(NUM_CHOICE_SHEETS):
        countries = rng.sample(sorted(CAPITALS), len(CAPITALS))
        examples, asked = countries[:NUM_EXAMPLE_CHOICES], countries[NUM_EXAMPLE_CHOICES:]
        shown = "".join(f"The capital of {country} is {CAPITALS[country]}.\n" for country in examples)
        items = []
        for country in asked:
            others = rng.sample([c for c in asked if c != country], NUM_CHOICES - 1)
            choices = [CAPITALS[c] for c in rng.sample([country, *others], NUM_CHOICES)]
            prompt = f"{shown}The capital of {country} is"
            gold = choices.index(CAPITALS[country])
            items.append(ChoiceItem(sheet=number, prompt=prompt, choices=choices, gold=gold))
        sheets.append(items)
    return _mixed(rng, sheets)


GENERATORS: dict[str, Callable[[int], list[Item]] | Callable[[int], list[ChoiceItem]]] = {
    "kvplug_counted_rows": counted_rows,
    "kvplug_capitals": capitals,
    "kvplug_copies": copies,
    "kvplug_sums": sums,
    "kvplug_capital_choice": capital_choice,
}


def _items(number: int, pairs: Sequence[tuple[str, str]], num_examples: int) -> list[Item]:
    """Items of one sheet: the first pairs of question and answer are its examples, each of the others is asked."""
    shown = "".join(f"{question} {answer}\n" for question, answer in pairs[:num_examples])
    return [Item(sheet=number, prompt=shown + question, target=answer) for question, answer in pairs[num_examples:]]


def _mixed(rng: random.Random, sheets: Iterable[list[_AnyItem]]) -> list[_AnyItem]:
    """One item of each sheet, then the next of each, each time in another order: a sheet comes back soon or late."""
    rounds = zip(*sheets, strict=True)
    return [item for items in rounds for item in rng.sample(items, len(items))]
