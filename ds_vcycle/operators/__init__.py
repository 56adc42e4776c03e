"""Coalesce, de-coalesce and blend: parent maps, the plan of a transition, and its arithmetic on tensors."""
