"""Stands in for vLLM where only its public interface is used: the same command, paths and fields."""
