"""Received data: spans as OTLP, from our tracers and from others."""
