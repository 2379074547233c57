"""How spans are created and observed: the two tracers, OpenTelemetry's processors, the hooks for each span."""
