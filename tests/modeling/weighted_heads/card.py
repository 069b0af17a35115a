"""What model cards say of it."""

PHRASE = "whose heads have one weight each (WEIGHTED)"


def in_words(config):
    return f"**WEIGHTED**. Each of {config.num_attention_heads} heads has a learned weight."


def citations(config):
    return ["@misc{nobody, title = {Weights of heads}}"]
