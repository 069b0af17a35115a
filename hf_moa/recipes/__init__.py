"""What the scripts in `examples/` share: their flags, data, models and runs. Needs the extra `train`.

Each script is one file, which can be copied and changed; the loop of those on Accelerate is in
`accelerate/`.
"""

from hf_moa.extras import from_extra

with from_extra("train"):
    import datasets  # noqa: F401 - for all modules here
