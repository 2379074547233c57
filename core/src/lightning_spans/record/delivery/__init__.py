"""From finished spans to where they are stored: queue, outbox, OTLP, HTTP."""
