"""What comes in to be stored: spans as OTLP, from our tracers and from others."""
