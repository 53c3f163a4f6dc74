"""The run: build everything once, then step, log, evaluate, save until it is over."""
