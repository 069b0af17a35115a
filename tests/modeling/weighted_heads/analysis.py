"""What is measured of it."""

import pandas as pd

from hf_moa.analysis import Measure


class WeightsMeasure(Measure):
    def __init__(self, model, vocabulary, **sizes):
        super().__init__(model, vocabulary, **sizes)
        self.model, self.batches = model, 0

    def update(self, observation):
        self.batches += 1

    def tables(self):
        weights = [p.mean().item() for n, p in self.model.named_parameters() if "weights.weight" in n]
        return {"head_weights": pd.DataFrame({"layer": range(len(weights)), "mean": weights})}

    def facts(self, tables):
        return {"batches of weights": self.batches}


MEASURES = (WeightsMeasure,)
