"""From pretrained weights to gated ones; `hf_moa.upcycle` is the door."""
