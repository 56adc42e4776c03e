"""Evaluation of a level while it trains."""
