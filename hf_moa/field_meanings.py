"""What a configuration's fields mean: read from its docstring, where it is written once."""

import re


def field_meaning(documentation: str | None, name: str) -> str:
    """The first sentence on a field in the docstring of its class.

    Args:
        documentation: the docstring, with entries like `name (`type`, ...): text`.
        name: the field.

    Returns:
        The sentence without its backticks and its full stop; "" where there is none, as under
        `python -OO`.
    """
    entry = re.search(
        rf"^ +{name} \(.*?\):\s(.*?)(?=\n +\w+(?:, \w+)* \(`|\n\n|\Z)",
        documentation or "",
        flags=re.MULTILINE | re.DOTALL,
    )
    if entry is None:
        return ""
    text = " ".join(entry[1].replace("`", "").split())
    return re.split(r"(?<=[^.]{2}[.:]) (?=[A-Z])", text)[0].rstrip(".:")
