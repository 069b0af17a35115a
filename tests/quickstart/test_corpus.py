import pytest

from hf_moa.quickstart.corpus import (
    MASK_TOKEN,
    Docstring,
    build_corpus,
    choose_labels,
    label_docstrings,
    mask_names,
    normalise,
    read_docstrings,
    read_topics,
)


@pytest.fixture(scope="module")
def texts():
    """What takes long to read."""
    return {"docstrings": read_docstrings(), "topics": read_topics()}


@pytest.fixture(scope="module")
def corpus(texts):
    return build_corpus(seed=3, **texts)


def numbered(package, start, stop):
    """Distinct docstrings of six words."""
    return [Docstring(package, f"Return the value of item {i}.") for i in range(start, stop)]


def test_standard_library_holds_enough_text(corpus):
    assert sum(map(len, corpus.pretraining)) > 1_000_000
    assert len(corpus.labels) == 10
    assert len(corpus.train) > 1000
    assert len(corpus.evaluation) > 250
    assert len(corpus.heldout) > 100


def test_every_class_is_on_both_sides_of_the_split(corpus):
    classes = set(range(len(corpus.labels)))
    assert {example.label for example in corpus.train} == classes
    assert {example.label for example in corpus.evaluation} == classes


def test_majority_rate_is_that_of_the_training_majority(corpus):
    train = [example.label for example in corpus.train]
    majority = max(set(train), key=train.count)
    right = [example.label == majority for example in corpus.evaluation]
    assert corpus.majority_rate == sum(right) / len(right)
    assert corpus.majority_rate < 0.5


def test_no_text_stands_on_both_sides(corpus):
    train = [normalise(example.text) for example in corpus.train]
    evaluation = [normalise(example.text) for example in corpus.evaluation]
    assert len(set(train)) == len(train)
    assert len(set(evaluation)) == len(evaluation)
    assert not set(train) & set(evaluation)


def test_pretraining_has_seen_no_evaluation_text(corpus):
    pretraining = {normalise(mask_names(text, corpus.labels)) for text in corpus.pretraining}
    assert not pretraining & {normalise(example.text) for example in corpus.evaluation}
    assert not pretraining & {normalise(mask_names(text, corpus.labels)) for text in corpus.heldout}


def test_no_example_names_a_class(corpus):
    for example in corpus.train + corpus.evaluation:
        assert not any(label in example.text.lower() for label in corpus.labels)


@pytest.mark.slow
def test_same_seed_gives_the_same_corpus_and_another_seed_another_split(corpus, texts):
    assert build_corpus(seed=3) == corpus
    assert build_corpus(seed=4, **texts).evaluation != corpus.evaluation


def test_split_does_not_depend_on_the_order_of_the_files():
    docstrings = numbered("asyncio", 0, 50) + numbered("email", 50, 100)
    assert label_docstrings(docstrings, ["asyncio", "email"]) == label_docstrings(
        docstrings[::-1], ["asyncio", "email"]
    )


def test_split_keeps_the_share_within_each_class():
    docstrings = numbered("asyncio", 0, 50) + numbered("email", 50, 150)
    train, evaluation = label_docstrings(docstrings, ["asyncio", "email"], eval_fraction=0.2)
    assert [sum(e.label == label for e in evaluation) for label in (0, 1)] == [10, 20]
    assert len(train) == 120


def test_text_of_several_packages_is_left_out_and_repeated_text_taken_once():
    docstrings = [
        Docstring("asyncio", "Close the connection to the server."),
        Docstring("email", "Close   the connection, to the SERVER"),
        Docstring("asyncio", "Return the number of open files."),
        Docstring("asyncio", "return the number of open files"),
    ]
    train, evaluation = label_docstrings(docstrings, ["asyncio", "email"])
    texts = [normalise(example.text) for example in train + evaluation]
    assert texts == ["return the number of open files"]


def test_text_equal_but_for_the_masked_names_counts_as_the_same():
    docstrings = [
        Docstring("email", "Raised by the email package on errors."),
        Docstring("logging", "Raised by the logging package on errors."),
    ]
    assert label_docstrings(docstrings, ["email", "logging"]) == ([], [])


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("See tkinter.Widget.", "See [MASK].Widget."),
        ("The Tkinter and _tkinter modules", "The [MASK] and [MASK] modules"),
        ("xmlrpc, not HTML", "[MASK], not HTML"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_words_that_contain_a_name_are_masked(text, masked):
    assert mask_names(text, ["xml", "tkinter"]) == masked


def test_short_texts_are_left_out_not_counting_the_mask():
    docstrings = [Docstring("email", "Email email email email email set up.")]
    assert label_docstrings(docstrings, ["email"], min_words=3) == ([], [])
    assert len(label_docstrings(docstrings, ["email"], min_words=2)[0]) == 1
    assert MASK_TOKEN in label_docstrings(docstrings, ["email"], min_words=2)[0][0].text


def test_labels_are_the_largest_public_packages():
    docstrings = (
        numbered("a", 0, 60)
        + numbered("_private", 0, 90)
        + numbered("b", 0, 80)
        + numbered("c", 0, 70)
        + [Docstring("d", "The same text all over again.")] * 100
    )
    assert choose_labels(docstrings, num_labels=2) == ["b", "c"]


def test_too_little_text_is_an_error():
    with pytest.raises(ValueError, match="at least 2 packages"):
        choose_labels(numbered("a", 0, 60) + numbered("b", 0, 40))


@pytest.mark.parametrize("fraction", [0, 1, -0.5])
def test_eval_fraction_out_of_range_is_an_error(fraction):
    with pytest.raises(ValueError, match="eval_fraction"):
        label_docstrings([], ["a"], eval_fraction=fraction)


def test_docstrings_are_parsed_not_imported(tmp_path):
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "module.py").write_text(
        '"""Of a module."""\nraise SystemExit\n'
        'class A:\n    """Of a class."""\n    async def f(self):\n        """Of a method."""\n'
        'def undocumented(): pass\nx = "no docstring"\n'
    )
    (tmp_path / "single.py").write_text('"""Of a file."""\n')
    (tmp_path / "broken.py").write_text('"""Of a file that does not parse."""\ndef (\n')
    for skipped in ("test", "site-packages", "good/tests"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "x.py").write_text('"""Of a test or somebody else."""\n')
    assert [(d.package, d.text) for d in read_docstrings(tmp_path)] == [
        ("good", "Of a module."),
        ("good", "Of a class."),
        ("good", "Of a method."),
        ("single", "Of a file."),
    ]
