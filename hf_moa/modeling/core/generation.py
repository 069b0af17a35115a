"""What generation with gated models needs beside transformers' own `generate`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation import (
    GenerationMixin,
    LogitsProcessorList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from ..attention.flow import AttentionFlow
from ..cache.naming import CACHE_NAME, takes_cache_by_any_name
from ..cache.place import own_cache
from .mixins import ModelMixin


class GatedGenerationMixin(GenerationMixin, ModelMixin):
    """`GenerationMixin` that hands the gates their budget, their past and the padding."""

    def generate(self, *args: Any, budget: Any = None, **kwargs: Any) -> Any:
        """transformers' `generate`, and:

        Args:
            budget: CCT's compute budget in every step, as the model's forward takes it: a number of
                `config.cct_budgets`, for T5 also a pair `(encoder, decoder)`, or a tensor with one
                per sequence. Default: the `budget` of the generation configuration, where that has one
                (as servers hand it on), what `set_budget` chose, else the largest. An assistant keeps to
                its own: choose that with `assistant_model.set_budget`.

        Raises:
            ValueError: a budget that the model does not know; a budget without CCT; a cache that
                cannot hold what the gates remember (MAE and CCT take dynamic and static ones).
        """
        if len(args) == 2:  # by position
            kwargs["generation_config"], args = args[1], args[:1]
        settings: Any = kwargs.get("generation_config") or self.generation_config
        if getattr(settings, "budget", None) is not None:
            if budget is None:  # a pair is a list in JSON
                budget = tuple(settings.budget) if isinstance(settings.budget, list) else settings.budget
            # it would keep the argument from the model
            kwargs["generation_config"] = settings = copy.copy(settings)
            del settings.budget
        if budget is not None:
            # beams repeat the entries of every tensor, and a scalar has none
            is_scalar = isinstance(budget, Tensor) and budget.ndim == 0
            kwargs["budget"] = budget = budget.item() if is_scalar else budget
            self._check_budget(budget)
        encoded = kwargs.get("encoder_outputs")
        if isinstance(encoded, dict):  # the same of its losses
            kept = {k: v for k, v in encoded.items() if not isinstance(v, Tensor) or v.ndim > 0}
            kwargs["encoder_outputs"] = type(encoded)(**kept)
        own: Any = super()  # what transformers says of `self` is for another checker
        return own.generate(*args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """transformers', for `generate_batch` and servers.

        Raises:
            ValueError: learned MAE gates, or a budget in the generation configuration, before a cache is
                made for them.
        """
        given = args[0] if args else kwargs.get("generation_config")
        budget = getattr(given or self.generation_config, "budget", None)
        if budget is not None:
            raise ValueError(
                "The generation configuration must have no budget in continuous batching: requests "
                f"share their steps (got {budget!r}). Use generate_batch(..., budget=...) or set_budget."
            )
        for module in self.modules():
            if isinstance(module, AttentionFlow):
                module.refuse_packed_requests()
        own: Any = super()
        return own.init_continuous_batching(*args, **kwargs)

    def generate_batch(self, inputs: Any, *args: Any, budget: Any = None, **kwargs: Any) -> Any:
        """transformers' continuous batching, and:

        Args:
            budget: a number of `config.listed_budgets` for all requests, or a list with one for each.
                Requests of a budget run together, one budget after the other. Default: what
                `set_budget` chose, else the largest.

        Raises:
            ValueError: a budget that the model does not know; a list of another length; learned MAE
                gates.
        """
        own: Any = super()
        if budget is None:
            return own.generate_batch(inputs, *args, **kwargs)
        budgets = list(budget) if isinstance(budget, (list, tuple)) else [budget] * len(inputs)
        if len(budgets) != len(inputs):
            raise ValueError(
                f"budget must be a number, or a list with one for each of the {len(inputs)} requests "
                f"(got {len(budgets)})."
            )
        known = self.config.listed_budgets
        if unknown := [each for each in budgets if each not in known]:
            raise ValueError(f"budget must be one of the model's budgets {known} (got {unknown[0]!r}).")
        results: dict[str, Any] = {}
        model: Any = self
        controls = model._budget_controls("generate_batch")
        before = [control.budgets.chosen for control in controls]
        try:
            for each in dict.fromkeys(budgets):
                places = [i for i, own_budget in enumerate(budgets) if own_budget == each]
                model.set_budget(each)
                found = own.generate_batch([inputs[i] for i in places], *args, **kwargs)
                results |= _by_place(found, places)
        finally:
            for control, chosen in zip(controls, before, strict=True):
                control.choose(chosen)
        return dict(
            sorted(results.items(), key=lambda item: int(item[0].split("__")[0].removeprefix("req_")))
        )

    def _check_budget(self, budget: Any) -> None:
        """Refuse what the first forward would take, and a later one would not."""

    @takes_cache_by_any_name
    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """transformers' own, by the names that it looks for; and the padding of the step's tokens.

        With a static cache, transformers turns the padding mask into one of pairs, from which gates
        cannot tell padding: the mask of the step's own tokens then travels beside it.
        """
        own: Any = super()
        if cache is not None and hasattr(held := own_cache(cache, is_cross=False), "reserve"):
            held.reserve()  # a compiled step cannot
        inputs: dict[str, Any] = own.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **{CACHE_NAME: cache},
            **kwargs,
        )
        prefix = "decoder_" if self.config.is_encoder_decoder else ""
        mask = kwargs.get("decoder_attention_mask") if prefix else attention_mask
        prepared = inputs.get(f"{prefix}attention_mask")
        if mask is not None and mask.ndim == 2 and (prepared is None or prepared.ndim != 2):
            tokens = inputs.get(f"{prefix}input_ids")
            tokens = inputs["inputs_embeds"] if tokens is None else tokens
            inputs[f"{prefix}padding_mask"] = mask[:, -tokens.shape[1] :].bool().contiguous()
        return inputs

    def _prepare_cache_for_generation(  # type: ignore[override]  # hands on what it is given
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        own: Any = super()
        own._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get(CACHE_NAME)
        if cache is None:
            return
        decoder: Any = self.decoder if self.config.is_encoder_decoder else self
        for module in decoder.modules():
            if isinstance(module, AttentionFlow):
                module.prepare_cache(cache)
        if generation_config.is_assistant:
            cache.activate_past_recording()  # the layers that were asked before are replaced

    def _get_candidate_generator(  # type: ignore[override]  # which is called by names
        self, *args: Any, model_kwargs: dict[str, Any], assistant_model: Any = None, **kwargs: Any
    ) -> Any:
        if assistant_model is not None and assistant_model is not self:
            model_kwargs = {name: value for name, value in model_kwargs.items() if name != "budget"}
        own: Any = super()
        return own._get_candidate_generator(
            *args, model_kwargs=model_kwargs, assistant_model=assistant_model, **kwargs
        )

    def _get_logits_processor(
        self, *args: Any, model_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> LogitsProcessorList:
        own: Any = super()
        processors: LogitsProcessorList = own._get_logits_processor(
            *args, model_kwargs=model_kwargs, **kwargs
        )
        budget = (model_kwargs or {}).get("budget")
        for processor in processors:
            if budget is not None and isinstance(
                processor, UnbatchedClassifierFreeGuidanceLogitsProcessor
            ):
                processor.model = partial(self, budget=budget)  # it asks the model by itself
        return processors


def _by_place(found: dict[str, Any], places: list[int]) -> dict[str, Any]:
    """The results of some requests, by names of their places among all: "req_3"; of a request's further
    sequences "req_3__child#0".

    Raises:
        RuntimeError: there are not as many as requests.
    """
    parents = list(dict.fromkeys(name.split("__")[0] for name in found))
    if len(parents) != len(places):
        raise RuntimeError(f"{len(places) - len(parents)} of {len(places)} requests have no result.")
    names = dict(zip(parents, places, strict=True))
    renamed = {}
    for name, result in found.items():
        parent, *child = name.split("__")
        result.request_id = "__".join([f"req_{names[parent]}", *child])
        renamed[result.request_id] = result
    return renamed
