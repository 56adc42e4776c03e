"""Checkpoints: the shard store that ds-vcycle saves to and resumes from."""
