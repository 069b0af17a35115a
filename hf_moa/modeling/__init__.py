"""Configurations, backbones and mechanisms: a flat, self-contained directory."""
