"""Looking at a running worker: metrics, profiler spans, traces, debug dumps."""
