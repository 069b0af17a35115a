"""The scripts' flags, from the command line or a JSON file: what is refused, and how it is said."""

import json
from dataclasses import dataclass

import pytest

from hf_moa.recipes.command_line import parse_arguments


@dataclass
class Flags:
    data_dir: str | None = None
    max_train_samples: int | None = None
    do_train: bool = False
    do_eval: bool = False
    eval_budgets: bool = False


def test_a_misspelt_flag_is_told_the_one_it_resembles():
    message = r"no such flags: --data_dr \(did you mean --data_dir\?\), --unheard_of\."
    with pytest.raises(ValueError, match=message):
        parse_arguments(["--data_dr", "glue", "--do_train", "--unheard_of"], Flags)


def test_so_is_a_key_of_a_file(tmp_path):
    path = tmp_path / "flags.json"
    path.write_text(json.dumps({"do_train": True, "do_evaluate": True}))
    with pytest.raises(ValueError, match=r"--do_evaluate \(did you mean --do_eval\?\)"):
        parse_arguments([str(path)], Flags)
    path.write_text(json.dumps({"do_train": True, "data_dir": "glue"}))
    assert parse_arguments([str(path)], Flags) == (Flags(do_train=True, data_dir="glue"),)


def test_a_run_that_would_do_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one of --do_train, --do_eval, --eval_budgets must"):
        parse_arguments(["--data_dir", "glue"], Flags)
    assert parse_arguments(["--eval_budgets", "True"], Flags) == (Flags(eval_budgets=True),)
