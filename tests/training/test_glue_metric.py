"""`GlueMetric` against hand-computed values and direct calls of scikit-learn and scipy."""

import math

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from hf_moa.training import GlueMetric

ACCURACY_ONLY = ["sst2", "qnli", "rte", "wnli", "ax", "mnli"]
ACCURACY_ONLY += ["mnli-mm", "mnli_matched", "mnli_mismatched"]

# 3 true and 1 false positives, 2 false and 4 true negatives.
PREDICTIONS = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
REFERENCES = [1, 1, 1, 0, 1, 1, 0, 0, 0, 0]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("the metric must not open a connection")

    monkeypatch.setattr("socket.socket.connect", refuse)


@pytest.mark.parametrize("task", ACCURACY_ONLY)
def test_accuracy_tasks(task):
    result = GlueMetric(task).compute(predictions=PREDICTIONS, references=REFERENCES)
    assert result == {"accuracy": 0.7}


@pytest.mark.parametrize("task", ["mrpc", "qqp"])
def test_paraphrase_tasks_add_f1_of_the_positive_class(task):
    result = GlueMetric(task).compute(predictions=PREDICTIONS, references=REFERENCES)
    # precision 3/4, recall 3/5
    assert result == pytest.approx({"accuracy": 0.7, "f1": 2 / 3})


def test_cola_is_matthews_correlation():
    result = GlueMetric("cola").compute(predictions=PREDICTIONS, references=REFERENCES)
    # (TP TN - FP FN) / sqrt((TP+FP) (TP+FN) (TN+FP) (TN+FN))
    assert result == pytest.approx({"matthews_correlation": (12 - 2) / math.sqrt(4 * 5 * 5 * 6)})


def test_stsb_is_pearson_and_spearman():
    result = GlueMetric("stsb").compute(predictions=[0.0, 1.0, 5.0], references=[0.0, 1.0, 2.0])
    # Same order; deviations (-2, -1, 3) and (-1, 0, 1): 5 / sqrt(14 * 2).
    assert result == pytest.approx({"pearson": 5 / math.sqrt(28), "spearmanr": 1.0})


def test_random_input_equals_the_libraries():
    rng = np.random.default_rng(0)
    predictions, references = rng.integers(0, 2, (2, 500))
    result = GlueMetric("mrpc").compute(predictions=predictions, references=references)
    assert result["f1"] == pytest.approx(metrics.f1_score(references, predictions))
    result = GlueMetric("cola").compute(predictions=predictions, references=references)
    expected = metrics.matthews_corrcoef(references, predictions)
    assert result["matthews_correlation"] == pytest.approx(expected)

    scores = rng.uniform(0, 5, 500).astype(np.float32)
    guesses = (scores + rng.normal(0, 1, 500)).astype(np.float32)
    result = GlueMetric("stsb").compute(predictions=guesses, references=scores)
    assert result["pearson"] == pytest.approx(stats.pearsonr(guesses, scores)[0], rel=1e-6)
    assert result["spearmanr"] == pytest.approx(stats.spearmanr(guesses, scores)[0], rel=1e-6)


def test_add_batch_gives_the_metric_of_all_batches():
    metric = GlueMetric("cola")
    for start in range(0, 10, 4):
        batch = slice(start, start + 4)
        metric.add_batch(predictions=PREDICTIONS[batch], references=REFERENCES[batch])
    batched = metric.compute()
    assert batched == metric.compute(predictions=PREDICTIONS, references=REFERENCES)


def test_stsb_with_constant_predictions_is_nan():
    with pytest.warns(stats.ConstantInputWarning):
        result = GlueMetric("stsb").compute(predictions=[2.5] * 4, references=[0.0, 1.0, 2.0, 3.0])
    assert math.isnan(result["pearson"])
    assert math.isnan(result["spearmanr"])


def test_constant_classes_give_zero():
    constant = {"predictions": [0, 0, 0], "references": [0, 1, 0]}
    assert GlueMetric("cola").compute(**constant) == {"matthews_correlation": 0.0}
    nothing_positive = {"predictions": [0, 0], "references": [0, 0]}
    assert GlueMetric("mrpc").compute(**nothing_positive) == {"accuracy": 1.0, "f1": 0.0}


def test_nothing_is_written_unless_asked_for(tmp_path):
    metric = GlueMetric("sst2", cache_dir=str(tmp_path))
    metric.compute(predictions=[0], references=[0])
    assert list(tmp_path.iterdir()) == []

    metric = GlueMetric("sst2", keep_in_memory=False, cache_dir=str(tmp_path))
    metric.add_batch(predictions=[0, 1], references=[0, 0])
    assert list(tmp_path.rglob("*.arrow"))
    assert metric.compute() == {"accuracy": 0.5}


@pytest.mark.parametrize("task", [None, "hans", "SST-2"])
def test_unknown_task_is_an_error(task):
    with pytest.raises(ValueError, match=rf"`config_name` must be one of .*sst2.* \(got {task!r}"):
        GlueMetric(task)


def test_compute_without_input_is_an_error():
    with pytest.raises(ValueError, match="needs `predictions` and `references`"):
        GlueMetric("sst2").compute()
