"""What a run tells about itself: log line, metric rows, timers, FLOPs, memory, summary."""
