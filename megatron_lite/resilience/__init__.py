"""What a run does when it is told to stop or when its numbers stop being numbers."""
