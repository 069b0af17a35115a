import peft  # noqa: F401 - to its end, where it imports these modules (see `hf_moa/peft_registration.py`)
