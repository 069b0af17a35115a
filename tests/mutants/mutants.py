"""Faults of the package, one small change of its text each, and the tests that have to notice them."""

from __future__ import annotations

from typing import NamedTuple

PACKAGE = "hf_moa"


class Mutant(NamedTuple):
    """A fault that somebody could write.

    Attributes:
        name: unique.
        fault: what is wrong with it, in words.
        file: in the package.
        edits: text -> what stands in its place. Each text occurs once in the file.
        tests: files below `tests/`.
        only: `-k` expression that selects some of their tests; empty for all.
    """

    name: str
    fault: str
    file: str
    edits: dict[str, str]
    tests: tuple[str, ...]
    only: str = ""

    def apply(self, source: str) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: a text does not occur exactly once.
        """
        for text, replacement in self.edits.items():
            count = source.count(text)
            if count != 1:
                raise ValueError(f"{self.name}: {text!r} must occur once in {self.file} (got {count}).")
            source = source.replace(text, replacement)
        return source


MAE = (
    Mutant(
        "mae-window",
        "a causal gate averages one position more than its window",
        "modeling/mae/pooling.py",
        {"else min(window, length)": "else min(window + 1, length)"},
        ("modeling/test_mae.py",),
        "causal_mixture",
    ),
    Mutant(
        "mae-head-scale",
        "heads are scaled by h / (h - 1) whatever number t is dropped",
        "modeling/mae/mixture.py",
        {"scale = num_heads / (num_heads - num_dropped)": "scale = num_heads / (num_heads - 1)"},
        ("modeling/test_mae.py",),
        "mixture_equals or head_weights",
    ),
    Mutant(
        "mae-gate-padding",
        "the gate averages padding too",
        "modeling/mae/mixture.py",
        {"masked_mean(hidden_states, padding_mask)": "masked_mean(hidden_states, None)"},
        ("modeling/test_mae.py",),
        "test_mixture_equals",
    ),
    Mutant(
        "mae-expert-gradient",
        "the expert of an F step is drawn with a gradient to the gate",
        "modeling/mae/mixture.py",
        {
            "self._one_hot(index, weights) + self._idle_gate()": (
                "self._one_hot(index, weights) + weights - weights.detach()"
            ),
            "with torch.no_grad():\n                return self._gate": (
                "with torch.enable_grad():\n                return self._gate"
            ),
        },
        ("modeling/test_mae.py",),
        "phase",
    ),
    Mutant(
        "mae-gate-phase",
        "in a G step everything learns, not only the gates",
        "modeling/mae/gate_phase.py",
        {"held[name] = parameter.detach()": "held[name] = parameter"},
        ("modeling/test_mae.py",),
        "gate_phase",
    ),
    Mutant(
        "mae-norm-padding",
        "batch statistics of the gate's norm count padding",
        "modeling/mae/norm.py",
        {"valid.flatten().unsqueeze(-1).to(x.dtype)": "None"},
        ("modeling/test_mae.py", "modeling/test_gate_norm.py"),
        "statistics",
    ),
    Mutant(
        "mae-norm-checkpointing",
        "running statistics move again in the forward that checkpointing recomputes",
        "modeling/mae/norm.py",
        {"if not _is_recomputing():": "if True:"},
        ("modeling/test_mae.py",),
        "checkpointing",
    ),
    Mutant(
        "mae-norm-batch-of-one",
        "a single vector is normalised by itself, and moves the running statistics",
        "modeling/mae/norm.py",
        {
            "count, count > 1)": "count, count > 0)",
            "enough = count > 1": "enough = count > 0",
        },
        ("modeling/test_mae.py", "modeling/test_gate_norm.py"),
        "batch_of_one or single_row",
    ),
)

MOA = (
    Mutant(
        "moa-normaliser",
        "the gradient of the weights goes through their normaliser",
        "modeling/routing/routers.py",
        {"(normalizer.detach() if self.detach_normalizer else normalizer)": "normalizer"},
        ("modeling/test_routing.py", "modeling/test_moa.py"),
        "normaliser or loop",
    ),
    Mutant(
        "moa-weights-sum",
        "the weights of the chosen experts are not normalised",
        "modeling/routing/routers.py",
        {"normalizer = top.sum(dim=-1, keepdim=True)": "normalizer = torch.ones_like(top[..., :1])"},
        ("modeling/test_routing.py", "modeling/test_moa.py"),
        "normalised or loop",
    ),
    Mutant(
        "moa-weights-twice",
        "an expert's output is weighted twice",
        "modeling/moa/mixture.py",
        {"linear(context, index, mix.weight)": "linear(context, index, mix.weight.square())"},
        ("modeling/test_moa.py",),
    ),
    Mutant(
        "moa-weights-missing",
        "an expert's output is not weighted",
        "modeling/moa/mixture.py",
        {
            "linear(context, index, mix.weight)": (
                "linear(context, index, mix.weight.new_ones(mix.weight.shape))"
            )
        },
        ("modeling/test_moa.py",),
    ),
    Mutant(
        "moa-position-bias",
        "position biases are those of another sequence's experts",
        "modeling/moa/mixture.py",
        {"self.ranks.part(mix.index, -1)": "self.ranks.part(mix.index.flip(0), -1)"},
        ("modeling/test_moa.py",),
        "loop and t5",
    ),
    Mutant(
        "moa-initial-scale",
        "output projections of new experts start without the factor k",
        "modeling/moa/projections.py",
        {"std=scales.output * scales.num_heads": "std=scales.output"},
        ("modeling/test_moa.py",),
        "scale_of_heads",
    ),
)

ROUTING = (
    Mutant(
        "routing-balance-sum",
        "the balance loss takes the sum of the probabilities over tokens, not their mean",
        "modeling/routing/losses.py",
        {"(load * _mean(probabilities, mask))": "(load * _sum(probabilities, mask))"},
        ("modeling/test_routing.py",),
        "balance",
    ),
    Mutant(
        "routing-z-loss",
        "the z-loss is without its square",
        "modeling/routing/losses.py",
        {"logits.logsumexp(dim=-1, keepdim=True).square()": "logits.logsumexp(dim=-1, keepdim=True)"},
        ("modeling/test_routing.py",),
        "z_losses",
    ),
    Mutant(
        "routing-padding",
        "padding counts in the experts' load",
        "modeling/routing/losses.py",
        {"x = x if mask is None else": "x = x if True else"},
        ("modeling/test_routing.py",),
        "padding or importance or losses_equal",
    ),
    Mutant(
        "routing-smooth-load",
        "the smooth load of a chosen expert is measured against its own logit",
        "modeling/routing/losses.py",
        {"torch.where(kept, top[..., -1:], top[..., -2:-1])": "top[..., -2:-1]"},
        ("modeling/test_routing.py",),
        "load",
    ),
    Mutant(
        "routing-noise-in-eval",
        "the noisy router draws its noise in eval too",
        "modeling/routing/routers.py",
        {"* scale if self.training else clean": "* scale"},
        ("modeling/test_routing.py",),
        "noise",
    ),
    Mutant(
        "routing-coefficient",
        "auxiliary losses are added without their coefficients",
        "modeling/core/totals.py",
        {"[coefficient * term for": "[term for"},
        ("modeling/test_moa.py",),
        "summed_over_layers",
    ),
)

MOE = (
    Mutant(
        "moe-weights",
        "the experts of a token are added without their weights",
        "modeling/moe/feed_forward.py",
        {"routing.weight.flatten(0, -2)": "torch.ones_like(routing.weight).flatten(0, -2)"},
        ("modeling/test_moe.py",),
        "equals_the_loop",
    ),
    Mutant(
        "moe-activated-half",
        "of a gated expert's two halves, the wrong one is activated",
        "modeling/moe/feed_forward.py",
        {"self.act_fn(activated) * multiplied": "activated * self.act_fn(multiplied)"},
        ("test_upcycle.py",),
        "gated_activations",
    ),
)

CCT = (
    Mutant(
        "cct-swapped-gates",
        "the gate of keys and values is taken for the queries', and the other way round",
        "modeling/cct/attention.py",
        {"kv=gates[..., 0], query=gates[..., 1]": "kv=gates[..., 1], query=gates[..., 0]"},
        ("modeling/test_cct.py",),
        "test_attention_equals and bert",
    ),
    Mutant(
        "cct-skipped-keys",
        "skipped keys are left out of the softmax",
        "modeling/cct/skipped_keys.py",
        {"taken[:, 0] = number": "taken[:, 0] = 0", "taken[..., 0] = number": "taken[..., 0] = 0"},
        ("modeling/test_cct.py", "modeling/test_open_keys_cache.py"),
        "test_attention_equals",
    ),
    Mutant(
        "cct-noise-in-eval",
        "gates are noisy in eval",
        "modeling/cct/control.py",
        {
            "return _hard(logits)": (
                "return _hard(logits + torch.randn_like(logits) * self.noise_scale)"
            ),
        },
        ("modeling/test_cct.py",),
        "noise",
    ),
    Mutant(
        "cct-noise-of-hard-gates",
        "the noise of hard gates grows, as that of soft ones",
        "training/schedules.py",
        {"1 - share if falls else share": "share"},
        ("training/test_schedules.py",),
        "hard_gates",
    ),
    Mutant(
        "cct-threshold",
        "a gate of exactly one half is closed: `>` where the paper has `>=`",
        "modeling/cct/control.py",
        {"(~(logits < 0))": "(~(logits <= 0))"},
        ("modeling/test_cct.py",),
        "one_half or noise",
    ),
    Mutant(
        "cct-budget-bias",
        "gates have the bias of the largest budget at every budget",
        "modeling/cct/control.py",
        {"self.budget_bias[budget.index]": "self.budget_bias[0 * budget.index]"},
        ("modeling/test_budget_inputs.py",),
        "bias",
    ),
    Mutant(
        "cct-hard-gradient",
        "hard gates have no gradient in training",
        "modeling/cct/control.py",
        {"(chance - chance.detach())": "0 * chance"},
        ("modeling/test_budget_inputs.py",),
        "hard",
    ),
    Mutant(
        "cct-full-budget-in-training",
        "gates decide at the full budget, too, in training",
        "modeling/cct/budgets.py",
        {"return Budget(index, symbols, plain)": "return Budget(index, symbols)"},
        ("modeling/test_budget_inputs.py",),
        "plain",
    ),
    Mutant(
        "cct-sum-over-budgets",
        "budgets that are drawn seldom weigh less in the budget loss",
        "modeling/cct/costs.py",
        {"weight = weight / made_on(used.device, chances, used.dtype)": "pass"},
        ("modeling/test_budget_inputs.py",),
        "budget_loss",
    ),
    Mutant(
        "cct-one-sided-loss",
        "the budget loss lets a model spend less than its budget",
        "modeling/cct/costs.py",
        {"(per_group(used) - target).abs()": "(per_group(used) - target).clamp(min=0)"},
        ("modeling/test_cct.py",),
        "budget_loss",
    ),
    Mutant(
        "cct-loss-over-groups",
        "budgets of a batch make up for one another in the budget loss",
        "modeling/cct/costs.py",
        {
            "(per_group(used) - target).abs() / target.clamp(min=1)": (
                "(per_group(used) - target).sum().abs() / target.sum().clamp(min=1)"
            )
        },
        ("modeling/test_cct.py",),
        "budget_loss",
    ),
    Mutant(
        "cct-control-symbol",
        "a sequence gets the control symbol of another budget",
        "modeling/cct/budgets.py",
        {"self.control_symbols(index)": "self.control_symbols(len(self.values) - 1 - index)"},
        ("modeling/test_cct.py",),
        "budget",
    ),
    Mutant(
        "cct-cost-of-padding",
        "padding counts in the compute fraction",
        "modeling/cct/costs.py",
        {"both if mask is None else": "both if True else"},
        ("modeling/test_cct.py",),
        "fraction or cost",
    ),
    Mutant(
        "cct-cost-of-later-keys",
        "causal layers are charged for keys that a query does not see",
        "modeling/cct/costs.py",
        {"kv.cumsum(dim=-2) if self.is_causal else": "kv.cumsum(dim=-2) if False else"},
        ("modeling/test_cct.py",),
        "fraction or cost",
    ),
    Mutant(
        "cct-gated-bias",
        "the bias of the feed-forward layer's last matrix is gated",
        "modeling/cct/sparse_feed_forward.py",
        {".repeat(*x.shape[:-1], 1)": ".repeat(*x.shape[:-1], 1) * gates.mean(dim=-1, keepdim=True)"},
        ("modeling/test_cct.py",),
        "plain_feed_forward",
    ),
)

CACHES = (
    Mutant(
        "cache-beam-reorder",
        "a beam search moves the keys, and leaves the gates' states where they were",
        "modeling/cache/gate_states.py",
        {
            "self._apply(lambda x: x.index_select(0, beam_idx.to(x.device)))": (
                "super().reorder_cache(beam_idx)"
            )
        },
        ("modeling/test_decoding.py",),
        "reordered and gpt2",
    ),
    Mutant(
        "cache-crop",
        "a cropped cache keeps the gates' states of the tokens that are gone",
        "modeling/cache/gate_states.py",
        {"state.crop(abs(tokens_to_remove))": "pass"},
        ("modeling/test_decoding.py",),
        "cropped and gpt2",
    ),
    Mutant(
        "cache-reset",
        "a cache that was reset keeps the gates' states",
        "modeling/cache/gate_states.py",
        {"self.states, self._growing = {}, {}": "self._growing = {}"},
        ("modeling/test_decoding.py",),
        "reordered and gpt2",
    ),
    Mutant(
        "cache-compact-positions",
        "a compact cache notes each new key one position too early",
        "modeling/cct/compact_cache.py",
        {"torch.where(is_open, self.length, -1)": "torch.where(is_open, self.length - 1, -1)"},
        ("modeling/test_open_keys_cache.py",),
        "decoding_equals",
    ),
    Mutant(
        "cache-cross-attention",
        "keys of cross-attention are cached, and not marked as cached",
        "modeling/cache/place.py",
        {"self._filled[self.layer_idx] = True": "self._filled[self.layer_idx] = False"},
        ("modeling/test_decoding.py",),
        "cross_attention_is_cached and gpt2",
    ),
)

MODELS = (
    Mutant(
        "model-aux-loss-in-eval",
        "the loss of eval includes the auxiliary losses",
        "modeling/core/gated_model.py",
        {"aux_loss is None or not self.training:": "aux_loss is None:"},
        ("modeling/test_common.py",),
        "every_head_adds",
    ),
    Mutant(
        "model-token-share",
        "each part of an accumulated batch adds its auxiliary losses in full",
        "modeling/core/gated_model.py",
        {"loss + aux_loss * share": "loss + aux_loss"},
        ("modeling/test_common.py",),
        "weighted_by_its_share",
    ),
    Mutant(
        "model-labels-shift",
        "a causal model predicts the token that it sees",
        "modeling/core/task_losses.py",
        {"nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)": "labels"},
        ("modeling/test_common.py",),
        "plain_path and gpt2",
    ),
    Mutant(
        "model-left-padding",
        "gates are not told of padding in front of a sequence",
        "modeling/core/masks.py",
        {"not is_traced(mask) and mask.all()": "not is_traced(mask) and mask[:, -1].all()"},
        ("modeling/test_generation.py", "modeling/test_decoding.py"),
        "padded and gpt2",
    ),
    Mutant(
        "model-positions-of-padding",
        "RoBERTa's positions count padding",
        "modeling/bert/embeddings.py",
        {"(is_real.cumsum(dim=1) + past)": "(torch.ones_like(is_real).cumsum(dim=1) + past)"},
        ("test_relatives.py",),
        "function_is_preserved and Roberta",
    ),
    Mutant(
        "upcycle-pooler-activation",
        "ELECTRA's classifier has BERT's activation",
        "relatives/of_bert.py",
        {'{"pooler_act": "gelu"}': "{}"},
        ("test_relatives.py",),
        "function_is_preserved and Electra",
    ),
    Mutant(
        "upcycle-shared-biases",
        "each of MPNet's layers sorts its heads for itself",
        "modeling/bert/layout.py",
        {'layer.split("layer.")[0] if has_table else None': "None"},
        ("test_relatives.py",),
        "importance and mpnet",
    ),
    Mutant(
        "model-biases-of-each-layer",
        "UMT5's layers share the first one's biases",
        "modeling/t5/layers.py",
        {
            "if self.has_relative_attention_bias:\n": (
                "if self.has_relative_attention_bias and position_bias is None:\n"
            )
        },
        ("test_relatives.py",),
        "function_is_preserved and UMT5",
    ),
    Mutant(
        "model-final-norm",
        "pre-norm BERT is without the LayerNorm behind its last layer",
        "modeling/bert/layers.py",
        {'if hasattr(self, "LayerNorm"):': "if False:"},
        ("modeling/test_modeling_moa_bert.py",),
        "pre_norm",
    ),
    Mutant(
        "model-tied-weights",
        "GPT-2's head has a matrix of its own, not that of the embeddings",
        "modeling/gpt2/model.py",
        {'{"lm_head.weight": "transformer.wte.weight"}': "{}"},
        ("modeling/test_common.py",),
        "tied_head and gpt2",
    ),
    Mutant(
        "model-half-of-budget",
        "T5's encoder spends the decoder's budget",
        "modeling/t5/stacks.py",
        {"budget=encoder_budget,": "budget=decoder_budget,"},
        ("modeling/test_modeling_moa_t5.py",),
        "budget",
    ),
)

TRAINING = (
    Mutant(
        "training-order-of-steps",
        "from the second update on, the F step comes before the G step, and sees the gates of before",
        "training/trainer.py",
        {
            "            self._begin_update(model, batches, num_items)\n"
            "        return self._checked(super().training_step(model, inputs, num_items_in_batch))": (
                "            if self._has_begun:\n"
                "                loss = super().training_step(model, inputs, num_items_in_batch)\n"
                "                self._begin_update(model, batches, num_items)\n"
                "                return self._checked(loss)\n"
                "            self._begin_update(model, batches, num_items)\n"
                "        return self._checked(super().training_step(model, inputs, num_items_in_batch))"
            )
        },
        ("training/test_gate_descent.py",),
        "every_update or gate_update_comes_first",
    ),
    Mutant(
        "training-gate-optimiser",
        "the gates' optimiser gets all parameters but the gates'",
        "training/gate_descent.py",
        {"SGD(gate_parameters(model)": "SGD(other_parameters(model)"},
        ("training/test_gate_descent.py",),
        "sgd_on_the_mixture",
    ),
)

FTG = (
    Mutant(
        "ftg-statistics",
        "an adapter's copy of a gate shares its running statistics with the base",
        "modeling/ftg/layer.py",
        {
            "copy = deepcopy(self.get_base_layer())": (
                "copy = deepcopy(self.get_base_layer(), "
                "{id(b): b for b in self.get_base_layer().buffers()})"
            )
        },
        ("adapters/test_several_adapters.py",),
        "base_never_moves",
    ),
)

STATIC = (
    Mutant(
        "static-cross-gate",
        "a gate behind self-attention takes its tokens for later ones",
        "modeling/mae/mixture.py",
        {", are_held=place.is_cross)": ")"},
        ("modeling/test_decoding.py",),
        "set_back and t5",
    ),
    Mutant(
        "static-valid",
        "what stood before the first token counts",
        "modeling/cache/gate_states.py",
        {"seen = seen & (place >= 0)": "seen = seen"},
        ("modeling/test_decoding.py",),
        "set_back and gpt2",
    ),
    Mutant(
        "static-sums",
        "keys of earlier steps are not counted",
        "modeling/cache/gate_states.py",
        {"before + added": "added"},
        ("modeling/test_decoding.py",),
        "compute_fraction_counts",
    ),
    Mutant(
        "norm-momentum",
        "without momentum the last batch's statistics stand for the mean of all",
        "modeling/mae/norm.py",
        {"momentum = 1 / (self.num_batches_tracked + 1)": "momentum = 1.0"},
        ("modeling/test_gate_norm.py",),
    ),
)

KERNELS = (
    Mutant(
        "kernel-window",
        "a gradient reaches a token from one window that it has left",
        "modeling/mae/fast_gate_gpu.py",
        {"< positions[:, None] + window)": "<= positions[:, None] + window)"},
        ("modeling/test_fast_gate.py",),
    ),
    Mutant(
        "kernel-moments",
        "the variance of a sequence forgets how many means stood before a tile",
        "modeling/mae/fast_gate_gpu.py",
        {"step * step * (number * here / both)": "step * step * (here / both)"},
        ("modeling/test_fast_gate.py",),
    ),
    Mutant(
        "kernel-dropout",
        "the derivative of tanh is taken of what dropout scaled up",
        "modeling/mae/fast_gate_gpu.py",
        {"value *= 1.0 - dropout": "value *= 1.0"},
        ("modeling/test_fast_gate.py",),
    ),
    Mutant(
        "kernel-statistics",
        "a single token is normalised by its own variance",
        "modeling/mae/norm.py",
        {"torch.where(count > 1, var, running_var)": "var"},
        ("modeling/test_fast_gate.py",),
    ),
    Mutant(
        "kernel-spread",
        "heads are spread over the experts without their weights",
        "modeling/moa/slots_gpu.py",
        {"part = part.to(tl.float32) * factors[:, None]": "pass"},
        ("modeling/test_expert_kernels.py",),
        "test_output",
    ),
    Mutant(
        "kernel-others",
        "an expert of another process is read from the next token",
        "modeling/moa/slots_gpu.py",
        {"is_here = (expert < EXPERTS)[:, None] &": "is_here = exists[:, None] &"},
        ("modeling/test_expert_kernels.py",),
        "rows_of_others",
    ),
    Mutant(
        "kernel-choice",
        "an expert may be chosen again",
        "modeling/routing/fast_choice_gpu.py",
        {"left = tl.where(experts[None, :] == place[:, None], -1.0, left)": "pass"},
        ("modeling/test_fast_choice.py",),
        "plain_forms",
    ),
    Mutant(
        "kernel-normaliser",
        "the gradient of weights goes through a detached normaliser",
        "modeling/routing/fast_choice_gpu.py",
        {"    if DETACHED:\n": "    if False:\n"},
        ("modeling/test_fast_choice.py",),
        "plain_forms",
    ),
    Mutant(
        "open-skipped-keys",
        "attention to open keys leaves the closed ones out of the softmax",
        "modeling/cct/open_tokens_gpu.py",
        {"total = total * shrink + closed * tl.exp2(-shift)": "total = total * shrink"},
        ("modeling/test_open_tokens.py",),
        "test_attention",
    ),
    Mutant(
        "open-causal",
        "an open query does not see its own key",
        "modeling/cct/open_tokens_gpu.py",
        {"sees = tl.load(key_rank + positions + 1, mask": "sees = tl.load(key_rank + positions, mask"},
        ("modeling/test_open_tokens.py",),
        "test_attention",
    ),
    Mutant(
        "open-mask",
        "a query counts closed keys that its mask hides, where scores have a bias",
        "modeling/cct/open_tokens_gpu.py",
        {
            "                is_seen = tl.load(mask_at, mask=is_seen, other=0) != 0\n"
            "            elif CAUSAL:\n"
            "                is_seen = is_seen & (places": "                is_seen = is_seen\n"
            "            elif CAUSAL:\n"
            "                is_seen = is_seen & (places"
        },
        ("modeling/test_open_tokens.py",),
        "test_attention",
    ),
    Mutant(
        "open-own-parts",
        "a token takes the parts of all tokens in its tile",
        "modeling/cct/open_tokens_gpu.py",
        {"tl.load(x_at + first, mask=is_own[:, None], other=0.0)": "tl.load(x_at + first)"},
        ("modeling/test_open_tokens.py",),
        "test_combinations",
    ),
    Mutant(
        "open-order",
        "tokens of later tiles are put behind those of all tiles",
        "modeling/cct/open_tokens_gpu.py",
        {"tl.where((tiles < tl.program_id(0))[:, None], found, 0)": "found"},
        ("modeling/test_open_tokens.py",),
        "test_order",
    ),
    Mutant(
        "open-cache",
        "behind a cache, keys of closed gates are what happened to be in memory",
        "modeling/cct/open_tokens.py",
        {".masked_fill(closed, 0.0) for each in normed": " for each in normed"},
        ("modeling/test_open_tokens.py",),
        "without_a_kernel",
    ),
    Mutant(
        "control-activation",
        "a control network has no activation",
        "modeling/cct/fast_control_gpu.py",
        {".to(tl.float32)[None, :], 0.0)": ".to(tl.float32)[None, :], -1e9)"},
        ("modeling/test_open_tokens.py",),
        "control_networks",
    ),
    Mutant(
        "pages-next",
        "no page is taken for a sequence's next key",
        "modeling/cct/paged_keys_gpu.py",
        {"tl.store(table + after // PAGE, tl.atomic_add(taken, 1))": "tl.atomic_add(taken, 1)"},
        ("modeling/test_static_compact_cache.py",),
        "test_steps or test_pages",
    ),
    Mutant(
        "pages-closed-keys",
        "a decoding step leaves closed keys out of the softmax",
        "modeling/cct/paged_keys_gpu.py",
        {"closed = tl.sum(shown, 0) - tl.sum(seen, 0)": "closed = 0"},
        ("modeling/test_static_compact_cache.py",),
        "test_steps",
    ),
    Mutant(
        "pages-bias",
        "an open key counts as closed, too, where scores have a bias",
        "modeling/cct/paged_keys_gpu.py",
        {"            is_seen = is_seen & (is_open == 0)\n": ""},
        ("modeling/test_static_compact_cache.py",),
        "test_steps",
    ),
    Mutant(
        "pages-beams",
        "a beam keeps its own keys when it goes on with another's tokens",
        "modeling/cct/static_compact_cache.py",
        {"held[to] = held[source]": "held[to] = held[to]"},
        ("modeling/test_static_compact_cache.py",),
        "beams",
    ),
    Mutant(
        "open-padding",
        "a projection that is not plain gets contexts that were not computed",
        "modeling/cct/open_tokens.py",
        {"context.masked_fill(~is_open, 0.0)": "context"},
        ("modeling/test_open_tokens.py",),
        "not_plain",
    ),
)

UPCYCLING = (
    Mutant(
        "upcycling-head",
        "expert i starts from the head behind the i-th",
        "modeling/moa/upcycling.py",
        {"group * size + i % size for": "group * size + (i + 1) % size for"},
        ("test_upcycle.py",),
        "moa_that_shares_keys_starts_from_the_heads",
    ),
    Mutant(
        "upcycling-sum",
        "the one head of keys and values is the sum of the source's, not their mean",
        "modeling/moa/upcycling.py",
        {"(groups, size, -1)).mean(dim=1)": "(groups, size, -1)).sum(dim=1)"},
        ("test_upcycle.py",),
        "moa_that_shares_keys_starts_from_the_heads",
    ),
    Mutant(
        "upcycling-group",
        "experts of a group start from the heads of the first",
        "modeling/moa/upcycling.py",
        {"group * size + i % size for": "i % size for"},
        ("test_upcycle.py",),
        "moa_that_keeps_the_keys",
    ),
    Mutant(
        "upcycling-routers",
        "MoA's routers do not start even",
        "modeling/moa/mixture.py",
        {"init.zeros_(self.router.gate.weight)": "pass"},
        ("test_upcycle.py",),
        "moa_that_keeps_the_keys",
    ),
    Mutant(
        "router-group",
        "every group of experts chooses among those of the first",
        "modeling/routing/routers.py",
        {"(index + first.unsqueeze(-1)).flatten(-2)": "index.flatten(-2)"},
        ("modeling/test_moa.py",),
        "experts_in_groups",
    ),
)

CHECKPOINTS = (
    Mutant(
        "checkpoint-buffer",
        "a model that is loaded does not know which heads its experts drop",
        "modeling/mae/mixture.py",
        {"self.dropped.copy_(dropped_heads(self.num_heads, self.num_dropped))": "pass"},
        ("modeling/test_loading.py",),
        "loads_bit_exactly and mae",
    ),
)

ONE_TOKEN = (
    Mutant(
        "token-sees-itself",
        "the last layer's one token does not see itself",
        "modeling/core/one_token.py",
        {
            "return (torch.arange(length, device=device) <= position)[:, None, None]": (
                "return (torch.arange(length, device=device) < position)[:, None, None]"
            )
        },
        ("modeling/test_one_token.py",),
        "padding and GPT2",
    ),
    Mutant(
        "token-mask",
        "the one token has the mask of the first",
        "modeling/core/one_token.py",
        {
            "return self.gather(x.expand(self.shape[0], -1, -1, -1).transpose(1, 2)).transpose(1, 2)": (
                "return x[:, :, :1]"
            )
        },
        ("modeling/test_one_token.py",),
        "padding and GPT2 or base_models",
    ),
    Mutant(
        "token-in-training",
        "with CCT, training computes and counts the last layer of all tokens",
        "modeling/cct/mechanism.py",
        {"    counts_what_it_computes=True,\n": ""},
        ("modeling/test_one_token.py",),
        "is_counted or holds_budgets",
    ),
    Mutant(
        "token-asked",
        "the last layer leaves tokens out where hidden states are asked for",
        "modeling/core/one_token.py",
        {'    "output_hidden_states",\n': ""},
        ("modeling/test_one_token.py",),
        "asked_for",
    ),
    Mutant(
        "token-gates",
        "gates of attention's queries are the first token's",
        "modeling/cct/attention.py",
        {"call.token.gather(gates.query)": "gates.query[:, :1]"},
        ("modeling/test_one_token.py",),
        "logits_are or base_models",
    ),
)

NESTED = (
    Mutant(
        "nested-heads",
        "the output projection takes the last heads' columns for the first's",
        "modeling/core/linear_slices.py",
        {"slice(x.shape[-1])\n": "slice(size - x.shape[-1], size)\n"},
        ("modeling/test_nested.py",),
        "budget",
    ),
    Mutant(
        "nested-cache",
        "a layer that earlier steps left out attends to nothing of them",
        "modeling/nested/attention.py",
        {"        _check_cache(call)\n": ""},
        ("modeling/test_nested.py",),
    ),
)

MUTANTS = (
    MAE
    + MOA
    + ROUTING
    + MOE
    + CCT
    + CACHES
    + MODELS
    + TRAINING
    + FTG
    + KERNELS
    + UPCYCLING
    + CHECKPOINTS
    + ONE_TOKEN
    + NESTED
    + STATIC
)
