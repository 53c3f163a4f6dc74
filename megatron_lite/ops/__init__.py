"""One file per operation: reference in plain torch, gradients, facts about its cost."""
