"""Results put side by side: scores, pairs of samples, answers that differ, the exact test, and the verdict."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.evals.accuracy_support import cache_use, chosen, generated
from vllm_kvplug.evals.accuracy.compare import comparisons, exact_p_value, scores
from vllm_kvplug.evals.accuracy.lm_eval_process import LoadedTask
from vllm_kvplug.evals.accuracy.verdict import verdict
from vllm_kvplug.evals.errors import EvalError
from vllm_kvplug.evals.results import UNTESTED_STATUS, CacheUse

LABELS = ("upstream", "kvplug")
TASK = LoadedTask("t", "generate_until", 40, 40)


def judged(
    results: tuple[dict[str, Any], dict[str, Any]],
    cache: tuple[CacheUse, CacheUse] | None = None,
    task: LoadedTask = TASK,
) -> tuple[list[str], int]:
    return verdict(LABELS, [task], comparisons(results, LABELS), scores(results), cache or (cache_use(), cache_use()))


def right_and_wrong(num_right: int, num_wrong: int, wrong: str = "no") -> dict[str, Any]:
    targets = ["yes"] * (num_right + num_wrong)
    return generated(["yes"] * num_right + [wrong] * num_wrong, targets)


@pytest.mark.parametrize(
    ("better", "worse", "expected"),
    [
        (0, 1, 1.0),
        (0, 5, 2 * 0.5**5),
        (5, 0, 2 * 0.5**5),
        (3, 3, 1.0),
        (1, 9, 2 * (1 + 10) / 2**10),
        (2, 10, 2 * sum(math.comb(12, k) for k in range(3)) / 2**12),
    ],
)
def test_the_exact_test_is_the_binomial_one(better: int, worse: int, expected: float) -> None:
    assert exact_p_value(better, worse) == pytest.approx(expected)


def test_there_is_no_test_where_nothing_changed() -> None:
    assert exact_p_value(0, 0) is None


def test_scores_carry_errors_filters_and_the_difference() -> None:
    first = generated(["a", "b"], ["a", "b"], filters=("strict", "none"))
    second = generated(["a", "x"], ["a", "b"], filters=("strict", "none"))
    strict, plain = scores((first, second))
    assert (strict.metric, plain.metric) == ("exact_match (strict)", "exact_match")
    assert (plain.values, plain.difference, plain.num_samples) == ((1.0, 0.5), -0.5, 2)
    assert plain.standard_errors == (0.01, 0.01)


def test_an_unknown_error_is_none() -> None:
    (score,) = scores((chosen([[-1, -2]]), chosen([[-3, -2]])))
    assert (score.standard_errors, score.values) == ((None, None), (1.0, 0.0))


def test_answers_that_differ_are_listed_once_with_both() -> None:
    first = generated(["a", "b", "c"], ["a", "b", "x"], filters=("strict", "none"))
    second = generated(["a", "x", "d"], ["a", "b", "x"], filters=("strict", "none"))
    (compared,) = comparisons((first, second), LABELS)
    agreement = compared.agreement()
    assert (agreement.num_samples, agreement.num_differing, agreement.p_value) == (3, 2, 1.0)
    one, two = compared.differing()
    assert (one.sample_id, one.answers, one.scores, one.target) == ("1", ("b", "x"), (1.0, 0.0), "b")
    # Another answer, but no other score.
    assert (two.sample_id, two.answers, two.scores) == ("2", ("c", "d"), (0.0, 0.0))
    assert one.prompt_end == "prompt 1"


def test_samples_are_paired_by_id_not_by_place() -> None:
    first = generated(["a"] * 12, ["a"] * 12)
    second = generated(["a"] * 12, ["a"] * 12)
    second["samples"]["t"].reverse()
    (compared,) = comparisons((first, second), LABELS)
    assert compared.differing() == []
    assert [pair[0].sample_id for pair in compared.pairs] == [str(number) for number in range(12)]


def test_a_multiple_choice_differs_where_another_choice_is_likeliest() -> None:
    (compared,) = comparisons((chosen([[-1.0, -2.0], [-1.0, -2.0]]), chosen([[-1.01, -2.0], [-1.0, -0.9]])), LABELS)
    (answer,) = compared.differing()
    assert (answer.sample_id, answer.answers) == ("1", ("choice 0", "choice 1"))


def test_other_prompts_than_on_the_other_side_are_refused() -> None:
    first, second = generated(["a"], ["a"]), generated(["a"], ["a"])
    second["samples"]["t"][0]["arguments"][0][0] = "another prompt"
    with pytest.raises(EvalError, match="t: expected equal prompts on both sides, found others on kvplug"):
        comparisons((first, second), LABELS)


def test_a_metric_that_is_better_when_lower() -> None:
    first, second = right_and_wrong(4, 0), right_and_wrong(0, 4)
    first["higher_is_better"]["t"]["exact_match"] = False
    (compared,) = comparisons((first, second), LABELS)
    assert compared.num_better_and_worse() == (4, 0)
    assert not scores((first, second))[0].higher_is_better


def test_equal_answers_end_with_0() -> None:
    sentences, status = judged((right_and_wrong(30, 10), right_and_wrong(30, 10)))
    assert status == 0
    assert sentences == ["upstream and kvplug give the same answer to all of 40 samples"]


def test_a_few_differences_show_no_loss() -> None:
    sentences, status = judged((right_and_wrong(32, 8), right_and_wrong(30, 10)))
    assert status == 0
    assert sentences == ["no loss of accuracy shown: 2 of 40 answers differ, kvplug scores better on 0 and worse on 2"]


def test_a_loss_that_chance_does_not_explain_ends_with_1() -> None:
    sentences, status = judged((right_and_wrong(40, 0), right_and_wrong(30, 10)))
    assert status == 1
    assert sentences[0].startswith("kvplug loses accuracy on t: 10 samples worse and 0 better than upstream")


def test_a_gain_is_told_and_is_no_loss() -> None:
    sentences, status = judged((right_and_wrong(30, 10), right_and_wrong(40, 0)))
    assert status == 0
    assert any(sentence.startswith("kvplug gains accuracy on t") for sentence in sentences)


def test_small_losses_of_many_tasks_add_up() -> None:
    """Six samples of each of three tasks: none is a loss by itself."""
    pairs = [(right_and_wrong(40, 0), right_and_wrong(34, 6))] * 3
    compared = [comparisons(pair, LABELS)[0] for pair in pairs]
    sentences, status = verdict(LABELS, [TASK] * 3, compared, scores(pairs[0]), (cache_use(), cache_use()))
    assert status == 1
    assert sentences[0].startswith("kvplug loses accuracy on all tasks together: 18 samples worse and 0 better")


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        (
            (cache_use(num_hit_tokens=0), cache_use(num_hit_tokens=7)),
            "this run does not test the prefix cache (hit tokens: upstream 0, kvplug 7)",
        ),
        (
            (cache_use(), cache_use(num_preemptions=0)),
            "this run does not test preemption (preemptions: upstream 5, kvplug 0)",
        ),
    ],
)
def test_what_was_not_tested_is_said_and_ends_with_3(cache: tuple[CacheUse, CacheUse], expected: str) -> None:
    sentences, status = judged((right_and_wrong(40, 0), right_and_wrong(40, 0)), cache)
    assert status == UNTESTED_STATUS == 3
    assert sentences[0] == expected


def test_a_loss_counts_more_than_what_was_not_tested() -> None:
    cache = (cache_use(num_preemptions=0), cache_use(num_preemptions=0))
    sentences, status = judged((right_and_wrong(40, 0), right_and_wrong(0, 40)), cache)
    assert status == 1
    assert sentences[0].startswith("kvplug loses")
    assert sentences[1].startswith("this run does not test preemption")


def test_tasks_that_skip_the_prefix_cache_are_named() -> None:
    results = (chosen([[-1, -2]] * 5), chosen([[-1, -2]] * 5))
    sentences, _ = judged(results, task=LoadedTask("t", "multiple_choice", 5, 10))
    assert any(sentence.startswith("t: log-likelihoods of prompts") for sentence in sentences)


def test_a_score_that_cannot_get_worse_is_named() -> None:
    sentences, _ = judged((right_and_wrong(0, 40), right_and_wrong(0, 40)))
    assert any("upstream scores 0" in sentence for sentence in sentences)


def of_aggregate(
    answers: list[str], metric: str, values: list[Any], value: float, error: float | str, higher_is_better: bool = True
) -> dict[str, Any]:
    """Results of one task whose metric is `value` over all samples; samples have `values` by the same name."""
    results = generated(answers, ["yes"] * len(answers))
    results["results"]["t"] = {"sample_len": len(answers), f"{metric},none": value, f"{metric}_stderr,none": error}
    results["higher_is_better"]["t"] = {metric: higher_is_better}
    for sample, own in zip(results["samples"]["t"], values, strict=True):
        sample |= {"metrics": [metric], metric: own}
    return results


def bleu(word: str, value: float, error: float | str) -> dict[str, Any]:
    return of_aggregate([word] * 40, "bleu", [["yes", word]] * 40, value, error)


@pytest.mark.parametrize(
    ("first", "second", "loss"),
    [
        (("yes", 60.0, 2.0), ("no", 0.0, 0.0), "30.0 standard errors worse"),
        (("yes", 100.0, 0.0), ("no", 0.0, 0.0), "worse, with 40 other answers and no standard error"),
        (("yes", 60.0, "N/A"), ("no", 59.0, "N/A"), "worse, with 40 other answers and no standard error"),
        (("yes", 60.0, 1.0), ("no", 55.0, 1.0), "3.5 standard errors worse"),
        (("yes", 60.0, 1.0), ("no", math.nan, math.nan), "which is no finite number on one side"),
    ],
)
def test_a_loss_in_a_value_of_all_samples_ends_with_1(first: Any, second: Any, loss: str) -> None:
    sentences, status = judged((bleu(*first), bleu(*second)))
    assert status == 1
    assert sentences[0].startswith(f"kvplug loses accuracy on t: bleu {second[1]:.4g} against {first[1]:.4g} of upstre")
    assert sentences[0].endswith(loss)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("yes", 60.0, 1.0), ("no", 58.0, 1.0)),
        (("yes", 60.0, "N/A"), ("no", 61.0, "N/A")),
        (("yes", 60.0, "N/A"), ("yes", 59.9999, "N/A")),
        (("yes", math.nan, "N/A"), ("no", math.nan, "N/A")),
        (("yes", 0.0, 0.0), ("no", 60.0, 2.0)),
    ],
)
def test_a_value_of_all_samples_that_is_no_worse_is_named_alone(first: Any, second: Any) -> None:
    sentences, status = judged((bleu(*first), bleu(*second)))
    assert status == 0
    told = f"t: not judged by sample, only by the value of all of them: bleu {first[1]:.4g} and {second[1]:.4g}"
    assert told in sentences
    assert not any("scores better on" in sentence for sentence in sentences)


def test_perplexitys_numbers_of_samples_are_no_scores() -> None:
    """They are log-likelihoods, higher where perplexity is lower."""
    first = of_aggregate(["greedy"] * 40, "perplexity", [-2.0] * 40, math.exp(2.0), 0.1, higher_is_better=False)
    better = of_aggregate(["greedy"] * 40, "perplexity", [-1.0] * 40, math.exp(1.0), 0.1, higher_is_better=False)
    (compared,) = comparisons((first, better), LABELS)
    assert compared.num_better_and_worse() == (0, 0)
    assert compared.aggregate_metrics == ["perplexity"]
    assert judged((first, better))[1] == 0
    assert judged((better, first))[1] == 1


def test_a_metric_of_samples_beside_one_of_all_is_judged_by_sample() -> None:
    pairs = (right_and_wrong(40, 0), right_and_wrong(30, 10))
    for results in pairs:
        results["results"]["t"]["bleu,none"] = 50.0
        for sample in results["samples"]["t"]:
            sample |= {"metrics": ["bleu", "exact_match"], "bleu": ["yes", "no"]}
    (compared,) = comparisons(pairs, LABELS)
    assert (compared.num_better_and_worse(), compared.aggregate_metrics) == ((0, 10), ["bleu"])
    assert judged(pairs)[1] == 1


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_scores_that_are_no_numbers_are_equal_and_worse_than_any_number(higher_is_better: bool) -> None:
    def scored(values: list[float]) -> dict[str, Any]:
        mean = sum(values) / len(values)
        return of_aggregate(["any"] * len(values), "f", values, mean, 0.1, higher_is_better)

    nan = math.nan
    (compared,) = comparisons((scored([nan, nan, 1.0, 1.0]), scored([nan, 2.0, nan, 1.0])), LABELS)
    assert compared.aggregate_metrics == []
    assert compared.num_better_and_worse() == (1, 1)
