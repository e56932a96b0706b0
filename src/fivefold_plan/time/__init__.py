"""Seconds of a step: operations, stages, messages beside them, the pipeline, offload, parameter servers."""
