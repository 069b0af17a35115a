"""The GLUE metrics as an `evaluate` module that is part of this package.

`evaluate.load("glue", task)` fetches the metric's code when it is called; `GlueMetric(task)` has
the same keys and values and needs no network:

    >>> from hf_moa.training import GlueMetric
    >>> GlueMetric("sst2").compute(predictions=[0, 1, 1], references=[0, 1, 0])
    {'accuracy': 0.6666666666666666}
"""

from hf_moa.extras import from_extra

with from_extra("train"):
    import datasets
    import evaluate
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

ACCURACY_TASKS = (
    "sst2",
    "mnli",
    "mnli_matched",
    "mnli_mismatched",
    "mnli-mm",
    "qnli",
    "rte",
    "wnli",
    "ax",
)
ACCURACY_AND_F1_TASKS = ("mrpc", "qqp")
METRIC_TASKS = ("cola", "stsb", *ACCURACY_AND_F1_TASKS, *ACCURACY_TASKS)

_INPUTS = """
Args:
    predictions (`list/array/tensor`): predicted class ids (`stsb`: predicted scores), shape `[N]`.
    references (`list/array/tensor`): true class ids (`stsb`: true scores), shape `[N]`.
Returns:
    `dict[str, float]`: `accuracy`; with `f1` for `mrpc` and `qqp`; `matthews_correlation` for
    `cola`; `pearson` and `spearmanr` for `stsb`.
"""


class GlueMetric(evaluate.Metric):
    """The metric or metrics that GLUE reports for one task.

    | task | keys |
    |---|---|
    | `cola` | `matthews_correlation` |
    | `mrpc`, `qqp` | `accuracy`, `f1` (of class 1) |
    | `stsb` | `pearson`, `spearmanr` |
    | `sst2`, `qnli`, `rte`, `wnli`, `ax`, `mnli` and its `_matched`, `_mismatched`, `-mm` | `accuracy` |

    Degenerate input gives the value of the library underneath: `matthews_correlation` is 0.0 when
    either side is constant, `f1` is 0.0 without any positive on either side, and `pearson` and
    `spearmanr` are NaN (with scipy's `ConstantInputWarning`) when either side is constant, because
    no correlation is defined then. A NaN never compares as better, so a checkpoint with one is not
    picked by `metric_for_best_model`. Two pairs at least are needed for `stsb` (ValueError).

    Args:
        config_name (`str`): the task.
        keep_in_memory (`bool`, defaults to `True`): hold added batches in memory and leave the
            user's cache folder untouched. `False` writes them to Arrow files there, which is what
            `evaluate` needs to combine several processes (`num_process`).
        **kwargs: passed to `evaluate.Metric`.

    Raises:
        ValueError: `config_name` is not one of the tasks; `compute()` without any input.
    """

    def __init__(self, config_name: str | None = None, keep_in_memory: bool = True, **kwargs):
        if config_name not in METRIC_TASKS:
            raise ValueError(
                f"`config_name` must be one of {', '.join(sorted(METRIC_TASKS))} (got {config_name!r})."
            )
        super().__init__(config_name=config_name, keep_in_memory=keep_in_memory, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        value = datasets.Value("float32" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description="The metrics of the GLUE benchmark (Wang et al. 2019), one task at a time.",
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": value, "references": value}),
            format="numpy",
        )

    def _build_data_dir(self) -> str:
        # The parent class makes this folder even when nothing will be written to it.
        return "" if self.keep_in_memory else super()._build_data_dir()

    def _finalize(self) -> None:
        if self.keep_in_memory and self.writer is None:
            raise ValueError(
                "`compute` needs `predictions` and `references`, or batches given to `add_batch` "
                "before (got neither)."
            )
        super()._finalize()

    def _compute(self, predictions, references) -> dict[str, float]:
        if self.config_name == "cola":
            return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
        if self.config_name == "stsb":
            return {
                "pearson": float(pearsonr(predictions, references)[0]),
                "spearmanr": float(spearmanr(predictions, references)[0]),
            }
        scores = {"accuracy": float(accuracy_score(references, predictions))}
        if self.config_name in ACCURACY_AND_F1_TASKS:
            scores["f1"] = float(f1_score(references, predictions, zero_division=0.0))
        return scores
