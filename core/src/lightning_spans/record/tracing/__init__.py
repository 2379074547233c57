"""How spans are made and who is told of them: the two tracers, OpenTelemetry's processors, the hooks of each span."""
