"""The cycle: its phases as a list, what a change of level does, and the runner that walks through them."""
