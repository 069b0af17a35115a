"""A gated BERT from nothing in a few minutes: offline, on the text that Python itself carries.

    hf-moa quickstart

or

    from hf_moa.quickstart.run import run_quickstart
    results = run_quickstart("hf-moa-quickstart")
"""
