"""Extractive question answering as SQuAD has it: files, features, answers and their scores."""

from __future__ import annotations

import collections
import json
import re
import string
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
from datasets import Dataset, List, Value
from datasets import Features as DatasetFeatures
from transformers import EvalPrediction, PreTrainedTokenizerBase

from .files import open_text

_QUESTIONS = DatasetFeatures(
    {
        **{name: Value("string") for name in ("id", "question", "context")},
        "answers": {"text": List(Value("string")), "answer_start": List(Value("int32"))},
    }
)


def read_squad(path: str, flag: str, *, need_answers: bool = True) -> Dataset:
    """Questions of a file in SQuAD's published form (version 1.1), plain or .gz.

    Args:
        need_answers: refuse questions without one; otherwise they need not even have the field.

    Returns:
        Columns `id`, `question`, `context` and `answers` (`text` and `answer_start`, lists), as in the
        Hub's `rajpurkar/squad`.

    Raises:
        ValueError: no such file, or one of another form; the message names `flag`.
    """
    with open_text(path, flag, "file of questions") as file:
        try:
            articles = json.load(file)["data"]
            questions = [
                {
                    "id": question["id"],
                    "question": question["question"].strip(),
                    "context": paragraph["context"],
                    "answers": {
                        name: [answer[name] for answer in _answers(question, need_answers)]
                        for name in ("text", "answer_start")
                    },
                }
                for article in articles
                for paragraph in article["paragraphs"]
                for question in paragraph["qas"]
            ]
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"`{flag}` must have SQuAD's form, data / paragraphs / qas (got {path}: {error!r})."
            ) from error
    unanswered = sum(not question["answers"]["text"] for question in questions)
    if not questions or (need_answers and unanswered):
        raise ValueError(
            f"`{flag}` must hold questions{' that have answers' if need_answers else ''} (got "
            f"{len(questions)} questions in {path}, {unanswered} without answers)."
        )
    return Dataset.from_list(questions, features=_QUESTIONS)


def _answers(question: Mapping[str, Any], need_answers: bool) -> list[Mapping[str, Any]]:
    return question["answers"] if need_answers else question.get("answers", [])


def check_ids(questions: Dataset, origin: str) -> None:
    """Raise a ValueError unless each question has an id of its own, by which its answer is kept."""
    name, count = collections.Counter(questions["id"]).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"Each question of {origin} must have an `id` of its own (got {name!r} {count} times)."
        )


def num_answered(questions: Dataset) -> int:
    """How many questions of `read_squad`, or of the Hub, have an answer."""
    if "answers" not in questions.column_names:
        return 0
    return sum(bool(answers["text"]) for answers in questions["answers"])


class Features:
    """Questions and their contexts as a model reads them; a long context in overlapping windows.

    Args:
        questions: of `read_squad`.
        tokenizer: a fast one.
        max_length: tokens of a window, the question included.
        stride: tokens that two windows of a context share.
        pad_to_max_length: pad all to `max_length`.
        keep_places: keep `offsets`, which `AnswerMetric` needs.
        with_answers: whether the questions have answers.

    Attributes:
        dataset: the model's inputs; with answers, also `start_positions` and `end_positions` of the
            first one in the window: those of the first token where the window does not hold it.
        question: for each window, the index of its question.
        offsets: for each window, an int array `[T, 2]`: where the text of each token is in the context;
            (-1, -1) for a token of the question and a special one.

    Raises:
        ValueError: a question without an answer, or so long that a window has no more than `stride`
            tokens for the context.
    """

    def __init__(
        self,
        questions: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        stride: int,
        pad_to_max_length: bool,
        keep_places: bool = True,
        with_answers: bool = True,
    ):
        self.questions = questions
        self.question: list[int] = []
        self.offsets: list[np.ndarray] = []

        def to_windows(examples: dict[str, list], indices: list[int]) -> dict[str, list]:
            asked = [question.lstrip() for question in examples["question"]]
            if with_answers:
                _check_answers(examples["answers"])
            _check_lengths(asked, tokenizer, max_length - stride)
            encoded = tokenizer(
                asked,
                examples["context"],
                truncation="only_second",
                max_length=max_length,
                stride=stride,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
                padding="max_length" if pad_to_max_length else False,
            )
            example_of = encoded.pop("overflow_to_sample_mapping")
            offsets = [
                np.array(
                    [
                        span if part == 1 else (-1, -1)
                        for span, part in zip(spans, encoded.sequence_ids(i), strict=True)
                    ],
                    dtype=np.int32,
                )
                for i, spans in enumerate(encoded.pop("offset_mapping"))
            ]
            self.question += [indices[example] for example in example_of]
            self.offsets += offsets if keep_places else []
            if not with_answers:
                return dict(encoded)
            places = [
                answer_place(offset, examples["answers"][example])
                for offset, example in zip(offsets, example_of, strict=True)
            ]
            starts, ends = zip(*places, strict=True)
            return {**encoded, "start_positions": list(starts), "end_positions": list(ends)}

        self.dataset = questions.map(
            to_windows,
            batched=True,
            with_indices=True,
            remove_columns=questions.column_names,
            load_from_cache_file=False,  # what is kept here would be missing
            desc="Tokenizing",
        )


