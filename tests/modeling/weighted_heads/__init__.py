"""A mechanism of a test: multi-head attention whose heads have one learned weight each."""
