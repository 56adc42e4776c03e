"""Other papers' ways to grow a model, as transitions of the same trainer: what the V cycle is measured against."""
