"""Made-up data of a few words: their tokenizer, and questions about them."""

from transformers import BertTokenizer

SENTENCE = "the a cat dog sat ran on under mat tree red blue . it she he was not very"
WORDS = SENTENCE.split()


def write_tokenizer(folder):
    """A BERT tokenizer that has an entry for each of the words; the number of its entries."""
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n")
    BertTokenizer(vocab=str(folder / "vocab.txt"), model_max_length=32).save_pretrained(folder)
    return len(vocab)


def squad(num_questions):
    """Questions in SQuAD's published form."""
    paragraphs = []
    for i in range(num_questions):
        words = [WORDS[(i + j) % len(WORDS)] for j in range(9)]
        context, answer = " ".join(words), words[5]
        answers = [{"text": answer, "answer_start": len(" ".join(words[:5])) + 1}]
        question = {"id": str(i), "question": f"the {words[4]}", "answers": answers}
        paragraphs.append({"context": context, "qas": [question]})
    return {"data": [{"paragraphs": paragraphs}]}