def _check_answers(answers: list[Mapping[str, list]]) -> None:
    unanswered = sum(not answer["text"] for answer in answers)
    if unanswered:
        raise ValueError(
            f"All questions must have an answer, as in SQuAD 1.1 (got {unanswered} without)."
        )


def _check_lengths(questions: list[str], tokenizer: PreTrainedTokenizerBase, most: int) -> None:
    lengths = [len(ids) for ids in tokenizer(questions, add_special_tokens=False)["input_ids"]]
    longest = max(range(len(questions)), key=lengths.__getitem__)
    room = most - tokenizer.num_special_tokens_to_add(pair=True)
    if lengths[longest] >= room:
        raise ValueError(
            f"`max_seq_length` less `doc_stride` must leave room for the question (got one of "
            f"{lengths[longest]} tokens, {questions[longest]!r}, for {room}): give a larger "
            "`max_seq_length` or a smaller `doc_stride`."
        )


def answer_place(offsets: np.ndarray, answers: Mapping[str, list]) -> tuple[int, int]:
    """First and last token of the first answer; (0, 0) where the window does not hold all of it.

    Args:
        offsets: `[T, 2]` of a window, as of `Features`.
    """
    text = answers["text"][0]
    first = answers["answer_start"][0] + len(text) - len(text.lstrip())
    last = first + len(text.strip())
    starts, ends = offsets.T
    context = starts >= 0
    inside = np.flatnonzero(context & (starts < last) & (ends > first))
    # within the window, a character may have no token: tokenizers strip accents without a letter
    if not len(inside) or first < starts[context].min() or last > ends[context].max():
        return 0, 0
    return int(inside[0]), int(inside[-1])


class AnswerMetric:
    """`compute_metrics` of a trainer that is evaluated on `features.dataset`, in its order.

    Args:
        features: what is evaluated on.
        n_best_size: starts and ends that are combined, of each window.
        max_answer_length: tokens of an answer.
    """

    def __init__(self, features: Features, *, n_best_size: int, max_answer_length: int):
        self.features = features
        self.n_best_size, self.max_answer_length = n_best_size, max_answer_length

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        starts, ends = cast("tuple[np.ndarray, np.ndarray]", prediction.predictions[:2])
        return squad_scores(self.answers(starts, ends), self.features.questions["answers"])

    def answers(self, starts: np.ndarray, ends: np.ndarray) -> list[str]:
        """The text with the largest sum of logits over the windows, for each question.

        Args:
            starts, ends: logits `[windows, T]`.
        """
        found = [(-np.inf, "")] * len(self.features.questions)
        contexts = self.features.questions["context"]
        for window, question in enumerate(self.features.question):
            best = self._best_span(self.features.offsets[window], starts[window], ends[window])
            if best is not None and best[0] > found[question][0]:
                score, first, last = best
                found[question] = (score, contexts[question][first:last])
        return [text for _, text in found]

    def _best_span(self, offsets: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple | None:
        """Score, and place in the context."""
        allowed = offsets[:, 0] >= 0
        start, end = (np.where(allowed, logits[: len(offsets)], -np.inf) for logits in (start, end))
        firsts, lasts = (np.argsort(-logits)[: self.n_best_size] for logits in (start, end))
        spans = [
            (start[i] + end[j], offsets[i, 0], offsets[j, 1])
            for i in firsts
            for j in lasts
            if allowed[i] and allowed[j] and i <= j < i + self.max_answer_length
        ]
        return max(spans, default=None)


def squad_scores(
    predictions: Iterable[str], references: Iterable[Mapping[str, list]]
) -> dict[str, float]:
    """Exact match and F1 in per cent, the best over the references (Rajpurkar et al. 2016, 6.1)."""
    exact, f1, count = 0.0, 0.0, 0
    for predicted, answers in zip(predictions, references, strict=True):
        exact += max(normalised(predicted) == normalised(text) for text in answers["text"])
        f1 += max(token_f1(predicted, text) for text in answers["text"])
        count += 1
    return {"exact_match": 100 * exact / count, "f1": 100 * f1 / count}


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous space."""
    text = "".join(each for each in text.lower() if each not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(predicted: str, reference: str) -> float:
    found, wanted = (collections.Counter(normalised(text).split()) for text in (predicted, reference))
    common = (found & wanted).total()
    return 2 * common / (found.total() + wanted.total()) if common else 0.0
