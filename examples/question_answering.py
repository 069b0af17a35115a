"""Extractive question answering as SQuAD has it: files, features, answers and their scores."""

from __future__ import annotations

import collections
import gzip
import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import EvalPrediction, PreTrainedTokenizerBase


def read_squad(path: str, flag: str) -> Dataset:
    """Questions of a file in SQuAD's published form (version 1.1), plain or .gz.

    Returns:
        Columns `id`, `question`, `context` and `answers` (`text` and `answer_start`, lists), as in the
        Hub's `rajpurkar/squad`.

    Raises:
        ValueError: no such file, or one of another form; the message names `flag`.
    """
    if not Path(path).is_file():
        raise ValueError(f"`{flag}` must be a file of questions (got {path}: no such file).")
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as file:
        try:
            articles = json.load(file)["data"]
            rows = [
                {
                    "id": question["id"],
                    "question": question["question"].strip(),
                    "context": paragraph["context"],
                    "answers": {
                        name: [answer[name] for answer in question["answers"]]
                        for name in ("text", "answer_start")
                    },
                }
                for article in articles
                for paragraph in article["paragraphs"]
                for question in paragraph["qas"]
            ]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"`{flag}` must have SQuAD's form, data / paragraphs / qas (got {path}: {error!r})."
            ) from error
    unanswered = sum(not row["answers"]["text"] for row in rows)
    if not rows or unanswered:
        raise ValueError(
            f"`{flag}` must hold questions that have answers (got {len(rows)} questions in {path}, "
            f"{unanswered} without)."
        )
    return Dataset.from_list(rows)


class Features:
    """Questions and their contexts as a model reads them; a long context in overlapping windows.

    Args:
        questions: of `read_squad`.
        tokenizer: a fast one.
        max_length: tokens of a window, the question included.
        stride: tokens that two windows of a context share.
        pad_to_max_length: pad all to `max_length`.

    Attributes:
        dataset: the model's inputs, with `start_positions` and `end_positions` of the first answer in
            the window; those of the first token where the window does not hold it.
        question: for each window, the index of its question.
        offsets: for each window and token, the `(start, end)` of its text in the context; None for a
            token of the question and a special one.
    """

    def __init__(
        self,
        questions: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        stride: int,
        pad_to_max_length: bool,
    ):
        self.questions = questions
        encoded = tokenizer(
            list(questions["question"]),
            list(questions["context"]),
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length" if pad_to_max_length else False,
        )
        self.question: list[int] = encoded.pop("overflow_to_sample_mapping")
        self.offsets = [
            [
                offset if part == 1 else None
                for offset, part in zip(row, encoded.sequence_ids(i), strict=True)
            ]
            for i, row in enumerate(encoded.pop("offset_mapping"))
        ]
        answers = questions["answers"]
        places = [
            answer_place(offsets, answers[question])
            for offsets, question in zip(self.offsets, self.question, strict=True)
        ]
        starts, ends = zip(*places, strict=True)
        self.dataset = Dataset.from_dict(
            {**encoded, "start_positions": list(starts), "end_positions": list(ends)}
        )


def answer_place(offsets: Sequence, answers: Mapping[str, list]) -> tuple[int, int]:
    """First and last token of the first answer; (0, 0) where the window does not hold all of it."""
    text = answers["text"][0]
    first = answers["answer_start"][0] + len(text) - len(text.lstrip())
    last = first + len(text.strip())
    inside = [
        i for i, span in enumerate(offsets) if span is not None and span[0] < last and span[1] > first
    ]
    if not inside or offsets[inside[0]][0] > first or offsets[inside[-1]][1] < last:
        return 0, 0
    return inside[0], inside[-1]


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
        starts, ends = prediction.predictions[:2]
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

    def _best_span(self, offsets: list, start: np.ndarray, end: np.ndarray) -> tuple | None:
        """Score, and place in the context."""
        allowed = np.array([span is not None for span in offsets])
        start, end = (np.where(allowed, logits[: len(offsets)], -np.inf) for logits in (start, end))
        firsts, lasts = (np.argsort(-logits)[: self.n_best_size] for logits in (start, end))
        spans = [
            (start[i] + end[j], offsets[i][0], offsets[j][1])
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
